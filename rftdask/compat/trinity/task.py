"""Configuration sections that user code reads, and the task of a workflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rftdask.data.task import Task as OurTask


@dataclass
class FormatConfig:
    """`format` of a taskset, as far as a task knows it."""

    prompt_type: str = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt_key: str | None = None
    system_prompt: str | None = None
    messages_key: str = "message"
    tools_key: str = "tools"
    image_key: str | None = None
    video_key: str | None = None
    reply_prefix: str | None = None
    workflow_key: str = ""
    reward_fn_key: str = ""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    enable_concatenated_multi_turn: bool = False
    chat_template: str | None = None
    enable_thinking: bool | None = None


@dataclass
class GenerationConfig:
    """`rollout_args` of a taskset. None: the taskset's value, which the model knows."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclass
class DataSelectorConfig:
    """`data_selector` of a taskset."""

    selector_type: str = "sequential"
    seed: int = 42
    feature_keys: list[str] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


class Config(SimpleNamespace):
    """Configuration, for annotations of user code."""


@dataclass
class Task:
    """A task, with the interface of Trinity-RFT."""

    workflow: Any = None
    repeat_times: int | None = None
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: Any = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)

    @property
    def task_desc(self) -> Any:
        """Prompt."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """True answer."""
        return self.raw_task.get(self.format_args.response_key)

    def to_dict(self) -> dict[str, Any]:
        """Return the row."""
        return self.raw_task

    def to_workflow(self, model: Any, auxiliary_models: list[Any] | None = None) -> Any:
        """Create the workflow for this task."""
        return self.workflow(task=self, model=model, auxiliary_models=auxiliary_models)


def read_task(task: OurTask, workflow: Any, reward_fn: Any) -> Task:
    """Convert one of our tasks. Prompt and answer get their own keys if the row lacks them."""
    row = dict(task.row)
    messages = list(task.messages)
    prompt = next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "") or task.prompt
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    prefix = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
    keys = {}
    # By their values: a task has no more of `format` than what came of it.
    for name, value in (("prompt", prompt), ("response", task.truth)):
        keys[name] = next((key for key, given in row.items() if given == value and value != ""), name)
        row.setdefault(keys[name], value)
    return Task(
        workflow=workflow,
        repeat_times=1,
        format_args=FormatConfig(
            prompt_key=keys["prompt"], response_key=keys["response"], system_prompt=system, reply_prefix=prefix
        ),
        workflow_args=dict(task.workflow_args),
        reward_fn_args=dict(task.reward_fn_args),
        reward_fn=reward_fn,
        raw_task=row,
        batch_id=task.epoch,
        task_id=task.index,
        index={"index": task.index, "taskset": task.taskset},
    )
