"""Entropy bonus: the loss is lowered by coefficient * entropy, with the token weights of the policy loss.

Knows nothing of logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.losses.base import LossInputs


@dataclass(frozen=True)
class EntropyBonus:
    """Every trained token counts. Williams and Peng, 1991; Mnih et al., arXiv:1602.01783."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy, in loss units per nat. 0: the entropy is not computed."""

    entropy_name = "default"

    @property
    def is_active(self) -> bool:
        """True if the entropy is needed."""
        return self.entropy_coef != 0.0

    def per_token(self, inputs: LossInputs) -> Tensor:
        """[B, T] entropy of each token. Raises: ValueError: the batch has no entropy."""
        if inputs.entropy_BT is None:
            raise ValueError(
                f"entropy_coef is {self.entropy_coef}, but entropy_BT is missing; compute it from the logits"
            )
        return inputs.entropy_BT


@dataclass(frozen=True)
class MixEntropyBonus(EntropyBonus):
    """Only tokens sampled by the policy count, not demonstrations. Used by MIX and CHORD."""

    entropy_name = "mix"

    def per_token(self, inputs: LossInputs) -> Tensor:
        """[B, T] entropy, 0 for demonstrations. expert_mask_B None: no demonstrations."""
        entropy_BT = super().per_token(inputs)
        if inputs.expert_mask_B is None:
            return entropy_BT
        return torch.where(inputs.spread(inputs.expert_mask_B), 0.0, entropy_BT)


@dataclass(frozen=True)
class NoEntropyBonus(EntropyBonus):
    """No entropy term, whatever the coefficient."""

    entropy_name = "none"

    @property
    def is_active(self) -> bool:
        """False, so that the trainer does not compute the entropy."""
        return False
