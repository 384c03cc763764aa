"""Batches: which experiences an optimizer step trains.

The ledger (ledger.py) says it, once and for ever; a source (source.py and its kinds) forms what the ledger does not say
yet, by a sample strategy (sample_strategies.py), and reads the rows as flat arrays (batch.py). Beside these: operators
and filters that drop rows, limits that hold explorers back, and an audit that accounts for every row. It does not know
what is computed of a batch.
"""
