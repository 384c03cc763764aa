"""Promise, with real processes: a run whose work units are committed in parts, killed with signal 9 while batches are
half committed, ends with the weights of an undisturbed run that committed its batches whole.
"""

from pathlib import Path

import pytest

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import done_units
from rftdask.storage import open_storage
from tests.integration.run_cases import RunProcess, assert_same_run, assert_sound, run_folder, write_config

pytestmark = pytest.mark.slow

STEPS = 8
SETTINGS = (
    f"trainer.total_steps={STEPS}",
    "trainer.save_interval=3",
    "explorer.eval_interval=100",
    "explorer.tasks_per_batch=4",
    "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.uneven",
    "--progress",
    "plain",
)


def num_half_done(folder: Path) -> int:
    """Return the number of partly committed work units."""
    names = ParquetLog(open_storage(str(folder))).shards()
    return len({(name.explore_step, name.unit) for name in names} - done_units(names))


def is_paused_half_done(run: RunProcess, folder: Path) -> bool:
    """Pause the run and return True if a batch is half done; otherwise let the run continue."""
    if not num_half_done(folder):
        return False
    run.pause()
    if num_half_done(folder):
        return True
    run.resume()
    return False


def test_a_run_killed_between_parts_of_a_batch_ends_the_same(tmp_path: Path) -> None:
    whole, parts = write_config(tmp_path / "whole"), write_config(tmp_path / "parts")
    with RunProcess("run", str(whole), "explorer.max_commit_delay_s=null", *SETTINGS) as run:
        assert run.end().code == 0
    folder = run_folder(parts)
    settings = ("run", str(parts), "explorer.max_commit_delay_s=0.01", *SETTINGS)
    for _ in range(2):
        with RunProcess(*settings) as run:
            run.wait_until(lambda run=run: is_paused_half_done(run, folder))
            run.kill()
            run.wait_for_no_survivors()
            assert num_half_done(folder) > 0
    with RunProcess(*settings) as run:
        ended = run.end()
    assert ended.code == 0, ended
    names = ParquetLog(open_storage(str(folder))).shards()
    assert sum(name.part is not None for name in names) > STEPS
    assert assert_same_run(folder, run_folder(whole))["step"] == assert_sound(run_folder(whole))["step"] == STEPS
