"""Losses that imitate: likelihood of demonstrations, its mixtures with rollouts, preferences between two responses.

Knows nothing of where demonstrations come from, nor of who preferred.
"""
