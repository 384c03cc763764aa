"""Custom engine in a plug-in folder."""

from __future__ import annotations

import os

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.fake import FakeEngine

SECONDS_PER_STEP = "TEST_SECONDS_PER_STEP"


class SlowEngine(FakeEngine):
    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> SlowEngine:
        return cls(seconds_per_step=float(os.environ[SECONDS_PER_STEP]), tokens_per_request=10**9)
