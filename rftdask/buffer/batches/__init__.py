"""Batches: which experiences each optimizer step trains.

The ledger (ledger.py) records the batch of each step permanently. A source (source.py and its subclasses) forms the
batches that are not yet recorded, by a sample strategy (selection.py), and reads the rows as flat arrays (batch.py).
The folder also has operators and filters that drop rows, limits that hold explorers back, and an audit that accounts
for every row. It does not know what is computed from a batch.
"""
