"""Explorer: the role that turns tasks into experiences on storage.

It contains the loop of the driver (explorer.py), the tasks of each step (task_order.py, difficulty.py), the claims of
units (unit_claims.py), evaluations, autoscaling, workers of auxiliary models, and the search for tasks that crash
workers (crash_suspects.py). It does not know how a worker runs a rollout (rollouts/), how an engine samples (engines/),
what is trained (buffer/batches/, trainer/), or how workers are started (cluster/).
"""
