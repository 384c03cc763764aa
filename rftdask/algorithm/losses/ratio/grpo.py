"""GRPO and two variants with other aggregations: PPO's loss with the other rollouts of a task as the baseline.

The loss is `ppo.Ppo`, the advantage `advantages.group.Grpo`. There is a baseline per task instead of a critic.
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
    """No division by the std or the response length, which both favor some responses over others.

    Source: Dr. GRPO, arXiv:2503.20783.
    """

    algorithm_type = "dr_grpo"
    advantage_fn_args: ClassVar = {"std": "none"}
    kl_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-sum-norm"


class BnpoAlgorithm(AlgorithmType):
    """GRPO with equal token weights over the whole batch. Source: loss type "bnpo" of TRL."""

    algorithm_type = "bnpo"
    kl_loss_fn = "none"
