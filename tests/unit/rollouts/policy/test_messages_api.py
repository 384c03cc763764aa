"""Promises of Anthropic's Messages API, tested with the package anthropic."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from rftdask.buffer.log.schema import Experience
from rftdask.engines.base import GenerateRequest
from rftdask.rollouts.policy.messages_api import as_answer, as_chat
from tests.unit.rollouts.policy.agent_rows import ASKED, WRITTEN, rows, sampled
from tests.unit.rollouts.rollout_cases import prompt_of, replies

TOOLS: Any = [{"name": "add", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}]


def test_tool_results_become_messages_before_the_text() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]},
        {"type": "text", "text": "go on"},
    ]
    used = [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"x": 1}}]
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "messages": [*ASKED, {"role": "assistant", "content": used}, {"role": "user", "content": blocks}],
        "tools": TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["end"],
    }
    chat = as_chat(body)
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert chat["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert chat["messages"][3] == {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]}
    assert (chat["stop"], chat["tool_choice"], chat["parallel_tool_calls"]) == (["end"], "required", False)
    assert chat["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]


def test_arguments_that_are_not_an_object_are_passed_through() -> None:
    call = {"id": "c", "function": {"name": "add", "arguments": "[1, 2]"}}
    message = {"content": None, "tool_calls": [call]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    returned = as_answer({"id": "chatcmpl-0", "model": "m", "choices": [choice], "usage": usage}, {})
    assert (returned["content"][0]["input"], returned["stop_reason"]) == ({"arguments": [1, 2]}, "tool_use")


def asked(agent: Callable[[Any], Awaitable[Any]], reply: str | Callable[[GenerateRequest], str]) -> list[Experience]:
    """The rows of a rollout whose agent uses the anthropic client."""
    anthropic = pytest.importorskip("anthropic")

    async def run(client: AsyncOpenAI) -> None:
        url = str(client.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key, max_retries=0) as own:
            await agent(own)

    return rows(run, replies(reply))


@pytest.mark.extras
def test_anthropic_agent_is_one_conversation() -> None:
    async def agent(client: Any) -> None:
        messages = list(ASKED)
        for _ in range(3):
            answer = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=TOOLS)
            if answer.stop_reason != "tool_use":
                break
            text, call = answer.content
            assert (text.text, call.name, call.input) == ("so:", "add", {"x": 1})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert (answer.content[0].text, answer.stop_reason) == ("it is 5", "end_turn")
        assert answer.usage.output_tokens == len("it is 5") + 1

    [row] = asked(agent, lambda request: "it is 5" if "<tool>5" in prompt_of(request) else WRITTEN)
    assert row.prompt_text == "[add]<user>hi<assistant>"
    assert row.response_text == f"{WRITTEN}<tool>5<assistant>it is 5"


@pytest.mark.extras
def test_anthropic_stream_equals_the_whole_message() -> None:
    async def agent(client: Any) -> None:
        options: Any = {"model": "m", "max_tokens": 99, "messages": ASKED, "tools": TOOLS, "system": "be kind"}
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            returned = await stream.get_final_message()
        assert [block.model_dump(exclude={"id", "parsed_output"}) for block in returned.content] == [
            block.model_dump(exclude={"id", "parsed_output"}) for block in whole.content
        ]
        assert (returned.stop_reason, returned.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        counted = await client.messages.count_tokens(model="m", messages=ASKED, tools=TOOLS, system="be kind")
        assert counted.input_tokens == whole.usage.input_tokens

    recorded = asked(agent, WRITTEN)
    assert [row.prompt_text for row in recorded] == ["[add]<system>be kind<user>hi<assistant>"] * 2


@pytest.mark.extras
def test_message_parameters_apply_or_are_refused_by_name() -> None:
    anthropic = pytest.importorskip("anthropic")

    async def agent(client: Any) -> None:
        create: Any = client.messages.create
        stopped = await create(model="m", max_tokens=99, messages=ASKED, stop_sequences=["never", "la"])
        returned = (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence)
        assert returned == ("tra", "stop_sequence", "la")
        cut = await create(model="m", max_tokens=3, messages=ASKED)
        assert (cut.content[0].text, cut.stop_reason) == ("tra", "max_tokens")
        with pytest.raises(anthropic.BadRequestError) as raised:
            await create(model="m", max_tokens=9, messages=ASKED, extra_body={"mcp_servers": [{"name": "x"}]})
        assert raised.value.body["error"]["param"] == "mcp_servers"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="another").messages.create(model="m", max_tokens=9, messages=ASKED)

    recorded = asked(agent, "tralala")
    assert [sampled(row) for row in recorded] == ["trala", "tra"], "a row includes the stop text"
