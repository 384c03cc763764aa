"""A user's loss that raises or hangs, and devices that cannot be used."""

import re
from pathlib import Path

import pytest
import torch

from rftdask.config import load_config
from rftdask.driver.experiment import plan_run
from rftdask.monitor.metrics import read_metrics
from rftdask.run.run_folder import STOP_FILE
from rftdask.storage import open_storage
from tests.e2e.own_stack import STACKS, read_own_calls
from tests.e2e.toy_runs import DEADLINE_S, run_folder, write_grpo_config
from tests.integration.run_cases import RunProcess, assert_sound, call_cli, num_steps

ADVICE = "a restart would meet this error again: fix its cause, then run the same command again"


def test_a_raising_loss_ends_the_run_with_traceback_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_grpo_config(tmp_path, algorithm={"policy_loss_fn": "tests.e2e.own_losses.BrokenLoss"})
    monkeypatch.setenv(STACKS, str(tmp_path / "stacks.jsonl"))
    ended = call_cli("run", str(config), "--progress", "plain")
    assert ended.code == 1, ended

    # The error and its place, down to the user's own line; and, as the last line, what to do.
    assert "error: rank 0 on worker" in ended.err, ended
    assert re.search(r'own_losses\.py", line \d+, in __call__\n +raise ValueError', ended.err), ended
    assert "ValueError: the slope of this loss must not be 7\nwhile training step 1; if" in ended.err, ended
    assert f"rftdask skip {run_folder(config)} 1 --because WHY\n" in ended.err, ended
    assert ended.err.count(ADVICE) == 1, ended
    assert ended.err.splitlines()[-1] == ADVICE, ended

    # One generation of ranks: no restart, although `trainer.max_restarts` allows more.
    assert [place for place, _ in read_own_calls(tmp_path / "stacks.jsonl")] == ["loss"]
    assert "restarts from its newest checkpoint" not in ended.out + ended.err, ended
    folder = run_folder(config)
    assert read_metrics(open_storage(folder), "trainer").empty
    assert num_steps(folder) <= 1  # the batch of the first step, which the same command trains next
    assert_sound(folder)


def test_out_of_memory_ends_the_run_and_names_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_grpo_config(tmp_path, algorithm={"policy_loss_fn": "tests.e2e.own_losses.GreedyLoss"})
    stacks = tmp_path / "stacks.jsonl"
    monkeypatch.setenv(STACKS, str(stacks))
    ended = call_cli("run", str(config), "--progress", "plain")
    assert ended.code == 2, ended
    message = " ".join(ended.err.split())
    assert "out of GPU memory while step 1 is trained: CUDA out of memory. Tried to allocate 2.00 GiB." in message, (
        ended
    )
    assert "To change: trainer.max_token_len_per_gpu below 16384, trainer.gradient_checkpointing: true," in message, (
        ended
    )
    assert [place for place, _ in read_own_calls(stacks)] == ["loss"]
    assert "restarts from its newest checkpoint" not in ended.out + ended.err, ended


def test_a_planned_gpu_that_torch_cannot_use_ends_the_run(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for GPUs")
    config = write_grpo_config(tmp_path, trainer={"total_steps": 1})
    with RunProcess("run", str(config), "--progress", "plain", env={"CUDA_VISIBLE_DEVICES": "0"}) as run:
        ended = run.end(DEADLINE_S, code=2)  # before, the exit code was 0, because the run continued on the CPU
    message = " ".join(ended.err.split())
    assert "GPU 0 is planned for this process (CUDA_VISIBLE_DEVICES), and torch" in message, ended
    assert "is built without CUDA" in message and "hide the GPUs: CUDA_VISIBLE_DEVICES=" in message, ended


def test_a_gpu_that_is_too_small_is_refused_or_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_grpo_config(tmp_path, trainer={"total_steps": 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("rftdask.driver.experiment.gpu_memory", lambda: 10**5)
    ended = call_cli("run", str(config), "--progress", "plain")
    assert ended.code == 2, ended
    message = " ".join(ended.err.split())
    assert message.startswith(
        "error: 1 problem: - GPU memory: stage tiny, trainer: needs at least 0.0 GB on each GPU (weights"
    ), ended
    assert not (run_folder(config) / "run.json").exists()
    monkeypatch.setattr("rftdask.driver.experiment.gpu_memory", lambda: 10**6)  # of 2.3 GB; 0.4 GB are certain
    checked = load_config(config)
    assert plan_run(checked, checked.stage_configs()).trains_on_gpus
    warned = "this is an estimate, and the run starts: GPU memory: stage tiny, trainer: needs about"
    assert [warned in line for line in caplog.messages] == [True]


def test_a_second_ctrl_c_waits_for_no_role(tmp_path: Path) -> None:
    config = write_grpo_config(tmp_path, algorithm={"policy_loss_fn": "tests.e2e.own_losses.StuckLoss"})
    stacks = tmp_path / "stacks.jsonl"
    with RunProcess("run", str(config), "--progress", "plain", env={STACKS: str(stacks)}) as run:
        run.wait_until(stacks.exists, DEADLINE_S)
        run.interrupt()
        run.wait_until(lambda: (run_folder(config) / STOP_FILE).exists(), DEADLINE_S)
        run.interrupt()
        ended = run.end(120.0, code=130)  # a fraction of every deadline of a role
    assert "ended at once" in ended.err, ended
