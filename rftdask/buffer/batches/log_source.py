"""Log source: forms each batch from the groups in the experience log, and reads the rows that the ledger names.

Forming batch k (`LogSource.entry`): replay the entry if the ledger has it. Otherwise wait for enough groups
(`_wait_for_groups`), apply the filter and write the entry (`_form_entry`). Reading (`EntryReader`) decides nothing, so
any rank may do it.

Invariants: a batch is a function of the log, the ledger and the rule, and of no message. The rows read depend only on
the entry, the log and the filter, so every rank and every replay trains the same numbers.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa

from rftdask.buffer.batches.backpressure import SETTLED_NOTE
from rftdask.buffer.batches.batch import (
    BATCH_COLUMNS,
    TrainingBatch,
    batch_from_table,
    column_of,
    join_batches,
    numbers_of,
)
from rftdask.buffer.batches.groups import groups_of_shard
from rftdask.buffer.batches.ledger import Fence, Ledger, LedgerEntry, Rows
from rftdask.buffer.batches.replay_priority import TIME_NOTE, Replay, UseCounts, select_with_reuse
from rftdask.buffer.batches.selection import Cursor, Group, Position, SampleRule, Selection, select_groups
from rftdask.buffer.batches.source import (
    BASELINE,
    BatchFilter,
    BatchNotReady,
    BatchSource,
    Demonstrations,
    with_masks,
    with_rewards,
)
from rftdask.buffer.log.columns import SCHEMA
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError, EmptyBatchError, WaitTimeout
from rftdask.storage.base import in_order

MAX_KEPT_BYTES = 1 << 30
"""Size limit of the shards kept in memory between indexing and training; other shards are read again, so memory does
not grow with the log. The shards of the batch being read are held in addition."""
MISSING_NOTE = "num_missing_groups"
"""Note of a ledger entry: number of groups that a partial batch lacks."""
REUSED_NOTE = "num_reused_groups"
"""Note of a ledger entry: number of its groups that were trained before."""
_BAD_ROWS = ("DataError: ", "PromptTooLongError: ")
"""Beginnings of the errors of rollouts whose task is a row that cannot be used."""
_MIN_POLL_S = 0.002
_POLL_COST = 20.0
"""Ratio of the pause between polls of the log to the duration of a poll, within bounds: waiting costs at most 5 % of a
core, and on a local disk a shard is seen milliseconds after its commit."""


@dataclass(eq=False)
class LogSource(BatchSource):
    """Batches from the experience log, formed by a `SampleRule`, without the rows that the filter drops.

    A batch may have no rows, if all are too stale or the filter drops all: its step changes no weights.

    After `max_read_timeout_s` a partial batch is formed from the groups that have arrived; its entry notes how many are
    missing. An ordered rule has no partial batches: batch k is the k-th run of positions, so the read times out.

    Example: LogSource(log, Ledger(storage), SampleRule(8, 64, ordered=True), tasks_per_unit=16, max_read_timeout_s=60)
    """

    log: ExperienceLog
    ledger: Ledger
    rule: SampleRule
    _: KW_ONLY
    tasks_per_unit: int
    """Tasks of a whole work unit; determines the slot of a group from its shard."""
    max_read_timeout_s: float
    poll_interval_s: float = 0.05
    """Longest pause between two polls of the log, in seconds."""
    replay: Replay | None = None
    """Rule for using groups more than once; None: each is used once."""
    notes_settled: bool = False
    """True if entries note the number of settled groups, for explorers that are held back by it."""
    max_bad_rows: int = 0
    """Largest number of tasks of a batch that trains nothing because all of them are rows that cannot be used."""
    batch_filter: BatchFilter = field(default_factory=BatchFilter)
    demonstrations: Demonstrations | None = None
    clock: Callable[[], float] = time.time
    """Returns Unix seconds; cooldowns are measured by it."""

    def __post_init__(self) -> None:
        self._fence = Fence(self.ledger)
        self._reader = EntryReader(self.log, batch_filter=self.batch_filter, demonstrations=self.demonstrations)
        self._requested_s = (0, 0.0)  # The step that is waited for, and the monotonic time of its first request.
        self._cursor = Cursor()
        self._waiting: dict[Position, Group] = {}  # Groups that are committed and not settled.
        self._seen: set[str] = set()  # Names of the shards whose groups are known.
        self._is_listed = False  # True after the whole log was listed.
        self._uses = UseCounts(self.replay or Replay(), self.rule.max_staleness)

    def state_dict(self) -> dict[str, object]:
        """The cursor; use counts are folded from the ledger."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See BatchSource; the next poll lists the whole log."""
        self._cursor = Cursor.from_state_dict(state)
        self._is_listed = False

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """See BatchSource; with replay it first counts the uses that this process has not seen."""
        entry = self._fence.read(step)
        if self.replay is not None:
            # After a resume: the uses in the newest entries.
            for earlier in range(self._uses.first_step(step), step):
                past = self.ledger.read(earlier)
                if past is None:
                    raise DamagedError(
                        f"{self.ledger.path(earlier)} is missing, and later entries exist; restore it from a backup"
                    )
                self._uses.fold(past, self._reader.min_policy_version)
        if entry is None:
            selection = self._wait_for_groups(step, patience_s)
            if selection is None:
                return None
            entry = self._form_entry(step, selection)
            self.ledger.write(entry)  # from here on it is the batch of this step, even if this process dies
        if self.replay is not None:  # replayed entries count, too: the next batch depends on all uses
            self._uses.fold(entry, self._reader.min_policy_version)
        for position in entry.positions:
            self._waiting.pop(position, None)
        self._cursor.settle(entry.positions, self.rule.tasks_per_step)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """See BatchSource; frees the shards that have no waiting group and are not in the entry."""
        # Here and not in `entry`, which ranks other than the first do not call.
        in_use = {group.source for group in self._waiting.values()} | {rows.source for rows in entry.use}
        self._reader.forget_all_but(in_use)
        return self._reader.read(entry, places)

    def look_ahead(self, step: int) -> LedgerEntry | None:
        """See BatchSource; reads new shards and keeps them in memory."""
        if not self._is_listed:  # a resumed trainer may still have entries to replay
            return self.ledger.read(step)
        self._index_new_shards()
        selection = self._select(step)
        if selection is None:
            return None
        use = [Rows(group.source, group.trainable_rows) for group in selection.use]
        use += [Rows(group.source, group.rows) for group in selection.reuse]
        return LedgerEntry(step, self.ledger.lineage, tuple(use))

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        self._reader.read_ahead(entry, places)

    # ---- waiting

    def _wait_for_groups(self, step: int, patience_s: float) -> Selection | None:
        """Wait for the groups of batch `step`; None if no batch will come.

        Raises: BatchNotReady: they did not arrive in `patience_s` seconds; WaitTimeout: `max_read_timeout_s` has
        passed, and no group that has arrived can be trained.
        """
        rule, slots = self.rule, range(self.rule.tasks_per_step)
        may_only_reuse = self.replay is not None and self.replay.after_the_end
        began = time.monotonic()
        # The deadline covers all calls for one step: the caller retries several times a second.
        if self._requested_s[0] != step:
            self._requested_s = (step, began)
        deadline = self._requested_s[1] + self.max_read_timeout_s
        while True:
            poll_began = time.monotonic()
            # The seal is read before the listing, so that everything committed before the seal is listed.
            sealed_at = self.log.sealed_at()
            self._index_new_shards()
            open_positions = ((s, slot) for s in range(self._cursor.low, (sealed_at or 0) + 1) for slot in slots)
            is_complete = sealed_at is not None and all(
                position in self._waiting or position in self._cursor for position in open_positions
            )
            # After the end of the explorers, a batch of used groups only is formed only if total_steps is set.
            reuse_is_over = self.replay is not None and not may_only_reuse and not self._waiting
            if not (is_complete and reuse_is_over):
                selection = self._select(step)
                if selection is not None:
                    return selection
            if is_complete and not (may_only_reuse and self._uses.is_cooling(step - 1, self.clock())):
                assert sealed_at is not None
                # Train the groups that partial batches left over; groups that never filled a batch are not trained.
                num_groups = sealed_at * rule.tasks_per_step
                in_whole_batches = num_groups - num_groups % rule.groups_per_batch
                left = in_whole_batches - self._cursor.num_settled(rule.tasks_per_step)
                return self._select(step, left) if 0 < left <= len(self._waiting) else None
            now = time.monotonic()
            if now > deadline:
                # A partial batch of all groups that have arrived, if one of them can be trained. Used groups that have
                # cooled down may fill it. Not with an ordered rule, whose next position is the late one.
                num_arrived = len(self._waiting) + len(self._uses.ready(step - 1, self.clock()))
                count = 0 if rule.ordered else min(num_arrived, rule.groups_per_batch)
                partial = self._select(step, count) if count else None
                if partial is None or not (partial.use or partial.reuse):
                    raise WaitTimeout(
                        f"batch {step} was not complete after {self.max_read_timeout_s:.0f} s: {len(self._waiting)} "
                        f"groups are waiting, {rule.groups_per_batch} are needed, and the oldest open explore step is "
                        f"{self._cursor.low}. Check that an explorer is running, or raise "
                        "buffer.trainer_input.experience_buffer.max_read_timeout"
                    )
                return partial
            # After the check of the deadline: repeated calls must not extend it.
            if now - began >= patience_s:
                raise BatchNotReady(f"batch {step} is not ready")
            time.sleep(min(max(_POLL_COST * (now - poll_began), _MIN_POLL_S), self.poll_interval_s))

    def _select(self, step: int, count: int | None = None) -> Selection | None:
        """Select the groups of batch `step` among those that have arrived; `count`: size of a partial batch."""
        if self.replay is None:
            return select_groups(self._waiting, self._cursor, step - 1, self.rule, count)
        used = self._uses.ready(step - 1, self.clock())
        return select_with_reuse(self._waiting, used, self._cursor, step - 1, self.rule, self.replay, count)

    def _index_new_shards(self) -> None:
        """Add the groups of new shards to the waiting ones; quarantine damaged shards."""

        def try_read(name: ShardName) -> pa.Table | DamagedError:
            try:
                return self.log.read(name, self._reader.columns)
            except DamagedError as error:
                return error

        # Only settled shards are compacted. After the first listing this trainer has settled them itself.
        list_shards = self.log.loose_shards if self._is_listed else self.log.shards
        names = [name for name in list_shards(self._cursor.low) if name.text not in self._seen]
        for name, table in zip(names, in_order(try_read, names, self.log.num_readers), strict=True):
            if isinstance(table, DamagedError):
                self.log.quarantine(name, str(table))
                continue  # not marked as seen: the same writer may commit a byte-identical shard again
            self._seen.add(name.text)
            for group in groups_of_shard(table, name, self.tasks_per_unit):
                # A position that is settled or waiting means that the work unit ran twice: one copy is used.
                if group.position not in self._cursor and group.position not in self._waiting:
                    self._waiting[group.position] = group
                    self._reader.keep(name, table)
        self._is_listed = True

    # ---- forming

    def _form_entry(self, step: int, selection: Selection) -> LedgerEntry:
        """Make the ledger entry of these groups. Raises: EmptyBatchError: no rollout produced an experience."""
        # Rows dropped by operators are not a failure: the run continues with a batch that trains nothing.
        any_filtered = any(reason == Status.FILTERED for group in selection.empty for reason, _ in group.other_rows)
        if not (selection.use or selection.stale or selection.reuse or any_filtered):
            parts = [Rows(group.source, rows) for group in selection.empty for _, rows in group.other_rows]
            errors = [error for error in self._reader.rows(parts).column("error").to_pylist() if error]
            are_bad_rows = bool(errors) and all(error.startswith(_BAD_ROWS) for error in errors)
            if not are_bad_rows or len(selection.empty) > self.max_bad_rows:
                raise EmptyBatchError(
                    f"batch {step} has nothing to train: all rollouts of its {len(selection.empty)} groups failed; "
                    f"first error: {errors[0] if errors else 'none recorded'}\n"
                    "failed rollouts are not repeated: fix the cause, then run again under another name (name=...)"
                )
        # Every row of every group is named, trained or not: an unnamed row would count as waiting forever.
        drop: list[Rows] = []
        for group in selection.use + selection.stale + selection.empty:
            drop.extend(Rows(group.source, rows, reason) for reason, rows in group.other_rows)
        drop.extend(Rows(group.source, group.trainable_rows, "stale") for group in selection.stale)
        # One table, because filters compare groups with each other.
        table = self._reader.rows([Rows(group.source, group.trainable_rows) for group in selection.use])
        reasons = iter(self.batch_filter.reasons(table, step))
        use: list[Rows] = []
        for group in selection.use:
            by_reason: dict[str, list[int]] = defaultdict(list)
            for row in group.trainable_rows:
                by_reason[next(reasons)].append(row)
            for reason, numbers in by_reason.items():
                (drop if reason else use).append(Rows(group.source, tuple(numbers), reason))
        # Not filtered again: their rows passed the filter when the groups were fresh.
        use.extend(Rows(group.source, group.rows) for group in selection.reuse)
        if self.demonstrations is not None:
            # Last, as in the batch: `read` puts the rollouts first.
            shown, unusable = self.demonstrations.rows(step)
            use, drop = [*use, *shown], [*drop, *unusable]

        notes: dict[str, float] = {}
        missing = self.rule.groups_per_batch - len(selection.settled) - len(selection.reuse)
        if missing > 0:
            notes[MISSING_NOTE] = missing
        if selection.reuse:
            notes[REUSED_NOTE] = len(selection.reuse)
        if self.replay is not None and self.replay.reuse_cooldown_s:
            notes[TIME_NOTE] = self.clock()
        if self.notes_settled:
            notes[SETTLED_NOTE] = self._cursor.num_settled(self.rule.tasks_per_step) + len(selection.settled)
        return LedgerEntry(step, self.ledger.lineage, tuple(use), tuple(drop), selection.settled, notes)


