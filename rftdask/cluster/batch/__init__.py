"""Batch: what a batch system is given: the text of SLURM's scripts, and steps in an allocation that is there already.
The clusters that use it are one folder above.
"""
