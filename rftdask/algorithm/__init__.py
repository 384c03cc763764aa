"""Reinforcement fine-tuning algorithms as pure functions on tensors: advantages, losses, operators, rules.

Needs torch and knows nothing of Dask, storage or config files. Importing only this package does not load torch. Start
at `rftdask.algorithm.compose.make_algorithm`.
"""
