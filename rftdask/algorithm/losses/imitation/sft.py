"""SFT: maximum likelihood of given responses. CPT and RAFT are the same loss on other rows, DFT and CHORD-phi weigh its
tokens.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
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


@dataclass(frozen=True)
class SftIs(Sft):
    """-sg(p) log p: likely tokens weigh more. DFT, arXiv:2508.05629; CHORD, arXiv:2508.11408."""

    loss_name = "sft_is"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # SFT's gradient is that of a reward of 1 / p; the factor sg(p) takes the 1 / p out.
        log_pi_BT = inputs.policy_logprobs_BT
        return -log_pi_BT.detach().exp() * log_pi_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}


@dataclass(frozen=True)
class SftPhi(Sft):
    """-sg(p (1 - p)) log p: tokens that are neither sure nor hopeless weigh most. CHORD-phi, arXiv:2508.11408,
    equation 7."""

    cutoff_prob: float = 1.0
    """Tokens more probable than this give no gradient; 1: none are cut."""

    loss_name = "sft_phi"

    def __post_init__(self) -> None:
        require(0.0 < self.cutoff_prob <= 1.0, f"cutoff_prob must be within (0, 1], got {self.cutoff_prob}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT = inputs.policy_logprobs_BT
        # phi = p (1 - p), largest at p = 1/2, is how uncertain the policy is about the token.
        p_BT = log_pi_BT.detach().exp()
        bounded_BT = log_pi_BT.clamp(max=math.log(self.cutoff_prob)) if self.cutoff_prob < 1.0 else log_pi_BT
        return -(p_BT * (1.0 - p_BT)) * bounded_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}


class SftAlgorithm(AlgorithmType):
    """Prompts with a response each."""

    algorithm_type = "sft"
    schema = "sft"
    repeat_times = 1
    advantage_fn = None
    policy_loss_fn = "sft"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"


class CptAlgorithm(SftAlgorithm):
    """Continued pretraining: plain text, every token is trained."""

    algorithm_type = "cpt"
    schema = "cpt"


class RaftAlgorithm(SftAlgorithm):
    """The policy's own rollouts, imitated. Source: RAFT, arXiv:2304.06767."""

    algorithm_type = "raft"
    schema = "experience"
