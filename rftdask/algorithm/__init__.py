"""Reinforcement fine-tuning algorithms as pure functions on tensors: advantages, losses, operators, rules.

Needs torch and knows nothing of Dask, storage or config files; importing this package alone loads no torch. Start at
`rftdask.algorithm.compose.make_algorithm`.
"""
