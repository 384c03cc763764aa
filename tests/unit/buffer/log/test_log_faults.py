"""Promises for foreign files, another schema, damaged or moved ledger entries, two trainers, full disks and clock jumps
in a run folder: what cannot be read is named, nothing is trained twice, and the run continues without losses.
"""

import io
import itertools
import json
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rftdask.buffer.batches.audit import Audit
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.replay_priority import DecayLimitRandomization, Replay
from rftdask.buffer.batches.selection import SampleRule
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName
from rftdask.cli.app import app
from rftdask.config import load_config
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.errors import DamagedError, DataError, FencedError, StorageError
from rftdask.monitor.metrics import MetricsWriter, read_metrics
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.lineage.trace import trace
from rftdask.reports.status import read_status
from rftdask.run.lease import Lease, lease_holder
from rftdask.run.run_folder import open_run
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import TMP_PREFIX
from rftdask.storage.local import LocalStorage
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import Checkpoints, checkpoint_steps
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.trainer import Trainer
from tests.unit.buffer.buffer_cases import audit, batch_of, commit_batch, experience, make_source, new_storage, take

NUM_STEPS = 4
_numbers = itertools.count()


class NoMetrics:
    def write(self, step: int, metrics: object) -> None: ...
    def flush(self) -> None: ...


