"""Promises of a stored experience: it reads back as written, and inconsistent values are refused."""

import dataclasses
import io
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger, Rows
from rftdask.buffer.batches.log_source import EntryReader
from rftdask.buffer.log.columns import SCHEMA, decode_parquet, experiences_to_table, mask_to_runs, runs_to_mask
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import SCHEMA_VERSION, Experience, Status, Turn, token_versions
from rftdask.buffer.log.shard import Part, ShardName
from rftdask.storage import Storage, open_storage
from tests.unit.buffer.buffer_cases import batch_of, experience, make_source, new_storage, parquet_shard
from tests.unit.buffer.log import golden_log

FULL = Experience(
    taskset="gsm8k",
    epoch=3,
    task_index=2**40,
    rollout=5,
    explore_step=77,
    turn=2,
    attempt=1,
    status=Status.TRUNCATED,
    tokens=(7, 0, 151_935, 3, 3, 8),
    prompt_length=2,
    rollout_logprobs=(-0.5, 0.0, -17.25, -1.0),
    loss_mask=(False, True, False, True),
    reward=-0.5,
    min_policy_version=10,
    max_policy_version=12,
    weights_hash="9f3a",
    temperature=0.5,
    top_p=0.75,
    top_k=20,
    seed=2**62,
    prompt_text="What is 1+1?",
    response_text="zwei \u00e9 \U0001f600",
    truth="2",
    error="",
    metrics={"accuracy": 1.0, "format": 0.1},
    env_state="at 0,1",
    turn_reward=0.25,
    turns=(Turn(2, 1, 2, 0, 4, "user", 2**62, 10, 10, "at 0,1", 0.25), Turn(3, 3, 4, 4, 8, "tool", 7, 11, 12)),
    routed_experts=np.array([[0, 1], [2, 3], [0, 2], [299, 1], [4, 0]], np.int16),
    version_starts=((0, 10), (3, 12)),
    session="ticket-4711",
)


def test_every_field_of_an_experience_reads_back() -> None:
    row = experiences_to_table([FULL]).to_pylist()[0]
    for field in dataclasses.fields(Experience):
        if field.name == "loss_mask":
            assert row["loss_mask_runs"] == [0, 1, 1, 1, 1]
            assert runs_to_mask(row["loss_mask_runs"], 4) == list(FULL.loss_mask or ())
        elif field.name in ("tokens", "rollout_logprobs"):
            assert row[field.name] == list(getattr(FULL, field.name))
        elif field.name == "turns":
            assert [Turn(**turn) for turn in row["turns"]] == list(FULL.turns or ())
        elif field.name == "routed_experts":
            assert FULL.routed_experts is not None and row["routed_experts"] == FULL.routed_experts.reshape(-1).tolist()
        elif field.name == "version_starts":
            assert [(each["start"], each["policy_version"]) for each in row["version_starts"]] == [(0, 10), (3, 12)]
        elif field.name == "metrics":
            assert dict(row["metrics"]) == dict(FULL.metrics)
        else:
            assert row[field.name] == getattr(FULL, field.name), field.name
    assert row["uid"] == "gsm8k/3/1099511627776/5/2"


def as_arrays(e: Experience) -> Experience:
    return dataclasses.replace(
        e,
        tokens=np.array(e.tokens, np.int32),
        rollout_logprobs=np.array(e.rollout_logprobs, np.float32),
        loss_mask=None if e.loss_mask is None else np.array(e.loss_mask),
    )


def test_an_experience_in_arrays_is_the_same_experience() -> None:
    rows = [FULL, experience(1, 0, tokens=(), prompt_length=0, rollout_logprobs=()), experience(1, 1)]
    arrays = [as_arrays(row) for row in rows]
    assert arrays == rows and rows == arrays
    assert experiences_to_table(arrays).equals(experiences_to_table(rows))
    assert arrays[0] != as_arrays(dataclasses.replace(FULL, tokens=(7, 0, 151_935, 3, 3, 9)))
    assert arrays[0] != dataclasses.replace(FULL, loss_mask=None)


@pytest.mark.parametrize("tokens", [(1, 2, 2**31), np.array([1, 2, 2**31])])
def test_a_token_id_beyond_int32_is_refused(tokens: object) -> None:
    with pytest.raises(OverflowError):
        experiences_to_table([experience(tokens=tokens, prompt_length=0)])


def test_a_uid_does_not_depend_on_the_attempt() -> None:
    assert dataclasses.replace(FULL, attempt=7).uid == FULL.uid


