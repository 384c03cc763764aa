"""Source: forms the batch of a step, from the experience log or from a dataset, and writes it in the ledger; then, as
a step of its own, reads the rows that the ledger names.

Invariant: the batch of a step is what the ledger says. If it says nothing yet, the batch is formed, written down, and
only then handed out; so a resumed trainer gets the very same batches, and two trainers cannot both form one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rftdask.buffer.batches.backpressure import SETTLED_NOTE
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.buffer.batches.demonstrations import Demonstrations, ReadRows, RowOrder
from rftdask.buffer.batches.entry_reader import EntryReader
from rftdask.buffer.batches.filters import Curation
from rftdask.buffer.batches.groups import groups_of_shard
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.batches.replay_priority import TIME_NOTE, ReplayRule, UseCounts, select_with_reuse
from rftdask.buffer.batches.selection import Cursor, Group, Position, SampleRule, Selection, select_groups
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError, FencedError, RoleError, WaitTimeout
from rftdask.storage.base import in_order

_MIN_POLL_S = 0.002
_POLL_COST = 20.0
"""Pauses are so many times as long as a look at the log takes, within bounds: waiting costs at most 5 % of a core, and
on a local disk a shard is seen some milliseconds after its commit."""
MISSING_NOTE = "num_missing_groups"
"""Note of a ledger entry: groups that a partial batch is short of a whole one."""
REUSED_NOTE = "num_reused_groups"
"""Note of a ledger entry: groups in it that were trained before."""


class BatchSource(ABC):
    """Where a trainer's batches come from.

    Example:
        entry = source.entry(7)  # formed and written down, by one rank
        batch = source.read(entry)  # on every rank, of the rows it trains
    """

    @abstractmethod
    def entry(self, step: int) -> LedgerEntry | None:
        """What the ledger says of `step` (1-based; steps are asked for in order), formed and written down now if it
        says nothing yet; None when there will be no more.

        Raises: WaitTimeout: it did not come in time; FencedError: another trainer works on this lineage.
        """

    @abstractmethod
    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """The rows that the entry trains, or those at `places` of its `use`, counted through from 0, ascending.

        It needs no entry to have been formed here. Raises: DamagedError; DataError: they are of another dataset.
        """

    def batch(self, step: int) -> tuple[LedgerEntry, TrainingBatch] | None:
        """`entry` and all its rows, for a trainer of one rank."""
        entry = self.entry(step)
        return None if entry is None else (entry, self.read(entry))

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """What a checkpoint must keep to go on after the last entry handed out; JSON types."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, object]) -> None: ...


@dataclass(frozen=True)
class LogOptions:
    rule: SampleRule
    tasks_per_batch: int
    """Tasks in a rollout batch: gives the slot of a group from its shard."""
    max_read_timeout_s: float
    poll_interval_s: float = 0.05
    """Longest pause between two looks at the log."""
    replay: ReplayRule | None = None
    """How groups are used more than once; None: each is used once, oldest first."""
    note_settled: bool = False
    """Whether entries note how many groups are settled so far, for explorers that are held back by it."""


