"""Explorer: the role that turns tasks into experiences on storage.

The loop of the driver (explorer.py), the Dask task of a worker (worker_task.py) with what its process keeps
(worker_cache.py), which tasks a step runs (task_order.py, difficulty.py), evaluations, autoscaling, and the search for
tasks that end workers (poison.py). It does not know how a rollout is run (rollouts/), how an engine samples (engines/),
what is trained (buffer/batches/, trainer/), or who starts workers (cluster/).
"""
