"""The name of an adapter that is not there: environments of the package `verifiers`.

Its version 0.4, the one that installs beside this package's constraints, runs environments by harnesses of its own, and
the clients it ships reach the policy over HTTP; this package opens no such server. A client of ours, in its place, may
be the way; nobody has tried.
"""

from __future__ import annotations

from rftdask.buffer.task import Task
from rftdask.explorer.workflows.base import PolicyModel


async def verifiers_workflow(task: Task, model: PolicyModel) -> float:
    raise NotImplementedError(verifiers_workflow.unavailable)  # type: ignore[attr-defined]


verifiers_workflow.unavailable = (  # type: ignore[attr-defined]
    "the clients of verifiers 0.4 reach the policy over HTTP, and no HTTP endpoint of the policy is available in "
    "this release; write a workflow around the environment's task and scorer instead (docs/workflows.md)"
)
