"""Promises of `model.openai_client()`, tested with the package openai: a parameter takes effect or is a 400."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any, ClassVar

import openai
import pytest
from jinja2 import TemplateError
from openai import AsyncOpenAI

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.rollouts.policy.openai_api import read_request
from tests.unit.rollouts.policy.agent_rows import ASKED, TOOLS, WRITTEN, ask, rows, sampled
from tests.unit.rollouts.rollout_cases import CharTokenizer, generation, prompt_of, replies

TWO_CALLS = WRITTEN + '<tool_call>{"name":"add","arguments":{"x":2}}</tool_call>'


def test_answer_is_recorded_as_sampled() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="any", messages=ASKED, temperature=0.5, logprobs=True)
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason, answer.model) == ("4!", "stop", "any")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs = [(each.token, each.logprob) for each in choice.logprobs.content]
        assert logprobs == [("4", -0.5), ("!", -0.5), ("<end>", -0.5)]
        assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 3)

    [row] = rows(agent, replies("4!"))
    assert (row.prompt_text, sampled(row), row.temperature) == ("<user>hi<assistant>", "4!", 0.5)
    assert list(row.rollout_logprobs) == [-0.5] * 3


def test_stream_equals_the_whole_answer() -> None:
    long = "an answer of more than one piece, " + WRITTEN

    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        options = {"model": "p", "messages": ASKED, "tools": TOOLS}
        whole = (await create(**options)).choices[0]
        chunks = [each async for each in await create(**options, stream=True, stream_options={"include_usage": True})]
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert "".join(delta.content or "" for delta in deltas) == whole.message.content
        [call] = [call for delta in deltas for call in delta.tool_calls or ()]
        assert call.function.arguments == whole.message.tool_calls[0].function.arguments
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
        assert chunks[-1].usage.completion_tokens == len(long) + 1 and not chunks[-1].choices

    assert len(rows(agent, replies(long))) == 2


def test_message_with_calls_returns_to_the_policy_as_sampled() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        messages, ids = list(ASKED), set[str]()
        for _ in range(3):
            message = (await ask(client, messages, tools=TOOLS)).message
            [call] = message.tool_calls
            assert (message.content, call.function.name) == ("so:", "add")
            assert json.loads(call.function.arguments) == {"x": 1}
            # Agents return the object or plain data from JSON.
            back = message if len(messages) == 1 else json.loads(message.model_dump_json())
            messages += [back, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
            ids.add(call.id)
        assert len(ids) == 3

    [row] = rows(agent, replies(WRITTEN))
    assert len(row.turns or ()) == 3
    assert row.response_text == f"{WRITTEN}<tool>2<assistant>{WRITTEN}<tool>2<assistant>{WRITTEN}"


async def returns_results(client: AsyncOpenAI, *results: str) -> None:
    """An agent that answers each call with the next result."""
    messages = list(ASKED)
    for result in results or ("2",):
        message = (await ask(client, messages, tools=TOOLS)).message
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}]
    await ask(client, messages, tools=TOOLS)


class ReadsCalls(CharTokenizer):
    """Its template shows tool results only after a message with tool calls, and otherwise drops them or fails."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self._fails = fails

    def apply_chat_template(self, chat: Any, **options: Any) -> str:
        shown: list[dict[str, Any]] = []
        for message in chat:
            if message["role"] != "tool" or shown[-1].get("tool_calls"):
                shown.append(message)
            elif self._fails:
                raise TemplateError("no tool was called")
        calls = [{**each, "content": f"{each['content']}{len(each.get('tool_calls') or ())}"} for each in shown]
        return super().apply_chat_template(calls, **options)


@pytest.mark.parametrize("fails", [True, False])
def test_template_that_reads_tool_calls_gets_them(fails: bool) -> None:
    first, second = rows(returns_results, replies(WRITTEN), ReadsCalls(fails))
    assert (first.prompt_text, second.prompt_text) == (
        "[add]<user>hi0<assistant>",
        "[add]<user>hi0<assistant>so:1<tool>20<assistant>",
    )


class WritesJson(CharTokenizer):
    """Its template writes tool results as JSON."""

    def apply_chat_template(self, chat: Any, **options: Any) -> str:
        result = [{**each, "content": json.dumps(each["content"])} if each["role"] == "tool" else each for each in chat]
        return super().apply_chat_template(result, **options)


