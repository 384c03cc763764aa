"""GRPO and two that aggregate otherwise: PPO's loss, and the rollouts of a task are each other's baseline.

The loss is `ppo.Ppo`, the advantage `advantages.group.Grpo`; no critic is trained.
"""

from typing import ClassVar

from rftdask.algorithm.algorithm_type import AlgorithmType


class GrpoAlgorithm(AlgorithmType):
    """A = (reward - mean of the task) / std of the task, PPO's clip, KL to the reference in the loss.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """

    algorithm_type = "grpo"
    deprecated_names = ("grpo_verl",)


class DrGrpoAlgorithm(AlgorithmType):
    """Neither the std nor the length of a response divides: both favor some answers over others.

    Source: Dr. GRPO, arXiv:2503.20783.
    """

    algorithm_type = "dr_grpo"
    advantage_fn_args: ClassVar = {"std": "none"}
    kl_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-sum-norm"


class BnpoAlgorithm(AlgorithmType):
    """GRPO whose tokens weigh alike in the whole batch. Source: the loss type "bnpo" of TRL."""

    algorithm_type = "bnpo"
    kl_loss_fn = "none"
