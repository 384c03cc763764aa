"""Promises of runs with videos. Uses a stand-in for torchvision, without which transformers cannot read videos."""

import json
import os
from pathlib import Path

import pytest

from rftdask import Experiment
from rftdask.models.toy import build_toy_image_model
from tests.integration.run_cases import RunProcess, assert_sound
from tests.unit.data.images.test_images import picture, png
from tests.versions import needs_newer_transformers

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@needs_newer_transformers
def test_a_run_with_videos_trains_on_its_own_samples(tmp_path: Path) -> None:
    build_toy_image_model(tmp_path / "model")
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(picture(number)))
    first, *rest = (picture(seed) for seed in (7, 8, 9))
    first.save(tmp_path / "moving.gif", save_all=True, append_images=rest, duration=250)
    videos = [["0.png", "1.png", "2.png"], ["moving.gif"], ["3.png", "4.png"], ["5.png"]]
    rows = [{"question": "what? ", "answer": "a", "video": video} for video in videos]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {
        "path": str(tmp_path / "tasks.jsonl"),
        "format": {"prompt_key": "question", "response_key": "answer", "video_key": "video"},
    }
    reward = "tests.e2e.toy_reward.varied_reward"
    tree = {
        "name": "watching",
        "mode": "both",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tmp_path / "model"), "max_prompt_tokens": 64, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "kl_loss_fn": "none", "optimizer": {"lr": 0.01}},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset, "default_reward_fn_type": reward}},
        "explorer": {"rollout_model": {"engine_type": "transformers", "engine_num": 1}},
        "trainer": {"total_steps": 2, "num_ranks": 1},
        "synchronizer": {"sync_style": "fixed", "sync_offset": 0},
        "cluster": {"num_cpus": 2},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(tree))
    path = os.pathsep.join([str(ROOT / "tests" / "stand_ins"), str(ROOT)])
    with RunProcess("run", str(config), "--progress", "plain", env={"PYTHONPATH": path}) as run:
        run.end(120, code=0)
    folder = tmp_path / "runs" / "rftdask" / "watching"
    assert_sound(folder)
    shown = {name for names in Experiment.open(folder).experiences()["images"] for name in names}
    assert shown == {f"video:{path.name}" for path in (folder / "media").iterdir()} and len(shown) == 4
    steps = Experiment.open(folder).metrics("trainer")
    assert len(steps) == 2 and (steps.grad_norm > 0).all()
    assert (steps.mismatch_kl.abs() < 1e-6).all()
