"""Workflow registry. A workflow is added by the decorator below, a dotted path, or a file in a plug-in folder.

Workflows of this package are imported on first use. Names are Trinity-RFT's where it has the workflow; its blocking and
async versions are the same workflow here.
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
    run: WorkflowFn
    in_process: bool
    """True: it runs on the shared event loop. False: in a sandbox."""
    max_concurrent: int | None
    """Concurrent rollouts in one worker; None: unlimited."""
    module: str
    """Module that a sandbox imports."""
    requires: tuple[str, ...]
    """Optional modules that it imports."""
    group_reward: GroupReward | None = None
    """Function that rewards all rollouts of a task together; None: each rollout has its own reward."""


def workflow(
    name: str,
    *,
    in_process: bool | None = None,
    max_concurrent: int | None = None,
    requires: Mapping[str, str] | None = None,
    group_reward: GroupReward | None = None,
) -> Callable[[_Workflow], _Workflow]:
    """Decorator that registers a function, or a class with `run`. Its module must be imported where rollouts run; a
    plug-in folder or a dotted path as the workflow's name does that. A class may set the options as attributes.

    Args:
        in_process: run on the shared event loop, which is faster and must never be blocked. None: run in a sandbox,
            where it may block, hang or crash.
        max_concurrent: concurrent rollouts in one worker, such as the number of an environment's licenses.
        requires: optional modules that it imports -> the extra of rftdask that installs them.
        group_reward: async function that rewards all rollouts of a task together, see GroupReward.
    Raises: ValueError: another workflow has this name.
    """

    def decorate(plugin: _Workflow) -> _Workflow:
        options = {"max_concurrent": max_concurrent, "requires": requires, "group_reward": group_reward}
        register("workflow", registered_workflows(), name, plugin, in_process=in_process, **options)
        return plugin

    return decorate


def find_workflow(name: str) -> FoundWorkflow:
    """Find a workflow by registered name or dotted path. A class is instantiated for each rollout. A function that is
    not async runs in a thread of its sandbox with `model.blocking()`.

    Raises: UserError: it does not exist, has no `run`, does not take (task, model), or is in_process and not async.
    """
    plugin: Any = find_part("workflow", name, registered_workflows())
    function = getattr(plugin, "run", plugin)
    if not callable(function) or (inspect.isclass(plugin) and function is plugin):
        raise UserError(f"workflow {name!r} must be a function or a class with run(task, model)")
    # `run` of a class is an unbound function, whose first parameter is `self`.
    takes_self = inspect.isclass(plugin) and inspect.isfunction(inspect.getattr_static(plugin, "run"))
    check_call("workflow", name, function, *("self",) * takes_self, "task", "model")
    is_async = inspect.iscoroutinefunction(function)
    in_process = runs_in_process(plugin)
    if in_process and not is_async:
        raise UserError(f"workflow {name!r} is declared in_process, so its function or run must be async")
    run: Callable[[Task, Any], Any] = function
    if inspect.isclass(plugin):
        make: Any = plugin
        run = lambda task, model: make().run(task, model)  # noqa: E731 -- a new instance per rollout

    # In a thread, so that the sandbox's event loop can carry the calls that the function waits for.
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
