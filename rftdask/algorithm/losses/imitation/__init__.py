"""Losses that imitate: likelihood of demonstrations, its mixtures with rollouts.

Knows nothing of where demonstrations come from.
"""
