"""Tables: the files of a run as Arrow tables, one row per experience, ledger line, optimizer step, checkpoint, ...

It knows neither SQL nor pages. It reads through `Storage` alone, therefore any URL will do, and it writes nothing: what
cannot be read is left out and named in `problems`, where a role of the run would set it aside.
Invariant: a row says where it is from: `stage`, and for experiences and ledger lines `shard` and `row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from rftdask.buffer.batches.audit import DAMAGED, REPEAT
from rftdask.buffer.batches.groups import group_slots
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import EXPERIENCES
from rftdask.buffer.log.schema import SCHEMA
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.errors import DamagedError, DataError, NotFoundError
from rftdask.monitor.metrics import read_metrics
from rftdask.provenance.states import LostShard, row_states
from rftdask.run.view import Stage, open_stages
from rftdask.storage.base import in_order
from rftdask.trainer.checkpoint import checkpoint_folder, checkpoint_steps
from rftdask.weights.manifest import Manifest, read_manifest
from rftdask.weights.published import CHECKPOINT_MODEL_FILE, MODEL_FILE, published_versions, weights_folder

if TYPE_CHECKING:
    import pandas as pd

_NUM_READERS = 8
"""Small files read at once: on object stores a read is mostly waiting."""

EXPERIENCE_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("slot", pa.int32()),  # place of its group in the explore step, from 0; null for an answer of an evaluation
        *SCHEMA.remove_metadata(),
    ]
)
LEDGER_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("lineage", pa.string()),
        ("step", pa.int64()),
        ("place", pa.int32()),  # in the batch, from 0; null for a dropped row
        ("shard", pa.string()),
        ("row", pa.int64()),
        ("reason", pa.string()),  # null for a trained row
    ]
)
CHECKPOINT_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("step", pa.int64()),
        ("lineage", pa.string()),
        ("folder", pa.string()),
        ("num_files", pa.int32()),
        ("size_bytes", pa.int64()),
        ("content_hash", pa.string()),
    ]
)
POSITION_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("lineage", pa.string()),
        ("step", pa.int64()),
        ("explore_step", pa.int64()),
        ("slot", pa.int32()),
    ]
)
WEIGHTS_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("version", pa.int64()),
        ("lineage", pa.string()),
        ("folder", pa.string()),
        ("size_bytes", pa.int64()),
        ("content_hash", pa.string()),  # what experiences name as weights_hash
    ]
)

_Read = TypeVar("_Read")


class RunTables:
    """The tables of one run, each read when it is first asked for.

    Example:
        tables = RunTables("runs/project/name")
        tables.table("ledger").to_pandas(); tables.problems
    """

    def __init__(self, url: str | Path) -> None:
        self.stages = open_stages(url)
        self.problems: list[str] = []
        """What could not be read, and is therefore missing from the tables."""
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """One of `TABLES`. All shards that it is made of are held in memory."""
        if name not in self._tables:
            if name == "states":
                self._tables[name] = row_states(
                    self.table("experiences"), self.table("ledger"), self.positions(), self._lost_shards()
                )
            else:
                self._tables[name] = _READERS[name](self)
        return self._tables[name]

    def read_shards(self, stage: Stage, folder: str = EXPERIENCES) -> Iterable[tuple[ShardName, pa.Table]]:
        """Every readable shard of one log with its rows, in the order of the log; columns as in `EXPERIENCE_SCHEMA`."""
        log = open_log(stage.storage, stage.config, folder)
        in_batch = stage.config.tasks_per_unit if folder == EXPERIENCES else None
        for name in log.shards(0):
            table = self._try(partial(log.read, name))
            if table is not None:
                yield name, _with_place(table, stage.name, name, in_batch)

    def positions(self) -> pa.Table:
        """The groups that each ledger entry has settled, as in `POSITION_SCHEMA`."""
        rows = [
            (stage.name, entry.lineage, entry.step, *position)
            for stage, entry in self._entries
            for position in entry.positions
        ]
        columns = list(zip(*rows, strict=True)) or [()] * len(POSITION_SCHEMA)
        return pa.table(dict(zip(POSITION_SCHEMA.names, columns, strict=True)), POSITION_SCHEMA)

    def _lost_shards(self) -> Iterator[LostShard]:
        """Shards that the audit counts, and that the table of experiences does not have."""
        there = set(self.table("experiences")["shard"].unique().to_pylist())
        named = set(self.table("ledger")["shard"].unique().to_pylist())
        for stage in self.stages:
            log = stage.log
            kept = {*log.shards(0), *log.removed(0)}
            damaged = {name for name in log.quarantined() or () if name.text in named and name not in kept}
            # A damaged copy of a batch that ran twice is of no use to anybody: the other one counts.
            repeated = set(repeated_shards({*kept, *damaged})) - set(log.removed(0))
            for name in sorted({*kept, *damaged}):
                if name.text not in there:
                    reason = DAMAGED if name in damaged else REPEAT if name in repeated else None
                    yield LostShard(stage.name, name.text, name.num_rows, reason)

    def _try(self, read: Callable[[], _Read]) -> _Read | None:
        """The result, or None and a line in `problems`: one bad file must not hide the others."""
        try:
            return read()
        except (DamagedError, DataError, NotFoundError) as error:  # DataError: of another schema
            self.problems.append(str(error))
            return None

    def _experiences(self) -> pa.Table:
        return _concat(EXPERIENCE_SCHEMA, (rows for stage in self.stages for _, rows in self.read_shards(stage)))

    def _eval_experiences(self) -> pa.Table:
        folders = [
            (stage, f"eval/{name.rstrip('/')}")
            for stage in self.stages
            for name in stage.storage.list("eval")
            if name.endswith("/")
        ]
        return _concat(
            EXPERIENCE_SCHEMA, (rows for stage, folder in folders for _, rows in self.read_shards(stage, folder))
        )

    def _ledger(self) -> pa.Table:
        return _concat(LEDGER_SCHEMA, (_entry_table(stage.name, entry) for stage, entry in self._entries))

    @cached_property
    def _entries(self) -> list[tuple[Stage, LedgerEntry]]:
        """The ledger entries of all lineages, by stage."""
        entries: list[tuple[Stage, LedgerEntry]] = []
        for stage in self.stages:
            lineages = [name.rstrip("/") for name in stage.storage.list("ledger") if name.endswith("/")]
            entries += [(stage, entry) for lineage in lineages for entry in self._read_ledger(stage, lineage)]
        return entries

    def _read_ledger(self, stage: Stage, lineage: str) -> list[LedgerEntry]:
        ledger = Ledger(stage.storage, lineage)
        names = (name.removesuffix(".json") for name in stage.storage.list(f"ledger/{lineage}"))
        steps = sorted(int(name) for name in names if name.isdecimal())

        def read(step: int) -> LedgerEntry | None:
            return self._try(partial(ledger.read, step))

        return [entry for entry in in_order(read, steps, _NUM_READERS) if entry is not None]

    def _checkpoints(self) -> pa.Table:
        rows = []
        for stage in self.stages:
            for step in checkpoint_steps(stage.storage):
                manifest = self._manifest(stage, checkpoint_folder(step))
                if manifest is not None:
                    common = _folder_row(stage, checkpoint_folder(step), manifest)
                    rows.append({**common, "step": step, "num_files": len(manifest.files)})
        return pa.Table.from_pylist(rows, CHECKPOINT_SCHEMA)

    def _weights(self) -> pa.Table:
        """Published folders, then the weights that checkpoints keep of versions whose folder is gone."""
        rows = []
        for stage in self.stages:
            published = published_versions(stage.storage)
            folders = [weights_folder(version) for version in published]
            folders += [checkpoint_folder(s) for s in checkpoint_steps(stage.storage) if s not in published]
            for folder in folders:
                manifest = self._manifest(stage, folder)
                if manifest is not None and CHECKPOINT_MODEL_FILE in manifest.files:
                    manifest = as_published(manifest)
                if manifest is not None:
                    rows.append({**_folder_row(stage, folder, manifest), "version": manifest.version})
        return pa.Table.from_pylist(rows, WEIGHTS_SCHEMA)

    def _manifest(self, stage: Stage, folder: str) -> Manifest | None:
        return self._try(partial(read_manifest, stage.storage, folder))

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
                frame = frame.rename(columns={"step": first[1]}).drop(columns="role")
                frames.append(frame.assign(stage=stage.name))
        if not frames:
            kinds = {"stage": pa.string(), "taskset": pa.string()}
            return pa.schema([(name, kinds.get(name, pa.int64())) for name in first]).empty_table()
        frame = pd.concat(frames, ignore_index=True)
        order = [name for name in first if name in frame] + [name for name in frame if name not in first]
        return pa.Table.from_pandas(frame[order], preserve_index=False).replace_schema_metadata(None)


_READERS: dict[str, Callable[[RunTables], pa.Table]] = {
    "experiences": RunTables._experiences,
    "ledger": RunTables._ledger,
    "steps": RunTables._steps,
    "checkpoints": RunTables._checkpoints,
    "evals": RunTables._evals,
    "eval_experiences": RunTables._eval_experiences,
    "weights": RunTables._weights,
}
TABLES = (*_READERS, "states")
"""Names of all tables; docs/lineage.md says what their columns mean."""


def as_published(checkpoint: Manifest) -> Manifest:
    """The manifest that publishing the policy of a checkpoint gives, and so the hash its experiences carry."""
    files = {MODEL_FILE: checkpoint.files[CHECKPOINT_MODEL_FILE]}
    return Manifest(checkpoint.lineage, checkpoint.version, files)


def _concat(schema: pa.Schema, tables: Iterable[pa.Table]) -> pa.Table:
    # A log of a later minor version has more columns; what an older shard lacks of them is null.
    return pa.concat_tables([schema.empty_table(), *tables], promote_options="default")


def _with_place(table: pa.Table, stage: str, name: ShardName, tasks_per_unit: int | None) -> pa.Table:
    """The table with the columns that say where a row is; its slot, if it is known how many tasks a unit has."""
    size = table.num_rows
    place = {
        "stage": pa.array([stage] * size, pa.string()),
        "shard": pa.array([name.text] * size, pa.string()),
        "row": pa.array(range(size), pa.int32()),
        "slot": pa.array(
            np.zeros(size, np.int64) if tasks_per_unit is None else group_slots(table, name, tasks_per_unit),
            pa.int32(),
            mask=np.full(size, tasks_per_unit is None),
        ),
    }
    columns = {**place, **dict(zip(table.column_names, table.columns, strict=True))}
    return pa.table(columns)


def _entry_table(stage: str, entry: LedgerEntry) -> pa.Table:
    use = [(rows.source, row, None) for rows in entry.use for row in rows.rows]
    drop = [(rows.source, row, rows.reason) for rows in entry.drop for row in rows.rows]
    lines = [*use, *drop]
    columns = {
        "stage": [stage] * len(lines),
        "lineage": [entry.lineage] * len(lines),
        "step": [entry.step] * len(lines),
        "place": [*range(len(use)), *[None] * len(drop)],
        "shard": [line[0] for line in lines],
        "row": [line[1] for line in lines],
        "reason": [line[2] for line in lines],
    }
    return pa.table(columns, schema=LEDGER_SCHEMA)


def _folder_row(stage: Stage, folder: str, manifest: Manifest) -> dict[str, object]:
    return {
        "stage": stage.name,
        "lineage": manifest.lineage,
        "folder": folder,
        "size_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "content_hash": manifest.content_hash,
    }
