"""Workflow and engines of longtail.py: responses of given lengths, and engines that record their use.

An engine appends a line to its own file for each response: entry time, exit time and number of tokens.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
from simulated import SimulatedEngine

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import Engine, GenerateRequest, Generation, Give, Take
from rftdask.engines.transformers import TransformersEngine
from rftdask.rollouts.workflows.base import PolicyModel, Task
from rftdask.rollouts.workflows.registry import workflow

TRACE = "LONGTAIL_TRACE"
"""Environment variable with the folder of the engines' files."""
_asked: Counter[str] = Counter()


def lengths(seed: tuple[int, ...], count: int, median: float, sigma: float, longest: int) -> list[int]:
    """Return lengths of responses: lognormal, cut off."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return [max(1, min(longest, round(length))) for length in drawn]


@workflow("longtail", in_process=True)
async def longtail(task: Task, model: PolicyModel) -> float:
    """Ask for one response of random length. Each rollout of a task has a different length, which is the same in every
    run.
    """
    row = task.row
    _asked[task.group_id] += 1
    length = lengths((task.epoch, task.index, _asked[task.group_id]), 1, row["median"], row["sigma"], row["longest"])[0]
    response = await model.generate(task.prompt, max_tokens=length, min_tokens=length)
    return float(len(response.tokens) == length)


class _Traced(Engine):
    """Engine that records the answers of the engine below it."""

    def serve(self, take: Take, give: Give) -> None:
        """Serve like the engine and write a line for each response."""
        entered: dict[int, float] = {}
        with (Path(os.environ[TRACE]) / f"{os.getpid()}.txt").open("a", buffering=1) as file:

            def taken() -> list[tuple[int, GenerateRequest | None]]:
                requests = list(take())
                now = time.time()
                entered.update({number: now for number, request in requests if request is not None})
                return requests

            def record_and_give(number: int, generation: Generation) -> None:
                file.write(f"{entered.pop(number)} {time.time()} {len(generation.tokens)}\n")
                give(number, generation)

            super().serve(taken, record_and_give)  # type: ignore[safe-super]  # of the engine that comes next


class TracedSimulation(_Traced, SimulatedEngine):
    """`engine_type: longtail_parts.TracedSimulation`"""

    engine_type = ""


class TracedTransformers(_Traced, TransformersEngine):
    """`engine_type: longtail_parts.TracedTransformers`"""

    engine_type = ""

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> TracedTransformers:
        """Return what the base returns, under the name of this class."""
        return cls(section.model_path or model.model_path, dtype=section.dtype, device=device)
