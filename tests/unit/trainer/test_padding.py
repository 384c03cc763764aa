"""Promises of the cut into micro-batches: every row once, within the limits, no pair parted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rftdask.trainer.engines.padding import micro_batches, pad


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 80),
    st.none() | st.integers(1, 5),
    st.sampled_from([1, 2]),
)
def test_every_row_once_within_the_limits_and_with_its_neighbors(
    lengths: list[int], max_tokens: int, max_rows: int | None, unit: int
) -> None:
    array = np.array(lengths * unit)
    parts = micro_batches(array, max_tokens=max_tokens, max_rows=max_rows, unit=unit)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(array)))
    for part in parts:
        pairs = part.reshape(-1, unit)
        assert (pairs == pairs[:, :1] // unit * unit + np.arange(unit)).all()
        if len(part) > unit:
            assert len(part) * array[part].max() <= max_tokens
            assert max_rows is None or len(part) <= max_rows


def test_rows_are_padded_with_zeros_at_the_end() -> None:
    assert pad([np.array([1, 2]), np.array([], np.int64), np.array([3])], np.int64).tolist() == [[1, 2], [0, 0], [3, 0]]
