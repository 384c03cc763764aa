"""Models: where a name's files are, what shape a model has, its LoRA adapters, and a toy to train without a network.

It knows nothing of training, sampling or runs.
"""
