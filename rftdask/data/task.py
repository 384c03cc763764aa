"""Task: a prompt and its scorer, read from a taskset; identified by (taskset, epoch, index)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MARKED_ANSWER = re.compile(r"####[ \t]*([^\n#]+?)[ \t]*\Z")


@dataclass(frozen=True)
class Task:
    """One prompt to roll out.

    Example: Task(taskset="gsm8k", epoch=0, index=17, prompt="Weng earns $12 an hour ...", truth="10",
    workflow="math_workflow")
    """

    taskset: str
    epoch: int
    index: int
    """Row in the taskset, before any shuffling."""
    prompt: str = ""
    """The prompt column as text; "" if the row has messages."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages, ready to render, including the system prompt; () for a raw prompt."""
    truth: str = ""
    """Reference answer as text; "": the taskset has none."""
    workflow: str = "simple_workflow"
    reward_fn: str = ""
    """Name of the reward function; "": the default of the workflow."""
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    """The whole dataset row, for workflows that need more."""
    tools: tuple[Any, ...] = ()
    """JSON schemas of the tools that the chat template shows; (): none."""
    problem: str = ""
    """Reason why the row cannot be used; all rollouts of the task fail with it. "": it can."""

    @property
    def group_id(self) -> str:
        """Id "taskset/epoch/row" of the rollouts of this task within a run."""
        return f"{self.taskset}/{self.epoch}/{self.index}"


def final_answer(solution: str) -> str:
    """Return the text after "####" in the last line, as in GSM8K; the whole text if the last line has no such mark."""
    match = _MARKED_ANSWER.search(solution.rstrip())
    return match.group(1) if match else solution.strip()
