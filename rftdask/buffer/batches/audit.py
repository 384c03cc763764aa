"""Audit: where every committed experience is: trained at a step, dropped for a reason, or waiting. Derived from log and
ledger, which names a batch before it is trained: who counts says how far the steps came.

A shard that was damaged after some of its rows were trained is in quarantine, and its work unit has run again: what was
trained of it stays trained, its other rows are dropped as "damaged", and the new copies of the first as "repeat". The
same holds of a shard that is lost and of which a skipped step names rows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rftdask.buffer.batches.groups import groups_of_shard
from rftdask.buffer.batches.ledger import SKIPPED, Ledger, skipped_sources
from rftdask.buffer.batches.selection import Position
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.errors import DamagedError, DataError, NotFoundError

REPEAT = "repeat"
"""Rows of a work unit that ran twice: the other copy was taken."""
DAMAGED = "damaged"
"""Rows of a shard in quarantine that were not used before; its unit ran again. Only where others of it were used."""


@dataclass(frozen=True)
class Audit:
    """Counts of experiences; `problems` is empty when every promise holds."""

    committed: int
    trained: int
    waiting: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> experiences."""
    reused: int = 0
    """Times that experiences were trained again, with replay; they count once in `trained`."""
    problems: tuple[str, ...] = ()
    """A sentence for each promise that is broken."""


def audit_log(
    log: ExperienceLog, ledger: Ledger, tasks_per_unit: int, max_uses: int | None = 1, trained_step: float = math.inf
) -> Audit:
    """Account for every row: committed = trained + dropped + waiting.

    Only shards of repeated units are read; the others are known by their names, also those that retention removed,
    which count as committed.

    Args:
        tasks_per_unit: tasks of a whole work unit.
        max_uses: most entries that may train one row, by the config; None: any number.
        trained_step: the last step that is known to be made; what later entries use waits for theirs. inf: all are.
    Raises: DamagedError: a ledger entry, or a record of the log.
    """
    problems: list[str] = []
    used: dict[str, Counter[int]] = defaultdict(Counter)  # shard -> row -> entries that name it, for whatever reason
    set_aside: dict[str, set[int]] = defaultdict(set)  # shard -> rows that an entry names as dropped
    settled: set[Position] = set()
    dropped: Counter[str] = Counter()
    trained = reused = 0
    skipped: set[str] = set()  # sources
    last_step = ledger.last_step()
    for step in range(1, last_step + 1):
        entry = ledger.read(step)
        if entry is None:
            problems.append(f"{ledger.path(step)} is missing, and the ledger goes on to step {last_step}")
            continue
        settled.update(entry.positions)
        skipped |= skipped_sources([entry])
        # Rows of the log by what became of them; those of a dataset are no experiences.
        for rows in (*entry.use, *entry.drop):
            if rows.of_dataset:
                continue
            seen, numbers = used[rows.source], rows.rows
            is_skipped = rows.reason.startswith(SKIPPED)
            if is_skipped and max_uses != 1:
                numbers = tuple(row for row in numbers if not seen[row])  # others count where they were trained
            again = sum(1 for row in numbers if seen[row]) if max_uses != 1 else 0
            seen.update(numbers)
            if rows.reason:
                dropped[rows.reason] += len(numbers)
                set_aside[rows.source].update(() if is_skipped else numbers)
            else:
                trained += len(numbers) - again if step <= trained_step else 0
                reused += again
        if max_uses != 1:  # else a row named twice is found below, in one entry or in two
            named = Counter((part.source, row) for part in entry.use if not part.of_dataset for row in part.rows)
            if twice := sorted(key for key, count in named.items() if count > 1):
                problems.append(f"step {entry.step} trains row {twice[0][1]} of {twice[0][0]} more than once")

    present = log.shards()
    kept = {*present, *log.removed()}
    # Of shards that are set aside only those count of which something was used: the others' rows were committed anew.
    gone = {*log.quarantined(), *filter(None, map(ShardName.try_parse, skipped))} - kept
    damaged = [name for name in gone if name.text in used]
    dropped[DAMAGED] += sum(name.num_rows - len(used[name.text]) for name in damaged)
    shards = sorted({*kept, *damaged})

    # Of these shards that are not readable one copy was taken.
    readable = {*present}
    repeated = [name for name in repeated_shards(shards) if name in readable]
    dropped[REPEAT] += _num_repeats(log, repeated, used, settled, tasks_per_unit, problems)
    # By the names, which say how many rows each has; nothing of them has to be there any more.
    committed = sum(name.num_rows for name in shards)
    waiting = committed - trained - dropped.total()
    problems += _broken_limits(used, set_aside, {name.text: name.num_rows for name in shards}, max_uses)
    if waiting < 0:
        problems.append(f"{-waiting} more experiences are accounted for than were committed")
    by_reason = {reason: count for reason, count in dropped.items() if count}
    return Audit(committed, trained, waiting, by_reason, reused, tuple(problems))


def _num_repeats(
    log: ExperienceLog,
    repeated: Sequence[ShardName],
    used: Mapping[str, Counter[int]],
    settled: Collection[Position],
    tasks_per_unit: int,
    problems: list[str],
) -> int:
    """Rows of groups that stand in several shards, less the copy that was taken or will be: the first, while none is.

    What cannot be told is added to `problems`.
    """
    num_rows, taken = 0, set(settled)
    for name in repeated:
        try:
            table = log.read(name)
        except (DamagedError, NotFoundError):  # of no use to anybody: the other copy is
            num_rows += name.num_rows - len(used.get(name.text, ()))
            continue
        except DataError as error:  # of another schema: only who can read it knows
            problems.append(str(error))
            continue
        for group in groups_of_shard(table, name, tasks_per_unit):
            numbers = {*group.trainable_rows, *(row for _, others in group.other_rows for row in others)}
            # Rows that the ledger names are counted by what it says of them.
            if numbers.isdisjoint(used.get(name.text, ())):
                num_rows += len(numbers) if group.position in taken else 0
                taken.add(group.position)
    return num_rows


def _broken_limits(
    used: Mapping[str, Counter[int]],
    set_aside: Mapping[str, Collection[int]],
    num_rows: Mapping[str, int],
    max_uses: int | None,
) -> list[str]:
    """Sentences on rows that the ledger names and the log does not have, or names too often."""
    problems = [f"{source} is in the ledger and not in the log" for source in used if source not in num_rows]
    for source, counts in used.items():
        # A row may be trained `max_uses` times; one that was dropped is never seen again.
        dropped = set_aside.get(source, ())
        limits = {row: 1 if row in dropped else max_uses for row in counts}
        twice = sorted(row for row, limit in limits.items() if limit is not None and counts[row] > limit)
        if twice:
            often = "more than once" if max_uses == 1 else "more often than the replay buffer allows"
            problems.append(f"rows {twice} of {source} are in the ledger {often}")
        if source in num_rows and max(counts, default=-1) >= num_rows[source]:
            problems.append(f"the ledger names row {max(counts)} of {source}, which has {num_rows[source]}")
    return problems
