"""Conformance: our functions against the real functions of other frameworks, value and gradient, on seeded random
tensors.

Peers are imported as installed packages and called unmodified; a peer that cannot be imported is skipped with
the reason. A case documents known differences, and the suite checks that each still exists.

Usage: `rows = run_conformance()`, then `print(format_table(rows))`. `failures(rows)` is empty if every row is as
documented.
"""
