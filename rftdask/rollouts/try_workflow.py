"""Try a workflow on one task without a model: the policy says what you write. For notebooks, first drafts, and the
checks before a run.

Everything but the engine is what a run has: sandboxes, timeouts, checks of the reward, typed failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.explorer import ExplorerConfig, SandboxConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import without_images
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.rollouts.sandbox.messages import Failed, SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer
from rftdask.synchronizer.published import Published

TRIAL_TIMEOUT_S = 30.0
"""Longest that a check before a run waits for a workflow."""
_END = 0
_MAX_TOKENS = 4096
_MISTAKES = {"TypeError", "AttributeError", "NameError", "UnboundLocalError", "SyntaxError", "IndentationError"}
_NOT_INSTALLED = {"ImportError", "ModuleNotFoundError"}


async def try_workflow(
    task: Task, replies: Sequence[str], *, max_timeout_s: float = 60.0, sandbox: SandboxConfig | None = None
) -> list[Experience]:
    """Run one rollout of `task`, whose calls of the policy are answered by `replies` in order, the last again and
    again.

    Raises: UserError: its workflow or reward function cannot be found.
    """
    said = iter(replies)
    explorer = ExplorerConfig(max_timeout=max_timeout_s, sandbox=sandbox or SandboxConfig())
    return await _attempt(task, lambda: next(said, replies[-1]), explorer)


async def _attempt(
    task: Task,
    reply: Callable[[], str],
    explorer: ExplorerConfig,
    fork_server: Callable[[SandboxSpec], ForkServer] | None = None,
) -> list[Experience]:
    """One attempt at `task`, whose models, the auxiliary ones too, answer what `reply` gives."""

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        answers = []
        for request in requests:
            # A token a character, so that the workflow reads the very text that it is given.
            tokens = (*map(ord, reply()), _END)[: request.sampling.max_tokens]
            answers.append(Generation(tokens, (0.0,) * len(tokens), "stop" if tokens[-1] == _END else "length", 0, 0))
        return answers

    async def logprobs(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return [(0.0,) * len(tokens) for _, tokens in pairs]

    engine = TextEngine(generate, _CharacterTokenizer(), logprobs)
    outcome = await run_work_unit(
        [replace(task, messages=without_images(task.messages))],
        repeat_times=1,
        explore_step=1,
        policy=engine,
        # One try: the first error is what is to be told.
        explorer=explorer.model_copy(update={"max_retry_times": 0}),
        model=ModelConfig(model_path="none", max_response_tokens=_MAX_TOKENS),
        sampling={task.taskset: SamplingParams(max_tokens=_MAX_TOKENS)},
        weights=Published(0, "", ""),
        auxiliary={each.name or each.model_path or "": engine for each in explorer.auxiliary_models},
        fork_server=fork_server,
    )
    return outcome.experiences


async def trial_problems(tasks: Sequence[Task], explorer: ExplorerConfig) -> tuple[list[str], list[str], list[str]]:
    """What is wrong with the workflows and rewards of `tasks`, each tried once with its own answer as the reply.

    Returns: mistakes: the code is wrong, or failed before it had asked the policy, so that every rollout would;
        imports: what is not installed here; and doubts: an answer, or the time there was, may have been the reason.
    Raises: UserError: a workflow or reward function cannot be found.
    """
    limits = explorer.model_copy(update={"max_timeout": min(explorer.max_timeout, TRIAL_TIMEOUT_S)})
    servers: dict[SandboxSpec, ForkServer] = {}

    def fork_server(spec: SandboxSpec) -> ForkServer:
        # One for all tasks of the same imports, which are what takes the time.
        if spec not in servers:
            servers[spec] = _QuietForkServer(spec)
        return servers[spec]

    mistakes, imports, doubts = list[str](), list[str](), list[str]()
    try:
        for task in tasks:
            # Whether the policy was asked tells a mistake from a doubt: before it, nothing depends on what a model
            # says.
            asked: list[str] = []

            def reply(truth: str = task.truth, asked: list[str] = asked) -> str:
                asked.append(truth)
                # Never empty: what is tried is how the workflow takes a usual answer.
                return truth or "1"

            [first, *_] = await _attempt(task, reply, limits, fork_server)
            if first.status not in (Status.FAILED, Status.TIMEOUT):
                continue
            kind = first.error.partition(":")[0]
            reward = f", reward {task.reward_fn}" if task.reward_fn else ""
            text = f"workflow {task.workflow}{reward}: tried on row {task.index} of {task.taskset}: {first.error}"
            never_asked = not asked and first.status == Status.FAILED
            where = imports if kind in _NOT_INSTALLED else mistakes if kind in _MISTAKES or never_asked else doubts
            where.append(text)
    finally:
        for server in servers.values():
            server.close()
    return mistakes, imports, doubts


class _QuietForkServer(ForkServer):
    """Logs no failure: a trial tells it in one line of its own."""

    def tell(self, failure: Failed) -> None: ...


class _CharacterTokenizer:
    """Code points as tokens, roles and contents line by line; a chat goes on where an answer ended."""

    eos_token_id: int | None = _END

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join(lines + ["assistant: "] * options["add_generation_prompt"])

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token != _END)
