"""Processes: children below a Dask worker, typed messages to and from them, and what a task has to look for itself.

The folder does not know what a child does: no engines, no trainer, no storage.
"""
