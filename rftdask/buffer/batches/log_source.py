"""Log source: forms each batch from the groups that lie in the experience log, and reads the rows the ledger names.

Forming batch k, top to bottom (`LogSource.entry`): what the ledger says already is replayed; else wait until enough
groups are there (`_wait_for_groups`), drop of them what the filter drops and write the entry (`_form_entry`). Reading
(`EntryReader`) decides nothing, so any rank may do it.

Invariants: a batch is a function of the log, the ledger and the rule, and of no message; what is read follows from the
entry, the log and the filter alone, so every rank and every replay trains the same numbers.
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
    BatchSource,
    Demonstrations,
    NotYet,
    with_masks,
    with_rewards,
)
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import SCHEMA, Status
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError, EmptyBatchError, WaitTimeout
from rftdask.storage.base import in_order

MAX_KEPT_BYTES = 1 << 30
"""Of shards kept in memory between indexing and training; others are read again, so a long log costs no more memory.
The shards that one batch is made of are held beside them while it is read."""
MISSING_NOTE = "num_missing_groups"
"""Note of a ledger entry: groups that a partial batch is short of a whole one."""
REUSED_NOTE = "num_reused_groups"
"""Note of a ledger entry: groups in it that were trained before."""
_MIN_POLL_S = 0.002
_POLL_COST = 20.0
"""Pauses are so many times as long as a look at the log takes, within bounds: waiting costs at most 5 % of a core, and
on a local disk a shard is seen some milliseconds after its commit."""


@dataclass(eq=False)
class LogSource(BatchSource):
    """Batches from the experience log, by a `SampleRule`, less what the filter drops.

    A batch may be without any row, if all are too stale or the filter leaves none: its step changes no weights.

    When `max_read_timeout_s` passes, a batch is made of the whole groups that are there; its entry says how many are
    missing. Not in order: there, batch k is the k-th run of positions, so a late one is waited for in vain.

    Example: LogSource(log, Ledger(storage), SampleRule(8, 64, ordered=True), tasks_per_unit=16, max_read_timeout_s=60)
    """

    log: ExperienceLog
    ledger: Ledger
    rule: SampleRule
    _: KW_ONLY
    tasks_per_unit: int
    """Tasks of a whole work unit; gives the slot of a group from its shard."""
    max_read_timeout_s: float
    poll_interval_s: float = 0.05
    """Longest pause between two looks at the log."""
    replay: Replay | None = None
    """How groups are used more than once; None: each is used once."""
    notes_settled: bool = False
    """Whether entries note how many groups are settled so far, for explorers held back by it."""
    batch_filter: BatchFilter = field(default_factory=BatchFilter)
    demonstrations: Demonstrations | None = None
    clock: Callable[[], float] = time.time
    """Unix seconds, for the stamps that cooldowns are measured by."""

    def __post_init__(self) -> None:
        self._fence = Fence(self.ledger)
        self._reader = EntryReader(self.log, batch_filter=self.batch_filter, demonstrations=self.demonstrations)
        self._asked_s = (0, 0.0)  # The step that is waited for, and when it was asked for first.
        self._cursor = Cursor()
        self._waiting: dict[Position, Group] = {}  # Groups that are committed and not settled.
        self._seen: set[str] = set()  # Names of the shards whose groups are known.
        self._looked = False  # Whether the log was listed whole.
        self._uses = UseCounts(self.replay or Replay(), self.rule.max_staleness)

    def state_dict(self) -> dict[str, object]:
        """The cursor; use counts are folded from the ledger."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See BatchSource; the log is listed whole at the next look."""
        self._cursor = Cursor.from_state_dict(state)
        self._looked = False

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """See BatchSource; with replay it first folds the uses that this process has not seen."""
        # What the ledger has is replayed. None: it is this trainer's to form.
        entry = self._fence.read(step)
        if self.replay is not None:
            # Uses before `step` that this process has not seen: after a resume, those of the newest entries.
            for earlier in range(self._uses.first_step(step), step):
                past = self.ledger.read(earlier)
                if past is None:
                    raise DamagedError(f"{self.ledger.path(earlier)} is missing, and later entries are there")
                self._uses.fold(past, self._reader.min_policy_version)
        if entry is None:
            selection = self._wait_for_groups(step, patience_s)
            if selection is None:
                return None
            entry = self._form_entry(step, selection)
            self.ledger.write(entry)  # from here on it is the batch of this step, whatever becomes of this process
        if self.replay is not None:
            # Also an entry that was replayed: the next batch must know what was used so far.
            self._uses.fold(entry, self._reader.min_policy_version)
        # Trained or dropped, it is settled, and in no later batch as a fresh group.
        for position in entry.positions:
            self._waiting.pop(position, None)
        self._cursor.settle(entry.positions, self.rule.tasks_per_step)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """See BatchSource; forgets the shards that neither wait nor are in the entry."""
        # Also on a rank that forms no entry, and so never settles one.
        in_use = {group.source for group in self._waiting.values()} | {rows.source for rows in entry.use}
        self._reader.forget_all_but(in_use)
        return self._reader.read(entry, places)

    def look_ahead(self, step: int) -> LedgerEntry | None:
        """See BatchSource; finds and reads new shards, whose groups then wait in memory."""
        if not self._looked:  # before the first look a resumed trainer may have entries to replay
            return self.ledger.read(step)
        self._index_new_shards()
        selection = self._select(step)
        if selection is None:
            return None
        use = [Rows(group.source, group.trainable_rows) for group in selection.use]
        use += [Rows(group.source, group.rows) for group in selection.reuse]
        return LedgerEntry(step, self.ledger.lineage, tuple(use))

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        """See BatchSource; the shards, as far as they may be kept."""
        self._reader.read_ahead(entry, places)

    # ---- waiting

    def _wait_for_groups(self, step: int, patience_s: float) -> Selection | None:
        """The groups of batch `step`, once enough are there; None: no batch will come.

        Raises: NotYet: they did not come in `patience_s`; WaitTimeout: `max_read_timeout_s` has passed, and nothing can
        be trained of what is there.
        """
        rule, slots = self.rule, range(self.rule.tasks_per_step)
        reuses_alone = self.replay is not None and self.replay.after_the_end
        began = time.monotonic()
        # The caller comes back several times a second while it waits.
        if self._asked_s[0] != step:
            self._asked_s = (step, began)  # the deadline holds over all calls for one step
        deadline = self._asked_s[1] + self.max_read_timeout_s
        while True:
            looked = time.monotonic()
            # The seal is read before the listing: what was committed before the seal is then listed.
            sealed_at = self.log.sealed_at()
            self._index_new_shards()
            open_positions = ((s, slot) for s in range(self._cursor.low, (sealed_at or 0) + 1) for slot in slots)
            is_complete = sealed_at is not None and all(
                position in self._waiting or position in self._cursor for position in open_positions
            )
            # Used groups alone make no batch when the explorers have ended, unless the trainer was given its steps.
            reuse_is_over = self.replay is not None and not reuses_alone and not self._waiting
            if not (is_complete and reuse_is_over):
                selection = self._select(step)
                if selection is not None:
                    return selection
            if is_complete and not (reuses_alone and self._uses.is_cooling(step - 1, self.clock())):
                assert sealed_at is not None
                # What partial batches left over of whole ones; what never filled a batch is not trained.
                num_groups = sealed_at * rule.tasks_per_step
                in_whole_batches = num_groups - num_groups % rule.groups_per_batch
                left = in_whole_batches - self._cursor.num_settled(rule.tasks_per_step)
                return self._select(step, left) if 0 < left <= len(self._waiting) else None
            now = time.monotonic()
            if now > deadline:
                # All the groups that are there, if one of them can be trained. Not in order: a late one is next.
                # Counted with the used ones that are cool: with replay they may fill the batch.
                num_there = len(self._waiting) + len(self._uses.ready(step - 1, self.clock()))
                count = 0 if rule.ordered else min(num_there, rule.groups_per_batch)
                partial = self._select(step, count) if count else None
                if partial is None or not (partial.use or partial.reuse):
                    raise WaitTimeout(
                        f"batch {step} did not come in {self.max_read_timeout_s:.0f} s: {len(self._waiting)} groups "
                        f"are waiting, {rule.groups_per_batch} are needed, the oldest open explore step is "
                        f"{self._cursor.low}. Is an explorer running? "
                        "(buffer.trainer_input.experience_buffer.max_read_timeout)"
                    )
                return partial
            # After the deadline was looked at: who asks again and again must not wait for ever.
            if now - began >= patience_s:
                raise NotYet(f"batch {step} is not there yet")
            time.sleep(min(max(_POLL_COST * (now - looked), _MIN_POLL_S), self.poll_interval_s))

    def _select(self, step: int, count: int | None = None) -> Selection | None:
        """The groups of batch `step` (`count` in place of a whole batch's), of what is there now."""
        if self.replay is None:
            return select_groups(self._waiting, self._cursor, step - 1, self.rule, count)
        # Policy version step - 1 is about to be trained.
        used = self._uses.ready(step - 1, self.clock())
        return select_with_reuse(self._waiting, used, self._cursor, step - 1, self.rule, self.replay, count)

    def _index_new_shards(self) -> None:
        """Take up the groups of shards that were not seen before; set damaged ones aside."""

        def try_read(name: ShardName) -> pa.Table | DamagedError:
            try:
                return self.log.read(name, self._reader.columns)
            except DamagedError as error:
                return error

        # What is compacted is settled: when this trainer looks for the first time, or else by itself, so it knows it.
        look = self.log.loose_shards if self._looked else self.log.shards
        # Shards of steps that are settled hold nothing for a new batch.
        names = [name for name in look(self._cursor.low) if name.text not in self._seen]
        for name, table in zip(names, in_order(try_read, names, self.log.num_readers), strict=True):
            if isinstance(table, DamagedError):
                self.log.quarantine(name, str(table))
                continue  # not seen: the same writer may make it again, to the byte
            self._seen.add(name.text)
            for group in groups_of_shard(table, name, self.tasks_per_unit):
                # A settled or waiting position makes this group a repeat: its work unit ran twice, one copy is taken.
                if group.position not in self._cursor and group.position not in self._waiting:
                    self._waiting[group.position] = group
                    self._reader.keep(name, table)
        self._looked = True

    # ---- forming

    def _form_entry(self, step: int, selection: Selection) -> LedgerEntry:
        """The ledger entry of these groups. Raises: EmptyBatchError: not one rollout of all gave an experience."""
        # Rows that operators set aside are no failure: the run goes on with a batch that trains nothing.
        any_filtered = any(reason == Status.FILTERED for group in selection.empty for reason, _ in group.other_rows)
        if not (selection.use or selection.stale or selection.reuse or any_filtered):
            table = self._reader.table(selection.empty[0].source)
            errors = [error for error in table.column("error").to_pylist() if error]
            raise EmptyBatchError(
                f"batch {step} has nothing to train: all rollouts of its {len(selection.empty)} groups failed; "
                f"first error: {errors[0] if errors else 'none recorded'}\n"
                "failed rollouts stay: mend the cause, then run again under another name (name=...)"
            )
        # Every row of every group gets a line, trained or not: what no line names would count as waiting for ever.
        drop: list[Rows] = []
        for group in selection.use + selection.stale + selection.empty:
            drop.extend(Rows(group.source, rows, reason) for reason, rows in group.other_rows)
        drop.extend(Rows(group.source, group.trainable_rows, "stale") for group in selection.stale)
        # In one table, because filters compare groups with each other.
        table = self._reader.rows([Rows(group.source, group.trainable_rows) for group in selection.use])
        reasons = iter(self.batch_filter.reasons(table, step))
        use: list[Rows] = []
        for group in selection.use:
            # By reason, in the order of the rows: a group that is kept whole is one run of rows.
            by_reason: dict[str, list[int]] = defaultdict(list)
            for row in group.trainable_rows:
                by_reason[next(reasons)].append(row)
            for reason, numbers in by_reason.items():
                (drop if reason else use).append(Rows(group.source, tuple(numbers), reason))
        # After the fresh ones, and past the filter: its rows were found good when the group was fresh.
        use.extend(Rows(group.source, group.rows) for group in selection.reuse)
        if self.demonstrations is not None:
            # Last, as in the batch: `read` puts the rollouts first, in the order of `use`.
            use.append(self.demonstrations.rows(step))

        notes: dict[str, float] = {}
        # Noted only where it is not 0, so that an entry of a usual batch has no notes.
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


