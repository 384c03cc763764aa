"""Tokenizer and engines for tests of rollouts: one token per character, and replies that the test chooses."""

import asyncio
import atexit
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from rftdask.buffer.log.schema import Experience
from rftdask.config.schema.explorer import ExplorerConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.task import Task
from rftdask.data.task_schedule import TaskRef
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.rollouts.policy.request_queues import GenerateBatch
from rftdask.rollouts.runner import TextEngine, UnitOutcome, run_work_unit
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer
from rftdask.rollouts.work_units import RolloutTask
from rftdask.rollouts.workflows.base import PolicyModel, WorkflowFn
from rftdask.rollouts.workflows.registry import workflow
from rftdask.synchronizer.published import Published
from rftdask.synchronizer.styles import WeightRequirement

VERSION = 7


class CharTokenizer:
    """Tokenizer of code points. A chat is the names of tools and options, then "<role>content" for each message. Token
    0 is special.
    """

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Any = (),
        **options: Any,
    ) -> str:
        assert not tokenize and add_generation_prompt != continue_final_message
        text = "".join(f"[{tool['function']['name']}]" for tool in tools)
        text += "".join(f"{{{name}={value}}}" for name, value in options.items())
        text += "".join(f"<{message['role']}>{message['content']}" for message in conversation)
        return text + "<assistant>" * add_generation_prompt

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) if token else "" if skip_special_tokens else "<end>" for token in token_ids)


def prompt_of(request: GenerateRequest) -> str:
    return "".join(chr(token) for token in request.prompt_tokens)


def replies(
    reply: str | Callable[[GenerateRequest], str], log: list[list[GenerateRequest]] | None = None
) -> GenerateBatch:
    """Engine that responds to every request with `reply`, truncated to max_tokens, and logs its calls."""

    async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
        if log is not None:
            log.append(requests)
        await asyncio.sleep(0)
        return [generation(reply if isinstance(reply, str) else reply(request), request) for request in requests]

    return generate_batch


def engine_of(make: Callable[[GenerateRequest], Generation]) -> GenerateBatch:
    async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
        return [make(request) for request in requests]

    return generate_batch


def generation(text: str, request: GenerateRequest) -> Generation:
    tokens = (*(ord(character) for character in text), 0)
    cut = tokens[: request.sampling.max_tokens]
    return Generation(cut, (-0.5,) * len(cut), "stop" if len(cut) == len(tokens) else "length", VERSION, VERSION)


MODEL = ModelConfig(model_path="none", max_response_tokens=100)


def cut_at(max_prompt_tokens: int, **changes: Any) -> ModelConfig:
    return MODEL.model_copy(update={"max_prompt_tokens": max_prompt_tokens, **changes})


def settings(**changes: Any) -> dict[str, Any]:
    """Arguments of run_work_unit: `sampling` of taskset t, `model`, and the rest of ExplorerConfig."""
    return {
        "sampling": {"t": changes.pop("sampling", SamplingParams(max_tokens=100))},
        "model": changes.pop("model", MODEL),
        "explorer": ExplorerConfig(**{"max_retry_times": 1, "rollout_model": {"seed": 42}, **changes}),
    }


def task(index: int = 0, workflow: str = "math_workflow", **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "messages": ({"role": "user", "content": f"q{index}"},),
        "prompt": f"q{index}",
        "truth": "4",
    }
    return Task(taskset="t", epoch=0, index=index, workflow=workflow, **{**fields, **changes})


def work_unit(*tasks: int, step: int = 1, epoch: int = 0, **fields: Any) -> RolloutTask:
    """Work unit of two rollouts of each task, given by index."""
    refs = tuple(TaskRef(0, epoch, index) for index in tasks)
    fields = {"repeat_times": 2, "greedy_baseline": False, "weights": WeightRequirement(0, exact=True), **fields}
    return RolloutTask("memory://run", "", 1, None, "experiences", step, 0, refs, **fields)


def run(
    tasks: Sequence[Task],
    generate_batch: GenerateBatch,
    *,
    repeat_times: int = 1,
    greedy_baseline: bool = False,
    on_group: Callable[[int, list[Experience]], None] = lambda number, experiences: None,
    **changes: Any,
) -> list[Experience]:
    """Run one work unit. Returns: its experiences. changes: as in `settings`."""
    batch = {"repeat_times": repeat_times, "greedy_baseline": greedy_baseline, "on_group": on_group}
    return outcome(tasks, TextEngine(generate_batch, CharTokenizer()), batch, **changes).experiences


_numbers = count()


def named(function: WorkflowFn, **declared: int) -> str:
    """Register a workflow of this process under a unique name."""
    name = f"test_workflow_{next(_numbers)}"
    workflow(name, in_process=True, **declared)(function)
    return name


def returns(value: Any, **options: Any) -> str:
    """Name of a workflow that calls the policy once, with these options, and returns `value`."""

    async def returning(task: Task, model: PolicyModel) -> Any:
        await model.generate("p", **options)
        return value

    return named(returning)


async def hangs(task: Task, model: PolicyModel) -> float:
    await asyncio.sleep(3600)
    return 1.0


_fork_servers: dict[SandboxSpec, ForkServer] = {}


def keep(spec: SandboxSpec) -> ForkServer:
    """Fork server that later tests reuse, because starting one takes most of a second."""
    if spec not in _fork_servers or not _fork_servers[spec].alive():
        _fork_servers[spec] = ForkServer(spec)
        atexit.register(_fork_servers[spec].close)
    return _fork_servers[spec]


def outcome(tasks: Sequence[Task], policy: TextEngine, batch: dict[str, Any], **changes: Any) -> UnitOutcome:
    """Run one work unit. batch: arguments of run_work_unit; changes: as in `settings`."""
    return asyncio.run(
        run_work_unit(
            tasks,
            **{"repeat_times": 1, **batch},
            explore_step=3,
            policy=policy,
            **settings(**changes),
            weights=Published(VERSION, "", "hash7"),
            fork_server=keep,
        )
    )
