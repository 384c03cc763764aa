"""Tests that users run, and stand-ins for seams: crash test, conformance, faults, ranks as threads.

Only tests and the commands `rftdask crashtest` and `rftdask conformance` import from here; nothing here trains a run.
"""
