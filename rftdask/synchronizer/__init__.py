"""Synchronizer: which weights an explore step runs with (styles.py, pure), and the Dask actor that shortens the wait
for them (actor.py).

It does not know how weights are written and verified (weights/), nor what explorers and trainers do with them.
"""
