"""Promises of `rftdask data export`: rows for offline training, each with the experience that it was made from."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Status
from rftdask.cli.results.data_export import export
from rftdask.errors import DataError, UserError
from tests.unit.reports.lineage.lineage_cases import Case, conversation, make_config, make_run


@pytest.fixture
def case(tmp_path: Path) -> Case:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"{n}?", "response": "A1", "n": n}) + "\n" for n in range(6)))
    taskset = {"name": "sums", "path": str(tasks)}
    config = make_config(str(tmp_path), buffer={"batch_size": 4, "explorer_input": {"taskset": taskset}})
    return make_run(str(tmp_path), config)


def rows(case: Case, path: Path, kind: Any, where: str = "") -> tuple[list[dict[str, Any]], dict[str, int]]:
    written, dropped = export(case.url, str(path), kind, where)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == written
    return found, dict(dropped)


def test_answers_are_sft_rows_with_their_origin(case: Case, tmp_path: Path) -> None:
    found, dropped = rows(case, tmp_path / "sft.jsonl", "sft", "reward >= 1 or error <> ''")
    assert [(row["prompt"], row["response"], row["step"]) for row in found] == [
        *(("?", "A1", 1), ("?", "B1", 1), ("?", "C1", 2)),
        *(("?", "E1", None), ("?", "F1", None)),
    ]
    assert found[2]["uid"] == "sums/0/2/1/0" and found[2]["run"] == case.url and found[2]["policy_version"] == 0
    assert dropped == {"without a reward (failed, timed out or filtered)": 1}
    assert len(rows(case, tmp_path / "sft.jsonl", "sft", "state = 'trained' and step = 1")[0]) == 4


def test_each_answer_of_a_conversation_is_a_row(case: Case, tmp_path: Path) -> None:
    log = ParquetLog(case.storage)
    cut = conversation(1)
    log.commit([conversation(0), cut.__class__(**{**vars(cut), "status": Status.TRUNCATED})], explore_step=3, unit=0)
    found, dropped = rows(case, tmp_path / "turns.jsonl", "sft", "explore_step = 3")
    assert [(row["prompt"], row["response"]) for row in found] == [("?", "Hi"), ("?Hi<2+2=4>", "4")]
    assert dropped == {"cut at the token limit: the answer has no end to learn": 1}
    with pytest.raises(UserError, match=r"nothing to write: 1 cut at the token limit.*; 1 groups whose rewards"):
        export(case.url, str(tmp_path / "p.jsonl"), "dpo", "explore_step = 3")


def test_best_and_worst_of_a_group_are_a_pair(case: Case, tmp_path: Path) -> None:
    found, dropped = rows(case, tmp_path / "dpo.jsonl", "dpo")
    assert [(row["chosen"], row["rejected"], row["chosen_reward"]) for row in found][:2] == [
        ("A1", "A0", 1.0),
        ("B1", "B0", 1.0),
    ]
    assert (found[0]["uid"], found[0]["rejected_uid"]) == ("sums/0/0/1/0", "sums/0/0/0/0")
    # Of task 3 one rollout failed, so it has no pair.
    assert len(found) == 5 and dropped["groups whose rewards are all the same"] == 1


def test_tasks_are_dataset_rows_with_reward_statistics(case: Case, tmp_path: Path) -> None:
    written, _ = export(case.url, str(tmp_path / "tasks.parquet"), "tasks", "task_index < 4")
    table = pq.read_table(tmp_path / "tasks.parquet").to_pylist()
    assert written == 4
    assert [(row["n"], row["mean_reward"], row["std_reward"], row["num_rollouts"]) for row in table] == [
        *((n, 0.5, 0.5, 2) for n in range(3)),
        (3, 0.0, 0.0, 1),
    ]
    assert (table[2]["task"], table[2]["step"], table[2]["run"]) == ("sums/2", 2, case.url)


def test_invalid_exports_raise(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must end in \.jsonl or \.parquet"):
        export(case.url, "rows.csv", "sft")
    with pytest.raises(UserError, match=r"(?s)rewards.*docs/lineage\.md"):
        export(case.url, str(tmp_path / "a.jsonl"), "sft", "rewards > 1")
    with pytest.raises(UserError, match="nothing to write: no experience matches"):
        export(case.url, str(tmp_path / "a.jsonl"), "sft", "reward > 1")
    with pytest.raises(DataError):
        export(str(tmp_path / "none"), str(tmp_path / "a.jsonl"), "sft")
