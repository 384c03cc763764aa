"""The workflows by name, and how to add one: the decorator below, or a dotted path in the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rftdask.buffer.task import Task
from rftdask.errors import UserError
from rftdask.explorer.plugins import find_plugin
from rftdask.explorer.workflows.base import PolicyModel, Reward, WorkflowFn
from rftdask.explorer.workflows.grid import grid_workflow
from rftdask.explorer.workflows.single_turn import math_boxed_workflow, math_workflow, simple_workflow

_Workflow = TypeVar("_Workflow")

_WORKFLOWS: dict[str, Any] = {
    "grid_workflow": grid_workflow,
    "math_boxed_workflow": math_boxed_workflow,
    "math_workflow": math_workflow,
    "simple_workflow": simple_workflow,
    # The reference system has a blocking and an async version of each; here every workflow is async.
    "async_math_boxed_workflow": math_boxed_workflow,
    "async_math_workflow": math_workflow,
    "async_simple_workflow": simple_workflow,
}


def workflow(name: str) -> Callable[[_Workflow], _Workflow]:
    """Decorator that gives an async function, or a class with an async `run`, a name. Its module has to be imported
    where rollouts run; a dotted path as the workflow's name does that.

    Raises: ValueError: the name is taken by another workflow.
    """

    def register(plugin: _Workflow) -> _Workflow:
        if _WORKFLOWS.setdefault(name, plugin) is not plugin:
            raise ValueError(f"workflow {name!r} exists already; choose another name")
        return plugin

    return register


def get_workflow(name: str) -> WorkflowFn:
    """The workflow called `name`, or at the dotted path `name`, as an async function. A class is instantiated, without
    arguments, for each rollout.

    Raises: UserError: there is none, or it is not async.
    """
    plugin = find_plugin("workflow", name, _WORKFLOWS)
    function: WorkflowFn = getattr(plugin, "run", plugin)
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"workflow {name!r} must be an async function or a class with an async run(task, model)")
    if not inspect.isclass(plugin):
        return function

    async def run_new_instance(task: Task, model: PolicyModel) -> float | Reward:
        instance: Any = plugin()
        reward: float | Reward = await instance.run(task, model)
        return reward

    return run_new_instance
