"""Promises of streams, tested with the package openai: text arrives early, is certain, and equals the whole answer."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from rftdask.buffer.log.schema import Experience
from rftdask.data.tokenizer import ByteTokenizer
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.policy import messages_api, responses_api
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.answer_stream import EventStream, Part, StreamedText
from rftdask.rollouts.policy.openai_api import OpenAIAnswer, TextDelta, pieces, refusal
from rftdask.rollouts.policy.request_queues import Streaming
from rftdask.rollouts.runner import TextEngine
from tests.unit.rollouts.policy.agent_rows import ASKED, TOOLS, WRITTEN, Agent, rows, sampled
from tests.unit.rollouts.rollout_cases import CharTokenizer, generation, outcome, prompt_of, task

ANSWER = "hello there"


class HalfAnswers:
    """An engine that streams half of an answer and holds the rest until a request with the prompt "go"."""

    def __init__(self, answer: str = ANSWER) -> None:
        self.answer = answer
        self.held: list[tuple[GenerateRequest, Future[Generation]]] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        futures = []
        for request in requests:
            futures.append(Future[Generation]())
            self.held.append((request, futures[-1]))
            if request.on_tokens is not None:
                for character in self.answer[: len(self.answer) // 2]:
                    request.on_tokens((ord(character),))
            if "go" in prompt_of(request):
                self.release()
        return futures

    def release(self) -> None:
        for request, future in self.held:
            if not future.cancelled():
                future.set_result(generation(self.answer, request))
        self.held = []


def rows_of(agent: Agent, engine: HalfAnswers | None = None, tokenizer: Any = None) -> list[Experience]:
    return rows(agent, Streaming((engine or HalfAnswers()).submit, 600.0), tokenizer)


async def go(client: AsyncOpenAI) -> None:
    await client.completions.create(model="p", prompt="go")


def test_text_arrives_while_the_answer_is_sampled() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        chunks = await create(model="p", messages=ASKED, stream=True, stream_options={"include_usage": True})
        text, received = "", []
        async for chunk in chunks:
            received.append(chunk)
            before, text = text, text + "".join(each.delta.content or "" for each in chunk.choices)
            if text == "h" and not before:
                await go(client)  # the engine continues only after this
        assert text == ANSWER and len({chunk.id for chunk in received}) == 1
        assert [chunk.choices[0].finish_reason for chunk in received[-3:-1]] == [None, "stop"]
        assert received[-1].usage.completion_tokens == len(ANSWER) + 1 and not received[-1].choices
        stream = await client.completions.create(model="p", prompt="x", stream=True)
        sent = ""
        async for piece in stream:
            sent += piece.choices[0].text
            if sent == "h":
                await go(client)
        assert sent == ANSWER

    recorded = rows_of(agent)
    assert [sampled(row) for row in recorded] == [ANSWER] * 4, "the whole answer is recorded once"
    assert [len(row.rollout_logprobs) for row in recorded] == [len(ANSWER) + 1] * 4


def test_responses_and_messages_stream_while_sampled() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        events, text = [], ""
        async for event in await client.responses.create(model="p", input="hi", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                text += event.delta
                if text == "h":
                    await go(client)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert isinstance(last, openai.types.responses.ResponseCompletedEvent)
        assert last.response.output_text == text == ANSWER
        items = {getattr(event, "item_id", last.response.output[0].id) for event in events}
        assert items == {last.response.output[0].id}
        body = {"model": "p", "max_tokens": 50, "messages": ASKED, "stream": True}
        text = ""
        async with client._client.stream(
            "POST", f"{client.base_url}messages", json=body, headers=client.auth_headers
        ) as sent:
            async for line in sent.aiter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
                if event["type"] == "content_block_delta":
                    text += event["delta"]["text"]
                    if text == "h":
                        await go(client)
        assert text == ANSWER and event["type"] == ""

    assert len(rows_of(agent)) == 4


class Thinking(CharTokenizer):
    """Its template has thoughts that end with </think>, and tool calls."""

    chat_template = "{{ messages }} {{ tools }} </think>"


GO = [{"role": "user", "content": "go"}]
USAGE: Any = {"stream_options": {"include_usage": True}}
STREAMED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": GO, "tools": TOOLS, "logprobs": True, "n": 2, **USAGE},
    "completions": {"prompt": "go", "logprobs": 0, "n": 2, **USAGE},
    "responses": {"input": "go", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]},
    "messages": {"messages": GO, "tools": [{"name": "add", "input_schema": {"type": "object"}}], "max_tokens": 150},
}


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("text", ["plain text", f"<think>hm, so</think>{WRITTEN}", "<think>cut of"])
def test_streamed_events_have_the_clients_types(path: str, text: str) -> None:
    types: dict[str, Any] = {
        "chat/completions": openai.types.chat.ChatCompletionChunk,
        "completions": openai.types.Completion,
        "responses": openai.types.responses.ResponseStreamEvent,
    }
    if path == "messages":
        types[path] = pytest.importorskip("anthropic").types.RawMessageStreamEvent
    sent, names = TypeAdapter(types[path]), []

    async def agent(client: AsyncOpenAI) -> None:
        body = {"model": "p", "stream": True, **STREAMED[path]}
        headers = client.auth_headers
        async with client._client.stream("POST", f"{client.base_url}{path}", json=body, headers=headers) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert stream.status_code == 200 and len(lines) > 4, lines
        for line in lines:
            field, _, data = line.partition(": ")
            if field == "event":
                names.append(data)
            elif data != "[DONE]":
                if path == "completions":
                    # OpenAI's service also sends null before the end, but its package's type does not allow it.
                    data = data.replace('"finish_reason": null', '"finish_reason": "stop"')
                event = sent.validate_json(data)
                assert not names or names[-1] == event.type

    rows_of(agent, HalfAnswers(text), Thinking())


def test_choices_of_one_request_stream_concurrently() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        texts, released = ["", "", ""], False
        async for chunk in await create(model="p", messages=ASKED, n=3, stream=True):
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if all(texts) and not released:
                released = True
                await go(client)
        assert texts == [ANSWER] * 3

    assert len(rows_of(agent)) == 4


def test_text_streams_into_a_sandbox() -> None:
    policy = TextEngine(Streaming(HalfAnswers().submit, 600.0), CharTokenizer())
    tasks = [task(0, "tests.unit.rollouts.policy.streaming_agent.streams", truth=ANSWER)]
    received = outcome(tasks, policy, {}, max_retry_times=0, sampling=SamplingParams(max_tokens=200)).experiences
    assert [(row.error, row.reward) for row in received] == [("", 1.0)] * 2


def test_disconnect_cancels_the_stream_and_records_nothing() -> None:
    engine = HalfAnswers()

    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        stream = await create(model="p", messages=ASKED, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        [(_, future)] = engine.held
        while not future.cancelled():
            await asyncio.sleep(0.001)
        await go(client)

    [row] = rows_of(agent, engine)
    assert row.prompt_text == "go"


def test_error_after_the_first_text_is_an_event() -> None:
    async def events(answer: Callable[[], OpenAIAnswer]) -> list[Mapping[str, Any]]:
        stream = EventStream("chat/completions", {})

        async def answering() -> OpenAIAnswer:
            stream.add_text(0, "content", "so")
            await asyncio.sleep(0)
            return answer()

        return [each async for each in stream.events(asyncio.ensure_future(answering()))]

    def fails() -> OpenAIAnswer:
        raise RuntimeError("it died")

    ways = ((lambda: refusal("the engine is full"), "the engine is full"), (fails, "RuntimeError: it died"))
    for answer, sent in ways:
        received = asyncio.run(events(answer))
        assert [bool(event.get("error")) for event in received] == [False, False, True]
        assert received[-1]["error"]["message"] == sent


def test_real_engine_streams_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, hidden_size=32, intermediate_size=64, num_heads=2)
    engine, sent = TransformersEngine(str(folder)), list[int]()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts: list[str] = []
    text = StreamedText(tokenizer, (), lambda text: ("", text), lambda part, piece: texts.append(piece))
    news: list[tuple[int, ...]] = []

    def on_tokens(tokens: tuple[int, ...]) -> None:
        news.append(tokens)
        sent.extend(tokens)
        text.add_tokens(tokens)

    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    streamed = GenerateRequest((5, 6), sampling, 3, on_tokens=on_tokens)
    looks = [[(1, GenerateRequest((7,), SamplingParams(max_tokens=3), 4))], [(0, streamed)]]
    answers: dict[int, Generation] = {}

    def take() -> Sequence[tuple[int, GenerateRequest | None]]:
        assert 0 not in answers or len(sent) == 39
        return looks.pop() if looks else []

    engine.serve(take, answers.__setitem__)
    assert tuple(sent) == answers[0].tokens[:-1] and len(news) == 39
    whole = tokenizer.decode(answers[0].tokens, skip_special_tokens=True)
    assert len(texts) > 5 and whole.startswith("".join(texts))
    alone = engine.generate([GenerateRequest((5, 6), sampling, 3)])[0]
    assert (alone.tokens, alone.logprobs) == (answers[0].tokens, pytest.approx(answers[0].logprobs, abs=1e-5))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_incomplete_characters_are_held_back(size: int) -> None:
    whole = "a\u00e9\u20ac\U0001f600b\n\U0001f468\u200d\U0001f469"
    texts: list[str] = []
    text = StreamedText(ByteTokenizer(), (), lambda text: ("", text), lambda part, piece: texts.append(piece))
    tokens = whole.encode()
    for start in range(0, len(tokens), size):
        text.add_tokens(tokens[start : start + size])
    assert "".join(texts) == whole and len(texts) > 1


@pytest.mark.parametrize(
    ("text", "stop", "sent"),
    [
        ("one two END three", ("END",), "one two "),
        ("one ENTER", ("END",), "one ENTER"),
        ("one EN", ("END", "one E!"), "one "),
        ("aab", ("ab", "b"), "a"),
    ],
)
def test_stop_texts_are_never_streamed(text: str, stop: tuple[str, ...], sent: str) -> None:
    texts: list[str] = []
    streamed = StreamedText(CharTokenizer(), stop, lambda text: ("", text), lambda part, piece: texts.append(piece))
    for character in text:
        streamed.add_tokens([ord(character)])
    assert "".join(texts) == sent


THINKS = "{% if x %}</think>{% endif %}"
ANSWERS = [
    ("", "", TOOLS, WRITTEN, ("", "so:")),
    ("", "", TOOLS, "so <tool_call>{broken</tool_call> it goes on", ("", "so")),
    ("", "", TOOLS, "  " + WRITTEN, ("", "")),
    ("", "", TOOLS, "a < b", ("", "a < b")),
    ("", "", None, WRITTEN, ("", WRITTEN)),
    (THINKS, "<think>\n", None, "hm hm </think>\n\n 4 ", ("hm hm", " 4 ")),
    (THINKS, "", None, "<think>hm</think>4", ("hm", "4")),
    (THINKS, "", None, "<thing>hm</think>4", ("", "")),
    (THINKS, "<think>", None, "cut of </thi", ("cut of", "")),
    (THINKS, "<think>", None, "<think> twice</think>4", ("twice", "4")),
    (THINKS, "<think>\n\n</think>\n\n", None, "4 </think> 5", ("", "4 </think> 5")),
    (THINKS, "<think>", TOOLS, "hm</think>" + WRITTEN, ("hm", "so:")),
    ("<|channel|>", "", None, "anything", ("", "")),
]


@pytest.mark.parametrize(("template", "prompt", "tools", "text", "sent"), ANSWERS)
def test_certain_text_begins_answers(template: str, prompt: str, tools: Any, text: str, sent: tuple[str, str]) -> None:
    tokenizer: Any = CharTokenizer()
    tokenizer.chat_template = template
    parser = AnswerParser(tokenizer)
    received = [parser.certain(text[:length], prompt, tools) for length in range(len(text) + 1)]
    assert received[-1] == sent
    whole = (None, text, ()) if template == "<|channel|>" else parser.parse(text, [], prompt, tools)
    for before, after in zip(received, [*received[1:], (whole[1] or "", whole[0] or "")], strict=True):
        assert all(late.startswith(early) for early, late in zip(before, after, strict=True)), (before, after)
        assert not before[1] or before[0] == after[0], "content begins only after the thoughts"


def chat_body(**message: Any) -> dict[str, Any]:
    call = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    choice = {"index": 0, "message": {"role": "assistant", **message, "tool_calls": [call]}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    common = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1, "model": "p"}
    return {**common, "choices": [{**choice, "logprobs": None}], "usage": usage}


THOUGHTS = {"reasoning": "hm, let me see", "reasoning_content": "hm, let me see"}
TOLD: list[list[tuple[Part, str]]] = [
    [],
    [("reasoning", "hm, ")],
    [("reasoning", "hm, "), ("reasoning", "let me see"), ("content", "h"), ("content", "ello")],
]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("sent", TOLD)
def test_events_are_those_of_the_whole_answer(path: str, sent: list[tuple[Part, str]]) -> None:
    body = chat_body(content="hello there", **THOUGHTS)
    if path == "responses":
        body = responses_api.as_answer(body, {"model": "p"})
    elif path == "messages":
        body = messages_api.as_answer(body, {})

    async def events(said: list[tuple[Part, str]]) -> list[Mapping[str, Any]]:
        stream = EventStream(path, {"model": "p"})
        stream._name, stream._created = "0" * 32, 1

        async def answer() -> OpenAIAnswer:
            for part, text in said:
                stream.add_text(0, part, text)
                await asyncio.sleep(0)
            return OpenAIAnswer(200, body)

        return [each async for each in stream.events(asyncio.ensure_future(answer()))]

    def frames_of(received: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        # Values that are known only at the end differ.
        later = {"sequence_number": 0, "message": None, "response": None}
        return [{**each, **later} for each in received if not isinstance(each, TextDelta)]

    def said_in(received: list[Mapping[str, Any]]) -> str:
        keys = ("text", "thinking", "content", "reasoning")
        deltas = [each["choices"][0]["delta"] if "choices" in each else each["delta"] for each in received]
        return "".join(
            each if isinstance(each, str) else next(each[key] for key in keys if key in each) for each in deltas
        )

    streamed, whole = asyncio.run(events(sent)), asyncio.run(events([]))
    assert frames_of(streamed) == frames_of(whole)
    parts = [[each for each in received if isinstance(each, TextDelta)] for received in (streamed, whole)]
    assert said_in(parts[0]) == said_in(parts[1]) == "hm, let me seehello there"
    assert pieces("x" * 40) == ["x" * 32, "x" * 8]