class LogSource(BatchSource):
    """Batches from the experience log, by a `SampleRule`, less what the curation drops.

    A batch may be without any row, if all are too stale or the curation leaves none: its step changes no weights.

    When `max_read_timeout_s` passes, a batch is made of the whole groups that are there; its entry says how many are
    missing. Not in order: there, batch k is the k-th run of positions, so a late one is waited for in vain.
    """

    def __init__(
        self,
        log: ExperienceLog,
        ledger: Ledger,
        options: LogOptions,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        curation: Curation | None = None,
        demonstrations: Demonstrations | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: Unix seconds, for the stamps that cooldowns are measured by."""
        self._log = log
        self._ledger = ledger
        self._clock = clock
        self._options = options
        self._should_stop = should_stop
        self._curation = curation or Curation()
        self._demonstrations = demonstrations
        self._reader = EntryReader(log, curation=self._curation, demonstrations=demonstrations)
        self._cursor = Cursor()
        self._waiting: dict[Position, Group] = {}
        self._seen: set[str] = set()
        self._looked = False
        """Whether the log was listed whole."""
        self._uses = UseCounts(options.replay or ReplayRule(), options.rule.max_staleness)
        self._replay_until: int | None = None
        """The last step that was written down before this trainer came; None until it asks for its first."""

    def state_dict(self) -> dict[str, object]:
        """The cursor; use counts are folded from the ledger."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._cursor = Cursor.from_state_dict(state)
        self._looked = False

    def entry(self, step: int) -> LedgerEntry | None:
        if self._replay_until is None:
            self._replay_until = self._ledger.last_of_run(step)
        entry = self._ledger.read(step)
        _check_place(self._ledger, step, entry, self._replay_until)
        self._fold_until(step)
        if entry is None:
            selection = self._wait_for_groups(step)
            if selection is None:
                return None
            entry = self._write_entry(step, selection)
        self._settle(entry)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        # Also on a rank that forms no entry, and so never settles one.
        in_use = {group.source for group in self._waiting.values()} | {rows.source for rows in entry.use}
        self._reader.forget_all_but(in_use)
        return self._reader.read(entry, places)

    def _wait_for_groups(self, step: int) -> Selection | None:
        deadline = time.monotonic() + self._options.max_read_timeout_s
        while True:
            looked = time.monotonic()
            sealed_at = self._log.sealed_at()  # before the listing: what was committed before the seal is then listed
            self._index_new_shards()
            all_there = sealed_at is not None and self._nothing_more(sealed_at)
            selection = None if all_there and self._reuse_is_over() else self._select(step)
            if selection is not None:
                return selection
            if all_there and not self._is_cooling(step):
                assert sealed_at is not None
                return self._last_groups(step, sealed_at)
            if self._should_stop():
                return None
            now = time.monotonic()
            if now > deadline:
                partial = self._partial(step)
                if partial is None:
                    raise WaitTimeout(self._who_is_missing(step))
                return partial
            time.sleep(min(max(_POLL_COST * (now - looked), _MIN_POLL_S), self._options.poll_interval_s))

    def _select(self, step: int, count: int | None = None) -> Selection | None:
        rule, replay = self._options.rule, self._options.replay
        if replay is None:
            return select_groups(self._waiting, self._cursor, step - 1, rule, count)
        used = self._uses.ready(step - 1, self._clock())
        return select_with_reuse(self._waiting, used, self._cursor, step - 1, rule, replay, count)

    def _partial(self, step: int) -> Selection | None:
        """All the groups that are there, if one of them can be trained."""
        rule = self._options.rule
        if rule.ordered:
            return None
        there = len(self._waiting) + len(self._uses.ready(step - 1, self._clock()))
        selection = self._select(step, min(there, rule.groups_per_batch)) if there else None
        return selection if selection is not None and (selection.use or selection.reuse) else None

    def _last_groups(self, step: int, sealed_at: int) -> Selection | None:
        """What partial batches left over of whole ones, when no more will come; else None: what never filled a batch
        is not trained.
        """
        rule = self._options.rule
        num_groups = sealed_at * rule.tasks_per_step
        in_whole_batches = num_groups - num_groups % rule.groups_per_batch
        left = in_whole_batches - self._cursor.num_settled(rule.tasks_per_step)
        return self._select(step, left) if 0 < left <= len(self._waiting) else None

    def _reuse_is_over(self) -> bool:
        """Used groups alone make no batch when the explorers have ended, unless the trainer was given its steps."""
        replay = self._options.replay
        return replay is not None and not replay.after_the_end and not self._waiting

    def _is_cooling(self, step: int) -> bool:
        replay = self._options.replay
        return replay is not None and replay.after_the_end and self._uses.is_cooling(step - 1, self._clock())

    def _nothing_more(self, sealed_at: int) -> bool:
        open_positions = (
            (explore_step, slot)
            for explore_step in range(self._cursor.low, sealed_at + 1)
            for slot in range(self._options.rule.tasks_per_step)
        )
        return all(p in self._waiting or p in self._cursor for p in open_positions)

    def _who_is_missing(self, step: int) -> str:
        need = self._options.rule.groups_per_batch
        return (
            f"batch {step} did not come in {self._options.max_read_timeout_s:.0f} s: "
            f"{len(self._waiting)} groups are waiting, {need} are needed, the oldest open explore step is "
            f"{self._cursor.low}. Is an explorer running? "
            "(buffer.trainer_input.experience_buffer.max_read_timeout)"
        )

    def _index_new_shards(self) -> None:
        # What is compacted is settled: when this trainer looks for the first time, or else by itself, so it knows it.
        look = self._log.loose_shards if self._looked else self._log.shards
        names = [name for name in look(self._cursor.low) if name.text not in self._seen]
        for name, found in zip(names, in_order(self._try_read, names, self._log.num_readers), strict=True):
            self._index_shard(name, found)
        self._looked = True

    def _try_read(self, name: ShardName) -> pa.Table | DamagedError:
        try:
            return self._log.read(name, self._reader.columns)
        except DamagedError as error:
            return error

    def _index_shard(self, name: ShardName, table: pa.Table | DamagedError) -> None:
        if isinstance(table, DamagedError):
            self._log.quarantine(name, str(table))
            return  # not seen: the same writer may make it again, to the byte
        self._seen.add(name.text)
        for group in groups_of_shard(table, name, self._options.tasks_per_batch):
            # A settled or waiting position makes this group a repeat: its batch ran twice, one of the two is taken.
            if group.position not in self._cursor and group.position not in self._waiting:
                self._waiting[group.position] = group
                self._reader.keep(name, table)

    def _write_entry(self, step: int, selection: Selection) -> LedgerEntry:
        if not (selection.use or selection.stale or selection.reuse or _any_filtered(selection.empty)):
            raise RoleError(self._nothing_trainable(step, selection))
        drops: list[Rows] = []
        for group in selection.use + selection.stale + selection.empty:
            drops.extend(Rows(group.source, rows, reason) for reason, rows in group.other_rows)
        drops.extend(Rows(group.source, group.trainable_rows, "stale") for group in selection.stale)
        use, dropped = self._curate(step, selection.use)
        use.extend(Rows(group.source, group.rows) for group in selection.reuse)
        if self._demonstrations is not None:
            use.append(self._demonstrations.rows(step))
        entry = LedgerEntry(
            step=step,
            lineage=self._ledger.lineage,
            use=tuple(use),
            drop=(*drops, *dropped),
            positions=selection.settled,
            notes=self._notes(selection),
        )
        self._ledger.write(entry)
        return entry

    def _notes(self, selection: Selection) -> dict[str, float]:
        notes: dict[str, float] = {}
        missing = self._options.rule.groups_per_batch - len(selection.settled) - len(selection.reuse)
        if missing > 0:
            notes[MISSING_NOTE] = missing
        if selection.reuse:
            notes[REUSED_NOTE] = len(selection.reuse)
        if self._options.replay is not None and self._options.replay.reuse_cooldown_s:
            notes[TIME_NOTE] = self._clock()
        if self._options.note_settled:
            settled = self._cursor.num_settled(self._options.rule.tasks_per_step)
            notes[SETTLED_NOTE] = settled + len(selection.settled)
        return notes

    def _curate(self, step: int, groups: Sequence[Group]) -> tuple[list[Rows], list[Rows]]:
        """What is trained of the groups, and what is dropped, by reason."""
        table = self._reader.rows([Rows(group.source, group.trainable_rows) for group in groups])
        reasons = self._curation.reasons(table, step)
        use: list[Rows] = []
        drop: list[Rows] = []
        end = 0
        for group in groups:
            begin, end = end, end + len(group.trainable_rows)
            by_reason: dict[str, list[int]] = {}
            if not any(reasons[begin:end]):
                use.append(Rows(group.source, group.trainable_rows))
                continue
            for row, reason in zip(group.trainable_rows, reasons[begin:end], strict=True):
                by_reason.setdefault(reason, []).append(row)
            for reason, rows in by_reason.items():
                (drop if reason else use).append(Rows(group.source, tuple(rows), reason))
        return use, drop

    def _nothing_trainable(self, step: int, selection: Selection) -> str:
        errors = [e for e in self._reader.table(selection.empty[0].source).column("error").to_pylist() if e]
        return (
            f"batch {step} has nothing to train: all rollouts of its {len(selection.empty)} groups failed; "
            f"first error: {errors[0] if errors else 'none recorded'}"
        )

    def _settle(self, entry: LedgerEntry) -> None:
        if self._options.replay is not None:
            self._uses.fold(entry, self._reader.min_policy_version)
        for position in entry.positions:
            self._waiting.pop(position, None)
        self._cursor.settle(entry.positions, self._options.rule.tasks_per_step)

    def _fold_until(self, step: int) -> None:
        """Count the uses before `step` that this process has not seen: after a resume, those of the newest entries."""
        if self._options.replay is None:
            return
        for earlier in range(self._uses.first_step(step), step):
            entry = self._ledger.read(earlier)
            if entry is None:
                raise DamagedError(f"{self._ledger.path(earlier)} is missing, and later entries are there")
            self._uses.fold(entry, self._reader.min_policy_version)


def _any_filtered(groups: Sequence[Group]) -> bool:
    """Whether operators set some of the rows aside, so that not all of them failed."""
    return any(reason == Status.FILTERED for group in groups for reason, _ in group.other_rows)


def _check_place(ledger: Ledger, step: int, entry: LedgerEntry | None, replay_until: int) -> None:
    """`replay_until`: the last step that was in the ledger when this trainer began.

    Raises: FencedError: the entry came later; DamagedError: it is missing, and was there, for later ones are.
    """
    if entry is not None:
        if step > replay_until:
            raise FencedError(
                f"{ledger.path(step)} appeared while this trainer was at step {step - 1}: another one is at work"
            )
        return
    # Before the first new entry of this life; read again, as another trainer may have written both just now.
    follows = step == replay_until + 1 and ledger.read(step + 1) is not None and ledger.read(step) is None
    if step <= replay_until or follows:
        raise DamagedError(
            f"{ledger.path(step)} is missing, and the ledger goes on to step {max(replay_until, step + 1)}; restore it "
            "from a backup: its rows may be trained, and a new batch could take them again"
        )


class DatasetSource(BatchSource):
    """Batches of supervised rows: batch k is a pure function of the dataset, the seed and k."""

    def __init__(
        self,
        rows: ReadRows,
        num_rows: int,
        fingerprint: str,
        ledger: Ledger,
        *,
        batch_size: int,
        total_epochs: int,
        shuffle_seed: int | None,
        group_size: int = 1,
    ) -> None:
        """`shuffle_seed` None keeps the order of the dataset; group_size: sequences that `rows` gives for each row."""
        self._rows = rows
        self._order = RowOrder(num_rows, shuffle_seed)
        self._group_size = group_size
        self._source = f"dataset:{fingerprint}"
        self._ledger = ledger
        self._batch_size = batch_size
        self._total_rows = num_rows * total_epochs
        self._replay_until: int | None = None
        """The last step that was written down before this trainer came; None until it asks for its first."""

    def state_dict(self) -> dict[str, object]:
        return {"source": self._source}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state["source"] != self._source:
            raise DataError(f"the dataset has changed since the checkpoint: was {state['source']}, is {self._source}")

    def entry(self, step: int) -> LedgerEntry | None:
        if self._replay_until is None:
            self._replay_until = self._ledger.last_of_run(step)
        entry = self._ledger.read(step)
        _check_place(self._ledger, step, entry, self._replay_until)
        if entry is None:
            numbers = self._numbers(step)
            if numbers is None:
                return None
            entry = LedgerEntry(step, self._ledger.lineage, (Rows(self._source, numbers),))
            self._ledger.write(entry)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """`places`: of rows of the dataset; each gives `group_size` sequences."""
        if any(rows.source != self._source for rows in entry.use):
            raise DataError(
                f"{self._ledger.path(entry.step)} was written for {entry.use[0].source}, the dataset is "
                f"{self._source} now"
            )
        first = (entry.step - 1) * self._batch_size
        numbers = entry.use[0].rows
        places = range(len(numbers)) if places is None else places
        uids = [
            f"{self._source}/{first + i}/{numbers[i]}" + (f"/{part}" if self._group_size > 1 else "")
            for i in places
            for part in range(self._group_size)
        ]
        return supervised_batch(self._rows([numbers[i] for i in places]), uids, self._group_size)

    def _numbers(self, step: int) -> tuple[int, ...] | None:
        start = (step - 1) * self._batch_size
        if start + self._batch_size > self._total_rows:
            return None
        return tuple(self._order.at(i) for i in range(start, start + self._batch_size))
