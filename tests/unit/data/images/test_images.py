"""Promises of images: generation equals that of transformers, and training uses the sampled tokens."""

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.images import (
    ImageFolder,
    ImageProcessor,
    can_be_given_images,
    check_reads_images,
    data_url,
    images_in,
    without_images,
)
from rftdask.data.tasksets import Taskset
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import DamagedError, DataError, UserError
from rftdask.models.image_models import packs_images
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.trainer import attention
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.numerics import assert_same_logprobs
from tests.versions import needs_newer_transformers

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def picture(seed: int, size: tuple[int, int] = (56, 28)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def prompt_with(folder: Path, pictures: list[Image.Image], text: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Inputs from the processor of the model for a chat."""
    processor = ImageProcessor(str(folder)).hf_processor
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    chat = processor.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    made = processor(text=[chat], images=pictures or None, return_tensors="pt")
    return dict(made), tuple(made["input_ids"][0].tolist())


def request(images: ImageProcessor, tokens: tuple[int, ...], pictures: list[Image.Image], **more: Any) -> Any:
    names = tuple(images.folder.put(png(each)) for each in pictures)
    return GenerateRequest(tokens, more.pop("sampling", GREEDY), seed=more.pop("seed", 0), images=names)


# The first image has four tokens in two rows and columns, so later positions do not count tokens.
PICTURES = [[picture(1, (56, 56))], [picture(2, (28, 56)), picture(3)], [], [picture(4, (28, 28))]]


def engine_with(folder: Path, images: ImageProcessor) -> TransformersEngine:
    engine = TransformersEngine(str(folder))
    engine._images = images
    return engine


@needs_newer_transformers
def test_greedy_batches_equal_those_of_transformers(folder: Path, images: ImageProcessor) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    requests, expected = [], []
    for number, pictures in enumerate(PICTURES):
        made, tokens = prompt_with(folder, pictures, "what?" * (number + 1))
        requests.append(request(images, tokens, pictures))
        answer = model.generate(**made, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        expected.append(tuple(answer[0, len(tokens) :].tolist()))
    engine = engine_with(folder, images)
    assert [each.tokens for each in engine.generate(requests)] == expected
    # One after another, and into a running batch.
    assert [engine.generate([each])[0].tokens for each in requests] == expected
    later, answers = [[(0, requests[2])], [], [(1, requests[1])], [(2, requests[3]), (3, requests[0])]], {}
    engine.serve(lambda: later.pop(0) if later else [], answers.__setitem__)
    assert [answers[number].tokens for number in range(4)] == [expected[i] for i in (2, 1, 3, 0)]


@needs_newer_transformers
def test_our_processor_creates_the_tokens_of_the_model(folder: Path, images: ImageProcessor) -> None:
    tokenizer = images.hf_processor.tokenizer
    for pictures in PICTURES:
        _, expected = prompt_with(folder, pictures, "so?")
        names = [images.folder.put(png(each)) for each in pictures]
        start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        tokens = [token for name in names for token in (start, *images.tokens(name), end)]
        assert (*tokens, *tokenizer.encode("so?")) == expected


@needs_newer_transformers
def test_the_input_cache_keeps_the_most_recent_bytes(folder: Path, images: ImageProcessor) -> None:
    first, second, third = ([images.folder.put(png(picture(seed)))] for seed in (1, 2, 3))
    size = sum(value.nbytes for value in images.inputs(first).values())
    processor = ImageProcessor(str(folder), folder=images.folder, max_input_bytes=2 * size)

    def pixels(names: list[str]) -> torch.Tensor:
        return processor.inputs(names)["pixel_values"]

    kept, others = pixels(first), pixels(second)
    assert pixels(first) is kept and pixels(second) is others and pixels(first) is kept
    pixels(third)
    assert pixels(first) is kept and pixels(second) is not others
    larger = [*first, *second, *third]
    alone = pixels(larger)
    assert pixels(larger) is alone, "the rows of a group are processed one after another"
    assert pixels(first) is not kept


@needs_newer_transformers
def test_a_prompt_with_placeholders_equals_the_processor_input(folder: Path, images: ImageProcessor) -> None:
    tokenizer = images.hf_processor.tokenizer
    for pictures in PICTURES:
        _, tokens = prompt_with(folder, pictures, "so?")
        names = [images.folder.put(png(each)) for each in pictures]
        chat = "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures) + "so?"
        assert images.with_placeholders(tokens, names) == tokenizer.encode(chat)
    four, two = (images.folder.put(png(picture(1, size))) for size in ((56, 56), (28, 56)))
    with pytest.raises(DataError, match=rf"a prompt of 2 tokens does not contain those of its image {four}"):
        images.with_placeholders(images.tokens(two), [four])


def check_training_logprobs(
    folder: Path, images: ImageProcessor, requests: list[Any], answers: list[Generation], **options: Any
) -> tuple[Any, Any]:
    """Compare the logprobs in training, at temperature 0.7, with the answers'; return the model and its rows."""
    model, _ = load_policy(str(folder), "float32", "cpu")
    rows = pack_rows(
        [np.array([*r.prompt_tokens, *a.tokens]) for r, a in zip(requests, answers, strict=True)],
        np.array([len(r.prompt_tokens) for r in requests]),
        np.full(len(requests), 0.7),
        images=[r.images for r in requests],
        processor=images,
        **options,
    )
    logprobs_BT, _ = token_logprobs(model, rows)
    for own, answer in zip(logprobs_BT, answers, strict=True):
        assert_same_logprobs(own[: len(answer.logprobs)].tolist(), answer.logprobs)
    return model, rows


@needs_newer_transformers
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_logprobs_in_training_are_those_of_the_engine(
    folder: Path, images: ImageProcessor, lean: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packs_images(load_policy(str(folder), "float32", "cpu")[0].base_model)
    monkeypatch.setattr(attention, "packs_images", lambda _: packs)
    sampling = SamplingParams(max_tokens=5, temperature=0.7, ignore_eos=True)
    prompts = [prompt_with(folder, pictures, "go")[1] for pictures in PICTURES]
    # Two rollouts for each of two prompts that differ only in their image.
    prompts.append(prompt_with(folder, [picture(9, (28, 28))], "go")[1])
    pictures = [*PICTURES, [picture(9, (28, 28))]]
    assert prompts[-1] == prompts[-2]
    requests = [
        request(images, tokens, own, sampling=sampling, seed=seed)
        for tokens, own in zip(prompts, pictures, strict=True)
        for seed in (1, 2)
    ]
    answers: list[Generation] = engine_with(folder, images).generate(requests)
    assert answers[-1].logprobs != answers[-3].logprobs, "the image matters"
    model, rows = check_training_logprobs(folder, images, requests, answers, lean=lean)
    # All parameters have a gradient, including the vision part.
    model.train()
    token_logprobs(model, rows)[0].sum().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "visual" in name)


@needs_newer_transformers
def test_gradients_are_those_of_transformers(folder: Path, images: ImageProcessor) -> None:
    pictures = PICTURES[1]
    made, tokens = prompt_with(folder, pictures, "go")
    response = [40, 41, 42]
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    made["input_ids"] = torch.tensor([[*tokens, *response]])
    made["mm_token_type_ids"] = torch.nn.functional.pad(made["mm_token_type_ids"], (0, 3))
    made.pop("attention_mask")
    logits = theirs(**made).logits[0, len(tokens) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()
    expected.backward()
    ours, _ = load_policy(str(folder), "float32", "cpu")
    names = tuple(images.folder.put(png(each)) for each in pictures)
    rows = pack_rows(
        [np.array([*tokens, *response])], np.array([len(tokens)]), np.ones(1), images=[names], processor=images
    )
    found = token_logprobs(ours, rows)[0].sum()
    found.backward()
    assert_same_logprobs([found.item()], [expected.item()])
    gradients = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)


def taskset(path: Path, **format: Any) -> Taskset:
    fmt = {"prompt_key": "question", "response_key": "answer", "image_key": "image", **format}
    return Taskset(TasksetConfig.model_validate({"name": "t", "path": str(path), "format": fmt}))


def rows_of(tmp_path: Path, *cells: Any, **more: Any) -> Path:
    import pandas

    path = tmp_path / "rows.parquet"
    frame = pandas.DataFrame([{"question": "q", "answer": "a", "image": cell, **more} for cell in cells])
    frame.to_parquet(path)
    return path


def test_an_image_is_a_file_for_every_form_of_a_cell(tmp_path: Path) -> None:
    content = png(picture(1))
    (tmp_path / "one.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    found = []
    for cell in (content, {"bytes": content, "path": None}, {"bytes": None, "path": "one.png"}, url, [content]):
        task = taskset(rows_of(tmp_path, cell)).task(0, 0)
        found.append(images_in(task.messages))
        assert task.row["image"] == list(found[-1])
        assert without_images(task.messages)[0]["content"].strip() == "q"
    assert set(found) == {found[0]} and len(found[0]) == 1
    assert ImageFolder().read(found[0][0]) == content


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("none.png", r"row 0: column 'image' \(format.image_key\): image .*none.png cannot be read"),
        (b"no image", "cannot be read"),
        ("https://example.org/a.png", "is a URL"),
        ("data:image/png;base64,?", "is a data URL"),
        (7, "is a int"),
    ],
)
def test_an_invalid_image_is_an_error_of_its_row(cell: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        taskset(rows_of(tmp_path, cell)).task(0, 0)


def test_a_chat_places_its_images(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "text": None}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}]
    path = rows_of(tmp_path, [png(picture(1))], message=chat)
    [message] = taskset(path).task(0, 0).messages
    assert [part["type"] for part in message["content"]] == ["text", "image", "text"]
    path = rows_of(tmp_path, [png(picture(1)), png(picture(2))], message=chat)
    with pytest.raises(DataError, match="has places for 1 images, and there are 2"):
        taskset(path).task(0, 0)


