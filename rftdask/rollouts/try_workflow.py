"""Try a workflow on one task without a model: the policy says what you write. For notebooks and first drafts.

Everything but the engine is what a run has: sandboxes, timeouts, checks of the reward, typed failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rftdask.buffer.log.schema import Experience
from rftdask.config.schema.explorer import ExplorerConfig, SandboxConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.weights.published import Published

_END = 0
_MAX_TOKENS = 4096


async def try_workflow(
    task: Task, replies: Sequence[str], *, max_timeout_s: float = 60.0, sandbox: SandboxConfig | None = None
) -> list[Experience]:
    """Run one rollout of `task`, whose calls of the policy are answered by `replies` in order, the last again and
    again.

    Raises: UserError: its workflow or reward function cannot be found.
    """
    said = iter(replies)
    last = replies[-1]

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        answers = []
        for request in requests:
            tokens = (*map(ord, next(said, last)), _END)[: request.sampling.max_tokens]
            answers.append(Generation(tokens, (0.0,) * len(tokens), "stop" if tokens[-1] == _END else "length", 0, 0))
        return answers

    outcome = await run_work_unit(
        [task],
        repeat_times=1,
        explore_step=1,
        policy=TextEngine(generate, _CharacterTokenizer()),
        explorer=ExplorerConfig(max_timeout=max_timeout_s, max_retry_times=0, sandbox=sandbox or SandboxConfig()),
        model=ModelConfig(model_path="none", max_response_tokens=_MAX_TOKENS),
        sampling={task.taskset: SamplingParams(max_tokens=_MAX_TOKENS)},
        weights=Published(0, "", ""),
    )
    return outcome.experiences


class _CharacterTokenizer:
    """Code points as tokens, roles and contents line by line."""

    eos_token_id: int | None = _END
    chat_template: Any = None

    def apply_chat_template(self, messages: Any, /, **options: Any) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token != _END)
