"""Promises of required forms, bad words and thinking budgets, tested with a real engine whose policy is random. A form
that the engine or the schema does not allow is a 400 that names the parameter.
"""

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from PIL import Image
from transformers import AutoTokenizer

from rftdask.buffer.log.schema import Experience
from rftdask.data.images import ImageFolder, ImageProcessor, data_url, name_of
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_image_model, build_toy_model
from rftdask.storage import open_storage
from tests.unit.rollouts.policy.agent_rows import ASKED, Agent, ask, rows, sampled
from tests.unit.rollouts.rollout_cases import replies
from tests.versions import needs_newer_transformers

LOOK: Any = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]},
}
GO: Any = {"name": "go", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": LOOK}, {"type": "function", "function": GO}]
SCHEMA: Any = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
SCHEMA["additionalProperties"] = False
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "said", "schema": SCHEMA, "strict": True}}
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, hidden_size=32, intermediate_size=64, num_heads=2)
    return TransformersEngine(str(folder))


def rows_of(engine: TransformersEngine, agent: Agent, template: str = TEMPLATE) -> list[Experience]:
    tokenizer = AutoTokenizer.from_pretrained(engine.model_path)
    tokenizer.chat_template = template

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(engine.generate, requests)

    return rows(agent, generate, tokenizer, is_guided=True)


