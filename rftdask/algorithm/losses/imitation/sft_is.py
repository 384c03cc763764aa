"""Weighted SFT: DFT (by token probability) and CHORD-phi (by the policy's uncertainty)."""

import math
from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.imitation.sft import Sft


@dataclass(frozen=True)
class SftIs(Sft):
    """-sg(p) log p: likely tokens have more weight. DFT, arXiv:2508.05629; CHORD, arXiv:2508.11408."""

    loss_name = "sft_is"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # The gradient of SFT is that of a reward of 1 / p; the factor sg(p) removes the 1 / p.
        log_pi_BT = inputs.policy_logprobs_BT
        return -log_pi_BT.detach().exp() * log_pi_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}


@dataclass(frozen=True)
class SftPhi(Sft):
    """-sg(p (1 - p)) log p: uncertain tokens have the largest weight. CHORD-phi, arXiv:2508.11408."""

    cutoff_prob: float = 1.0
    """Tokens more probable than this have no gradient. 1: all tokens have one."""

    loss_name = "sft_phi"

    def __post_init__(self) -> None:
        require(0.0 < self.cutoff_prob <= 1.0, f"cutoff_prob must be within (0, 1], got {self.cutoff_prob}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT = inputs.policy_logprobs_BT
        # phi = p (1 - p), largest at p = 1/2, measures the uncertainty about the token.
        p_BT = log_pi_BT.detach().exp()
        # Above the cutoff log p is constant and has no gradient.
        bounded_BT = log_pi_BT.clamp(max=math.log(self.cutoff_prob)) if self.cutoff_prob < 1.0 else log_pi_BT
        return -(p_BT * (1.0 - p_BT)) * bounded_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}
