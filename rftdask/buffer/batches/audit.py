"""Audit: the state of every committed experience: trained at a step, dropped for a reason, or waiting.

The audit is derived from the log and the ledger. The ledger names a batch before it is trained, so the caller passes
the last step that was trained.

If a shard is damaged after some of its rows were trained, it is in quarantine and its work unit has run again. The
trained rows stay trained, the other rows of the shard are dropped as "damaged", and the new copies of the trained rows
as "repeat". The same holds for a lost shard of which a skipped step names rows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rftdask.buffer.batches.ledger import SKIPPED, Ledger, skipped_sources
from rftdask.buffer.batches.selection import Position
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.errors import DamagedError, DataError, NotFoundError

REPEAT = "repeat"
"""Rows of a work unit that ran twice; the other copy was used."""
DAMAGED = "damaged"
"""Unused rows of a quarantined shard, if other rows of the shard were used. Its unit ran again."""


@dataclass(frozen=True)
class Audit:
    """Counts of experiences; `problems` is empty when every promise holds."""

    committed: int
    trained: int
    waiting: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> experiences."""
    reused: int = 0
    """Additional times that experiences were trained, with replay; each experience counts once in `trained`."""
    problems: tuple[str, ...] = ()
    """One sentence per broken promise."""


def audit_log(
    log: ExperienceLog, ledger: Ledger, tasks_per_unit: int, max_uses: int | None = 1, trained_step: float = math.inf
) -> Audit:
    """Account for every row: committed = trained + dropped + waiting.

    Only shards of repeated units are read. The others are counted by their names, including shards that retention
    removed, which count as committed.

    Args:
        tasks_per_unit: tasks of a whole work unit.
        max_uses: most entries that may train one row, from the config; None: any number.
        trained_step: the last step that was trained; rows of later entries count as waiting. inf: all were trained.
    Raises: DamagedError: a ledger entry or a record of the log is damaged.
    """
    problems: list[str] = []
    used: dict[str, Counter[int]] = defaultdict(Counter)  # shard -> row -> number of entries that name it
    dropped_rows: dict[str, set[int]] = defaultdict(set)  # shard -> rows that an entry names as dropped
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
        for rows in (*entry.use, *entry.drop):
            if rows.of_dataset:  # not an experience
                continue
            seen, numbers = used[rows.source], rows.rows
            is_skipped = rows.reason.startswith(SKIPPED)
            if is_skipped and max_uses != 1:
                numbers = tuple(row for row in numbers if not seen[row])  # the others count where they were trained
            again = sum(1 for row in numbers if seen[row]) if max_uses != 1 else 0
            seen.update(numbers)
            if rows.reason:
                dropped[rows.reason] += len(numbers)
                dropped_rows[rows.source].update(() if is_skipped else numbers)
            else:
                trained += len(numbers) - again if step <= trained_step else 0
                reused += again
        if max_uses != 1:  # otherwise `_broken_limits` reports a row named twice, in one entry or in two
            named = Counter((part.source, row) for part in entry.use if not part.of_dataset for row in part.rows)
            if twice := sorted(key for key, count in named.items() if count > 1):
                problems.append(f"step {entry.step} trains row {twice[0][1]} of {twice[0][0]} more than once")

    present = log.shards()
    kept = {*present, *log.removed()}
    # A quarantined shard counts only if some rows of it were used; the rows of the others were committed again.
    gone = {*log.quarantined(), *filter(None, map(ShardName.try_parse, skipped))} - kept
    damaged = [name for name in gone if name.text in used]
    dropped[DAMAGED] += sum(name.num_rows - len(used[name.text]) for name in damaged)
    shards = sorted({*kept, *damaged})

    # Only readable shards: of the others one copy was used.
    readable = {*present}
    repeated = [name for name in repeated_shards(shards) if name in readable]
    dropped[REPEAT] += _num_repeats(log, repeated, used, settled, tasks_per_unit, problems)
    # By the names, which contain the number of rows: the files may have been removed.
    committed = sum(name.num_rows for name in shards)
    waiting = committed - trained - dropped.total()
    problems += _broken_limits(used, dropped_rows, {name.text: name.num_rows for name in shards}, max_uses)
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
    """Count the rows of groups that occur in several shards, without the copy that was used or, if none was, the first.

    Shards that cannot be read because of their schema are added to `problems`.
    """
    if not repeated:
        return 0
    from rftdask.buffer.batches.groups import groups_of_shard  # late: loads numpy and pyarrow, which are heavy

    num_rows, taken = 0, set(settled)
    for name in repeated:
        try:
            table = log.read(name)
        except (DamagedError, NotFoundError):  # nobody can use this copy, so the other one is used
            num_rows += name.num_rows - len(used.get(name.text, ()))
            continue
        except DataError as error:  # another schema version
            problems.append(str(error))
            continue
        for group in groups_of_shard(table, name, tasks_per_unit):
            numbers = {*group.trainable_rows, *(row for _, others in group.other_rows for row in others)}
            # Rows that the ledger names were counted there.
            if numbers.isdisjoint(used.get(name.text, ())):
                num_rows += len(numbers) if group.position in taken else 0
                taken.add(group.position)
    return num_rows


def _broken_limits(
    used: Mapping[str, Counter[int]],
    dropped_rows: Mapping[str, Collection[int]],
    num_rows: Mapping[str, int],
    max_uses: int | None,
) -> list[str]:
    """Return one sentence per row that the ledger names too often, or that the log does not have."""
    problems = [f"{source} is in the ledger and not in the log" for source in used if source not in num_rows]
    for source, counts in used.items():
        # A row may be trained `max_uses` times; a dropped row must not be named again.
        dropped = dropped_rows.get(source, ())
        limits = {row: 1 if row in dropped else max_uses for row in counts}
        twice = sorted(row for row, limit in limits.items() if limit is not None and counts[row] > limit)
        if twice:
            often = "more than once" if max_uses == 1 else "more often than the replay buffer allows"
            problems.append(f"rows {twice} of {source} are in the ledger {often}")
        if source in num_rows and max(counts, default=-1) >= num_rows[source]:
            problems.append(f"the ledger names row {max(counts)} of {source}, which has {num_rows[source]}")
    return problems
