"""Rollouts: tasks in, experiences out. The runner of a work unit, attempts at a rollout, and what workflows talk to.

The folder knows no Dask, storage or weights: it asks engines through queues, and gives experiences to its caller.
"""
