"""Environments of the package verifiers (0.4 and later). Tasks, tools, programs and rewards are the environment's; the
model is the policy.

A taskset `path: verifiers:<taskset>` gives rows with a task and the environment's settings (see datasets.py). Programs
that play an environment use HTTP; they call the endpoint of this attempt, so their calls are recorded.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rftdask.config import fill_from_environment
from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.registry import workflow

_KEY_VARIABLE = "RFTDASK_POLICY_API_KEY"
"""Environment variable that holds the key for such a program."""


@workflow(
    "verifiers_workflow",
    in_process=False,  # environments are third-party code
    requires={"verifiers.v1": "verifiers"},
)
async def verifiers_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one episode of the task's environment. The reward is the mean over its agents, each of which earns the
    weighted sum of the environment's rewards. Metrics: the environment's, and each reward by name.

    `workflow_args`: settings of the environment, which override the taskset's `dataset_args`.

    Raises: ValueError: the row is not from verifiers; RuntimeError: the episode failed.
    """
    if not isinstance(task.row.get("environment"), Mapping) or not isinstance(task.row.get("task"), Mapping):
        raise ValueError(f"task {task.group_id} is not from verifiers; set the taskset's path to verifiers:<taskset>")
    vf = importlib.import_module("verifiers.v1")
    settings = fill_from_environment({**task.row["environment"], **task.workflow_args})
    environment = _environment(json.dumps(settings, sort_keys=True))
    # Rebuilt from the row, because loading the taskset may read a large dataset.
    kind = type(environment.taskset).task_type()
    env_task = kind(kind.data_type().model_validate(dict(task.row["task"])), environment.taskset.config.task)
    policy = model.openai_client()
    os.environ[_KEY_VARIABLE] = policy.api_key  # this process runs only this attempt
    async with environment.serving():
        client = vf.EvalClientConfig(base_url=str(policy.base_url), api_key_var=_KEY_VARIABLE)
        context = vf.ModelContext(model="policy", client=client)
        episode = await environment.run_slot(environment.slots(env_task)[0], context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
        raise RuntimeError(f"the episode of task {task.group_id} failed: {text[:400]}")
    # One trace per agent; the calls of all agents are trained with the mean reward.
    rewards = [float(trace.reward) for trace in episode.traces]
    trace = episode.traces[0]
    values = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    values |= {name: value for name, value in trace.metrics.items() if value is not None}
    metrics = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return Reward(sum(rewards) / len(rewards), metrics)


@lru_cache(maxsize=4)
def _environment(settings: str) -> Any:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    return loaders.load_environment(loaders.resolve_env_config(json.loads(settings)))
