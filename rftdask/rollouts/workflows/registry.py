"""The workflows by name, and how to add one: the decorator below, a dotted path, or a file of a plug-in folder.

A workflow of this package is imported when it is first needed. Names are those of Trinity-RFT where it has the
workflow; of some it has a blocking and an async version, which are the same here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rftdask.config.plugins import check_call, find_part, module_of, register, runs_in_process
from rftdask.config.plugins import requires as required_modules
from rftdask.config.schema.buffer import registered_workflows
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.base import GroupReward, PolicyModel, WorkflowFn

_Workflow = TypeVar("_Workflow")


@dataclass(frozen=True)
class FoundWorkflow:
    """A workflow and how it is run."""

    run: WorkflowFn
    in_process: bool
    """True: it runs on the event loop beside all others. False: in a sandbox."""
    max_concurrent: int | None
    """Rollouts of it at the same time in one worker; None: any number."""
    module: str
    """Module that a sandbox imports to have it."""
    requires: tuple[str, ...]
    """Optional modules that it imports."""
    group_reward: GroupReward | None = None
    """What gives the rollouts of a task their rewards once all have ended; None: each has its own."""


def workflow(
    name: str,
    *,
    in_process: bool | None = None,
    max_concurrent: int | None = None,
    requires: Mapping[str, str] | None = None,
    group_reward: GroupReward | None = None,
) -> Callable[[_Workflow], _Workflow]:
    """Decorator that gives a function, or a class with `run`, a name. Its module has to be imported where rollouts
    run; a plugin folder or a dotted path as the workflow's name does that.

    in_process: run it on the event loop, which is faster and which it must never block; None: in a sandbox, where it
    may block, hang or crash. max_concurrent: rollouts of it at the same time in one worker, such as an environment's
    licenses. requires: optional modules that it imports -> the extra of rftdask that installs them.
    group_reward: an async function that gives the rollouts of a task their rewards together, see GroupReward. A class
    may say the same as attributes.

    Raises: ValueError: the name is taken by another workflow.
    """

    def decorate(plugin: _Workflow) -> _Workflow:
        declared = {
            "in_process": in_process,
            "max_concurrent": max_concurrent,
            "requires": requires,
            "group_reward": group_reward,
        }
        register("workflow", registered_workflows(), name, plugin, **declared)
        return plugin

    return decorate


def find_workflow(name: str) -> FoundWorkflow:
    """The workflow called `name`, or at the dotted path `name`. A class is instantiated, without arguments, for each
    rollout. One that is not async runs in a thread of its sandbox, with `model.blocking()`.

    Raises: UserError: there is none, it has no `run`, does not take (task, model), or is in_process and blocks.
    """
    plugin: Any = find_part("workflow", name, registered_workflows())
    function = getattr(plugin, "run", plugin)
    if not callable(function) or (inspect.isclass(plugin) and function is plugin):
        raise UserError(f"workflow {name!r} must be a function or a class with run(task, model)")
    # Of a class the plain function is looked at, which has `self` before the two.
    takes_self = inspect.isclass(plugin) and inspect.isfunction(inspect.getattr_static(plugin, "run"))
    check_call("workflow", name, function, *("self",) * takes_self, "task", "model")
    is_async = inspect.iscoroutinefunction(function)
    in_process = runs_in_process(plugin)
    if in_process and not is_async:
        raise UserError(f"workflow {name!r} is declared in_process, so it must be an async function or async run")
    run: Callable[[Task, Any], Any] = function
    if inspect.isclass(plugin):
        make: Any = plugin
        run = lambda task, model: make().run(task, model)  # noqa: E731 -- an instance for each rollout

    # The sandbox's event loop stays free to carry the questions that the thread waits for.
    async def run_in_thread(task: Task, model: PolicyModel) -> Any:
        return await asyncio.to_thread(run, task, model.blocking())

    return FoundWorkflow(
        run=run if is_async else run_in_thread,
        in_process=in_process,
        max_concurrent=getattr(plugin, "max_concurrent", None),
        module=module_of(plugin),
        requires=tuple(required_modules(plugin)),
        group_reward=getattr(plugin, "group_reward", None),
    )
