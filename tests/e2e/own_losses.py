"""Policy losses of a user, given to runs by their dotted paths. Each call is a line of the file that STACKS names."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from tests.e2e.own_stack import write_own_calls


@dataclass(frozen=True)
class RecordedLoss(PolicyLoss):
    """-A log p; it tells by which functions it was reached."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        return -inputs.advantages() * inputs.policy_logprobs_BT, {}


@dataclass(frozen=True)
class BrokenLoss(PolicyLoss):
    """Raises whenever it is called."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        raise ValueError("the slope of this loss must not be 7")


@dataclass(frozen=True)
class StuckLoss(PolicyLoss):
    """Does not come back."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        time.sleep(3600)
        raise AssertionError("nobody waits for so long")
