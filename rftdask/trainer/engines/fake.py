"""Fake train engine without a model, for tests and benchmarks of everything around the engine.

Its weights are a digest of its training data and frozen bytes, so that a step changes a small part of them. The same
batches in the same order give the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from safetensors.numpy import load, save

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.storage.base import Data
from rftdask.synchronizer.published import CHECKPOINT_MODEL_FILE, MODEL_FILE
from rftdask.trainer.engines.base import TrainEngine

_NUM_FROZEN = 2048


class FakeTrainEngine(TrainEngine):
    """Folds uids, tokens and rewards into a digest."""

    trainer_type: ClassVar[str] = "fake"
    has_model: ClassVar[bool] = False

    def __init__(self) -> None:
        self._digest = b"start"

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        content = "\n".join(batch.uids).encode() + batch.tokens.tobytes() + batch.rewards.tobytes()
        self._digest = hashlib.sha256(self._digest + str(step).encode() + content).digest()
        return {"loss": 0.0}

    def evaluate(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        return {"loss": 0.0}

    def weights(self) -> Mapping[str, bytes]:
        return {MODEL_FILE: self._bytes()}

    def _bytes(self) -> bytes:
        tensors = {"digest": np.frombuffer(self._digest, np.uint8).copy(), "frozen": np.zeros(_NUM_FROZEN, np.uint8)}
        return save(tensors, {"format": "np"})

    def state_files(self) -> dict[str, bytes]:
        return {CHECKPOINT_MODEL_FILE: self._bytes()}

    def load_state_files(self, files: Mapping[str, Data]) -> None:
        self._digest = load(bytes(files[CHECKPOINT_MODEL_FILE]))["digest"].tobytes()

    def export_files(self) -> Mapping[str, bytes]:
        return self.weights()  # not a folder that transformers reads