@dataclass(eq=False)
class EntryReader:
    """Reads the rows that ledger entries name, as a batch. Any rank may have one; it forms nothing and decides nothing.

    Example: EntryReader(log, batch_filter=batch_filter).read(entry, places=[0, 1, 2])
    """

    log: ExperienceLog
    _: KW_ONLY
    batch_filter: BatchFilter = field(default_factory=BatchFilter)
    demonstrations: Demonstrations | None = None

    def __post_init__(self) -> None:
        self.columns = (*BATCH_COLUMNS, "status", "error", *self.batch_filter.columns)
        """Columns of a shard that the trainer takes: texts stay where they are."""
        self._tables: dict[str, pa.Table] = {}
        self._num_bytes = 0

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the entry trains, or those at `places` of its `use`, counted through from 0, ascending.

        Raises: DamagedError: a shard it names; DataError: rows of a dataset that is not there.
        """
        rollouts: list[Rows] = []
        shown: list[tuple[Rows, Sequence[int]]] = []  # rows of a dataset, and which of them
        # `places` counts through all parts of `use`; each part takes the slice that is its own.
        begin = 0
        for part in entry.use:
            end = begin + len(part.rows)
            within: Sequence[int] = range(len(part.rows))
            if places is not None:
                within = [place - begin for place in places[bisect_left(places, begin) : bisect_left(places, end)]]
            if not within and places is not None:
                pass  # nothing of this part
            elif part.of_dataset:
                shown.append((part, within))
            else:
                rollouts.append(Rows(part.source, tuple(part.rows[i] for i in within)))
            begin = end
        # A skipped step needs no baseline, and its rows may be lost.
        baselines = [part for part in entry.drop if part.reason == BASELINE and entry.use]
        batch = batch_from_table(self._trained_rows(rollouts), self._trained_rows(baselines) if baselines else None)
        if not shown:
            return batch
        if self.demonstrations is None:
            source = shown[0][0].source
            raise DataError(f"ledger entry {entry.step} names {source}, and no demonstrations are configured")
        return join_batches([batch, *(self.demonstrations.batch(part, entry.step, within) for part, within in shown)])

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        """Read the shards of which `read` will want rows, unless they are here; keep them while there is room."""
        begin, wanted = 0, dict[str, ShardName]()
        for part in entry.use:
            end = begin + len(part.rows)
            is_read = places is None or bisect_left(places, begin) < bisect_left(places, end)
            name = None if part.of_dataset or part.source in self._tables else ShardName.try_parse(part.source)
            if is_read and name is not None:
                wanted[part.source] = name
            begin = end
        read = partial(self.log.read, columns=self.columns)
        for name, table in zip(
            wanted.values(), in_order(read, list(wanted.values()), self.log.num_readers), strict=True
        ):
            self.keep(name, table)

    def rows(self, parts: Sequence[Rows]) -> pa.Table:
        """Read the rows of the log as recorded, one part after another."""
        tables = []
        for source, run in groupby(parts, key=lambda part: part.source):
            table = self.table(source)
            numbers = np.concatenate([np.asarray(part.rows, np.int64) for part in run])
            # Neighbors are a slice, which copies nothing; most batches take whole shards.
            if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
                tables.append(table.slice(numbers[0], len(numbers)))
            else:
                tables.append(table.take(column_of(numbers)))
        return pa.concat_tables(tables, promote_options="default") if tables else SCHEMA.empty_table()

    def min_policy_version(self, rows: Rows) -> int:
        """The oldest weights that sampled a token of some rows of the log."""
        versions = numbers_of(self.table(rows.source).column("min_policy_version"))
        return int(versions[list(rows.rows)].min())

    def table(self, source: str) -> pa.Table:
        """All rows of the shard that a ledger calls `source`, of `columns` at least. Raises: DamagedError."""
        if source not in self._tables:
            name = ShardName.try_parse(source)
            if name is None:
                raise DamagedError(f"the ledger names {source!r}, which is no shard")
            # Kept beyond the limit of memory, too: the batch at hand needs it whole.
            self._tables[source] = self.log.read(name, self.columns)
            self._num_bytes += self._tables[source].nbytes
        return self._tables[source]

    def keep(self, name: ShardName, table: pa.Table) -> None:
        """Hold a shard that was read for another reason and will be needed, while there is room."""
        if name.text not in self._tables and self._num_bytes + table.nbytes <= MAX_KEPT_BYTES:
            self._tables[name.text] = table
            self._num_bytes += table.nbytes

    def forget_all_but(self, sources: Collection[str]) -> None:
        """Free the memory of all other shards."""
        # Shards of settled groups: nobody reads them again but a replay.
        for source in [source for source in self._tables if source not in sources]:
            self._num_bytes -= self._tables.pop(source).nbytes

    def _trained_rows(self, parts: Sequence[Rows]) -> pa.Table:
        """The rows of the log with the rewards and masks they are trained with."""
        table = self.rows(parts)
        table = with_masks(table, self.batch_filter.masked(table))
        return with_rewards(table, self.batch_filter.rewards(table))
