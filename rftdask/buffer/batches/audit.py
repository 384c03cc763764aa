"""Audit: where every committed experience is: trained at a step, dropped for a reason, or waiting. Derived from log and
ledger.

A shard that was damaged after some of its rows were trained is in quarantine, and its work unit has run again: what was
trained of it stays trained, its other rows are dropped as "damaged", and the new copies of the first as "repeat".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rftdask.buffer.batches.groups import groups_of_shard
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
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


def audit_log(log: ExperienceLog, ledger: Ledger, tasks_per_unit: int, max_uses: int | None = 1) -> Audit:
    """Account for every row: committed = trained + dropped + waiting.

    Only shards of repeated units are read; the others are known by their names, also those that retention removed,
    which count as committed.

    Args:
        tasks_per_unit: tasks of a whole work unit.
        max_uses: most entries that may train one row, by the config; None: any number.
    Raises: DamagedError: a ledger entry, or a record of the log.
    """
    present = log.shards()
    books = _Books(max_uses)
    last_step = ledger.last_step()
    for step in range(1, last_step + 1):
        entry = ledger.read(step)
        if entry is None:
            books.problems.append(f"{ledger.path(step)} is missing, and the ledger goes on to step {last_step}")
        else:
            books.add_entry(entry)
    kept = {*present, *log.removed()}
    damaged = [name for name in log.quarantined() or () if name.text in books.used and name not in kept]
    books.dropped[DAMAGED] += sum(books.num_unused(name) for name in damaged)
    shards = sorted({*kept, *damaged})
    readable = set(present)
    repeated = [name for name in repeated_shards(shards) if name in readable]  # of the others one copy was taken
    books.dropped[REPEAT] += _count_repeats(log, repeated, books, tasks_per_unit)
    return books.close(shards)


class _Books:
    """The rows of the log, added up over the entries of a ledger."""

    def __init__(self, max_uses: int | None) -> None:
        self.used: dict[str, Counter[int]] = {}
        """Shard -> row -> entries that name it, for whatever reason."""
        self.set_aside: dict[str, Counter[int]] = {}
        """Shard -> row -> entries that name it as dropped."""
        self.settled: set[Position] = set()
        self.dropped: Counter[str] = Counter()
        self.trained = self.reused = 0
        self.problems: list[str] = []
        self._max_uses = max_uses

    def num_unused(self, name: ShardName) -> int:
        """Rows of a shard that no entry names."""
        return name.num_rows - len(self.used.get(name.text, ()))

    def add_entry(self, entry: LedgerEntry) -> None:
        self.settled.update(entry.positions)
        for rows in (*entry.use, *entry.drop):
            if rows.of_dataset:
                continue
            seen = self.used.setdefault(rows.source, Counter())
            again = sum(1 for row in rows.rows if seen[row]) if self._max_uses != 1 else 0
            seen.update(rows.rows)
            if rows.reason:
                self.dropped[rows.reason] += len(rows.rows)
                self.set_aside.setdefault(rows.source, Counter()).update(rows.rows)
            else:
                self.trained += len(rows.rows) - again
                self.reused += again
        if self._max_uses != 1:  # else a row named twice is found below, in one entry or in two
            named = Counter((part.source, row) for part in entry.use if not part.of_dataset for row in part.rows)
            if twice := sorted(key for key, count in named.items() if count > 1):
                self.problems.append(f"step {entry.step} trains row {twice[0][1]} of {twice[0][0]} more than once")

    def close(self, shards: Sequence[ShardName]) -> Audit:
        """The counts, of a log that has these shards."""
        committed = sum(name.num_rows for name in shards)
        waiting = committed - self.trained - self.dropped.total()
        num_rows = {name.text: name.num_rows for name in shards}
        problems = [*self.problems]
        problems += [f"{source} is in the ledger and not in the log" for source in self.used if source not in num_rows]
        for source, rows in self.used.items():
            # A row may be trained `max_uses` times; one that was dropped is never seen again.
            twice = {row for row, count in rows.items() if count > 1 and row in self.set_aside.get(source, ())}
            if self._max_uses is not None:
                twice |= {row for row, count in rows.items() if count > self._max_uses}
            if twice:
                often = "more than once" if self._max_uses == 1 else "more often than the replay buffer allows"
                problems.append(f"rows {sorted(twice)} of {source} are in the ledger {often}")
            if source in num_rows and max(rows, default=-1) >= num_rows[source]:
                problems.append(f"the ledger names row {max(rows)} of {source}, which has {num_rows[source]}")
        if waiting < 0:
            problems.append(f"{-waiting} more experiences are accounted for than were committed")
        counts = {reason: count for reason, count in self.dropped.items() if count}
        return Audit(committed, self.trained, waiting, counts, self.reused, tuple(problems))


def _count_repeats(log: ExperienceLog, repeated: Sequence[ShardName], books: _Books, tasks_per_unit: int) -> int:
    """Rows of groups that stand in several shards, less the copy that was taken or will be."""
    count = 0
    taken = set(books.settled)
    for name in repeated:
        try:
            table = log.read(name)
        except (DamagedError, NotFoundError):  # of no use to anybody: the other copy is
            count += books.num_unused(name)
            continue
        except DataError as error:  # of another schema: only who can read it knows
            books.problems.append(str(error))
            continue
        used = books.used.get(name.text, Counter())
        for group in groups_of_shard(table, name, tasks_per_unit):
            rows = {*group.trainable_rows, *(row for _, others in group.other_rows for row in others)}
            if used.keys().isdisjoint(rows):
                count += len(rows) if group.position in taken else 0
                taken.add(group.position)
    return count
