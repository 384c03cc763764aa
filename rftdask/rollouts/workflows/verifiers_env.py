"""Environments of the package verifiers (0.4 and later), by name: the tasks, their tools, programs and rewards are the
environment's, the model is the policy.

A taskset `path: verifiers:<taskset>` gives rows that hold a task and the environment's settings (see datasets.py).
Whatever program plays an environment speaks HTTP; it asks the endpoint of this attempt, and so is recorded.
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
"""Environment variable of the key for the program that plays an environment."""


@workflow(
    "verifiers_workflow",
    in_process=False,  # its environments are anybody's code
    requires={"verifiers.v1": "verifiers"},
)
async def verifiers_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one episode of the task's environment. The reward is the mean over its agents of what each earned, which is
    the weighted sum of the environment's rewards. Metrics: the environment's, and each reward by its name.

    `workflow_args`: settings of the environment that go before those of the taskset's `dataset_args`.

    Raises: ValueError: the task's row is not of verifiers; RuntimeError: the episode failed, with the reason.
    """
    if not isinstance(task.row.get("environment"), Mapping) or not isinstance(task.row.get("task"), Mapping):
        raise ValueError(f"task {task.group_id} is not of verifiers: set the taskset's path to verifiers:<taskset>")
    vf = importlib.import_module("verifiers.v1")
    settings = fill_from_environment({**task.row["environment"], **task.workflow_args})
    environment = _environment(json.dumps(settings, sort_keys=True))
    # The environment's task of the row, without loading the taskset, which may read a large dataset.
    kind = type(environment.taskset).task_type()
    own = kind(kind.data_type().model_validate(dict(task.row["task"])), environment.taskset.config.task)
    policy = model.openai_client()
    os.environ[_KEY_VARIABLE] = policy.api_key  # this process is the attempt's alone
    async with environment.serving():
        client = vf.EvalClientConfig(base_url=str(policy.base_url), api_key_var=_KEY_VARIABLE)
        episode = await environment.run_slot(environment.slots(own)[0], vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "without a reason"
        raise RuntimeError(f"the episode of task {task.group_id} failed: {text[:400]}")
    # One trace for each agent; every call of each is recorded, and trained with the mean.
    rewards = [float(trace.reward) for trace in episode.traces]
    trace = episode.traces[0]
    told = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    told |= {name: value for name, value in trace.metrics.items() if value is not None}
    metrics = {name: float(value) for name, value in told.items() if math.isfinite(value)}
    return Reward(sum(rewards) / len(rewards), metrics)


@lru_cache(maxsize=4)
def _environment(settings: str) -> Any:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    return loaders.load_environment(loaders.resolve_env_config(json.loads(settings)))
