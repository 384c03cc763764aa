"""Audit: where every committed experience is: trained at a step, dropped for a reason, or waiting. Derived from log and
ledger.

A shard that was damaged after some of its rows were trained is in quarantine, and its batch has run again: what was
trained of it stays trained, its other rows are dropped as "damaged", and the new copies of the first as "repeat".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rftdask.buffer.groups import groups_of_shard
from rftdask.buffer.ledger import Ledger, LedgerEntry
from rftdask.buffer.log import ExperienceLog
from rftdask.buffer.sampling import Position
from rftdask.buffer.shard import ShardName, repeated_shards
from rftdask.errors import DamagedError, NotFoundError

REPEAT = "repeat"
"""Rows of a rollout batch that ran twice: the other copy was taken."""
DAMAGED = "damaged"
"""Rows of a shard in quarantine that were not used before; its batch ran again. Only where others of it were used."""


@dataclass(frozen=True)
class Audit:
    """Counts of experiences; `problems` is empty when every promise holds."""

    committed: int
    trained: int
    waiting: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    reused: int = 0
    """Times that experiences were trained again, with replay; they count once in `trained`."""
    problems: tuple[str, ...] = ()


def audit_log(log: ExperienceLog, ledger: Ledger, tasks_per_batch: int, max_uses: int | None = 1) -> Audit:
    """Account for every row. Only shards of repeated batches are read; the others are known by their names, also those
    that retention removed, which count as committed.

    max_uses: most entries that may train one row, by the config; None: any number.
    """
    present = log.shards()
    kept = {*present, *log.removed()}
    used: dict[str, Counter[int]] = {}
    set_aside: dict[str, Counter[int]] = {}
    dropped: Counter[str] = Counter()
    settled: set[Position] = set()
    trained = reused = 0
    problems: list[str] = []
    last_step = ledger.last_step()
    for step in range(1, last_step + 1):
        entry = ledger.read(step)
        if entry is None:
            problems.append(f"{ledger.path(step)} is missing, and the ledger goes on to step {last_step}")
            continue
        settled.update(entry.positions)
        for rows in (*entry.use, *entry.drop):
            if rows.of_dataset:
                continue
            seen = used.setdefault(rows.source, Counter())
            again = sum(1 for row in rows.rows if seen[row])
            seen.update(rows.rows)
            if rows.reason:
                dropped[rows.reason] += len(rows.rows)
                set_aside.setdefault(rows.source, Counter()).update(rows.rows)
            else:
                trained += len(rows.rows) - (again if max_uses != 1 else 0)
                reused += again if max_uses != 1 else 0
        problems.extend(_repeated_within(entry) if max_uses != 1 else ())
    damaged = [name for name in log.quarantined() or () if name.text in used and name not in kept]
    dropped[DAMAGED] += sum(name.num_rows - len(used[name.text]) for name in damaged)
    shards = sorted({*kept, *damaged})
    readable = set(present)
    repeated = [name for name in repeated_shards(shards) if name in readable]  # of the others one copy was taken
    dropped[REPEAT] += _count_repeats(log, repeated, used, settled, tasks_per_batch)
    committed = sum(name.num_rows for name in shards)
    waiting = committed - trained - dropped.total()
    problems += _problems(shards, used, set_aside, waiting, max_uses)
    counts = {reason: count for reason, count in dropped.items() if count}
    return Audit(committed, trained, waiting, counts, reused, tuple(problems))


def _repeated_within(entry: LedgerEntry) -> list[str]:
    rows = Counter((part.source, row) for part in entry.use if not part.of_dataset for row in part.rows)
    twice = sorted(key for key, count in rows.items() if count > 1)
    return [f"step {entry.step} trains row {twice[0][1]} of {twice[0][0]} more than once"] if twice else []


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
        try:
            table = log.read(name)
        except (DamagedError, NotFoundError):  # of no use to anybody: the other copy is
            count += name.num_rows - len(used.get(name.text, ()))
            continue
        for group in groups_of_shard(table, name, tasks_per_batch):
            rows = {*group.trainable_rows, *(row for _, others in group.other_rows for row in others)}
            if rows & set(used.get(name.text, ())):
                continue
            if group.position in settled or group.position in open_positions:
                count += len(rows)
            open_positions.add(group.position)
    return count


def _problems(
    shards: list[ShardName],
    used: Mapping[str, Counter[int]],
    set_aside: Mapping[str, Counter[int]],
    waiting: int,
    max_uses: int | None,
) -> list[str]:
    known = {name.text: name.num_rows for name in shards}
    problems = [f"{source} is in the ledger and not in the log" for source in used if source not in known]
    for source, rows in used.items():
        twice = sorted(row for row, count in rows.items() if count > 1 and row in set_aside.get(source, ()))
        if max_uses is not None:
            twice = sorted({*twice, *(row for row, count in rows.items() if count > max_uses)})
        if twice:
            often = "more than once" if max_uses == 1 else "more often than the replay buffer allows"
            problems.append(f"rows {twice} of {source} are in the ledger {often}")
        if source in known and max(rows, default=-1) >= known[source]:
            problems.append(f"the ledger names row {max(rows)} of {source}, which has {known[source]}")
    if waiting < 0:
        problems.append(f"{-waiting} more experiences are accounted for than were committed")
    return problems
