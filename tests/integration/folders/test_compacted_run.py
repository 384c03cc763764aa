"""Promises of a run whose shards are compacted during the run and again after its end: it ends sound, every reader
finds all experiences, and it can be trained again.
"""

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
        lambda: len(ParquetLog(open_storage(str(folder))).compacted_shards()) >= first_bucket, config, *SETTINGS
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
