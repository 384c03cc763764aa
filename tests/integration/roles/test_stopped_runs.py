"""Runs that are stopped, and runs that must not start."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration import run_cases as runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "code"),
    [
        pytest.param(runs.RunProcess.interrupt, 130, id="Ctrl-C"),
        pytest.param(runs.RunProcess.terminate, 143, id="SIGTERM", marks=pytest.mark.long),
    ],
)
def test_a_stopped_run_writes_a_checkpoint_and_can_continue(
    folder: Path, config: Path, ask: Callable[[runs.RunProcess], None], code: int
) -> None:
    settings = ("trainer.total_steps=150", "trainer.save_interval=0")
    with runs.RunProcess("run", str(config), *settings) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 3)
        ask(run)
        ended = run.end(code=code)
    assert "stopped" in ended.out
    stopped_at = runs.read_number(folder / "latest_checkpointed_iteration.txt")
    assert 3 <= stopped_at < 150
    assert runs.assert_sound(folder)["step"] == stopped_at, "nothing is trained again"

    runs.finish(config, *settings)
    assert runs.assert_sound(folder)["checkpoint"] == 150


@pytest.mark.slow
def test_a_running_folder_refuses_a_second_start_and_goes_on(folder: Path, config: Path) -> None:
    settings = ("trainer.total_steps=5000", "buffer.total_epochs=5000")
    with runs.RunProcess("run", str(config), *settings) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 1)
        second = runs.call_cli("run", str(config), *settings)
        assert second.code == 2, second
        assert f"process {run.process.pid}" in second.err and "trainer" in second.err
        assert runs.status_of(folder)["state"] == "running"
        steps = runs.num_steps(folder)
        run.wait_until(lambda: runs.num_steps(folder) > steps + 2)
        run.interrupt()
        run.end(code=130)
    runs.assert_sound(folder)


_SCRIPT = """
import sys
from rftdask import Experiment

experiment = Experiment.from_yaml(sys.argv[1], *sys.argv[2:]).start()
experiment.progress()
experiment.wait()
print(len(experiment.metrics("trainer")), "steps")
"""


def workers(run: runs.RunProcess) -> list[psutil.Process]:
    """Return the processes that the fork server has forked so far."""
    below = [process for process in run.survivors() if process.pid != run.process.pid]
    servers = {process.pid for process in below if process.ppid() == run.process.pid}
    return [process for process in below if process.ppid() in servers]


def send(number: int) -> Callable[[runs.RunProcess], None]:
    return lambda run: os.killpg(run.process.pid, number)


def test_the_readme_script_needs_no_guard_and_obeys_ctrl_c(config: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    with runs.RunProcess(str(config), "trainer.total_steps=2", program=(str(script),)) as run:
        ended = run.end()
        run.wait_for_no_survivors()
    assert (ended.code, ended.out) == (0, "2 steps\n"), ended
    with runs.RunProcess(str(config), "trainer.total_steps=5000", program=(str(script),)) as run:
        run.wait_until(lambda: runs.num_steps(runs.run_folder(config)) > 3)
        run.interrupt()
        run.end(60)
        run.wait_for_no_survivors()


@pytest.mark.parametrize(
    ("ask", "code"),
    [(runs.RunProcess.interrupt, 130), (runs.RunProcess.terminate, 143), (send(signal.SIGHUP), 129)],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_a_run_ended_early_returns_its_code(config: Path, ask: Callable[[runs.RunProcess], None], code: int) -> None:
    with runs.RunProcess("run", str(config), "trainer.total_steps=5000") as run:
        run.wait_until(lambda: len(workers(run)) > 0)
        time.sleep(0.3)  # at any moment of their imports
        ask(run)
        ended = run.end(code=code)
    assert "Traceback" not in ended.out + ended.err
    runs.finish_alone(config, "trainer.total_steps=2")


def test_sighup_ends_a_run_with_a_checkpoint(folder: Path, config: Path) -> None:
    with runs.RunProcess("run", str(config), "trainer.total_steps=5000", "trainer.save_interval=0") as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 3)
        send(signal.SIGHUP)(run)
        ended = run.end(code=129)
    assert "Traceback" not in ended.err, ended
    assert runs.assert_sound(folder)["step"] == runs.read_number(folder / "latest_checkpointed_iteration.txt")


def test_a_worker_killed_during_cluster_start_is_restarted(config: Path) -> None:
    with runs.RunProcess("run", str(config), "trainer.total_steps=2", "--progress", "plain") as run:
        run.wait_until(lambda: len(workers(run)) > 0)
        workers(run)[0].kill()
        ended = run.end(code=0)
    assert "Traceback" not in ended.err, ended


def test_without_a_trainer_a_killing_task_does_not_end_the_run(config: Path, tmp_path: Path) -> None:
    settings = ("mode=explore", "buffer.total_steps=2", "explorer.sandbox.mode=never")
    poison = {"POISON_FILE": str(tmp_path / "deaths")}
    workflow = "buffer.explorer_input.default_workflow_type=tests.integration.roles.poison_workflow.poisonous"
    with runs.RunProcess("run", str(config), *settings, workflow, "--progress", "plain", env=poison) as run:
        run.end(code=0)
    assert (tmp_path / "deaths").exists()
    assert runs.status_of(runs.run_folder(config))["experiences"]["committed"] == 16


def test_a_missing_ledger_entry_below_the_checkpoint_is_an_error(config: Path) -> None:
    runs.finish_alone(config, "trainer.total_steps=2", "trainer.save_interval=2")
    (runs.run_folder(config) / "ledger" / "main" / "00000001.json").unlink()
    ended = runs.call_cli("run", str(config), "trainer.total_steps=3", "trainer.save_interval=2")
    assert ended.code == 1 and "ledger/main/00000001.json is missing" in ended.err, ended
    assert runs.num_steps(runs.run_folder(config)) == 2
