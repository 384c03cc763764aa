"""Promises of `rftdask skip`: one command, named in the errors of such a run, skips a batch that cannot be trained. The
run then continues with the same bits, also after kills, and all reports count the rows of the batch as skipped.
"""

import shutil
from pathlib import Path

import pytest

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.batches.source import DatasetSource
from rftdask.cli.replay import skip_step
from rftdask.config import load_config
from rftdask.errors import DamagedError, FencedError, StorageError, UserError
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.lineage.trace import trace
from rftdask.reports.page.report_file import report_run
from rftdask.reports.run_reader import open_stages
from rftdask.reports.status import read_status
from rftdask.run.lease import Lease
from rftdask.run.run_folder import open_run, record_run
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, move_pointer, published_versions
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import checkpoint_steps
from rftdask.trainer.engines.fake import FakeTrainEngine
from tests.integration.run_cases import call_cli
from tests.unit.trainer.trainer_cases import Sink, fill_log, make_trainer

STEPS, BAD = 7, 6
"""A checkpoint every 2 steps: when step 6 fails, 1 to 4 are trained for good, and 5 is made again."""
WHY = "its loss is nan"
TREE = {
    "model": {"model_path": "tiny", "max_model_len": 64},
    "algorithm": {"repeat_times": 2},
    "buffer": {"batch_size": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
}


class Picky(FakeTrainEngine):
    """Raises on one batch, whenever it meets it."""

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        if step == BAD:
            raise ValueError("nan")
        return super().train_step(batch, step)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A run that ended when it met the batch of step 6."""
    config = load_config({**TREE, "checkpoint_root_dir": str(tmp_path / "runs")})
    store = open_storage(config.checkpoint_job_dir)
    open_run(store, config)
    fill_log(store, STEPS)
    with pytest.raises(ValueError, match="nan") as caught:
        make_trainer(store, engine=Picky()).run()
    assert f"rftdask skip {store.url} {BAD} --because WHY" in caught.value.__notes__[0]
    return store


def finish(storage: Storage) -> bytes:
    """The last weights."""
    assert make_trainer(storage, engine=Picky()).run().step == STEPS
    data = storage.get(f"weights/{STEPS}/model.safetensors")
    assert data == storage.get(f"global_step_{STEPS}/actor/model.safetensors")
    return data


def test_the_run_continues_and_counts_skipped_rows(storage: Storage) -> None:
    ended = call_cli("skip", storage.url, str(BAD), "--because", f"  {WHY}\n")
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.out == f"skipped step {BAD} with 2 rows; run the same command again to continue the run\n"
    finish(storage)
    move_pointer(storage, CHECKPOINT_POINTER, STEPS)
    reason = f"skipped: {WHY}"
    (status,) = read_status(storage.url)
    assert status.experiences == {"committed": 14, "trained": 12, "waiting": 0, reason: 2}
    assert (status.problems, status.warnings) == ((), (f"step {BAD} was skipped: {WHY}",))
    states = [s for s in RunTables(storage.url).table("states").to_pylist() if s["step"] == BAD]
    assert [(s["state"], s["reason"]) for s in states] == [("dropped", reason)] * 2
    assert f"dropped     {reason}, when the batch of step {BAD}" in trace(storage.url, f"t/0/{BAD}/0/0").render()
    report_run(storage.url)
    assert f"step {BAD} was skipped: {WHY}" in storage.get("report.html").decode()


def test_kills_and_replays_after_a_skip_give_the_same_bits(storage: Storage, tmp_path: Path) -> None:
    skip_step(storage.url, BAD, WHY)
    skipped = tmp_path / "skipped"
    shutil.copytree(storage.url, skipped)
    whole = finish(storage)
    for kill_at in range(1, 100):
        folder = tmp_path / str(kill_at)
        shutil.copytree(skipped, folder)
        if not is_killed_at(open_storage(folder), kill_at):
            break
        assert finish(open_storage(folder)) == whole, kill_at
    else:
        pytest.fail("there are not so many writes")
    for step in checkpoint_steps(storage):  # again from the start, from the ledger only
        storage.remove(f"global_step_{step}")
    storage.remove("weights")
    assert finish(storage) == whole


def is_killed_at(storage: Storage, kill_at: int) -> bool:
    left = kill_at

    def kill(verb: str, path: str, stage: str) -> None:
        nonlocal left
        left -= verb in ("put", "put_new", "remove")
        if left == 0:
            raise StorageError("gone")

    try:
        make_trainer(FaultyStorage(storage, kill), engine=Picky()).run()
    except StorageError:
        return True
    return False


def test_a_skip_removes_weights_trained_on_the_step(storage: Storage) -> None:
    """A later version was published before its checkpoint; it would stay as it is when it is made again."""
    skip_step(storage.url, 5, WHY)
    assert published_versions(storage) == [1, 2, 3, 4]
    skip_step(storage.url, BAD, WHY)
    assert finish(storage) != b""
    audit = open_stages(storage.url)[0].audit
    assert audit is not None and (audit.trained, audit.dropped) == (10, {f"skipped: {WHY}": 4})
    assert storage.get("weights/4/model.safetensors") == storage.get("weights/6/model.safetensors")


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_batch_with_a_lost_or_damaged_shard_is_skipped(storage: Storage, is_removed: bool) -> None:
    entry = Ledger(storage).read(BAD)
    assert entry is not None
    name = entry.use[0].source
    path = next(f"experiences/000000/{n}" for n in storage.list("experiences/000000") if n == name)
    if is_removed:
        storage.remove(path)
    else:
        storage.put(path, storage.get(path)[:-20])
    with pytest.raises(StorageError, match=name) as caught:
        make_trainer(storage).run()
    assert isinstance(caught.value, DamagedError) or is_removed
    assert f"rftdask skip {storage.url} {BAD}" in caught.value.__notes__[0]
    skip_step(storage.url, BAD, WHY)
    finish(storage)
    move_pointer(storage, CHECKPOINT_POINTER, STEPS)
    counts = {"committed": 14, "trained": 12, "waiting": 0, f"skipped: {WHY}": 2}
    (status,) = read_status(storage.url)
    assert (status.problems, status.experiences) == ((), counts)
    states = RunTables(storage.url).table("states").to_pylist()
    assert [s["reason"] for s in states if s["state"] != "trained"] == [f"skipped: {WHY}"] * 2


def test_invalid_skips_change_nothing(storage: Storage, tmp_path: Path) -> None:
    def refuse(step: int, words: str, because: str = WHY, kind: type[Exception] = UserError) -> None:
        with pytest.raises(kind, match=words):
            skip_step(storage.url, step, because)
        assert Ledger(storage).skips == {}

    refuse(4, "step 4 is already trained: .*global_step_4 includes it")
    refuse(1, "step 1 is already trained")
    refuse(BAD + 1, f"has no batch of step {BAD + 1}; its ledger ends at step {BAD}")
    refuse(BAD, "give a reason of 1 to 200", because=" \n")
    refuse(BAD, "give a reason of 1 to 200", because="\x1b[2J")
    refuse(BAD, "give a reason of 1 to 200", because="x" * 300)
    with Lease(storage, "trainer"):
        refuse(BAD, "is in use", kind=FencedError)
    storage.put("global_step_8/MANIFEST.json", b"torn")  # somebody may put it back
    refuse(BAD, "global_step_8 includes it, damaged or not")
    storage.remove("global_step_8")
    skip_step(storage.url, BAD, WHY)
    with pytest.raises(UserError, match=f"already skipped: {WHY}"):
        skip_step(storage.url, BAD, "another reason")
    path = f"ledger/main/{BAD - 1:08d}.json"
    storage.put(path, storage.get(path)[:-9])
    with pytest.raises(DamagedError, match="is damaged"):
        skip_step(storage.url, BAD - 1, WHY)
    stages = [{"stage_name": name} for name in "ab"]
    tree = {**TREE, "name": "staged", "checkpoint_root_dir": str(tmp_path), "stages": stages}
    staged = load_config(tree)
    record_run(open_storage(staged.checkpoint_job_dir), staged)
    with pytest.raises(UserError, match=r"has stages; skip a step of one of them: .*/<stage>, of a, b"):
        skip_step(staged.checkpoint_job_dir, 1, WHY)


def test_status_reports_a_damaged_skip_and_the_rest(storage: Storage) -> None:
    skip_step(storage.url, BAD, WHY)
    storage.put(f"ledger/main/skipped/{BAD:08d}.json", b"{")
    (status,) = read_status(storage.url)
    assert status.step == BAD and f"skipped/{BAD:08d}.json is damaged" in status.problems[0]


def test_a_skipped_dataset_step_trains_nothing(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    ledger = Ledger(storage)

    def make_source(ledger: Ledger) -> DatasetSource:
        return DatasetSource(
            lambda numbers: [((1, 2, number), 1, None) for number in numbers],
            *(8, "f00", ledger),
            batch_size=2,
            total_epochs=1,
            shuffle_seed=None,
        )

    source = make_source(ledger)
    first = source.entry(1)
    assert first is not None and len(source.read(first)) == 2
    ledger.skip(1, WHY)
    entry = Ledger(storage).read(1)
    assert entry == LedgerEntry(1, "main", (), (Rows("dataset:f00", (0, 1), f"skipped: {WHY}"),))
    assert len(source.read(entry)) == 0
    again, sink = make_source(Ledger(storage)), Sink()
    assert make_trainer(storage, source=again, publish_due=None, sink=sink).run().step == 4
    assert [row["num_rows"] for _, row in sink.rows] == [0, 2, 2, 2]
    assert sink.rows[0][1]["num_dropped_skipped"] == 2
