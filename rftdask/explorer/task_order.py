"""From the tasksets of a config to what the buffer reads and orders them by.

Knows no step. Invariant: the order is a function of the config and of the rows, so a resumed run has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.task_schedule import Order, Selector
from rftdask.data.tasksets import Taskset, TasksetSpec


def taskset_spec(config: TasksetConfig) -> TasksetSpec:
    """The values of one taskset, defaults of its workflow and reward filled in."""
    fmt = config.format
    return TasksetSpec(
        name=config.name,
        path=config.path,
        split=config.split,
        subset_name=config.subset_name,
        dataset_args=config.dataset_args,
        table=config.table,
        prompt_type=fmt.prompt_type,
        prompt_key=fmt.prompt_key,
        response_key=fmt.response_key,
        messages_key=fmt.messages_key,
        system_prompt=fmt.system_prompt,
        system_prompt_key=fmt.system_prompt_key,
        reply_prefix=fmt.reply_prefix,
        workflow=config.default_workflow_type or "simple_workflow",
        workflow_key=fmt.workflow_key,
        reward_fn=config.default_reward_fn_type or "",
        reward_fn_key=fmt.reward_fn_key,
        workflow_args=config.workflow_args,
        reward_fn_args=config.reward_fn_args,
    )


@dataclass(frozen=True)
class TaskOrder:
    """Arguments of `explore_tasks` that say in which order tasks are taken."""

    selector: Selector = "sequential"
    seed: int = 0
    orders: tuple[Order | None, ...] | None = None


def task_order(tasksets: Sequence[TasksetConfig], sizes: Mapping[str, int]) -> TaskOrder:
    """The order of training tasksets whose selectors go together; reads the rows of those ordered by their columns.

    Args: sizes: tasks by name of the taskset.
    Raises: DataError: a column of `feature_keys` is missing or holds something else than numbers.
    """
    if any(taskset.data_selector.selector_type == "random" for taskset in tasksets):
        return TaskOrder("random", tasksets[0].data_selector.seed)
    seeds = [t.data_selector.seed for t in tasksets if t.data_selector.selector_type == "shuffle"]
    common: Selector = "shuffle" if seeds else "sequential"
    orders = tuple(
        None if taskset.data_selector.selector_type == common else _own_order(taskset, sizes[taskset.name])
        for taskset in tasksets
    )
    return TaskOrder(common, seeds[0] if seeds else 0, orders)


def _own_order(config: TasksetConfig, size: int) -> Order:
    selector = config.data_selector
    if selector.selector_type == "sequential":
        return np.arange(size)
    # Late: torch takes seconds to import, and most runs need none of it here.
    import torch

    from rftdask.algorithm.selectors import easy_to_hard

    numbers = Taskset(taskset_spec(config)).numbers(selector.feature_keys)
    order: Order = easy_to_hard(torch.tensor(numbers, dtype=torch.float64)).numpy()
    return order
