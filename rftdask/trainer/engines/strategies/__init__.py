"""Strategies: how ranks share a model. Replicated (base.py), weights sharded (fsdp2.py), layers split (tensor.py)."""
