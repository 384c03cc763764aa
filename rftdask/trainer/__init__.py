"""Trainer: the role that turns batches of experiences into weights.

The loop that every rank runs (trainer.py), a rank's process (rank.py) and the gang of them that the driver starts
(gang.py), what ranks say to each other, checkpoints, and the policy over packed rows. It does not know how experiences
are sampled or stored (explorer/, buffer/log/), the formulas of losses (algorithm/), nor who starts workers (cluster/).
"""
