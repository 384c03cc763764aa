"""Experiences of a rollout whose workflow is an agent with an openai client."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from rftdask.buffer.log.schema import Experience
from rftdask.engines.base import SamplingParams
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Task
from rftdask.rollouts.workflows.registry import workflow
from tests.unit.rollouts.rollout_cases import outcome, task

Agent = Callable[[AsyncOpenAI], Awaitable[Any]]


def agent_rows(agent: Agent, policy: TextEngine, batch: Any = None) -> list[Experience]:
    """The rows of a rollout that must succeed."""
    # Random, because tests may import each other's modules under two names.
    name = f"agent_{os.urandom(8).hex()}"

    async def run(task: Task, model: PolicyModel) -> float:
        await agent(model.openai_client())
        return 1.0

    workflow(name, in_process=True)(run)
    sampling = SamplingParams(max_tokens=200)
    rows = outcome([task(0, name)], policy, batch or {}, max_retry_times=0, sampling=sampling).experiences
    assert {row.error for row in rows} == {""}, rows[0].error
    return rows
