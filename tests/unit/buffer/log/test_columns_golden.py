"""Promises for kept runs: a log of an earlier version can be read, audited and trained from, and columns of a later
minor version are kept.
"""

import io
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger, Rows
from rftdask.buffer.batches.log_source import EntryReader
from rftdask.buffer.log.columns import SCHEMA, decode_parquet, experiences_to_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import SCHEMA_VERSION
from rftdask.buffer.log.shard import Part, ShardName
from rftdask.storage import Storage, open_storage
from tests.unit.buffer.buffer_cases import batch_of, experience, make_source, new_storage, parquet_shard
from tests.unit.buffer.log import golden_log

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    shutil.copytree(GOLDEN / request.param, tmp_path / request.param)
    return open_storage(str(tmp_path / request.param))


def test_a_small_golden_log_of_the_current_schema_exists() -> None:
    assert SCHEMA_VERSION in VERSIONS, "write one: see golden_log.py"
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*.*")) < 32_000 * len(VERSIONS)


def test_every_column_of_a_golden_log_is_read(golden: Storage) -> None:
    log = ParquetLog(golden)
    names = log.shards()
    parts = {(name.explore_step, name.part) for name in names}
    assert parts == {(2, None), (3, Part((0,), num_tasks=2)), (3, Part((1,), num_tasks=2))}
    for name in names:
        slots = name.part.slots if name.part is not None else (0, 1)
        step, version = name.explore_step, golden.url.rpartition("/")[2]
        written = [row for slot in slots for row in golden_log.rows(step, 2 * step + slot, version)]
        expected = experiences_to_table(written, run="golden")
        assert log.read(name).select(SCHEMA.names).to_pylist() == expected.to_pylist()


def test_the_audit_of_a_golden_log_includes_removed_shards(golden: Storage) -> None:
    log = ParquetLog(golden)
    assert [name.explore_step for name in log.removed()] == [1]
    found = audit_log(log, Ledger(golden), tasks_per_unit=2)
    assert (found.committed, found.trained, found.waiting) == (12, 9, 2)
    assert (dict(found.dropped), found.problems) == ({"failed": 1}, ())


def test_a_trainer_goes_on_from_a_golden_log(golden: Storage) -> None:
    source = make_source(golden, groups_per_batch=1, tasks_per_step=2, tasks_per_batch=2)
    source.load_state_dict({"low": 2, "beyond": []})
    batches = [batch_of(source, step) for step in (3, 4, 5, 6)]
    assert [batch[1].uids for batch in batches if batch is not None] == [
        ("golden/0/4/0/0", "golden/0/4/1/0"),
        ("golden/0/5/0/0",),
        ("golden/0/6/0/0", "golden/0/6/1/0"),
        ("golden/0/7/0/0", "golden/0/7/1/0"),
    ]
    first = batches[0]
    assert first is not None
    assert first[1].tokens.tolist() == [1, 2, 151_935, 4, 0, 9, 1, 2, 151_935, 4, 1, 9]
    assert first[1].loss_mask.tolist() == [True, False, False, True, True, True, True, True]
    assert first[1].rewards.tolist() == [4.0, 4.5]


def of_a_later_version() -> tuple[ShardName, bytes]:
    """A shard with a column that this version does not know."""
    name, data = parquet_shard([experience(1, 0), experience(1, 1)])
    table = decode_parquet(name, data).append_column(pa.field("mood", pa.string()), pa.array(["calm", None]))
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"rftdask.schema": "1.99"}), sink)
    return replace(name, crc32=zlib.crc32(sink.getvalue())), sink.getvalue()


def test_columns_of_a_later_minor_version_are_kept() -> None:
    later, data = of_a_later_version()
    own = replace(later, explore_step=2, num_rows=1)
    reader = EntryReader(ParquetLog(new_storage()))
    reader.keep(later, decode_parquet(later, data))
    reader.keep(own, experiences_to_table([experience(2, 0)]))
    taken = reader.rows([Rows(own.text, (0,)), Rows(later.text, (1, 0))])
    assert taken.column("mood").to_pylist() == [None, None, "calm"]
    assert taken.select(SCHEMA.names).column("uid").to_pylist() == ["t/0/2/0/0", "t/0/1/1/0", "t/0/1/0/0"]
