"""Promises of streams: text arrives while the answer is sampled, kept to the real package openai; what arrived is the
beginning of the whole answer, whatever its parser makes of it; no half character and no text to stop at is told; who
breaks off takes the request along, and an error says so in the stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from rftdask.rollouts.policy.streaming_queue import Streaming
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Task
from rftdask.rollouts.workflows.registry import workflow
from tests.unit.rollouts.policy.test_openai_client import ASKED, TOOLS, WRITTEN, sampled
from tests.unit.rollouts.rollout_cases import CharTokenizer, generation, outcome, prompt_of, task

ANSWER = "hello there"


class HalfAnswers:
    """An engine that tells half of an answer, and holds the rest until somebody asks "go"."""

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


Agent = Callable[[AsyncOpenAI], Awaitable[Any]]


def rows_of(agent: Agent, engine: HalfAnswers | None = None, tokenizer: Any = None) -> list[Experience]:
    """The rows of a rollout whose workflow is `agent`, given its client; all of them ended well."""

    async def run(task: Task, model: PolicyModel) -> float:
        await agent(model.openai_client())
        return 1.0

    name = f"streamed_{id(agent)}"
    workflow(name, in_process=True)(run)
    policy = TextEngine(Streaming((engine or HalfAnswers()).submit, 600.0), tokenizer or CharTokenizer())
    found = outcome([task(0, name)], policy, {}, max_retry_times=0, sampling=SamplingParams(max_tokens=200)).experiences
    assert {row.error for row in found} == {""}, found[0].error
    return found


async def go(client: AsyncOpenAI) -> None:
    await client.completions.create(model="p", prompt="go")


def test_text_arrives_before_the_answer_is_sampled_to_its_end() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        chunks = await create(model="p", messages=ASKED, stream=True, stream_options={"include_usage": True})
        text, found = "", []
        async for chunk in chunks:
            found.append(chunk)
            before, text = text, text + "".join(each.delta.content or "" for each in chunk.choices)
            if text == "h" and not before:
                await go(client)  # only this has the engine go on
        assert text == ANSWER and len({chunk.id for chunk in found}) == 1
        assert [chunk.choices[0].finish_reason for chunk in found[-3:-1]] == [None, "stop"]
        assert found[-1].usage.completion_tokens == len(ANSWER) + 1 and not found[-1].choices
        stream = await client.completions.create(model="p", prompt="x", stream=True)
        told = ""
        async for piece in stream:
            told += piece.choices[0].text
            if told == "h":
                await go(client)
        assert told == ANSWER

    rows = rows_of(agent)
    assert [sampled(row) for row in rows] == [ANSWER] * 4, "what is recorded is the whole answer, once"
    assert [len(row.rollout_logprobs) for row in rows] == [len(ANSWER) + 1] * 4


def test_responses_and_messages_arrive_so_too() -> None:
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
        ) as told:
            async for line in told.aiter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
                if event["type"] == "content_block_delta":
                    text += event["delta"]["text"]
                    if text == "h":
                        await go(client)
        assert text == ANSWER and event["type"] == ""

    assert len(rows_of(agent)) == 4


class Thinking(CharTokenizer):
    """Its answers have thoughts, which end with </think>, and calls of tools."""

    chat_template = "{{ messages }} {{ tools }} </think>"


GO = [{"role": "user", "content": "go"}]
STREAMED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": GO,
        "tools": TOOLS,
        "logprobs": True,
        "n": 2,
        "stream_options": {"include_usage": True},
    },
    "completions": {"prompt": "go", "logprobs": 0, "n": 2, "stream_options": {"include_usage": True}},
    "responses": {"input": "go", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]},
    "messages": {"messages": GO, "tools": [{"name": "add", "input_schema": {"type": "object"}}], "max_tokens": 150},
}


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("text", ["plain text", f"<think>hm, so</think>{WRITTEN}", "<think>cut of"])
def test_every_streamed_event_is_of_a_type_that_the_clients_know(path: str, text: str) -> None:
    types: dict[str, Any] = {
        "chat/completions": openai.types.chat.ChatCompletionChunk,
        "completions": openai.types.Completion,
        "responses": openai.types.responses.ResponseStreamEvent,
    }
    if path == "messages":
        types[path] = pytest.importorskip("anthropic").types.RawMessageStreamEvent
    told, names = TypeAdapter(types[path]), []

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
                    # OpenAI's service says so, too, until the end, and its package has no type for it.
                    data = data.replace('"finish_reason": null', '"finish_reason": "stop"')
                event = told.validate_json(data)
                assert not names or names[-1] == event.type

    rows_of(agent, HalfAnswers(text), Thinking())


def test_several_answers_to_one_request_are_told_side_by_side() -> None:
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


def test_text_arrives_in_a_sandbox_too() -> None:
    policy = TextEngine(Streaming(HalfAnswers().submit, 600.0), CharTokenizer())
    tasks = [task(0, "tests.unit.rollouts.policy.streaming_agent.streams", truth=ANSWER)]
    found = outcome(tasks, policy, {}, max_retry_times=0, sampling=SamplingParams(max_tokens=200)).experiences
    assert [(row.error, row.reward) for row in found] == [("", 1.0)] * 2


def test_who_breaks_off_takes_the_request_along_and_nothing_is_recorded_of_it() -> None:
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


def test_an_error_after_the_first_text_is_told_in_the_stream() -> None:
    async def events(answer: Callable[[], OpenAIAnswer]) -> list[Mapping[str, Any]]:
        stream = EventStream("chat/completions", {})

        async def answering() -> OpenAIAnswer:
            stream.tell(0, "content", "so")
            await asyncio.sleep(0)
            return answer()

        return [each async for each in stream.events(asyncio.ensure_future(answering()))]

    def fails() -> OpenAIAnswer:
        raise RuntimeError("it died")

    ways = ((lambda: refusal("the engine is full"), "the engine is full"), (fails, "RuntimeError: it died"))
    for answer, told in ways:
        found = asyncio.run(events(answer))
        assert [bool(event.get("error")) for event in found] == [False, False, True]
        assert found[-1]["error"]["message"] == told


def test_a_real_engine_tells_its_tokens_while_it_goes_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, hidden_size=32, intermediate_size=64, num_heads=2)
    engine, told = TransformersEngine(str(folder)), list[int]()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts: list[str] = []
    text = StreamedText(tokenizer, (), lambda text: ("", text), lambda part, piece: texts.append(piece))
    news: list[tuple[int, ...]] = []

    def on_tokens(tokens: tuple[int, ...]) -> None:
        news.append(tokens)
        told.extend(tokens)
        text.take(tokens)

    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    streamed = GenerateRequest((5, 6), sampling, 3, on_tokens=on_tokens)
    looks = [[(1, GenerateRequest((7,), SamplingParams(max_tokens=3), 4))], [(0, streamed)]]
    answers: dict[int, Generation] = {}

    def take() -> Sequence[tuple[int, GenerateRequest | None]]:
        assert 0 not in answers or len(told) == 39
        return looks.pop() if looks else []

    engine.serve(take, answers.__setitem__)
    assert tuple(told) == answers[0].tokens[:-1] and len(news) == 39
    whole = tokenizer.decode(answers[0].tokens, skip_special_tokens=True)
    assert len(texts) > 5 and whole.startswith("".join(texts))
    alone = engine.generate([GenerateRequest((5, 6), sampling, 3)])[0]
    assert (alone.tokens, alone.logprobs) == (answers[0].tokens, pytest.approx(answers[0].logprobs, abs=1e-5))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_half_a_character_is_not_told_and_nothing_is_lost(size: int) -> None:
    whole = "a\u00e9\u20ac\U0001f600b\n\U0001f468\u200d\U0001f469"
    texts: list[str] = []
    text = StreamedText(ByteTokenizer(), (), lambda text: ("", text), lambda part, piece: texts.append(piece))
    tokens = whole.encode()
    for start in range(0, len(tokens), size):
        text.take(tokens[start : start + size])
    assert "".join(texts) == whole and len(texts) > 1


@pytest.mark.parametrize(
    ("text", "stop", "told"),
    [
        ("one two END three", ("END",), "one two "),
        ("one ENTER", ("END",), "one ENTER"),
        ("one EN", ("END", "one E!"), "one "),
        ("aab", ("ab", "b"), "a"),
    ],
)
def test_a_text_to_stop_at_is_never_told(text: str, stop: tuple[str, ...], told: str) -> None:
    texts: list[str] = []
    streamed = StreamedText(CharTokenizer(), stop, lambda text: ("", text), lambda part, piece: texts.append(piece))
    for character in text:
        streamed.take([ord(character)])
    assert "".join(texts) == told


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


@pytest.mark.parametrize(("template", "prompt", "tools", "text", "told"), ANSWERS)
def test_what_is_certain_is_the_beginning_of_what_the_parser_finds(
    template: str, prompt: str, tools: Any, text: str, told: tuple[str, str]
) -> None:
    tokenizer: Any = CharTokenizer()
    tokenizer.chat_template = template
    parser = AnswerParser(tokenizer)
    found = [parser.certain(text[:length], prompt, tools) for length in range(len(text) + 1)]
    assert found[-1] == told
    whole = (None, text, ()) if template == "<|channel|>" else parser.parse(text, [], prompt, tools)
    for before, after in zip(found, [*found[1:], (whole[1] or "", whole[0] or "")], strict=True):
        assert all(late.startswith(early) for early, late in zip(before, after, strict=True)), (before, after)
        assert not before[1] or before[0] == after[0], "its thoughts are over when the rest begins"


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
@pytest.mark.parametrize("told", TOLD)
def test_the_events_are_those_of_the_whole_answer_in_other_pieces(path: str, told: list[tuple[Part, str]]) -> None:
    body = chat_body(content="hello there", **THOUGHTS)
    if path == "responses":
        body = responses_api.as_response(body, {"model": "p"})
    elif path == "messages":
        body = messages_api.as_message(body)

    async def events(said: list[tuple[Part, str]]) -> list[Mapping[str, Any]]:
        stream = EventStream(path, {"model": "p"})
        stream._name, stream._created = "0" * 32, 1

        async def answer() -> OpenAIAnswer:
            for part, text in said:
                stream.tell(0, part, text)
                await asyncio.sleep(0)
            return OpenAIAnswer(200, body)

        return [each async for each in stream.events(asyncio.ensure_future(answer()))]

    def frames_of(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        # What is counted at the end alone is not known at the beginning.
        later = {"sequence_number": 0, "message": None, "response": None}
        return [{**each, **later} for each in found if not isinstance(each, TextDelta)]

    def said_in(found: list[Mapping[str, Any]]) -> str:
        keys = ("text", "thinking", "content", "reasoning")
        deltas = [each["choices"][0]["delta"] if "choices" in each else each["delta"] for each in found]
        return "".join(
            each if isinstance(each, str) else next(each[key] for key in keys if key in each) for each in deltas
        )

    streamed, whole = asyncio.run(events(told)), asyncio.run(events([]))
    assert frames_of(streamed) == frames_of(whole)
    parts = [[each for each in found if isinstance(each, TextDelta)] for found in (streamed, whole)]
    assert said_in(parts[0]) == said_in(parts[1]) == "hm, let me seehello there"
    assert pieces("x" * 40) == ["x" * 32, "x" * 8]
