"""Runs that are stopped, and runs that must not start. Promises:

- Ctrl-C ends a run with a checkpoint and exit code 130, SIGTERM to its driver or to all of its processes with 143, and
  the same command continues it to its end;
- a run folder has one owner: a second start is refused, names the owner, and disturbs nothing;
- a config that does not match the folder is refused with the keys that differ.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import run_cases as runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "code"), [(runs.RunProcess.interrupt, 130), (runs.RunProcess.terminate, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stopped_run_writes_a_checkpoint_and_can_continue(
    folder: Path, config: Path, ask: Callable[[runs.RunProcess], None], code: int
) -> None:
    settings = ("trainer.total_steps=150", "trainer.save_interval=0")
    with runs.RunProcess("run", str(config), *settings) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 3)
        ask(run)
        ended = run.end()
        run.wait_for_no_survivors()
    assert ended.code == code, ended
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
        assert run.end().code == 130
    runs.assert_sound(folder)


def test_another_config_is_refused_naming_the_keys(config: Path) -> None:
    runs.finish(config, "trainer.total_steps=2")
    weights = runs.final_weights(runs.run_folder(config))
    second = runs.call_cli("run", str(config), "trainer.total_steps=3", "buffer.batch_size=6", "model.temperature=0.5")
    assert second.code == 2
    assert "buffer.batch_size: was 4, is 6" in second.err
    assert "model.temperature: was 1.0, is 0.5" in second.err
    assert "total_steps" not in second.err, "how far a run goes may change"
    assert runs.final_weights(runs.run_folder(config)) == weights
