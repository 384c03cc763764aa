"""DFT: SFT whose tokens weigh by their probability, so that unlikely ones do not dominate the gradient."""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.imitation.sft import Sft


@dataclass(frozen=True)
class SftIs(Sft):
    """-sg(p) log p: likely tokens weigh more. DFT, arXiv:2508.05629; CHORD, arXiv:2508.11408."""

    loss_name = "sft_is"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # SFT's gradient is that of a reward of 1 / p; the factor sg(p) takes the 1 / p out.
        log_pi_BT = inputs.policy_logprobs_BT
        return -log_pi_BT.detach().exp() * log_pi_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}
