"""Promise: a run that removes trained shards ends sound, and its audit counts the removed rows."""

from pathlib import Path

import pytest

from rftdask.buffer.log.file_log import STEPS_PER_BUCKET, ParquetLog
from rftdask.driver.experiment import Experiment
from rftdask.run.lease import Lease
from rftdask.storage import open_storage
from rftdask.trainer.checkpoint import checkpoint_steps
from tests.integration import run_cases as runs

pytestmark = pytest.mark.slow

SETTINGS = (
    "trainer.total_steps=5000",  # the run is stopped when enough is removed, whatever the speed of the machine
    "buffer.total_epochs=5000",
    "trainer.save_interval=5",
    "trainer.max_checkpoints_to_keep=2",
    "explorer.eval_interval=1000",
    "buffer.trainer_input.experience_buffer.retention.keep=none",
)


def test_a_run_that_removes_trained_data_is_sound(config: Path, folder: Path) -> None:
    runs.interrupt_when(lambda: len(ParquetLog(open_storage(str(folder))).removed()) > 10, config, *SETTINGS)
    removed = ParquetLog(open_storage(str(folder))).removed()
    status = runs.assert_sound(folder)
    assert status["checkpoint"] == status["step"] >= 10
    assert runs.num_shards(folder) + len(removed) >= 2 * status["step"], "every work unit is there or was removed"


def test_a_separate_trainer_also_removes_trained_shards(config: Path) -> None:
    settings = (
        "buffer.total_steps=12",
        "trainer.total_steps=null",
        "trainer.save_interval=3",
        "trainer.max_checkpoints_to_keep=2",
        "synchronizer.sync_style=fully_async",
        "buffer.explorer_input.eval_tasksets=[]",
        "buffer.trainer_input.experience_buffer.retention.keep=none",
    )
    runs.finish(config, *settings, "mode=explore")
    folder = runs.run_folder(config)
    assert ParquetLog(open_storage(str(folder))).removed() == []
    runs.finish(config, *settings, "mode=train")
    removed = ParquetLog(open_storage(str(folder))).removed()
    # The checkpoints of steps 9 and 12 are kept, so shards after step 9 must stay.
    assert {name.explore_step for name in removed} == set(range(1, 10))
    assert runs.assert_sound(folder)["experiences"]["trained"] == 12 * 4 * 2


COMPACTED = (
    "trainer.total_steps=5000",  # the run is stopped when a bucket is compacted, whatever the speed of the machine
    "buffer.total_epochs=5000",
    "trainer.save_interval=10",
    "trainer.max_checkpoints_to_keep=2",
    "explorer.eval_interval=1000",
    "buffer.trainer_input.experience_buffer.retention.keep=compact",
)


def rows_of(folder: Path) -> str:
    query = (
        "select shard, row, uid, state, step, reason from experiences join states using (shard, row, uid) order by all"
    )
    ended = runs.call_cli("experiences", str(folder), "--sql", query, "--csv")
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def test_a_compacted_run_is_sound_and_complete_for_readers(config: Path, folder: Path) -> None:
    first_bucket = 2 * (STEPS_PER_BUCKET - 1)
    runs.interrupt_when(
        lambda: len(ParquetLog(open_storage(str(folder))).compacted_shards()) >= first_bucket, config, *COMPACTED
    )
    was, rows = runs.assert_sound(folder), rows_of(folder)
    assert was["checkpoint"] == was["step"] > STEPS_PER_BUCKET
    oldest = min(checkpoint_steps(open_storage(str(folder))))
    with Lease(open_storage(str(folder)), "trainer"):
        busy = runs.call_cli("compact", str(folder))
    assert busy.code == 2 and "is in use: trainer is process" in busy.err
    ended = runs.call_cli("compact", str(folder))
    assert ended.code == 0 and "audit       unchanged" in ended.out, ended
    waiting = was["experiences"]["waiting"] // runs.REPEAT_TIMES  # a shard holds at least one group
    assert runs.num_shards(folder) <= waiting + 2 * 2, "untrained shards, and single shards of their bucket"
    assert runs.assert_sound(folder)["experiences"] == was["experiences"]
    assert rows_of(folder) == rows
    assert len(Experiment.open(str(folder)).experiences()) == was["experiences"]["committed"]
    uid = rows.splitlines()[1].split(",")[2]
    assert uid in runs.call_cli("trace", str(folder), uid).out
    ended = runs.call_cli("replay", str(folder), "--from", str(oldest), "--progress", "none")
    assert ended.code == 0, ended
