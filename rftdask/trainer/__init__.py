"""Trainer: the role that turns batches of experiences into weights.

The loop that every rank runs (trainer.py), the process of a rank (rank.py), the gang of ranks that the driver starts
(gang.py), communication between ranks, checkpoints, and the policy over packed rows.
"""
