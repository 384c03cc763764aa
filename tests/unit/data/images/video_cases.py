"""Cases of test_images_videos.py, run in a process with torchvision or its replacement, which transformers needs.

Promises of videos: generation equals that of transformers, and training uses the sampled tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.images import ImageProcessor, images_in, video_files
from rftdask.data.tasksets import Taskset
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.models.image_models import with_images
from rftdask.trainer import attention
from rftdask.trainer.model import load_policy
from tests.unit.data.images.test_images import GREEDY, check_training_logprobs, engine_with, picture, png


def frames(seed: int, count: int, size: tuple[int, int] = (56, 28)) -> list[Any]:
    return [picture(100 * seed + number, size) for number in range(count)]


# Videos of four and three frames, the last of which counts twice; images next to a video; two of each.
SHOWN: list[list[Any]] = [
    [frames(1, 4)],
    [picture(2, (56, 56)), frames(3, 3, (28, 28))],
    [],
    [frames(4, 2), picture(5), frames(6, 4), picture(7, (28, 28))],
]


def asked(images: ImageProcessor, shown: list[Any], text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    content: list[dict[str, str]] = []
    for each in shown:
        if isinstance(each, list):
            [file] = video_files(each, "")
            content.append({"type": "video", "video": images.folder.put(file)})
        else:
            content.append({"type": "image", "image": images.folder.put(png(each))})
    chat = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    videos = [np.stack([np.asarray(frame) for frame in each]) for each in shown if isinstance(each, list)]
    made = images.hf_processor(
        text=[images.hf_processor.tokenizer.apply_chat_template(chat, tokenize=False)],
        images=[each for each in shown if not isinstance(each, list)] or None,
        videos=videos or None,
        video_metadata=[{"total_num_frames": len(video), "fps": 2.0} for video in videos] or None,
        return_tensors="pt",
    )
    return images_in(chat), {name: value for name, value in made.items() if hasattr(value, "shape")}


def test_greedy_video_responses_equal_transformers(folder: Path, images: ImageProcessor) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    requests, expected = [], []
    for number, shown in enumerate(SHOWN):
        names, made = asked(images, shown, "what?" * (number + 1))
        tokens_1L = made.pop("input_ids")
        length = tokens_1L.shape[1]
        requests.append(GenerateRequest(tuple(tokens_1L[0].tolist()), GREEDY, 0, names))
        del made["mm_token_type_ids"], made["attention_mask"]
        for _ in range(GREEDY.max_tokens):
            given, _ = with_images(model, tokens_1L, names, images)
            with torch.no_grad():
                logits_V = model(input_ids=tokens_1L, **made, position_ids=given.get("position_ids")).logits[0, -1]
            tokens_1L = torch.cat([tokens_1L, logits_V.argmax()[None, None]], dim=1)
        expected.append(tuple(tokens_1L[0, length:].tolist()))
    assert [each.tokens for each in engine_with(folder, images).generate(requests)] == expected


def test_text_after_a_video_starts_after_its_time(folder: Path, images: ImageProcessor) -> None:
    names, made = asked(images, [picture(1, (56, 56)), frames(3, 4)], "go")
    body = load_policy(str(folder), "float32", "cpu")[0].base_model
    given, shift = with_images(body, made["input_ids"], names, images)
    # Start, four tokens of an image, end and start; two times two tokens of a video, one second apart, which are four
    # positions; its end, and the text.
    assert given["position_ids"][:, 0].tolist() == [
        [0, 1, 1, 1, 1, 3, 4, 5, 5, 9, 9, 10, 11, 12],
        [0, 1, 1, 2, 2, 3, 4, 5, 5, 5, 5, 10, 11, 12],
        [0, 1, 2, 1, 2, 3, 4, 5, 6, 5, 6, 10, 11, 12],
    ]
    assert shift == 13 - 14


@pytest.mark.parametrize("packs", [False, True])
def test_logprobs_in_training_are_those_of_the_engine(
    folder: Path, images: ImageProcessor, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "packs_images", lambda _: packs)
    sampling = SamplingParams(max_tokens=5, temperature=0.7, ignore_eos=True)
    requests = []
    # The same tokens with another video, and with the same frames in another order.
    for shown in (*SHOWN, [frames(8, 4)], [frames(8, 4)[::-1]]):
        names, made = asked(images, shown, "go")
        requests += [GenerateRequest(tuple(made["input_ids"][0].tolist()), sampling, seed, names) for seed in (1, 2)]
    answers = engine_with(folder, images).generate(requests)
    assert requests[-1].prompt_tokens == requests[-3].prompt_tokens == requests[0].prompt_tokens
    assert answers[-1].logprobs != answers[-3].logprobs, "the order of frames counts"
    check_training_logprobs(folder, images, requests, answers)


def test_the_time_between_frames_matters(folder: Path, images: ImageProcessor, tmp_path: Path) -> None:
    inputs = []
    for milliseconds in (500, 125):
        path = tmp_path / f"{milliseconds}.png"
        first, *rest = frames(1, 4)
        first.save(path, save_all=True, append_images=rest, duration=milliseconds)
        [file] = video_files(str(path), "")
        inputs.append(images.inputs([f"video:{images.folder.put(file)}"]))
    assert [each["second_per_grid_ts"].tolist() for each in inputs] == [[1.0], [0.25]]
    assert torch.equal(*(each["pixel_values_videos"] for each in inputs))


def test_a_task_shows_its_video(tmp_path: Path, images: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for number, frame in enumerate(frames(1, 3)):
        (tmp_path / f"{number}.png").write_bytes(png(frame))
    (tmp_path / "tasks.jsonl").write_text('{"q": "so?", "a": "b", "v": ["0.png", "1.png", "2.png"]}\n')
    fmt = {"prompt_key": "q", "response_key": "a", "video_key": "v"}
    taskset = Taskset(TasksetConfig.model_validate({"path": str(tmp_path / "tasks.jsonl"), "format": fmt}))
    taskset.check()
    [message] = taskset.task(0, 0).messages
    [name] = images_in([message])
    assert [part["type"] for part in message["content"]] == ["video", "text"] and name == f"video:{name[6:]}"
