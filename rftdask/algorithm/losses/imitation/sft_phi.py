"""CHORD-phi: SFT whose tokens weigh by the policy's doubt about them."""

import math
from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.imitation.sft import Sft


@dataclass(frozen=True)
class SftPhi(Sft):
    """-sg(p (1 - p)) log p: tokens that are neither sure nor hopeless weigh most. CHORD-phi, arXiv:2508.11408."""

    cutoff_prob: float = 1.0
    """Tokens more probable than this give no gradient; 1: none are cut."""

    loss_name = "sft_phi"

    def __post_init__(self) -> None:
        require(0.0 < self.cutoff_prob <= 1.0, f"cutoff_prob must be within (0, 1], got {self.cutoff_prob}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT = inputs.policy_logprobs_BT
        # phi = p (1 - p), largest at p = 1/2, is how uncertain the policy is about the token.
        p_BT = log_pi_BT.detach().exp()
        # Beyond the cutoff log p is a constant, which has no gradient.
        bounded_BT = log_pi_BT.clamp(max=math.log(self.cutoff_prob)) if self.cutoff_prob < 1.0 else log_pi_BT
        return -(p_BT * (1.0 - p_BT)) * bounded_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}
