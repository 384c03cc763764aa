"""States: where each experience is: trained at a step, dropped for a reason, or waiting. A pure rule over two tables.

It gives for each row what `buffer.audit` gives as counts. Invariant: every experience has at least one line; it has
several only where several ledger lines name it (a lineage of its own, or a strategy that uses rows again).
"""

from __future__ import annotations

import pyarrow as pa

from rftdask.buffer.audit import REPEAT

TRAINED, DROPPED, WAITING = "trained", "dropped", "waiting"

STATE_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("uid", pa.string()),
        ("state", pa.string()),
        ("reason", pa.string()),  # null unless dropped
        ("lineage", pa.string()),  # null where the ledger does not name the row
        ("step", pa.int64()),  # in whose ledger entry it is; null as above
    ]
)

_PLACE = ["stage", "shard", "row"]
_GROUP = ["stage", "explore_step", "taskset", "epoch", "task_index"]


def row_states(experiences: pa.Table, ledger: pa.Table) -> pa.Table:
    """Lines of `STATE_SCHEMA` for the rows of `experiences`, in their order.

    A rollout batch that ran twice stands in two shards. Of each group one copy is taken, or will be (the first, while
    none is taken); the rows of the other are dropped as "repeat", which the ledger does not write down.
    """
    if not experiences.num_rows:
        return STATE_SCHEMA.empty_table()
    rows = experiences.select([*_PLACE, "uid", *_GROUP[1:]]).to_pandas()
    lines = ledger.select([*_PLACE, "lineage", "step", "reason"]).to_pandas().astype({"step": "Int64"})
    found = rows.merge(lines, how="left", on=_PLACE)
    named = found["step"].notna()
    copy = found.groupby([*_GROUP, "shard"], sort=False).ngroup()
    group = found.groupby(_GROUP, sort=False).ngroup()
    is_taken = named.groupby(copy).transform("any")
    some_copy_is_taken = named.groupby(group).transform("any")
    is_first = found["shard"] == found["shard"].groupby(group).transform("min")
    is_repeat = ~named & ~is_taken & (some_copy_is_taken | ~is_first)
    found["reason"] = found["reason"].astype(object).where(~is_repeat, REPEAT)
    found["state"] = WAITING
    found.loc[named, "state"] = TRAINED
    found.loc[found["reason"].notna(), "state"] = DROPPED
    return pa.Table.from_pandas(found[STATE_SCHEMA.names], schema=STATE_SCHEMA, preserve_index=False).cast(STATE_SCHEMA)