def test_template_may_rewrite_tool_results() -> None:
    [row] = rows(lambda client: returns_results(client, "2", 'a "b"'), replies(WRITTEN), WritesJson())
    assert row.response_text.startswith(f'{WRITTEN}<tool>"2"<assistant>{WRITTEN}<tool>"a \\"b\\""<assistant>')


class Marked(CharTokenizer):
    """Its calls follow a special token, which is not part of the text."""

    added_tokens_decoder: ClassVar = {1: SimpleNamespace(content="\x01", special=True)}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text.replace("\x01", "") if skip_special_tokens else text


def test_calls_marked_by_special_tokens_are_templated() -> None:
    first, second = rows(returns_results, replies(f"so: \x01{WRITTEN[4:]}"), Marked())
    assert 1 in first.tokens
    assert second.prompt_text == "[add]<user>hi<assistant>so:<tool>2<assistant>"


def test_request_decides_which_calls_are_parsed() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        cases: list[tuple[Any, int]] = [({}, 2), ({"parallel_tool_calls": False}, 1), ({"tool_choice": "none"}, 0)]
        for options, num_calls in cases:
            choice = await ask(client, tools=TOOLS, **options)
            assert len(choice.message.tool_calls or ()) == num_calls
            assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
        assert choice.message.content == TWO_CALLS

    recorded = rows(agent, replies(TWO_CALLS))
    assert {row.prompt_text for row in recorded} == {"[add]<user>hi<assistant>"}
    assert [sampled(row) for row in recorded] == [TWO_CALLS] * 3


def test_stop_ends_an_answer_at_the_completing_token() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        choice = await ask(client, stop=["zz", "wo", "orl"])
        assert (choice.message.content, choice.finish_reason) == ("hello ", "stop")
        assert (await ask(client, [*ASKED, *ASKED], stop="never")).message.content == "hello world"

    cut, whole = rows(agent, replies("hello world"))
    # Tokens up to the end of the stop text are trained, later ones are not.
    assert (sampled(cut), sampled(whole)) == ("hello wo", "hello world")
    assert len(cut.rollout_logprobs) == len("hello wo") and cut.status == "ok"


def test_seed_repeats_n_different_answers_within_a_rollout() -> None:
    texts: list[list[str]] = []

    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create

        async def choices(**options: Any) -> list[str]:
            return [choice.message.content for choice in (await create(model="p", messages=ASKED, **options)).choices]

        free, first = await choices(n=3), await choices(n=2, seed=5)
        again, other = await choices(n=2, seed=5), await choices(n=2, seed=6)
        assert first == again != other
        assert len({*free, *first, *other}) == 7
        texts.append(first)

    recorded = rows(agent, replies(lambda request: str(request.seed)), batch={"repeat_times": 2})
    # Sibling rollouts differ even with equal seeds.
    assert texts[0] != texts[1] and len(recorded) == 18
    assert [row.metrics.get("branches/forked", 0.0) for row in recorded[:9]] == [0.0] + [1.0] * 8


def test_completions_continue_texts() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.completions.create
        answer = await create(model="p", prompt=["one", "two"], n=2, max_tokens=3, logprobs=0)
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
            (index, "hel", "length") for index in range(4)
        ]
        assert answer.choices[0].logprobs.tokens == ["h", "e", "l"] and answer.usage.prompt_tokens == 6
        text = "".join([chunk.choices[0].text async for chunk in await create(model="p", prompt="x", stream=True)])
        assert text == "hello"

    recorded = rows(agent, replies("hello"))
    assert [row.prompt_text for row in recorded] == ["one", "one", "two", "two", "x"]


IMAGE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
LINK = {"type": "url", "url": "http://x"}
CALLS_ADD: Any = {"type": "function", "function": {"name": "add"}}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat/completions": [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": CALLS_ADD}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop": 0}, "stop"),
        ({"tools": {}}, "tools"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": IMAGE}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"guided_json": {}}, "guided_json"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"temprature": 1}, "temprature=1 is not supported; did you mean temperature"),
    ],
    "responses": [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"tone": "kind"}}, "text"),
        ({"reasoning": {"depth": 3}}, "reasoning"),
        ({"instructions": 0}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "add"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"background": True}, "background"),
    ],
    "messages": [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": LINK}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": LINK}]}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"thinking": {"budget_tokens": 5}}, "thinking"),
        ({"system": {}}, "system"),
        ({"tools": False}, "tools"),
        ({"stop_sequences": {}}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 0}]}]}, "messages"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
}


