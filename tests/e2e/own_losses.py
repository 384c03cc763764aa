"""Policy losses of a user, given to runs by their dotted paths. Each call appends a line to the file that STACKS
names.
"""

import os
import signal
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch import OutOfMemoryError, Tensor

from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from rftdask.algorithm.losses.ratio import Ppo
from tests.e2e.own_stack import write_own_calls

KILL_AT = "RFTDASK_TEST_KILL_AT"
"""Environment variable: number of a call of `KilledPpo` and, after a space, a file."""
_calls = count(1)


@dataclass(frozen=True)
class KilledPpo(Ppo):
    """PPO's loss; the call that KILL_AT names creates the file and kills its process, unless the file exists."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        number, _, mark = os.environ.get(KILL_AT, "0").partition(" ")
        if next(_calls) == int(number) and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(inputs)


@dataclass(frozen=True)
class RecordedLoss(PolicyLoss):
    """-A log p; records the functions on its call stack."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        return -inputs.advantages() * inputs.policy_logprobs_BT, {}


@dataclass(frozen=True)
class BrokenLoss(PolicyLoss):
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        raise ValueError("the slope of this loss must not be 7")


@dataclass(frozen=True)
class StuckLoss(PolicyLoss):
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        time.sleep(3600)
        raise AssertionError("nobody waits for so long")


@dataclass(frozen=True)
class GreedyLoss(PolicyLoss):
    """A loss that raises torch's out-of-memory error without a GPU."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        write_own_calls("loss")
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB")
