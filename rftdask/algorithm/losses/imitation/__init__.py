"""Losses that imitate: likelihood of demonstrations, and mixtures with rollouts.

Knows nothing of the source of demonstrations.
"""
