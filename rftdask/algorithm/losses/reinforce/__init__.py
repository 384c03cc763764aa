"""Losses of the REINFORCE family: log pi times the advantage and a weight without gradient.

Invariant: the gradient of a token's loss with respect to log pi is -weight * A.
"""
