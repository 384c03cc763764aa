"""States: where each experience is: trained at a step, dropped for a reason, or waiting. A pure rule over tables.

It gives for each row what `buffer.audit` gives as counts, also of the rows that cannot be read any more: those that
retention removed, and those of damaged shards. Invariant: every experience has at least one line; it has several only
where several ledger lines name it (a lineage of its own, or a strategy that uses rows again).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from rftdask.buffer.batches.audit import REPEAT

if TYPE_CHECKING:
    import pandas as pd

TRAINED, DROPPED, WAITING = "trained", "dropped", "waiting"

STATE_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("uid", pa.string()),  # null where the row cannot be read any more
        ("state", pa.string()),
        ("reason", pa.string()),  # null unless dropped
        ("lineage", pa.string()),  # null where the ledger does not name the row
        ("step", pa.int64()),  # in whose ledger entry it is; null as above
    ]
)

_PLACE = ["stage", "shard", "row"]
_POSITION = ["stage", "explore_step", "slot"]
_GROUP = ["stage", "explore_step", "taskset", "epoch", "task_index"]


@dataclass(frozen=True)
class LostShard:
    """A shard of the log whose rows cannot be read, and are known by its name."""

    stage: str
    shard: str
    num_rows: int
    reason: str | None
    """Why those of its rows that no ledger names count as dropped. None: they wait."""


def row_states(
    experiences: pa.Table, ledger: pa.Table, positions: pa.Table | None = None, lost: Iterable[LostShard] = ()
) -> pa.Table:
    """Lines of `STATE_SCHEMA` for the rows of `experiences`, in their order, then for those of the `lost` shards.

    A work unit that ran twice stands in two shards. Of each group one copy is taken, or will be (the first, while
    none is taken); the rows of the other are dropped as "repeat", which the ledger does not write down.

    positions: "stage", "explore_step" and "slot" of the groups that the ledger has settled; a copy whose twin is lost
    is known by them.
    """
    lines = ledger.select([*_PLACE, "lineage", "step", "reason"]).to_pandas().astype({"step": "Int64"})
    parts = [_states_of_rows(experiences, lines, positions), *(_states_of_lost(shard, lines) for shard in lost)]
    tables = [pa.Table.from_pandas(part[STATE_SCHEMA.names], STATE_SCHEMA, preserve_index=False) for part in parts]
    return pa.concat_tables([table.cast(STATE_SCHEMA) for table in tables])


def _states_of_rows(experiences: pa.Table, lines: pd.DataFrame, positions: pa.Table | None) -> pd.DataFrame:
    place = ["slot"] * (positions is not None)
    rows = experiences.select([*_PLACE, "uid", *_GROUP[1:], *place]).to_pandas()
    found = rows.merge(lines, how="left", on=_PLACE)
    named = found["step"].notna()
    copy = found.groupby([*_GROUP, "shard"], sort=False).ngroup()
    group = found.groupby(_GROUP, sort=False).ngroup()
    is_taken = named.groupby(copy).transform("any")
    other_is_taken = named.groupby(group).transform("any")
    if positions is not None:
        settled = positions.select(_POSITION).to_pandas().drop_duplicates().assign(settled=True)
        other_is_taken |= _is_settled(found, settled)
    is_first = found["shard"] == found["shard"].groupby(group).transform("min")
    return _with_states(found, REPEAT, where=~named & ~is_taken & (other_is_taken | ~is_first))


def _states_of_lost(shard: LostShard, lines: pd.DataFrame) -> pd.DataFrame:
    numbers = pa.table({"row": pa.array(range(shard.num_rows), pa.int64())}).to_pandas()
    rows = numbers.assign(stage=shard.stage, shard=shard.shard, uid=None)
    found = rows.merge(lines, how="left", on=_PLACE)
    return _with_states(found, shard.reason, where=found["step"].isna() & (shard.reason is not None))


def _is_settled(found: pd.DataFrame, settled: pd.DataFrame) -> pd.Series:
    """Mark the rows of `found` whose group is settled."""
    marks = found[_POSITION].merge(settled, how="left", on=_POSITION)
    return marks["settled"].notna().set_axis(found.index)


def _with_states(found: pd.DataFrame, reason: str | None, where: pd.Series) -> pd.DataFrame:
    """`found` with its states; `where` rows are dropped for `reason`, which no ledger says."""
    named = found["step"].notna()
    found["reason"] = found["reason"].astype(object).where(~where, reason)
    found["state"] = WAITING
    found.loc[named, "state"] = TRAINED
    found.loc[found["reason"].notna(), "state"] = DROPPED
    return found