def test_a_missing_or_replaced_image_is_damage(tmp_path: Path) -> None:
    storage, folder = open_storage(tmp_path / "run"), ImageFolder(tmp_path)
    name = ImageFolder(tmp_path / "other").put(png(picture(1)))
    with pytest.raises(DamagedError, match="is missing"):
        folder.fetch(storage, [name])
    storage.put(f"media/{name}", png(picture(2)))
    with pytest.raises(DamagedError, match="does not match the hash"):
        folder.fetch(storage, [name])


def test_a_model_without_vision_is_refused(tmp_path: Path, folder: Path) -> None:
    check_reads_images(str(folder))
    build_toy_model(tmp_path, hidden_size=16, num_heads=2)
    with pytest.raises(UserError, match="reads no images"):
        check_reads_images(str(tmp_path))


def test_engine_and_trainer_must_read_images_alike(folder: Path) -> None:
    check_reads_images(str(folder), ("idefics3", "qwen2_5_vl"))
    with pytest.raises(UserError, match=r"is a qwen2_5_vl; .* only for idefics3; use engine_type: transf"):
        check_reads_images(str(folder), ("idefics3",))
    assert can_be_given_images(str(folder)) and not can_be_given_images(str(folder), ("idefics3",))


def test_a_page_shows_an_image_by_its_file_type() -> None:
    content = png(picture(1))
    assert data_url(content) == "data:image/png;base64," + base64.b64encode(content).decode()
    assert data_url(b"\xff\xd8\xff").startswith("data:image/jpeg;") and data_url(b"?").startswith("data:application/")


def test_a_replaced_local_file_is_damage_and_removed(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path)
    name = folder.put(png(picture(1)))
    (tmp_path / name).write_bytes(b"")  # such as after a crash of the machine
    with pytest.raises(DamagedError, match="does not match the hash"):
        folder.read(name)
    assert folder.put(png(picture(1))) == name and folder.read(name) == png(picture(1))


@pytest.mark.parametrize("target", ["folder", "file", "missing"])
def test_a_link_in_shared_folders_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    link = tmp_path / f"rftdask-media-{os.getuid()}"
    link.symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=f"{link} belongs to another user, or is a link; set TMPDIR"):
        ImageFolder()
    assert not any((tmp_path / "folder").iterdir())
