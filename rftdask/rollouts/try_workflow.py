"""Tries a workflow on one task without a model: the policy returns given texts. For drafts and preflight checks.

Everything but the engine is as in a run: sandboxes, timeouts, checks of the reward, typed failures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.explorer import ExplorerConfig, SandboxConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import without_images
from rftdask.data.task import Task
from rftdask.data.tasksets import Taskset
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.errors import DataError
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer
from rftdask.synchronizer.published import Published

TRIAL_TIMEOUT_S = 30.0
"""Seconds that a check before a run waits for a workflow."""
_NUM_TRUTHS = 100
_END = 0
_MAX_TOKENS = 4096
_MISTAKES = {"TypeError", "AttributeError", "NameError", "UnboundLocalError", "SyntaxError", "IndentationError"}
_NOT_INSTALLED = {"ImportError", "ModuleNotFoundError"}


async def try_workflow(
    task: Task, replies: Sequence[str], *, max_timeout_s: float = 60.0, sandbox: SandboxConfig | None = None
) -> list[Experience]:
    """Run one rollout of `task`. The policy returns `replies` in order, then the last one repeatedly.

    Raises: UserError: the workflow or reward function does not exist.
    """
    remaining = iter(replies)
    explorer = ExplorerConfig(max_timeout=max_timeout_s, sandbox=sandbox or SandboxConfig())
    return await _attempt(task, lambda: next(remaining, replies[-1]), explorer)


async def _attempt(
    task: Task,
    reply: Callable[[], str],
    explorer: ExplorerConfig,
    fork_server: Callable[[SandboxSpec], ForkServer] | None = None,
) -> list[Experience]:
    # All models, including auxiliary ones, respond with `reply()`.
    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        answers = []
        for request in requests:
            # One token per character, so that the workflow receives exactly the text of the reply.
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
        # No retries: the first error is reported.
        explorer=explorer.model_copy(update={"max_retry_times": 0}),
        model=ModelConfig(model_path="none", max_response_tokens=_MAX_TOKENS),
        sampling={task.taskset: SamplingParams(max_tokens=_MAX_TOKENS)},
        weights=Published(0, "", ""),
        auxiliary={section.name or section.model_path or "": engine for section in explorer.auxiliary_models},
        fork_server=fork_server,
    )
    return outcome.experiences


async def rewards_of_truths(taskset: Taskset, explorer: ExplorerConfig) -> str:
    """Roll out up to 100 rows of a taskset, each with its expected answer as the reply of the policy, and describe the
    rewards. "": no row has an expected answer, or all rollouts failed, such as those that call a judge. Takes at most
    30 s and the last rollout.

    Example: "reward of the expected answer: 1 on 53 rows, 0 on 47 rows, for example row 12: '5 km'; is the reward
    wrong for such answers?"
    """
    # Without auxiliary models, which would reply as the policy does, so that their verdicts would mean nothing.
    changes = {"max_timeout": min(explorer.max_timeout, TRIAL_TIMEOUT_S), "auxiliary_models": ()}
    limits = explorer.model_copy(update=changes)
    rewarded, began = defaultdict[float, list[Task]](list), time.monotonic()
    with _ForkServers() as servers:
        for number in range(0, len(taskset), max(1, -(-len(taskset) // _NUM_TRUTHS))):
            if time.monotonic() - began > TRIAL_TIMEOUT_S:
                break
            try:
                task = taskset.task(0, number)
            except DataError:
                continue  # counted by `Taskset.check`
            if task.truth:
                [first, *_] = await _attempt(task, partial(str, task.truth), limits, servers.of)
                if first.status not in (Status.FAILED, Status.TIMEOUT) and first.reward is not None:
                    rewarded[first.reward].append(task)
    if not rewarded:
        return ""
    rewards = sorted(rewarded, reverse=True)
    shown = rewards if len(rewards) <= 3 else [rewards[0], rewards[1], rewards[-1]]
    rows = {reward: f"{len(tasks)} row{'s' * (len(tasks) > 1)}" for reward, tasks in rewarded.items()}
    counts = ", ".join(f"{reward:g} on {rows[reward]}" for reward in shown)
    others = f", others on {sum(len(rewarded[reward]) for reward in rewards[2:-1])}" * (len(rewards) > 3)
    worst = rewarded[rewards[-1]][0]
    example = f", for example row {worst.index}: {worst.truth!r:.80}; is the reward wrong for such answers?"
    example *= len(rewards) > 1
    return f"reward of the expected answer: {counts}{others}{example}"


class _ForkServers:
    """Fork servers of sandboxes, one for all tasks with the same imports, which take most of the time."""

    def __init__(self) -> None:
        self._servers: dict[SandboxSpec, ForkServer] = {}

    def of(self, spec: SandboxSpec) -> ForkServer:
        if spec not in self._servers:
            self._servers[spec] = ForkServer(spec, logs_failures=False)
        return self._servers[spec]

    def __enter__(self) -> _ForkServers:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers.values():
            server.close()


async def trial_problems(tasks: Sequence[Task], explorer: ExplorerConfig) -> tuple[list[str], list[str], list[str]]:
    """Try the workflows and rewards of `tasks` once each, with the task's own answer as the reply of the policy.

    Returns: (mistakes, imports, doubts), messages of failures. A mistake is wrong code, or failed before it called the
        policy, which does not depend on the reply. An import needs a package that is not installed here. A doubt may
        have failed because of the reply or the time limit.
    Raises: UserError: a workflow or reward function does not exist.
    """
    limits = explorer.model_copy(update={"max_timeout": min(explorer.max_timeout, TRIAL_TIMEOUT_S)})
    mistakes, imports, doubts = list[str](), list[str](), list[str]()
    with _ForkServers() as servers:
        for task in tasks:
            replies: list[str] = []

            def reply(truth: str = task.truth, replies: list[str] = replies) -> str:
                replies.append(truth or "1")  # never empty, as a usual reply
                return replies[-1]

            [first, *_] = await _attempt(task, reply, limits, servers.of)
            if first.status not in (Status.FAILED, Status.TIMEOUT):
                continue
            kind = first.error.partition(":")[0]
            reward = f", reward {task.reward_fn}" if task.reward_fn else ""
            text = f"workflow {task.workflow}{reward}: tried on row {task.index} of {task.taskset}: {first.error}"
            is_mistake = kind in _MISTAKES or (not replies and first.status == Status.FAILED)
            (imports if kind in _NOT_INSTALLED else mistakes if is_mistake else doubts).append(text)
    return mistakes, imports, doubts


class _CharacterTokenizer:
    """Tokenizer of code points. A chat is one "role: content" line per message, so it continues a response exactly."""

    eos_token_id: int | None = _END

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join(lines + ["assistant: "] * options["add_generation_prompt"])

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token != _END)
