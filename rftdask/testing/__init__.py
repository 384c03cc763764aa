"""Tests that users can run: crash test, conformance, the contract of train engines; and storage faults for them."""
