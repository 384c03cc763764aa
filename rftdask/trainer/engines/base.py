"""Train engine: one step on a batch, of one update or several. It knows nothing of storage, ledgers or Dask.

Promise: in deterministic mode on a CPU, the same state and the same batch give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np

from rftdask.algorithm.algorithm import Algorithm
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.config import Config
from rftdask.storage.base import Data
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.trainer.ranks import Ranks


class TrainEngine(ABC):
    """Holds the policy and its optimizer on one rank."""

    trainer_type: ClassVar[str] = ""
    """Name in a configuration. A class without one is named as `package.module.Name`."""
    has_model: ClassVar[bool] = True
    """It trains a model, whose folder has to be there, and imports what that takes."""
    is_hosted: ClassVar[bool] = False
    """A service trains the model: its tokenizer is here, but neither its weights nor a GPU for them."""

    @classmethod
    def from_config(cls, config: Config, algorithm: Algorithm, total_steps: int | None, ranks: Ranks) -> TrainEngine:
        """The engine of one rank. Called by all ranks. total_steps: where the run ends, if that is known."""
        return cls()

    @abstractmethod
    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Train on `batch` as step `step` (1-based); the metrics of the step.

        Raises: RoleError: a loss or gradient is not finite, naming the step.
        """

    def rows_to_compute(self, batch: TrainingBatch, step: int) -> np.ndarray | None:
        """[M] numbers of the rows whose tokens this rank needs for `train_step`; None: of all. `batch` has none yet.
        Called by all ranks, if there are several.
        """
        return None

    def evaluate(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        """Means of loss and metrics over all batches, of the weights as they are; nothing is trained. {}: it measures
        none. Called by all ranks.
        """
        return {}

    @abstractmethod
    def weights(self) -> Mapping[str, Data]:
        """What explorers load, file name -> bytes: the policy's state dict in safetensors format, tied tensors once, in
        the data type in which engines compute; or its adapters, where they alone are trained. A copy: it is written
        while the next step changes the weights. Called by all ranks, each of which gets what it is to write; of a file
        that several have, the lowest one's is written.
        """

    def reuse(self, files: Mapping[str, Data]) -> None:  # noqa: B027 (an engine may make new memory each time)
        """Told that nobody reads what `weights` or `state_files` gave any more, whose memory may be filled again."""

    def fingerprint(self) -> Fingerprint | None:
        """What these weights compute, for engines to reproduce; None: there is no model. Called by all ranks."""
        return None

    @abstractmethod
    def state_files(self) -> Mapping[str, Data]:
        """Files from which `load_state_files` restores policy, optimizer and random state, to the bit; a rank gets what
        it is to write, which is a copy. Called by all ranks.
        """

    @abstractmethod
    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """Restore from what all ranks wrote, however many they were. Called by all ranks."""

    def keep_only(self, versions: Collection[int], checkpoints: Collection[int]) -> None:  # noqa: B027
        """Told, where `is_hosted`, which versions and checkpoints the run folder names: what lies elsewhere of older
        ones may go."""

    def leave_device(self) -> None:  # noqa: B027 (an engine may have nothing on a device)
        """Free the memory of the device until `return_to_device`, while engines have it. No step is under way."""

    def return_to_device(self) -> None:  # noqa: B027
        """Go on where `leave_device` was called, to the bit."""

    @abstractmethod
    def export_files(self) -> Mapping[str, bytes]:
        """The policy as a Hugging Face folder: file name -> bytes, tokenizer and generation config included."""
