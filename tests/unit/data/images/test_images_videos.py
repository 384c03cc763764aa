"""Promises of videos. Further cases are in video_cases.py, which runs in a process with torchvision."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rftdask.data import images as module
from rftdask.data.images import ImageFolder, ImageProcessor, check_reads_videos, images_in, video_files
from rftdask.errors import DataError, UserError
from rftdask.models.toy import build_toy_image_model, build_toy_model
from rftdask.rollouts.policy.openai_api import BadRequestError, plain_message
from tests.unit.data.images.test_images import picture, png
from tests.versions import needs_newer_transformers

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
@needs_newer_transformers
def test_videos_are_processed_exactly_as_by_transformers() -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "stand_ins"), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/data/images/video_cases.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]


def test_frames_are_stored_in_one_lossless_file() -> None:
    frames = [picture(1), picture(1), picture(2)]
    [file] = video_files(frames, "")
    read, per_second = module._frames(file)
    assert [each.tobytes() for each in read] == [each.tobytes() for each in frames] and per_second == 2.0
    assert video_files([png(each) for each in frames], "") == [file]
    assert video_files([frames, frames[:1]], "") == [file, *video_files(frames[:1], "")]


def test_an_animated_image_is_a_video_with_its_timing() -> None:
    buffer = io.BytesIO()
    picture(1).save(buffer, format="GIF", save_all=True, append_images=[picture(2), picture(3)], duration=100)
    assert video_files(buffer.getvalue(), "") == [buffer.getvalue()]
    assert video_files([buffer.getvalue()] * 2, "") == [buffer.getvalue()] * 2
    frames, per_second = module._frames(buffer.getvalue())
    assert (len(frames), per_second) == (3, 10.0)
    with pytest.raises(DataError, match="some images of a video are animated"):
        video_files([buffer.getvalue(), png(picture(1))], "")


def test_an_invalid_video_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"frames of a video differ in size: \(28, 28\), \(56, 28\)"):
        video_files([picture(1), picture(1, (28, 28))], "")
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x20ftypisom" * 9)
    with pytest.raises(DataError, match="extract the frames of other files, for example with `ffmpeg"):
        video_files("a.mp4", str(tmp_path))
    truncated = png(picture(1))[:60]
    with pytest.raises(DataError, match="cannot be read"):
        video_files([truncated], "")


@needs_newer_transformers
def test_a_model_or_machine_without_videos_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_toy_image_model(tmp_path / "sees")
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    check_reads_videos(str(tmp_path / "sees"))
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="with torchvision, which is not installed"):
        check_reads_videos(str(tmp_path / "sees"))
    build_toy_model(tmp_path / "reads", hidden_size=16, num_heads=2)
    with pytest.raises(UserError, match=r"is a qwen2, .* only qwen2_vl, qwen2_5_vl read videos"):
        check_reads_videos(str(tmp_path / "reads"))
    images = ImageProcessor(str(tmp_path / "sees"), folder=ImageFolder(tmp_path))
    if images.hf_processor.video_processor is None:
        [file] = video_files([picture(1)], "")
        with pytest.raises(UserError, match="with torchvision, which is not installed"):
            images.tokens(f"video:{images.folder.put(file)}")


def test_a_processor_without_a_video_token_reads_images(tmp_path: Path) -> None:
    images = ImageProcessor(str(tmp_path), folder=ImageFolder(tmp_path))
    images.hf_processor = SimpleNamespace(
        image_token="<image>", image_token_id=3, video_token="<video>"
    )  # as SmolVLM's
    assert images.placeholders == {3: "<image>"}


def test_tasks_hold_videos_but_requests_do_not() -> None:
    message = {"role": "user", "content": [{"type": "video", "video": "ab"}]}
    assert images_in([plain_message(message)]) == ("video:ab",)
    for part in (*message["content"], {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}):
        with pytest.raises(BadRequestError, match="videos in messages are not supported; send frames as images"):
            plain_message({"role": "user", "content": [part]}, lambda told: told)
