"""Explorer: the role that turns tasks into experiences on storage.

It contains the loop of the driver (explorer.py) and its rules. It does not know how a worker runs a rollout
(rollouts/), how an engine samples (engines/), what is trained (trainer/), or how workers are started (cluster/).
"""