def test_answer_has_the_requested_form(engine: TransformersEngine) -> None:
    async def agent(client: AsyncOpenAI) -> None:
        answer = await ask(client, response_format=FORMAT)
        assert json.loads(answer.message.content)["yes"] in (True, False)
        chunks = await client.chat.completions.create(model="p", messages=ASKED, response_format=FORMAT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        assert json.loads(text)["yes"] in (True, False)
        answered = await client.responses.create(
            model="p", input="hi", text={"format": {"type": "json_schema", "name": "said", "schema": SCHEMA}}
        )
        assert json.loads(answered.output_text)["yes"] in (True, False)

    for row in rows_of(engine, agent):
        prompt, response = row.tokens[: row.prompt_length].tolist(), row.tokens[row.prompt_length :].tolist()
        [expected] = engine.logprobs([(tuple(prompt), tuple(response))])
        np.testing.assert_allclose(row.rollout_logprobs, expected, atol=1e-4)


def test_required_tool_is_called(engine: TransformersEngine) -> None:
    async def agent(client: AsyncOpenAI) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            answer = await ask(client, tools=TOOLS, parallel_tool_calls=False, tool_choice=choice)
            [call] = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls" and call.function.name in ("look", "go")
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "go" or arguments["at"] in ("here", "there")
        assert call.function.name == "look"
        own: Any = [{"type": "function", **GO}]
        answered = await client.responses.create(
            model="p", input="hi", tools=own, tool_choice={"type": "function", "name": "go"}
        )
        assert [(item.type, item.name) for item in answered.output] == [("function_call", "go")]  # type: ignore[union-attr]

    assert len(rows_of(engine, agent)) == 3


def test_bad_words_are_never_sampled(engine: TransformersEngine) -> None:
    words = [chr(code) for code in range(32, 127)]

    async def agent(client: AsyncOpenAI) -> None:
        answer = await client.completions.create(model="p", prompt="x", max_tokens=60, extra_body={"bad_words": words})
        assert not set(answer.choices[0].text) & set(words)

    assert len(rows_of(engine, agent)) == 1


@pytest.mark.parametrize("budget", [0, 5])
def test_thinking_budget_ends_thoughts_with_untrained_tokens(engine: TransformersEngine, budget: int) -> None:
    template = TEMPLATE + "<think>{% if enable_thinking %}</think>{% endif %}"

    async def agent(client: AsyncOpenAI) -> None:
        extra = {"thinking_token_budget": budget, "bad_words": ["<"]}
        message = (await ask(client, max_tokens=40, extra_body=extra)).message
        assert len(message.reasoning.encode()) <= 4 * budget and message.content

    [row] = rows_of(engine, agent, template)
    assert row.loss_mask is not None
    end = len("\n</think>\n\n")
    assert np.flatnonzero(~row.loss_mask).tolist() == list(range(budget, budget + end))
    assert row.response_text[:0] == "" and "</think>" in row.response_text
    sampled = row.loss_mask
    [expected] = engine.logprobs([(tuple(row.tokens[: row.prompt_length]), tuple(row.tokens[row.prompt_length :]))])
    np.testing.assert_allclose(row.rollout_logprobs[sampled], np.array(expected)[sampled], atol=1e-4)
    assert len(row.tokens) - row.prompt_length <= 40


def test_answer_without_thoughts_ignores_the_budget() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        for budget in (2, 100):
            answer = await ask(client, extra_body={"thinking_token_budget": budget})
            assert answer.message.content in ("heleven", "hello!")

    def say(request: GenerateRequest) -> str:
        return "leven" if request.prompt_tokens[-1] == ord("e") else "hello!"

    recorded = rows(agent, replies(say))
    assert [sampled(row) for row in recorded] == ["heleven", "hello!"]
    assert all(row.loss_mask is None for row in recorded)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "moon"}}}}, "response_format"),
    ({"response_format": FORMAT, "stop": "x"}, "stop"),
    ({"response_format": FORMAT, "extra_body": {"min_tokens": 4}}, "min_tokens"),
    ({"response_format": FORMAT, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ({"extra_body": {"bad_words": [""]}}, "bad_words"),
    ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget"),
]


def test_invalid_form_is_refused_by_name(engine: TransformersEngine) -> None:
    async def agent(client: AsyncOpenAI) -> None:
        for options, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as error:
                await ask(client, **options)
            assert error.value.param == param and param in error.value.message, options
        await ask(client, max_tokens=3)

    assert len(rows_of(engine, agent)) == 1


def test_missing_llguidance_is_reported(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="pip install"):
            await ask(client, response_format=FORMAT)
        await ask(client, max_tokens=3)

    assert len(rows_of(engine, agent)) == 1


GREEDY: Any = {"model": "p", "temperature": 0, "max_tokens": 5}


def picture() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (28, 56, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


@needs_newer_transformers
def test_image_of_a_request_equals_one_of_a_task(tmp_path: Path) -> None:
    folder, file = tmp_path / "model", picture()
    build_toy_image_model(folder)
    engine, tokenizer = TransformersEngine(str(folder)), AutoTokenizer.from_pretrained(folder)
    images = ImageProcessor(str(folder), folder=ImageFolder(tmp_path / "here"))
    images.run = storage = open_storage(f"memory://{tmp_path.name}")
    engine._images = images
    url = data_url(file)

    def asked(item: Any) -> Any:
        return [{"role": "user", "content": [{"type": "text", "text": "what? "}, item]}]

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(engine.generate, requests)

    async def agent(client: AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        messages = asked({"type": "image_url", "image_url": {"url": url}})
        first = (await create(messages=messages, **GREEDY)).choices[0].message
        messages += [first, {"role": "user", "content": "and?"}]
        await create(messages=messages, **GREEDY)
        name = name_of(file)
        named = await create(messages=asked({"type": "image", "image": name}), **GREEDY)
        assert named.choices[0].message.content == first.content
        part: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
        content: Any = [{"type": "input_text", "text": "what? "}, part]
        item = await client.responses.create(
            model="p", temperature=0, max_output_tokens=5, input=[{"role": "user", "content": content}]
        )
        assert item.output_text == first.content
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        body = {**GREEDY, "messages": asked({"type": "image", "source": source})}
        said = await client.post("/messages", body=body, cast_to=object)
        assert said["content"][0]["text"] == first.content  # type: ignore[index]
        counted: Any = await client.post("/messages/count_tokens", body=body, cast_to=object)
        assert counted["input_tokens"] == said["usage"]["input_tokens"]  # type: ignore[index]
        files = ("https://example.org/a.png", "file:///etc/passwd", "/etc/passwd")
        for address in (*files, "data:image/png;base64,AAAA", "0" * 64):
            with pytest.raises(openai.BadRequestError) as error:
                await create(messages=asked({"type": "image_url", "image_url": {"url": address}}), **GREEDY)
            assert error.value.param == "messages", address

    first, named, *_ = recorded = rows(agent, generate, tokenizer, is_guided=True, images=images)
    assert [row.images for row in recorded] == [(name_of(file),)] * 4
    assert storage.get(f"media/{name_of(file)}") == file
    assert first.turns is not None and len(first.turns) == 2
    prompt, answer = tuple(named.tokens[: named.prompt_length].tolist()), named.tokens[named.prompt_length :].tolist()
    placeholder = images.placeholder_id
    assert prompt.count(placeholder) == images.tokens(name_of(file)).count(placeholder)
    request = GenerateRequest(prompt, SamplingParams(5, temperature=0.0), 0, (name_of(file),))
    [alone] = engine.generate([request])
    assert list(alone.tokens) == answer
