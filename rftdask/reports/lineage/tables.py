"""Tables: the files of a run as Arrow tables, one row per experience, ledger line, optimizer step, checkpoint, ...

It knows neither SQL nor pages. It reads through `Storage` alone, therefore any URL will do, and it writes nothing: what
cannot be read is left out and named in `problems`, where a role of the run would set it aside. Invariants: a row says
where it is from: `stage`, and for experiences and ledger lines `shard` and `row`; every experience has a line in
`states`, several only where several ledger lines name it (a lineage of its own, or a strategy that uses rows again).
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
from rftdask.buffer.log.log import EXPERIENCES
from rftdask.buffer.log.schema import SCHEMA
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.errors import DamagedError, DataError, NotFoundError
from rftdask.monitor.metrics import read_metrics
from rftdask.reports.run_reader import Stage, open_stages
from rftdask.storage.base import in_order
from rftdask.synchronizer.manifest import read_manifest
from rftdask.synchronizer.published import (
    as_published,
    hash_as_published,
    hash_of_weights,
    published_versions,
    weights_folder,
)
from rftdask.trainer.checkpoint import checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    import pandas as pd

_NUM_READERS = 8  # Small files read at once: on object stores a read is mostly waiting.
TRAINED, DROPPED, WAITING = "trained", "dropped", "waiting"

# The slot is the place of a row's group in the explore step, from 0; null for an answer of an evaluation.
EXPERIENCE_SCHEMA = pa.schema([("stage", "string"), ("shard", "string"), ("row", "int32"), ("slot", "int32"), *SCHEMA])
# The place is that in the batch, from 0, null for a dropped row; the reason is null for a trained one.
LEDGER_SCHEMA = pa.schema(
    {"stage": "string", "lineage": "string", "step": "int64"}
    | {"place": "int32", "shard": "string", "row": "int64", "reason": "string"}
)
POSITION_SCHEMA = pa.schema(
    {"stage": "string", "lineage": "string", "step": "int64", "explore_step": "int64", "slot": "int32"}
)
# The uid is null where a row cannot be read any more, the reason unless it was dropped; lineage and step are those of
# the ledger entry that names the row, null where none does.
STATE_SCHEMA = pa.schema(
    {"stage": "string", "shard": "string", "row": "int32", "uid": "string"}
    | {"state": "string", "reason": "string", "lineage": "string", "step": "int64"}
)
CHECKPOINT_SCHEMA = pa.schema(
    {"stage": "string", "step": "int64", "lineage": "string", "folder": "string"}
    | {"num_files": "int32", "size_bytes": "int64", "content_hash": "string"}
)
# The content hash is what experiences name as weights_hash.
WEIGHTS_SCHEMA = pa.schema(
    {"stage": "string", "version": "int64", "lineage": "string", "folder": "string"}
    | {"size_bytes": "int64", "content_hash": "string"}
)

TABLES = ("experiences", "ledger", "steps", "checkpoints", "evals", "eval_experiences", "weights", "states")
"""Names of all tables; docs/lineage.md says what their columns mean."""

_Read = TypeVar("_Read")
_LostShard = tuple[str, str, int, str | None]
"""(stage, shard, number of rows, why those that no ledger names count as dropped or None if they wait)."""


class RunTables:
    """The tables of one run, each read when it is first asked for.

    Example:
        tables = RunTables("runs/project/name")
        tables.table("ledger").to_pandas(); tables.problems
    """

    def __init__(self, url: str | Path) -> None:
        """Raises: DataError: `url` is no run folder."""
        self.stages = open_stages(url)
        self.problems: list[str] = []
        """What could not be read, and is therefore missing from the tables."""
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """One of `TABLES`. All shards that it is made of are held in memory."""
        if name not in self._tables:
            self._tables[name] = getattr(self, f"_{name}")()
        return self._tables[name]

    def read_shards(
        self, stage: Stage, folder: str = EXPERIENCES, only: Container[str] | None = None
    ) -> Iterator[tuple[ShardName, pa.Table]]:
        """Every readable shard of one log with its rows, in the order of the log; columns as in `EXPERIENCE_SCHEMA`.

        only: names of the shards to read; None: all of them.
        """
        log = open_log(stage.storage, stage.config, folder)
        for name in log.shards(0):
            if only is not None and name.text not in only:
                continue
            table = self._try(partial(log.read, name))
            if table is None:
                continue
            slots = None  # nothing says how many tasks a unit of an evaluation has
            if folder == EXPERIENCES:
                slots = pa.array(group_slots(table, name, stage.config.tasks_per_unit), "int32")
            place = {
                "stage": pa.repeat(stage.name, len(table)),
                "shard": pa.repeat(name.text, len(table)),
                "row": pa.array(range(len(table)), "int32"),
                "slot": pa.nulls(len(table), "int32") if slots is None else slots,
            }
            yield name, pa.table(place | dict(zip(table.column_names, table.columns, strict=True)))

    @cached_property
    def positions(self) -> pa.Table:
        """The groups that each ledger entry has settled, as in `POSITION_SCHEMA`."""
        return _table(
            [(stage.name, entry.lineage, entry.step, *p) for stage, entry in self._entries for p in entry.positions],
            POSITION_SCHEMA,
        )

    def _try(self, read: Callable[[], _Read]) -> _Read | None:
        """The result, or None and a line in `problems`: one bad file must not hide the others."""
        try:
            return read()
        except (DamagedError, DataError, NotFoundError) as error:  # DataError: of another schema
            self.problems.append(str(error))
            return None

    def _experiences(self) -> pa.Table:
        return self._all_rows((stage, EXPERIENCES) for stage in self.stages)

    def _eval_experiences(self) -> pa.Table:
        names = ((stage, name) for stage in self.stages for name in stage.storage.list("eval") if name.endswith("/"))
        return self._all_rows((stage, f"eval/{name.rstrip('/')}") for stage, name in names)

    def _all_rows(self, folders: Iterable[tuple[Stage, str]]) -> pa.Table:
        tables = [rows for stage, folder in folders for _, rows in self.read_shards(stage, folder)]
        # A log of a later minor version has more columns; what an older shard lacks of them is null.
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
    def _entries(self) -> list[tuple[Stage, LedgerEntry]]:
        """The ledger entries of all lineages, by stage."""
        entries: list[tuple[Stage, LedgerEntry]] = []
        for stage in self.stages:
            for lineage in (name.rstrip("/") for name in stage.storage.list("ledger") if name.endswith("/")):
                ledger = Ledger(stage.storage, lineage)
                reads = [partial(ledger.read, step) for step in ledger.steps()]
                entries += [(stage, e) for e in in_order(self._try, reads, _NUM_READERS) if e is not None]
        return entries

    def _states(self) -> pa.Table:
        experiences, ledger = self.table("experiences"), self.table("ledger")
        return row_states(experiences, ledger, self.positions, self.made_steps, self._lost_shards())

    @cached_property
    def made_steps(self) -> dict[str, int]:
        """The last step that is known to be made, by stage; without a stage whose files do not tell."""
        # One by one, so that a damaged stage leaves the others their answer.
        found = {stage.name: self._try(partial(getattr, stage, "made_step")) for stage in self.stages}
        return {name: step for name, step in found.items() if step is not None}

    def _lost_shards(self) -> Iterator[_LostShard]:
        """Shards that the audit counts, and that the table of experiences does not have."""
        there = set(self.table("experiences")["shard"].unique().to_pylist())
        # A skipped step may name shards that were lost before; they count as dropped there.
        skipped = skipped_sources(entry for _, entry in self._entries)
        named = set(self.table("ledger")["shard"].unique().to_pylist())
        for stage in self.stages:
            removed = set(stage.log.removed(0))
            kept = {*stage.log.shards(0), *removed}
            gone = {*stage.log.quarantined(), *filter(None, map(ShardName.try_parse, skipped))} - kept
            damaged = {name for name in gone if name.text in named}
            # A damaged copy of a batch that ran twice is of no use to anybody: the other one counts.
            repeated = set(repeated_shards(kept | damaged)) - removed
            for name in sorted(kept | damaged):
                if name.text not in there:
                    reason = DAMAGED if name in damaged else REPEAT if name in repeated else None
                    yield stage.name, name.text, name.num_rows, reason

    def _checkpoints(self) -> pa.Table:
        folders = [(stage, step) for stage in self.stages for step in checkpoint_steps(stage.storage)]
        rows = [(step, self._folder(stage, checkpoint_folder(step))) for stage, step in folders]
        return pa.Table.from_pylist([row | {"step": step} for step, row in rows if row], CHECKPOINT_SCHEMA)

    def _weights(self) -> pa.Table:
        """Published folders, then the weights that checkpoints keep of versions whose folder is gone."""
        rows = []
        for stage in self.stages:
            published = published_versions(stage.storage)
            rows += [self._folder(stage, weights_folder(version)) for version in published]
            # Published weights are removed as explorers move on; a checkpoint of the same step still has them.
            gone = [step for step in checkpoint_steps(stage.storage) if step not in published]
            rows += [self._folder(stage, checkpoint_folder(step), of_weights=True) for step in gone]
        return pa.Table.from_pylist([row for row in rows if row], WEIGHTS_SCHEMA)

    def _folder(self, stage: Stage, folder: str, of_weights: bool = False) -> dict[str, Any] | None:
        """What the tables of checkpoints and weights say of a folder with a manifest."""
        manifest = self._try(partial(read_manifest, stage.storage, folder))
        # Half written or half removed: no folder for anybody.
        if manifest is None:
            return None
        content_hash = self._try(partial(hash_of_weights, manifest))
        if of_weights:
            content_hash, manifest = hash_as_published(manifest), as_published(manifest)
            if not manifest.files:  # a trainer engine of the user's own may keep them under other names
                return None
        return {
            "stage": stage.name,
            "version": manifest.version,
            "lineage": manifest.lineage,
            "folder": folder,
            "num_files": len(manifest.files),
            "size_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
            "content_hash": content_hash,
        }

    def _steps(self) -> pa.Table:
        return self._metrics("trainer", ["stage", "step"])

    def _evals(self) -> pa.Table:
        return self._metrics("eval", ["stage", "version", "taskset"])

    def _metrics(self, role: str, first: list[str]) -> pa.Table:
        """Rows of `role`, the columns `first` in front. The step of an eval is the policy version that it looked at."""
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


_PLACE = ["stage", "shard", "row"]
_POSITION = ["stage", "explore_step", "slot"]
_GROUP = ["stage", "explore_step", "taskset", "epoch", "task_index"]


def row_states(
    experiences: pa.Table,
    ledger: pa.Table,
    positions: pa.Table,
    made_steps: Mapping[str, int],
    lost: Iterable[_LostShard] = (),
) -> pa.Table:
    """Lines of `STATE_SCHEMA` for the rows of `experiences`, in their order, then for those of the `lost` shards.

    They give for each row what the audit gives as counts. A work unit that ran twice stands in two shards. Of each
    group one copy is taken, or will be (the first, while none is taken); the rows of the other are dropped as "repeat",
    which the ledger does not write down. A copy whose twin is lost is known by the `positions` that are settled. What
    a step is to train waits until it is made; of a stage that `made_steps` does not name all are.
    """
    import pandas as pd  # late: half a second

    lines = ledger.select([*_PLACE, "lineage", "step", "reason"]).to_pandas().astype({"step": "Int64"})
    rows = experiences.select([*_PLACE, "uid", *_GROUP[1:], "slot"]).to_pandas()
    # One line for each time that the ledger names a row, and one for a row that it does not name.
    found = rows.merge(lines, how="left", on=_PLACE)
    named = found["step"].notna()
    # What one shard has of a group is a copy of it; the ledger takes rows of one copy alone.
    copy = found.groupby([*_GROUP, "shard"], sort=False).ngroup()
    group = found.groupby(_GROUP, sort=False).ngroup()
    # A settled position means that a copy was taken, also where that one cannot be read any more.
    settled = positions.select(_POSITION).to_pandas().drop_duplicates().assign(settled=True)
    is_settled = found[_POSITION].merge(settled, how="left", on=_POSITION)["settled"].notna().set_axis(found.index)
    other_is_taken = named.groupby(group).transform("any") | is_settled
    # While none is taken the first by name will be: names sort as the log is read.
    is_first = found["shard"] == found["shard"].groupby(group).transform("min")
    # A copy of which any row is named is the one that was taken: its other rows wait, and are no repeat.
    is_repeat = ~named & ~named.groupby(copy).transform("any") & (other_is_taken | ~is_first)
    parts = [found.assign(reason=found["reason"].astype(object).where(~is_repeat, REPEAT))]
    # Of rows that nobody can read, the ledger and the names of shards still tell how many there were, and what became
    # of them.
    for stage, shard, num_rows, reason in lost:
        rows = pd.DataFrame({"row": range(num_rows)}).assign(stage=stage, shard=shard, uid=None)
        found = rows.merge(lines, how="left", on=_PLACE)
        is_dropped = found["step"].isna() & (reason is not None)
        parts.append(found.assign(reason=found["reason"].astype(object).where(~is_dropped, reason)))
    tables = []
    for part in parts:
        part["state"] = WAITING
        # The ledger has a batch before it is trained.
        is_made = part["step"] <= part["stage"].map(made_steps).fillna(np.inf)  # no step: NA, and so False
        part.loc[is_made.fillna(False), "state"] = TRAINED
        part.loc[part["reason"].notna(), "state"] = DROPPED
        tables.append(pa.Table.from_pandas(part[STATE_SCHEMA.names], STATE_SCHEMA, preserve_index=False))
    return pa.concat_tables([table.cast(STATE_SCHEMA) for table in tables])
