"""Conformance: our functions against the real functions of other frameworks, value and gradient, on seeded random
tensors.

Peers are imported as installed packages and called as they are; one that does not import is a visible skip with its
reason. Where a peer computes something else, the case says so, and the suite checks that it still does. Knows
nothing of the command line.

Usage: `rows = run_conformance()`, then `print(format_table(rows))`; `failures(rows)` is empty if all is as the table
says.
"""