def test_unsupported_request_is_refused_by_name_without_a_call() -> None:
    calls: list[list[GenerateRequest]] = []

    async def agent(client: AsyncOpenAI) -> None:
        for path, cases in REFUSED.items():
            asked = {"input": "hi"} if path == "responses" else {"messages": ASKED, "max_tokens": 9}
            for options, problem in cases:
                with pytest.raises(openai.BadRequestError) as error:
                    await client.post(f"/{path}", cast_to=object, body={"model": "p", **asked, **options})
                param = problem.partition("=")[0] if options else None
                assert error.value.param == param, options
                # Messages of the other APIs have the parameters of chat completions.
                assert path in ("responses", "messages") or problem in error.value.message, options
        for path in ("audio/speech", "embeddings"):
            with pytest.raises(openai.NotFoundError, match=f"POST '/v1/{path}' does not exist; use chat/completions, "):
                await client.post(f"/{path}", cast_to=object, body={"model": "p"})
        assert not calls
        await ask(client)

    rows(agent, replies("4", calls))


def test_responses_api_is_recorded_as_one_chat() -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}]

    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.responses.create
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "2+3?"}]}]
        options = {"model": "p", "instructions": "add", "tools": tools, "store": False, "max_output_tokens": 90}
        first = await create(input=asked, **options)
        said, call = first.output
        assert (first.status, said.content[0].text, call.name) == ("completed", "so:", "add")
        assert first.usage.output_tokens == len(WRITTEN) + 1
        # Agents return the items or plain data.
        back = [said, call.model_dump()]
        done = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        events = [event async for event in await create(input=[*asked, *back, done], stream=True, **options)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created" and events[-1].type == "response.completed"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events[-1].response.output_text == "it is five, which is a long answer to a sum"

    engine = replies(
        lambda request: "it is five, which is a long answer to a sum" if "<tool>5" in prompt_of(request) else WRITTEN
    )
    [row] = rows(agent, engine)
    assert row.prompt_text == "[add]<system>add<user>2+3?<assistant>" and len(row.turns or ()) == 2
    assert row.response_text.startswith(f"{WRITTEN}<tool>5<assistant>it is five")


def test_responses_api_reports_the_token_limit() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        cut = await client.responses.create(model="p", input="hi", max_output_tokens=3)
        assert (cut.status, cut.output_text) == ("incomplete", "hel")
        assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"

    assert len(rows(agent, replies("hello"))) == 1


def test_neutral_parameters_are_accepted() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        nothing = {"user": "u", "metadata": {}, "store": False, "parallel_tool_calls": True, "logit_bias": {}}
        nothing |= {"response_format": {"type": "text"}, "frequency_penalty": 0.0, "stop": None}
        parts = [{"type": "text", "text": text} for text in ("be ", "brief")]
        messages = [{"role": "developer", "content": parts}]
        await ask(client, messages, extra_body={"session_id": "s", "min_tokens": 1}, **nothing)

    [row] = rows(agent, replies("4"))
    assert row.prompt_text == "<system>be brief<assistant>"


class Templated(CharTokenizer):
    """Its template reads only enable_thinking; thoughts end with </think>."""

    chat_template = "{{ messages }} {{ enable_thinking }} </think>"


def test_template_gets_only_variables_that_it_reads() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}):
            await ask(client, extra_body=body)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"extra_body": {"chat_template_kwargs": {"style": "terse"}}}, "chat_template_kwargs.style"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"tools": TOOLS}, "tools"),
        ]
        for options, param in refused:
            with pytest.raises(openai.BadRequestError, match="template does not") as error:
                await ask(client, **options)
            assert error.value.param == param

    recorded = rows(agent, replies("4"), Templated())
    assert {row.prompt_text for row in recorded} == {"{enable_thinking=False}<user>hi<assistant>"}


