"""Losses in the ratio r = pi / pi_old of the sampled token, clipped, gated or filtered, times the advantage.

Invariant: where pi equals pi_old, r is exactly 1 and the gradient of every loss with respect to log pi is -A.
"""
