"""Experiences of a rollout whose workflow is an agent with an openai client."""

from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from rftdask.buffer.log.schema import Experience
from rftdask.engines.base import SamplingParams
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Task
from tests.unit.rollouts.rollout_cases import CharTokenizer, named, outcome, task

Agent = Callable[[AsyncOpenAI], Awaitable[Any]]
ASKED: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WRITTEN = 'so: <tool_call>{"name":"add",  "arguments":{"x":1}}</tool_call>'


def rows(agent: Agent, engine: Any, tokenizer: Any = None, batch: Any = None, **options: Any) -> list[Experience]:
    """The rows of a rollout that must succeed. engine, options: of a TextEngine."""

    async def run(task: Task, model: PolicyModel) -> float:
        await agent(model.openai_client())
        return 1.0

    policy, sampling = TextEngine(engine, tokenizer or CharTokenizer(), **options), SamplingParams(max_tokens=200)
    rows = outcome([task(0, named(run))], policy, batch or {}, max_retry_times=0, sampling=sampling).experiences
    assert {row.error for row in rows} == {""}, rows[0].error
    return rows


async def ask(client: AsyncOpenAI, messages: Any = ASKED, **options: Any) -> Any:
    create: Any = client.chat.completions.create
    return (await create(model="p", messages=messages, **options)).choices[0]


def sampled(row: Experience) -> str:
    """Text that the policy sampled in a row, without end tokens."""
    return "".join(chr(token) for token in row.tokens[row.prompt_length :] if token)
