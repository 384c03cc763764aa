"""Promises of a shard: its name has everything a planner needs."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import Part, ShardName
from tests.unit.buffer.buffer_cases import experience, new_storage


def test_a_name_has_step_unit_writer_rows_versions_and_checksum() -> None:
    log = ParquetLog(storage := new_storage())
    log.writer = "9f3a61c2b07d"
    rows = [
        experience(task, k, min_policy_version=task, max_policy_version=task + 2) for task in (4, 5) for k in (0, 1)
    ]
    name = log.commit(rows, explore_step=12, unit=3)
    data = storage.get(log.path(name))
    assert name.text == f"00000012-0003-9f3a61c2b07d-n4-v4-7-{zlib.crc32(data):08x}.parquet"
    assert ShardName.try_parse(name.text) == name


@given(
    st.builds(
        ShardName,
        explore_step=st.integers(0, 10**11),
        unit=st.integers(0, 10**6),
        writer=st.text("0123456789abcdef", min_size=1, max_size=12),
        num_rows=st.integers(0, 10**6),
        min_policy_version=st.integers(0, 10**9),
        max_policy_version=st.integers(0, 10**9),
        crc32=st.integers(0, 2**32 - 1),
        part=st.none()
        | st.sets(st.integers(0, 9), min_size=1).map(lambda slots: Part(tuple(sorted(slots)), num_tasks=10)),
    )
)
def test_a_name_is_read_back_from_its_text(name: ShardName) -> None:
    assert ShardName.try_parse(name.text) == name


@given(st.text("0123456789-nvabcdef.parquet", max_size=60) | st.text(max_size=20))
def test_a_parsed_shard_name_has_the_parsed_text(text: str) -> None:
    name = ShardName.try_parse(text)
    assert name is None or name.text == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "README.md", "SEALED.json", "00000012-0003-9f3a-n4-v4-7-1c291ca3.parquet.reason.json"),
        "000000012-0003-9f3a-n4-v4-7-1c291ca3.parquet",  # more zeros: it would be looked for at another path
    ],
)
def test_a_file_of_somebody_else_has_no_name(text: str) -> None:
    assert ShardName.try_parse(text) is None
