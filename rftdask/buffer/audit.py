"""Audit: where every committed experience is: trained at a step, dropped for a reason, or waiting. Derived from log and
ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rftdask.buffer.groups import groups_of_shard
from rftdask.buffer.ledger import Ledger
from rftdask.buffer.log import ExperienceLog
from rftdask.buffer.sampling import Position
from rftdask.buffer.shard import ShardName, repeated_shards

REPEAT = "repeat"
"""Rows of a rollout batch that ran twice: the other copy was taken."""


@dataclass(frozen=True)
class Audit:
    """Counts of experiences; `problems` is empty when every promise holds."""

    committed: int
    trained: int
    waiting: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def audit_log(log: ExperienceLog, ledger: Ledger, tasks_per_batch: int) -> Audit:
    """Account for every row. Only shards of repeated batches are read; the others are known by their names, also those
    that retention removed, which count as committed.
    """
    present = log.shards()
    shards = sorted({*present, *log.removed()})
    used: dict[str, Counter[int]] = {}
    dropped: Counter[str] = Counter()
    settled: set[Position] = set()
    trained = 0
    problems: list[str] = []
    last_step = ledger.last_step()
    for step in range(1, last_step + 1):
        entry = ledger.read(step)
        if entry is None:
            problems.append(f"the ledger has step {last_step} and no step {step}")
            continue
        settled.update(entry.positions)
        for rows in (*entry.use, *entry.drop):
            if rows.of_dataset:
                continue
            used.setdefault(rows.source, Counter()).update(rows.rows)
            if rows.reason:
                dropped[rows.reason] += len(rows.rows)
            else:
                trained += len(rows.rows)
    readable = set(present)
    repeated = [name for name in repeated_shards(shards) if name in readable]  # of the others one copy was taken
    repeats = _count_repeats(log, repeated, used, settled, tasks_per_batch)
    if repeats:
        dropped[REPEAT] += repeats
    committed = sum(name.num_rows for name in shards)
    waiting = committed - trained - sum(dropped.values())
    return Audit(committed, trained, waiting, dict(dropped), (*problems, *_problems(shards, used, waiting)))


def _count_repeats(
    log: ExperienceLog,
    repeated: list[ShardName],
    used: Mapping[str, Counter[int]],
    settled: set[Position],
    tasks_per_batch: int,
) -> int:
    """Rows of groups that stand in several shards, less the copy that was taken or will be."""
    count = 0
    open_positions: set[Position] = set()
    for name in repeated:
        for group in groups_of_shard(log.read(name), name, tasks_per_batch):
            rows = {*group.trainable_rows, *(row for _, others in group.other_rows for row in others)}
            if rows & set(used.get(name.text, ())):
                continue
            if group.position in settled or group.position in open_positions:
                count += len(rows)
            open_positions.add(group.position)
    return count


def _problems(shards: list[ShardName], used: Mapping[str, Counter[int]], waiting: int) -> list[str]:
    known = {name.text: name.num_rows for name in shards}
    problems = [f"{source} is in the ledger and not in the log" for source in used if source not in known]
    for source, rows in used.items():
        twice = sorted(row for row, count in rows.items() if count > 1)
        if twice:
            problems.append(f"rows {twice} of {source} are in the ledger more than once")
        if source in known and max(rows, default=-1) >= known[source]:
            problems.append(f"the ledger names row {max(rows)} of {source}, which has {known[source]}")
    if waiting < 0:
        problems.append(f"{-waiting} more experiences are accounted for than were committed")
    return problems
