"""SFT: maximum likelihood of given responses. CPT and RAFT use the same loss on other rows."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Sft(PolicyLoss):
    """-log p: maximum likelihood. Metric sft_nll, nats per token."""

    loss_name = "sft"
    uses_advantages = False
    schema = "any"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT = -inputs.policy_logprobs_BT
        return loss_BT, {"sft_nll": inputs.weighted(loss_BT)}


class SftAlgorithm(AlgorithmType):
    """Prompts with one response each."""

    algorithm_type = "sft"
    schema = "sft"
    repeat_times = 1
    advantage_fn: ClassVar[str | None] = None
    policy_loss_fn = "sft"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"


class CptAlgorithm(SftAlgorithm):
    """Continued pretraining: plain text, every token is trained."""

    algorithm_type = "cpt"
    schema = "cpt"


class RaftAlgorithm(SftAlgorithm):
    """Imitation of the best rollout of each task. Source: RAFT, arXiv:2304.06767."""

    algorithm_type = "raft"
    schema = "experience"
    repeat_times = 8
    advantage_fn = "best_of_n"
