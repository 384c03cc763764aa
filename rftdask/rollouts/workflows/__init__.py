"""Workflows: one rollout of one task. See `base.py` for the interface and `registry.py` for the names."""
