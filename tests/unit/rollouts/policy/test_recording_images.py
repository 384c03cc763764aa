"""Promises of requests with images: in all APIs a data URL reaches the policy like the image of a task, and is stored
in the run folder and the row by its hash. No URL is fetched and no file is read for a request.
"""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from PIL import Image
from transformers import AutoTokenizer

from rftdask.data.images import ImageFolder, ImageProcessor, data_url, name_of
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_image_model
from rftdask.storage import open_storage
from tests.unit.rollouts.policy.agent_rows import rows
from tests.versions import needs_newer_transformers

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
