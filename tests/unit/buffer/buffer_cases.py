"""Experiences, shards and logs for the tests of the buffer: small, and readable in an assertion."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from rftdask.buffer.batches.audit import Audit, audit_log
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.selection import SampleRule
from rftdask.buffer.batches.source import BatchSource
from rftdask.buffer.log.columns import encode_parquet
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.buffer.log.shard import ShardName
from rftdask.storage import Storage, open_storage

_numbers = itertools.count()


def new_storage() -> Storage:
    return open_storage(f"memory://buffer-{next(_numbers)}")


def entries(storage: Storage) -> list[LedgerEntry]:
    ledger = Ledger(storage)
    found = [ledger.read(step) for step in range(1, ledger.last_step() + 1)]
    return [entry for entry in found if entry is not None]


def experience(
    task: int = 0, rollout: int = 0, *, step: int = 1, status: Status = Status.OK, **fields: Any
) -> Experience:
    """Two prompt tokens and three response tokens, which contain the task and the rollout."""
    values: dict[str, Any] = {
        "taskset": "t",
        "epoch": 0,
        "task_index": task,
        "rollout": rollout,
        "explore_step": step,
        "status": status,
        "tokens": (1, 2, task, rollout, 9),
        "prompt_length": 2,
        "rollout_logprobs": (-0.5, -0.25, -1.0),
        "reward": float(rollout) if status.trainable else None,
        "error": "" if status.trainable else f"task {task} rollout {rollout} {status}",
    }
    return Experience(**{**values, **fields})


def parquet_shard(rows: Sequence[Experience], codec: str = "lz4") -> tuple[ShardName, bytes]:
    """The name and the bytes of a shard with these rows."""
    data = encode_parquet(rows, "r", codec)
    return ShardName(1, 0, "ab", len(rows), 0, 0, zlib.crc32(data)), data


Statuses = Callable[[int, int], Status]
"""(task, rollout) -> status"""


def all_ok(task: int, rollout: int) -> Status:
    return Status.OK


def commit_batch(
    log: ExperienceLog,
    step: int,
    batch: int,
    *,
    tasks_per_batch: int = 2,
    tasks_per_step: int = 4,
    repeat_times: int = 2,
    version: int = 0,
    statuses: Statuses = all_ok,
) -> ShardName:
    """Commit work unit `batch` of explore step `step`. Tasks are numbered through the whole run, from 0."""
    first = (step - 1) * tasks_per_step + batch * tasks_per_batch
    last = min(first + tasks_per_batch, step * tasks_per_step)
    rows = [
        experience(task, k, step=step, status=statuses(task, k), min_policy_version=version, max_policy_version=version)
        for task in range(first, last)
        for k in range(repeat_times)
    ]
    return log.commit(rows, explore_step=step, unit=batch)


BATCHES = [(step, batch) for step in (1, 2) for batch in (0, 1)]
"""Two explore steps of four tasks in work units of two: eight groups of two rows, four train batches."""


def committed(
    order: Sequence[tuple[int, int]] = BATCHES, statuses: Statuses = all_ok, versions: Sequence[int] = (0, 0)
) -> Storage:
    """A storage with these work units. versions: policy version that sampled explore step 1, and 2."""
    storage = new_storage()
    for step, batch in order:
        commit_batch(ParquetLog(storage), step, batch, statuses=statuses, version=versions[step - 1])
    return storage


def uids(*tasks: int) -> tuple[str, ...]:
    """Uids of both rollouts of each task."""
    return tuple(f"t/0/{task}/{k}/0" for task in tasks for k in (0, 1))


def make_source(
    storage: Storage, *, log: ExperienceLog | None = None, lineage: str = "main", **options: Any
) -> LogSource:
    """A source over `storage`: four tasks per step in work units of two, two groups per training batch."""
    rule = SampleRule(
        groups_per_batch=options.pop("groups_per_batch", 2),
        tasks_per_step=options.pop("tasks_per_step", 4),
        ordered=options.pop("ordered", True),
        max_staleness=options.pop("max_staleness", None),
    )
    return LogSource(
        log or ParquetLog(storage),
        Ledger(storage, lineage),
        rule,
        tasks_per_unit=options.pop("tasks_per_batch", 2),
        max_read_timeout_s=options.pop("max_read_timeout_s", 0.02),
        poll_interval_s=0.001,
        replay=options.pop("replay", None),
        notes_settled=options.pop("note_settled", False),
        **options,
    )


def batch_of(source: BatchSource, step: int) -> tuple[LedgerEntry, TrainingBatch] | None:
    """The entry of a step and all its rows, as read by a trainer with one rank."""
    entry = source.entry(step)
    return None if entry is None else (entry, source.read(entry))


def take(source: LogSource, steps: Sequence[int]) -> list[tuple[str, ...]]:
    """The uids of the batches of `steps`, which must all exist."""
    batches = []
    for step in steps:
        found = batch_of(source, step)
        assert found is not None, f"batch {step} is missing"
        batches.append(found[1].uids)
    return batches


def audit(storage: Storage, max_uses: int | None = 1) -> Audit:
    return audit_log(ParquetLog(storage), Ledger(storage), tasks_per_unit=2, max_uses=max_uses)


def sound_audit(storage: Storage, max_uses: int | None = 1) -> Audit:
    """An audit that must add up without problems."""
    found = audit(storage, max_uses)
    assert found.problems == ()
    assert found.committed == found.trained + found.waiting + sum(found.dropped.values())
    return found


def find_whole(log: ExperienceLog, explore_step: int, unit: int) -> ShardName | None:
    """A committed shard of this whole work unit; None: there is none."""
    return next((name for name in log.find_all(explore_step, unit) if name.part is None), None)
