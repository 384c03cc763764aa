"""Workflows: how one rollout of a task is run. See `base.py` for the interface, `registry.py` for the names."""