def test_a_failure_is_kept_as_a_null_reward_and_never_as_zero() -> None:
    row = experiences_to_table([experience(status=Status.FAILED, tokens=(), prompt_length=0, rollout_logprobs=())])
    assert row.column("reward").to_pylist() == [None]
    assert row.column("tokens").to_pylist() == [[]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_logprobs": (-0.5, -0.5)}, "t/0/0/0/0: 2 rollout_logprobs for 3 response tokens"),
        ({"loss_mask": (True,)}, "t/0/0/0/0: loss_mask of 1 for 3 response tokens"),
        (
            {"turns": (Turn(0, 0, 2, 0, 1, "user", 1),)},
            "t/0/0/0/0: its last turn does not end with its 3 response tokens",
        ),
        (
            {"version_starts": ((0, 1), (3, 2))},
            r"t/0/0/0/0: version_starts at \[0, 3\] do not begin with its first of 3 ",
        ),
        (
            {"version_starts": ((1, 1), (2, 2))},
            r"t/0/0/0/0: version_starts at \[1, 2\] do not begin with its first of 3 ",
        ),
        ({"reward": None}, "t/0/0/0/0: status ok without a reward"),
        ({"prompt_length": 6, "rollout_logprobs": ()}, "t/0/0/0/0: 0 rollout_logprobs for -1 response tokens"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_naming_the_uid(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiences_to_table([experience(**fields)])


@pytest.mark.parametrize(("status", "trainable"), [(s, s in ("ok", "truncated")) for s in Status])
def test_only_ok_and_truncated_may_be_trained(status: Status, trainable: bool) -> None:
    assert status.trainable is trainable


@given(st.lists(st.booleans(), max_size=40))
def test_run_lengths_are_a_mask_and_back(mask: list[bool]) -> None:
    runs = mask_to_runs(mask)
    assert runs_to_mask(runs, len(mask)) == mask
    assert all(count > 0 for count in runs[1:]), "only the first run may be empty"
    assert sum(runs) in (0, len(mask))


def test_a_mask_that_is_all_true_costs_nothing() -> None:
    assert mask_to_runs(None) == mask_to_runs([True] * 9) == mask_to_runs([]) == []
    assert mask_to_runs([True, True, True, False, False, True]) == [3, 2, 1]


def versions_of(**fields: object) -> list[int | None]:
    [row] = experiences_to_table([dataclasses.replace(FULL, **fields)]).to_pylist()  # type: ignore[arg-type]
    return token_versions(row)


def test_each_token_has_its_policy_version_if_known() -> None:
    # A turn of version 10, and one in which 11 became 12; between them tokens that were not sampled.
    turns = (Turn(2, 0, 1, 0, 4, "user", 1, 10, 10), Turn(3, 2, 4, 4, 8, "tool", 2, 11, 12))
    assert versions_of(turns=turns, version_starts=((0, 10), (2, 11), (3, 12))) == [10, None, 11, 12]
    assert versions_of(turns=turns, version_starts=None) == [10, None, None, None], "a row of before 1.5"
    assert versions_of(turns=None, version_starts=((0, 10), (3, 12))) == [10, 10, 10, 12]
    assert versions_of(turns=None, version_starts=None, max_policy_version=10) == [10] * 4
    assert versions_of(turns=None, version_starts=None) == [None] * 4


def test_the_schema_version_is_in_the_parquet_metadata() -> None:
    table = experiences_to_table([FULL], run="my run")
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata == {b"rftdask.schema": b"1.5", b"rftdask.run": b'"my run"'}


def test_text_invalid_in_utf8_is_stored_as_an_escape() -> None:
    lone, shown = "a\ud800", r"a\ud800"
    texts = dict.fromkeys(("taskset", "prompt_text", "response_text", "truth", "error"), lone)
    turns = (Turn(0, 0, 4, 0, 2, lone, 7, env_state=lone),)
    rows = [dataclasses.replace(FULL, metrics={lone: 1.0}, turns=turns, **texts), FULL]
    first, second = experiences_to_table(rows).to_pylist()
    assert {first[name] for name in texts} == {shown} and first["uid"].startswith(shown)
    assert (first["turns"][0]["source"], first["turns"][0]["env_state"]) == (shown, shown)
    assert dict(first["metrics"]) == {shown: 1.0}
    assert second == experiences_to_table([FULL]).to_pylist()[0]


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
