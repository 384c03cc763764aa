"""Tables: the files of a run as Arrow tables, one row per experience, ledger line, optimizer step, checkpoint, ...

It reads through `Storage`, so any URL works, and writes nothing: unreadable files are left out and listed in
`problems`, while a role of the run would quarantine them. Invariants: a row contains its origin: `stage`, and for
experiences and ledger lines `shard` and `row`; every experience has a line in `states`, and several only if several
ledger lines name it (in other lineages, or with a strategy that reuses rows).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from rftdask.buffer.batches.audit import DAMAGED, REPEAT
from rftdask.buffer.batches.groups import group_slots
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, skipped_sources
from rftdask.buffer.log import open_log
from rftdask.buffer.log.columns import SCHEMA
from rftdask.buffer.log.log import EXPERIENCES
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.errors import DamagedError, DataError, NotFoundError
from rftdask.monitor.metrics import read_metrics
from rftdask.reports.run_reader import StageReader, open_stages
from rftdask.storage.base import in_order
from rftdask.synchronizer.manifest import read_manifest
from rftdask.synchronizer.published import checkpoint_weights, published_as, published_versions, weights_folder
from rftdask.trainer.checkpoint import checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    import pandas as pd

_NUM_READERS = 8  # small files read concurrently: on object stores a read is mostly latency
TRAINED, DROPPED, WAITING = "trained", "dropped", "waiting"

# slot: position of the row's group in the explore step, from 0; null for an answer to an evaluation.
EXPERIENCE_SCHEMA = pa.schema([("stage", "string"), ("shard", "string"), ("row", "int32"), ("slot", "int32"), *SCHEMA])
# place: position in the batch, from 0, null for a dropped row. reason: null for a trained row.
LEDGER_SCHEMA = pa.schema(
    {"stage": "string", "lineage": "string", "step": "int64"}
    | {"place": "int32", "shard": "string", "row": "int64", "reason": "string"}
)
POSITION_SCHEMA = pa.schema(
    {"stage": "string", "lineage": "string", "step": "int64", "explore_step": "int64", "slot": "int32"}
)
# uid: null if the row cannot be read any more. reason: null unless the row was dropped. lineage, step: of the ledger
# entry that names the row, or null.
STATE_SCHEMA = pa.schema(
    {"stage": "string", "shard": "string", "row": "int32", "uid": "string"}
    | {"state": "string", "reason": "string", "lineage": "string", "step": "int64"}
)
CHECKPOINT_SCHEMA = pa.schema(
    {"stage": "string", "step": "int64", "lineage": "string", "folder": "string"}
    | {"num_files": "int32", "size_bytes": "int64", "content_hash": "string"}
)
# content_hash: equal to weights_hash of the experiences sampled with these weights.
WEIGHTS_SCHEMA = pa.schema(
    {"stage": "string", "version": "int64", "lineage": "string", "folder": "string"}
    | {"size_bytes": "int64", "content_hash": "string"}
)

PLACE = ["stage", "shard", "row"]
"""Columns that identify an experience."""
TABLES = ("experiences", "ledger", "steps", "checkpoints", "evals", "eval_experiences", "weights", "states")
"""Names of all tables; docs/lineage.md explains their columns."""

_Read = TypeVar("_Read")
_LostShard = tuple[str, str, int, str | None]
"""(stage, shard, number of rows, drop reason of the rows that no ledger entry names, None if they are waiting)."""


class RunTables:
    """Tables of one run, each read on first access. Example: RunTables("runs/project/name").table("ledger")"""

    def __init__(self, url: str | Path) -> None:
        """Raises: DataError: `url` is not a run folder."""
        self.stages = open_stages(url)
        self.problems: list[str] = []
        """Errors of files that could not be read and are missing from the tables."""
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """Return one of `TABLES`. All its shards are held in memory."""
        if name not in self._tables:
            self._tables[name] = getattr(self, f"_{name}")()
        return self._tables[name]

    def read_shards(
        self, stage: StageReader, folder: str = EXPERIENCES, only: Container[str] | None = None
    ) -> Iterator[tuple[ShardName, pa.Table]]:
        """Yield the readable shards of a log with rows as in `EXPERIENCE_SCHEMA`, in order. only: names to read."""
        log = open_log(stage.storage, stage.config, folder)
        for name in log.shards(0):
            if only is not None and name.text not in only:
                continue
            table = self._try(partial(log.read, name))
            if table is None:
                continue
            slots: Any = [None] * len(table)  # evaluations do not record the tasks per unit
            if folder == EXPERIENCES:
                slots = group_slots(table, name, stage.config.tasks_per_unit)
            place = {
                "stage": pa.repeat(stage.name, len(table)),
                "shard": pa.repeat(name.text, len(table)),
                "row": pa.array(range(len(table)), "int32"),
                "slot": pa.array(slots, "int32"),
            }
            yield name, pa.table(place | dict(zip(table.column_names, table.columns, strict=True)))

    @cached_property
    def positions(self) -> pa.Table:
        """Groups settled by each ledger entry, as in `POSITION_SCHEMA`."""
        return _table(
            [(stage.name, entry.lineage, entry.step, *p) for stage, entry in self._entries for p in entry.positions],
            POSITION_SCHEMA,
        )

    def _try(self, read: Callable[[], _Read]) -> _Read | None:
        """Return the result, or None after recording the error in `problems`: one bad file must not hide the others."""
        try:
            return read()
        except (DamagedError, DataError, NotFoundError) as error:  # DataError: another schema
            self.problems.append(str(error))
            return None

    def _experiences(self) -> pa.Table:
        return self._all_rows((stage, EXPERIENCES) for stage in self.stages)

    def _eval_experiences(self) -> pa.Table:
        names = ((stage, name) for stage in self.stages for name in stage.storage.list("eval") if name.endswith("/"))
        return self._all_rows((stage, f"eval/{name.rstrip('/')}") for stage, name in names)

    def _all_rows(self, folders: Iterable[tuple[StageReader, str]]) -> pa.Table:
        tables = [rows for stage, folder in folders for _, rows in self.read_shards(stage, folder)]
        # Logs of a later minor version have more columns, which are null in older shards.
        return pa.concat_tables([EXPERIENCE_SCHEMA.empty_table(), *tables], promote_options="default")

    def _ledger(self) -> pa.Table:
        lines: list[tuple[Any, ...]] = []
        for stage, entry in self._entries:
            used = [(part.source, row, None) for part in entry.use for row in part.rows]
            dropped = [(part.source, row, part.reason) for part in entry.drop for row in part.rows]
            lines += [(stage.name, entry.lineage, entry.step, place, *line) for place, line in enumerate(used)]
            lines += [(stage.name, entry.lineage, entry.step, None, *line) for line in dropped]
        return _table(lines, LEDGER_SCHEMA)

    @cached_property
    def _entries(self) -> list[tuple[StageReader, LedgerEntry]]:
        entries: list[tuple[StageReader, LedgerEntry]] = []
        for stage in self.stages:
            for lineage in (name.rstrip("/") for name in stage.storage.list("ledger") if name.endswith("/")):
                ledger = Ledger(stage.storage, lineage)
                reads = [partial(ledger.read, step) for step in ledger.steps()]
                entries += [(stage, e) for e in in_order(self._try, reads, _NUM_READERS) if e is not None]
        return entries

    def _states(self) -> pa.Table:
        experiences, ledger = self.table("experiences"), self.table("ledger")
        return row_states(experiences, ledger, self.positions, self.completed_steps, self._lost_shards())

    @cached_property
    def completed_steps(self) -> dict[str, int]:
        """Last completed step by stage, without stages whose metrics are damaged."""
        steps = {stage.name: self._try(partial(getattr, stage, "completed_step")) for stage in self.stages}
        return {name: step for name, step in steps.items() if step is not None}

    def _lost_shards(self) -> Iterator[_LostShard]:
        """Yield the shards that the audit counts but the table of experiences lacks."""
        readable = set(self.table("experiences")["shard"].unique().to_pylist())
        # A skipped step can name shards that were lost earlier; they count as dropped.
        skipped = skipped_sources(entry for _, entry in self._entries)
        named = set(self.table("ledger")["shard"].unique().to_pylist())
        for stage in self.stages:
            removed = set(stage.log.removed(0))
            kept = {*stage.log.shards(0), *removed}
            gone = {*stage.log.quarantined(), *filter(None, map(ShardName.try_parse, skipped))} - kept
            damaged = {name for name in gone if name.text in named}
            # If a work unit ran twice and one copy is damaged, the other copy counts.
            repeated = set(repeated_shards(kept | damaged)) - removed
            for name in sorted(kept | damaged):
                if name.text not in readable:
                    reason = DAMAGED if name in damaged else REPEAT if name in repeated else None
                    yield stage.name, name.text, name.num_rows, reason

    def _checkpoints(self) -> pa.Table:
        folders = [(stage, step) for stage in self.stages for step in checkpoint_steps(stage.storage)]
        rows = [(step, self._folder(stage, checkpoint_folder(step))) for stage, step in folders]
        return pa.Table.from_pylist([row | {"step": step} for step, row in rows if row], CHECKPOINT_SCHEMA)

    def _weights(self) -> pa.Table:
        """Published weights, then the weights in checkpoints whose published folder was removed."""
        rows = []
        for stage in self.stages:
            published = published_versions(stage.storage)
            rows += [self._folder(stage, weights_folder(version)) for version in published]
            removed = [step for step in checkpoint_steps(stage.storage) if step not in published]
            rows += [self._folder(stage, checkpoint_folder(step), of_weights=True) for step in removed]
        return pa.Table.from_pylist([row for row in rows if row], WEIGHTS_SCHEMA)

    def _folder(self, stage: StageReader, folder: str, of_weights: bool = False) -> dict[str, Any] | None:
        """Return the row of a folder in the table of checkpoints or weights; None without a readable manifest."""
        manifest = self._try(partial(read_manifest, stage.storage, folder))
        if manifest is None:  # partially written or partially removed
            return None
        weights = self._try(partial(checkpoint_weights if of_weights else published_as, manifest, folder))
        if of_weights and weights is None:  # a custom trainer engine may store them under other names
            return None
        entries = dict(weights.files if of_weights and weights is not None else manifest.files)
        return {
            "stage": stage.name,
            "version": manifest.version,
            "lineage": manifest.lineage,
            "folder": folder,
            "num_files": len(entries),
            "size_bytes": sum(entry.size_bytes for entry in entries.values()),
            "content_hash": None if weights is None else weights.content_hash,
        }

    def _steps(self) -> pa.Table:
        return self._metrics("trainer", ["stage", "step"])

    def _evals(self) -> pa.Table:
        return self._metrics("eval", ["stage", "version", "taskset"])

    def _metrics(self, role: str, first: list[str]) -> pa.Table:
        """Return the metrics of `role`, with the columns `first` first. The step of an eval is its policy version."""
        import pandas as pd  # late: half a second

        frames = []
        for stage in self.stages:
            frame: pd.DataFrame | None = self._try(partial(read_metrics, stage.storage, role))
            if frame is not None and len(frame):
                frames.append(frame.rename(columns={"step": first[1]}).drop(columns="role").assign(stage=stage.name))
        if not frames:
            kinds = {"stage": "string", "taskset": "string"}
            return pa.schema({name: kinds.get(name, "int64") for name in first}).empty_table()
        frame = pd.concat(frames, ignore_index=True)
        order = [name for name in first if name in frame] + [name for name in frame if name not in first]
        return pa.Table.from_pandas(frame[order], preserve_index=False).replace_schema_metadata(None)


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(dict(zip(schema.names, columns, strict=True)), schema)


_POSITION = ["stage", "explore_step", "slot"]
_GROUP = ["stage", "explore_step", "taskset", "epoch", "task_index"]


def row_states(
    experiences: pa.Table,
    ledger: pa.Table,
    positions: pa.Table,
    completed_steps: Mapping[str, int],
    lost: Iterable[_LostShard] = (),
) -> pa.Table:
    """Return lines of `STATE_SCHEMA` for the rows of `experiences`, in order, then for those of the `lost` shards.

    Summed up, they equal the counts of the audit. A work unit that ran twice has two shards. The trainer takes one copy
    of each group (the first by name, unless the other was taken already), and drops the rows of the other copy as
    "repeat" without a ledger entry. If the copy that was taken is lost, `positions` still lists its group as settled.
    Rows of a step wait until the step is complete; all steps of a stage missing in `completed_steps` count as complete.
    """
    import pandas as pd  # late: half a second

    lines = ledger.select([*PLACE, "lineage", "step", "reason"]).to_pandas().astype({"step": "Int64"})
    rows = experiences.select([*PLACE, "uid", *_GROUP[1:], "slot"]).to_pandas()
    # One line per ledger entry that names the row, and one line for an unnamed row.
    states = rows.merge(lines, how="left", on=PLACE)
    named = states["step"].notna()
    # The rows of a group in one shard are a copy of the group; the ledger takes rows of one copy only.
    copy = states.groupby([*_GROUP, "shard"], sort=False).ngroup()
    group = states.groupby(_GROUP, sort=False).ngroup()
    # A settled position means that a copy was taken, even if it cannot be read any more.
    settled = positions.select(_POSITION).to_pandas().drop_duplicates().assign(settled=True)
    is_settled = states[_POSITION].merge(settled, how="left", on=_POSITION)["settled"].notna().set_axis(states.index)
    other_is_taken = named.groupby(group).transform("any") | is_settled
    # Otherwise the first copy by name will be taken, since the log is read in the order of names.
    is_first = states["shard"] == states["shard"].groupby(group).transform("min")
    # The copy with a named row was taken, so its other rows wait and are not repeats.
    is_repeat = ~named & ~named.groupby(copy).transform("any") & (other_is_taken | ~is_first)
    parts = [states.assign(reason=states["reason"].astype(object).where(~is_repeat, REPEAT))]
    # The number and state of unreadable rows follow from the ledger and the names of the shards.
    for stage, shard, num_rows, reason in lost:
        rows = pd.DataFrame({"row": range(num_rows)}).assign(stage=stage, shard=shard, uid=None)
        states = rows.merge(lines, how="left", on=PLACE)
        is_dropped = states["step"].isna() & (reason is not None)
        parts.append(states.assign(reason=states["reason"].astype(object).where(~is_dropped, reason)))
    tables = []
    for part in parts:
        part["state"] = WAITING
        # The ledger records a batch before training.
        is_complete = part["step"] <= part["stage"].map(completed_steps).fillna(np.inf)  # NA without a step
        part.loc[is_complete.fillna(False), "state"] = TRAINED
        part.loc[part["reason"].notna(), "state"] = DROPPED
        tables.append(pa.Table.from_pandas(part[STATE_SCHEMA.names], STATE_SCHEMA, preserve_index=False))
    return pa.concat_tables([table.cast(STATE_SCHEMA) for table in tables])
