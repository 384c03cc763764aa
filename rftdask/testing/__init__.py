"""Tests that users can run, and fakes for seams: crash test, conformance, storage faults, ranks as threads.

Imported only by tests and by the commands `rftdask crashtest` and `rftdask conformance`.
"""