def test_thoughts_are_separate_and_stay_in_the_conversation() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        message = (await ask(client)).message
        assert (message.content, message.reasoning, message.reasoning_content) == ("4", "hm", "hm")
        # An agent that ignores thoughts returns only the content.
        back = {"role": "assistant", "content": message.content}
        await ask(client, [*ASKED, back, {"role": "user", "content": "and?"}])
        streamed = await client.chat.completions.create(model="p", messages=ASKED, stream=True)
        result = [chunk.choices[0].delta async for chunk in streamed]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in result) == "hm"

    whole, _ = rows(agent, replies("<think>hm</think>\n4"), Templated())
    assert [turn.source for turn in whole.turns or ()] == ["user", "user"]


def test_key_is_valid_for_one_attempt_only() -> None:
    clients: list[AsyncOpenAI] = []

    async def agent(client: AsyncOpenAI) -> None:
        clients.append(client)
        assert client.base_url.host == "127.0.0.1"
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["policy"]
        for header in ("Bearer wrong", f"Basic {client.api_key}", client.api_key):
            stranger = client.copy(default_headers={"Authorization": header})
            with pytest.raises(openai.AuthenticationError):
                await ask(stranger)
        await ask(client)

    rows(agent, replies("4"), batch={"repeat_times": 2})
    assert clients[0].api_key != clients[1].api_key and all(client.is_closed() for client in clients)


def test_another_program_can_use_address_and_key() -> None:
    code = (
        "import json, os, urllib.request as u\n"
        "body = json.dumps({'model': 'p', 'messages': [{'role': 'user', 'content': 'from outside'}]}).encode()\n"
        "key = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "print(u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + 'chat/completions', body, key)).read().decode())\n"
    )

    async def agent(client: AsyncOpenAI) -> None:
        env = {**os.environ, "OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=env, stdout=subprocess.PIPE)
        output, _ = await child.communicate()
        assert json.loads(output)["choices"][0]["message"]["content"] == "4"

    [row] = rows(agent, replies("4"))
    assert row.prompt_text == "<user>from outside<assistant>"


def test_disconnect_cancels_a_request_that_can_be_retried() -> None:
    timed_out = asyncio.Event()

    async def slow(requests: list[GenerateRequest]) -> list[Generation]:
        if "slow" in prompt_of(requests[0]):
            await timed_out.wait()
        return [generation("4", request) for request in requests]

    async def agent(client: AsyncOpenAI) -> None:
        more = [*ASKED, (await ask(client)).message, {"role": "user", "content": "slow"}]
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=0.05, max_retries=0), more)
        await asyncio.sleep(0.1)  # until the server notices the disconnect
        timed_out.set()
        await ask(client, more)

    [row] = rows(agent, slow)
    assert [turn.number for turn in row.turns or ()] == [0, 1], "a cancelled call is not a turn of the row"


def test_engine_error_is_not_retried_by_the_client() -> None:
    class Broken(Exception):
        pass

    asked = 0

    async def broken(requests: list[GenerateRequest]) -> list[Generation]:
        nonlocal asked
        asked += 1
        raise Broken("out of memory")

    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await ask(client)

    with pytest.raises(Broken):
        rows(agent, broken)
    assert asked == 1


def test_token_ids_are_returned_on_request() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        answer: Any = await client.chat.completions.create(
            model="p", messages=ASKED, extra_body={"return_token_ids": True}
        )
        assert answer.prompt_token_ids == [*map(ord, "<user>hi<assistant>")]
        assert answer.choices[0].token_ids == [ord("4"), 0]

    rows(agent, replies("4"))


def test_body_that_is_not_an_object_is_refused() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        def post(data: bytes) -> Any:
            headers = {"Authorization": f"Bearer {client.api_key}"}
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(urllib.request.Request(f"{client.base_url}chat/completions", data, headers))
            with error.value as response:
                return response.code, json.loads(response.read())["error"]["type"]

        for data in (b"{", b"[]", b'"x"'):
            assert await asyncio.to_thread(post, data) == (400, "invalid_request_error")
        await ask(client)

    rows(agent, replies("4"))


def test_call_arguments_reach_templates_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, *ASKED]
    [read, _] = read_request("chat/completions", {"messages": messages}, None).messages
    assert read["tool_calls"][0]["function"]["arguments"] == {"x": 1} and read["content"] == ""
