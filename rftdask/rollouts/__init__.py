"""Rollouts: tasks in, experiences out. Runs work units on explorer workers.

The Dask task of a worker (work_unit_task.py) with its cache (worker_state.py), the runner of a work unit (runner.py),
attempts at a rollout (rollout.py), sandboxes (sandbox/), and the model handles of workflows (policy/).
"""
