"""Curation: what is kept of the selected groups when a batch is formed, and the rewards they are trained with.

A base that keeps everything. It is pure: what it says of rows follows from the rows and the step, so that a replay of
the ledger trains the same numbers. Invariant: a row's reward does not depend on which other rows are there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

BASELINE = "baseline"
"""Reason of rows that are not trained because their reward is the baseline of their group."""


class Curation:
    """Keeps every row and its reward."""

    columns: tuple[str, ...] = ()
    """Of the rows, what it looks at beside `BATCH_COLUMNS` and their status."""

    def reasons(self, table: pa.Table, step: int) -> list[str]:
        """Why each row of whole groups (schema of experiences, trainable rows) is dropped at this step; "" keeps it."""
        return [""] * len(table)

    def rewards(self, table: pa.Table) -> np.ndarray:
        """[N] float32 rewards to train with."""
        return np.asarray(table.column("reward").to_numpy(zero_copy_only=False), dtype=np.float32)


def with_rewards(table: pa.Table, rewards: np.ndarray) -> pa.Table:
    """The rows with these rewards in place of the recorded ones."""
    place = table.schema.get_field_index("reward")
    return table.set_column(place, table.schema.field(place), pa.array(rewards, pa.float32()))
