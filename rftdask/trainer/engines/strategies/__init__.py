"""Strategies: how ranks share a model. Replicated (base.py), weights sharded (fsdp2.py), layers split (tensor.py).

A strategy places weights, gradients and optimizer states, and knows neither batches nor losses.
"""