def new_run(root: str | None = None) -> Storage:
    """An empty run folder for status and trace, in memory or below `root`."""
    tree = {
        "project": "p",
        "name": "run",
        "checkpoint_root_dir": root or f"memory://bad-log-{next(_numbers)}",
        "model": {"model_path": "tiny", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "explorer": {"tasks_per_batch": 2, "rollout_model": {"engine_type": "fake"}},
        "buffer": {"batch_size": 4, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    config = load_config(tree)
    storage = open_storage(config.checkpoint_job_dir)
    open_run(storage, config)
    return storage


def fill(storage: Storage, num_steps: int = NUM_STEPS // 2) -> None:
    """Two work units of two groups per explore step: one training batch each."""
    log = ParquetLog(storage)
    for step in range(1, num_steps + 1):
        for batch in (0, 1):
            log.writer = "a" * 12  # as an explorer that never changes, so that two runs can be compared
            commit_batch(log, step, batch)
    log.seal(num_steps)


def train(storage: Storage) -> bytes:
    """Run a trainer with its own process state to the end of the log; return its final weights."""
    rule = SampleRule(groups_per_batch=2, tasks_per_step=4, ordered=True)
    trainer = Trainer(
        FakeTrainEngine(),
        LogSource(ParquetLog(storage), Ledger(storage), rule, tasks_per_unit=2, max_read_timeout_s=0.0),
        Checkpoints(storage, "main"),
        storage,
        NoMetrics(),
        TrainerConfig(save_interval=2),
        total_steps=None,
        lineage="main",
        publish_due=lambda step, published: True,
        should_stop=lambda: False,
        emit=lambda event: None,
    )
    assert trainer.run().step == NUM_STEPS
    return storage.get(f"weights/{NUM_STEPS}/model.safetensors")


WHOLE = Audit(committed=16, trained=16, waiting=0)


@pytest.fixture(scope="module")
def weights() -> bytes:
    storage = new_storage()
    fill(storage)
    return train(storage)


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def put_shard(storage: Storage, data: bytes, num_rows: int, step: int = 1, batch: int = 0) -> ShardName:
    """A file with the name of a shard and a valid checksum."""
    name = ShardName(step, batch, "f" * 12, num_rows, 0, 0, zlib.crc32(data))
    storage.put(ParquetLog(storage).path(name), data)
    return name


def test_foreign_files_are_not_touched(weights: bytes) -> None:
    storage = new_run()
    fill(storage)
    foreign = parquet(pa.table({"price": [1.0, 2.0]}))
    paths = [
        "experiences/000000/prices.parquet",
        "experiences/000000/00000001-0000-copy of a shard.parquet",
        "experiences/notes/prices.parquet",
        "experiences/prices.parquet",
        "experiences/quarantine/prices.parquet",
        "experiences/removed/prices.parquet",
        "ledger/main/prices.json",
        "ledger/prices.json",
        "control/lease-trainer-mine.json",
        "metrics/trainer/prices.jsonl",
        "metrics/prices.parquet",
        "weights/prices",
        "global_step_mine/prices",
        "eval/prices.parquet",
    ]
    for path in paths:
        storage.put(path, foreign)
    with Lease(storage, "trainer"):
        assert lease_holder(storage, "trainer") is not None
        assert train(storage) == weights
    assert audit(storage) == WHOLE
    (stage,) = read_status(storage.url)
    assert (stage.step, stage.experiences, stage.problems) == (4, {"committed": 16, "trained": 16, "waiting": 0}, ())
    tables = RunTables(storage.url)
    counts = {name: tables.table(name).num_rows for name in ("experiences", "ledger", "states", "checkpoints")}
    assert counts == {"experiences": 16, "ledger": 16, "states": 16, "checkpoints": 2} and tables.problems == []
    assert "trained     step 1" in trace(storage.url, "t/0/0/0/0").render()
    assert all(storage.get(path) == foreign for path in paths)


def test_status_names_a_damaged_entry_and_reports_the_rest(tmp_path: Path) -> None:
    storage = new_run(str(tmp_path))
    fill(storage)
    train(storage)
    entry = storage.get("ledger/main/00000002.json")
    storage.put("ledger/main/00000002.json", entry.replace(b'"step": 2', b'"step": 3'))
    (stage,) = read_status(storage.url)
    assert (stage.step, stage.checkpoint, stage.experiences) == (4, 4, {})
    assert len(stage.problems) == 1 and "ledger/main/00000002.json is damaged" in stage.problems[0]
    result = CliRunner().invoke(app, ["status", storage.url])
    assert (result.exit_code, "4 in the ledger" in result.output, stage.problems[0] in result.output) == (1, True, True)


@pytest.mark.parametrize("version", ["2.0", None])
def test_a_shard_of_another_schema_stops_the_trainer_and_stays(weights: bytes, version: str | None) -> None:
    storage = new_run()
    rows = experiences_to_table([experience(0, 0), experience(0, 1)], "")
    rows = rows.replace_schema_metadata({} if version is None else {"rftdask.schema": version})
    name = put_shard(storage, parquet(rows), 2)
    fill(storage)
    data = storage.get(ParquetLog(storage).path(name))
    message = f"shard {name.text}: schema version {version or 'unknown'}, .*use the version that wrote the run"
    with pytest.raises(DataError, match=message):
        train(storage)
    assert storage.get(ParquetLog(storage).path(name)) == data and ParquetLog(storage).quarantined() == []
    assert Ledger(storage).last_step() == 0 and checkpoint_steps(storage) == []

    (stage,) = read_status(storage.url)
    assert stage.experiences["committed"] == 18 and name.text in stage.problems[0]
    tables = RunTables(storage.url)
    assert tables.table("experiences").num_rows == 16
    assert len(tables.problems) == 1 and name.text in tables.problems[0]
    assert name.text in trace(storage.url, "t/0/3/0/0").problems[0]

    storage.remove(ParquetLog(storage).path(name))  # by hand, to where another version reads it
    assert train(storage) == weights and audit(storage) == WHOLE


def test_ledger_entries_of_another_lineage_are_not_trained(weights: bytes) -> None:
    storage = new_storage()
    fill(storage)
    assert take(make_source(storage, lineage="fork"), [1, 2]) != []
    assert train(storage) == weights, "another lineage has no effect"
    assert audit(storage) == WHOLE

    moved = new_storage()
    fill(moved)
    moved.put("ledger/main/00000001.json", storage.get("ledger/fork/00000001.json"))
    with pytest.raises(DamagedError, match=r"00000001\.json holds step 1 of lineage fork: files were moved"):
        train(moved)
    assert checkpoint_steps(moved) == []
    moved.remove("ledger/main/00000001.json")
    assert train(moved) == weights and audit(moved) == WHOLE


@pytest.mark.parametrize("step", [1, 2, 4])
def test_of_two_trainers_one_stops_and_nothing_is_trained_twice(weights: bytes, step: int) -> None:
    storage = new_storage()
    fill(storage)
    others: list[bytes] = []

    def overtake(verb: str, path: str, stage: str) -> None:
        if (verb, stage) == ("put_new", "before") and path == f"ledger/main/{step:08d}.json":
            others.append(train(storage))

    with pytest.raises(FencedError, match=f"{step:08d}.json was written by another trainer"):
        train(FaultyStorage(storage, overtake))
    assert others == [weights] and audit(storage) == WHOLE
    assert train(storage) == weights


def fill_disk(disk: LocalStorage) -> None:
    with Path(disk.url, "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def full_before(disk: LocalStorage, prefix: str, nth: int) -> FaultyStorage:
    """The disk, which fills up just before the n-th write below `prefix`."""
    writes = itertools.count(1)

    def hook(verb: str, path: str, stage: str) -> None:
        if verb in ("put", "put_new") and stage == "before" and path.startswith(prefix) and next(writes) == nth:
            fill_disk(disk)

    return FaultyStorage(disk, hook)


def leftovers(disk: LocalStorage) -> list[str]:
    return [name for _, _, files in os.walk(disk.url) for name in files if name.startswith(TMP_PREFIX)]


@pytest.mark.parametrize(
    ("prefix", "nth", "checkpoint"),
    [
        ("ledger/", 1, None),
        ("ledger/", 3, 2),
        ("weights/", 1, None),
        ("weights/", 5, 2),
        ("latest_", 2, None),
        ("global_step_2/", 1, None),
        ("global_step_2/MANIFEST", 1, None),
        ("global_step_4/", 1, 2),
    ],
)
def test_a_trainer_continues_after_a_full_disk(
    small_disk: LocalStorage, weights: bytes, prefix: str, nth: int, checkpoint: int | None
) -> None:
    fill(small_disk)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        train(full_before(small_disk, prefix, nth))
    assert leftovers(small_disk) == []
    counts = audit(small_disk)
    assert counts.committed == 16 and counts.problems == ()
    for step in range(1, Ledger(small_disk).last_step() + 1):
        assert Ledger(small_disk).read(step) is not None
    newest = Checkpoints(small_disk, "main").load_newest()
    assert (newest and newest[0]) == checkpoint

    small_disk.remove("filler")
    assert train(small_disk) == weights
    assert audit(small_disk) == WHOLE


def test_an_explorer_continues_after_a_full_disk(small_disk: LocalStorage, weights: bytes) -> None:
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        fill(full_before(small_disk, "experiences/", 3))
    assert len(ParquetLog(small_disk).shards()) == 2 and leftovers(small_disk) == []
    assert audit(small_disk) == Audit(committed=8, trained=0, waiting=8)
    small_disk.remove("filler")
    fill(small_disk)
    assert train(small_disk) == weights and audit(small_disk) == WHOLE


def lease(storage: Storage, number: int = 1, **fields: object) -> Callable[[], None]:
    """Write a lease of a process on another machine; the result writes its next heartbeat."""
    since_boot = psutil.Process().create_time() - psutil.boot_time()
    owner = {"host": "elsewhere", "pid": 1, "started_s": since_boot, "time_s": 1000.0, "released": False}
    content = {**owner, **fields}

    def beat() -> None:
        content["time_s"] += 5.0
        storage.put(f"control/lease-trainer-{number}.json", json.dumps(content).encode())

    beat()
    return beat


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_jump_does_not_end_the_lease_of_a_live_owner(jump_s: float) -> None:
    storage = new_storage()
    beat = lease(storage)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        beat()

    with pytest.raises(FencedError, match="process 1 on elsewhere"):
        Lease(storage, "trainer", clock=lambda: 1000.0 + jump_s, sleep=sleep)
    assert slept == [12.5], "it checked whether the owner still writes"


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_jump_does_not_block_the_role_of_a_dead_owner(jump_s: float) -> None:
    storage = new_storage()
    lease(storage)
    Lease(storage, "trainer", clock=lambda: 1000.0 + jump_s, sleep=lambda seconds: None).release()


def test_a_heartbeat_outweighs_another_start_time() -> None:
    storage = new_storage()
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    beat = lease(storage, **here, started_s=psutil.Process().create_time())
    with pytest.raises(FencedError, match=f"process {os.getpid()}"):
        Lease(storage, "trainer", sleep=lambda seconds: beat())


def test_after_a_takeover_of_the_role_nothing_is_trained_twice(weights: bytes) -> None:
    storage = new_storage()
    fill(storage)
    first = Lease(storage, "trainer", heartbeat_s=60.0)
    storage.put("control/lease-trainer-2.json", storage.get("control/lease-trainer-1.json"))
    source = make_source(storage)
    assert take(source, [1]) != []
    assert train(storage) == weights
    with pytest.raises(FencedError):
        batch_of(source, 2)
    assert audit(storage) == WHOLE
    first.release()


def test_a_clock_jump_loses_no_metrics() -> None:
    storage = new_storage()
    times = iter([1000.0, 1000.0, 5000.0, 5000.0, 20.0, 20.0, 20.1, 20.1])
    writer = MetricsWriter(storage, "trainer", clock=lambda: next(times, 30.0))
    for step in (1, 2, 3, 4):
        writer.write(step, {"loss": float(step)})
        if step != 4:
            assert len(read_metrics(storage)) == step, "flushed at each jump"
    writer.close()
    assert sorted(read_metrics(storage)["step"]) == [1, 2, 3, 4]


@pytest.mark.parametrize(("jump_s", "reuses"), [(1.0, False), (-3600.0, True), (3600.0, True)])
def test_a_clock_jump_delays_no_group_beyond_its_cooldown(jump_s: float, reuses: bool) -> None:
    storage = new_storage()
    commit_batch(ParquetLog(storage), 1, 0)
    now = [10_000.0]
    rule = Replay(DecayLimitRandomization(use_count_limit=2), reuse_cooldown_s=30.0, after_the_end=True)
    source = make_source(storage, ordered=False, replay=rule, clock=lambda: now[0])
    (first,) = take(source, [1])
    now[0] += jump_s
    if reuses:
        assert sorted(take(source, [2])[0]) == sorted(first)
    else:
        with pytest.raises(Exception, match="batch 2 was not complete"):
            batch_of(source, 2)