def _parts_at(entry: LedgerEntry, places: Sequence[int] | None) -> list[tuple[Rows, Sequence[int]]]:
    """Split `places`, which count across all rows of `use`, into indices within each of its parts that has any."""
    if places is None:
        return [(rows, range(len(rows.rows))) for rows in entry.use]
    parts, begin = list[tuple[Rows, Sequence[int]]](), 0
    for rows in entry.use:
        end = begin + len(rows.rows)
        if within := [place - begin for place in places[bisect_left(places, begin) : bisect_left(places, end)]]:
            parts.append((rows, within))
        begin = end
    return parts


@dataclass(eq=False)
class EntryReader:
    """Reads the rows that ledger entries name, as a batch. It forms and decides nothing, so any rank may have one.

    Example: EntryReader(log, batch_filter=batch_filter).read(entry, places=[0, 1, 2])
    """

    log: ExperienceLog
    _: KW_ONLY
    batch_filter: BatchFilter = field(default_factory=BatchFilter)
    demonstrations: Demonstrations | None = None

    def __post_init__(self) -> None:
        self.columns = (*BATCH_COLUMNS, "status", "error", *self.batch_filter.columns)
        """Columns that the trainer reads; texts are not among them."""
        self._tables: dict[str, pa.Table] = {}
        self._num_bytes = 0

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the entry trains, or those at `places` of its `use` (counted across it from 0, ascending).

        Raises: DamagedError: a shard that it names; DataError: it names a dataset, and none is configured.
        """
        parts = _parts_at(entry, places)
        rollouts = [Rows(rows.source, tuple(rows.rows[i] for i in at)) for rows, at in parts if not rows.of_dataset]
        demonstrations = [(rows, at) for rows, at in parts if rows.of_dataset]
        # A skipped step needs no baselines, whose rows may be lost.
        baselines = [rows for rows in entry.drop if rows.reason == BASELINE and entry.use]
        batch = batch_from_table(self._trained_rows(rollouts), self._trained_rows(baselines) if baselines else None)
        if not demonstrations:
            return batch
        if self.demonstrations is None:
            source = demonstrations[0][0].source
            raise DataError(f"ledger entry {entry.step} names {source}, and no demonstrations are configured")
        shown = [self.demonstrations.batch(rows, entry.step, at) for rows, at in demonstrations]
        return join_batches([batch, *shown])

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        """Read the shards that `read` will need and that are not in memory; keep them while there is room."""
        sources = dict.fromkeys(rows.source for rows, _ in _parts_at(entry, places) if not rows.of_dataset)
        names = [name for s in sources if s not in self._tables and (name := ShardName.try_parse(s)) is not None]
        read = partial(self.log.read, columns=self.columns)
        for name, table in zip(names, in_order(read, names, self.log.num_readers), strict=True):
            self.keep(name, table)

    def rows(self, parts: Sequence[Rows]) -> pa.Table:
        """Read rows of the log as recorded, one part after another."""
        tables = []
        for source, run in groupby(parts, key=lambda part: part.source):
            table = self.table(source)
            numbers = np.concatenate([np.asarray(part.rows, np.int64) for part in run])
            # Consecutive rows are a slice, which copies nothing; most batches take whole shards.
            if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
                tables.append(table.slice(numbers[0], len(numbers)))
            else:
                tables.append(table.take(column_of(numbers)))
        return pa.concat_tables(tables, promote_options="default") if tables else SCHEMA.empty_table()

    def min_policy_version(self, rows: Rows) -> int:
        """Return the version of the oldest weights that sampled a token of these rows of the log."""
        versions = numbers_of(self.table(rows.source).column("min_policy_version"))
        return int(versions[list(rows.rows)].min())

    def table(self, source: str) -> pa.Table:
        """Return all rows of the shard named `source`, with at least `columns`. Raises: DamagedError."""
        if source not in self._tables:
            name = ShardName.try_parse(source)
            if name is None:
                raise DamagedError(f"the ledger names {source!r}, which is not a shard; restore it from a backup")
            # Kept even beyond the memory limit: the current batch needs it.
            self._tables[source] = self.log.read(name, self.columns)
            self._num_bytes += self._tables[source].nbytes
        return self._tables[source]

    def keep(self, name: ShardName, table: pa.Table) -> None:
        """Keep a shard that was read and will be needed, if there is room."""
        if name.text not in self._tables and self._num_bytes + table.nbytes <= MAX_KEPT_BYTES:
            self._tables[name.text] = table
            self._num_bytes += table.nbytes

    def forget_all_but(self, sources: Collection[str]) -> None:
        for source in [source for source in self._tables if source not in sources]:
            self._num_bytes -= self._tables.pop(source).nbytes

    def _trained_rows(self, parts: Sequence[Rows]) -> pa.Table:
        """Read rows of the log with the rewards and masks that are trained."""
        table = self.rows(parts)
        table = with_masks(table, self.batch_filter.masked(table))
        return with_rewards(table, self.batch_filter.rewards(table))
