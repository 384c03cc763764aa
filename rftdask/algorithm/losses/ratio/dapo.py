"""DAPO: GRPO with a higher upper clip bound, which drops tasks whose rewards are all equal.

The loss is `ppo.Ppo`. Its overlong filtering and dynamic sampling are operators (../../operators.py).
"""

from typing import ClassVar

from rftdask.algorithm.algorithm_type import AlgorithmType


class DapoAlgorithm(AlgorithmType):
    """Clip-higher 0.2 and 0.28, tasks without spread dropped, token-mean, no KL. Source: DAPO, arXiv:2503.14476."""

    algorithm_type = "dapo"
    repeat_times = 16
    # Drops tasks whose rewards have standard deviation 0: dynamic sampling.
    advantage_fn_args: ClassVar = {"std_threshold": 0.0}
    policy_loss_fn_args: ClassVar = {"clip_range_low": 0.2, "clip_range_high": 0.28}
    kl_loss_fn = "none"
