"""Promises of tasksets: the format maps columns to tasks, and a wrong column fails before the first rollout."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rftdask.config import load_config
from rftdask.config.schema.buffer import FormatConfig, TasksetConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.tasksets import Taskset, final_answer, truth_text
from rftdask.errors import ConfigError, DataError

ROW = {"question": "1+1?", "answer": "One and one is <<1+1=2>>2.\n#### 2", "style": "terse"}
CHAT = [{"role": "system", "content": "own"}, {"role": "user", "content": "1+1?"}]


def taskset(*rows: dict[str, Any], **changes: Any) -> Taskset:
    reward_fn = changes.pop("reward_fn", None)
    config = TasksetConfig(
        name="sums",
        path="sums.jsonl",
        format=FormatConfig(**{"prompt_key": "question", "response_key": "answer", **changes}),
        default_workflow_type="math_workflow",
        default_reward_fn_type=reward_fn,
    )
    return Taskset(config, RowsDataset([list(rows)], "f"))


def test_a_text_prompt_becomes_a_chat_with_the_system_prompt() -> None:
    task = taskset(ROW, system_prompt="Be kind.", reply_prefix="Well, ").task(2, 0)
    assert task.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Well, "},
    )
    assert (task.group_id, task.prompt, task.truth, task.workflow) == ("sums/2/0", "1+1?", "2", "math_workflow")
    assert task.row == ROW


def test_a_system_prompt_of_the_row_wins() -> None:
    rows = [ROW, {**ROW, "style": None}]
    tasks = taskset(*rows, system_prompt="general", system_prompt_key="style")
    assert [tasks.task(0, index).messages[0]["content"] for index in (0, 1)] == ["terse", "general"]


def test_plaintext_prompts_win_over_a_messages_column() -> None:
    task = taskset({**ROW, "message": CHAT}, prompt_type="plaintext").task(0, 0)
    assert (task.prompt, task.messages) == ("1+1?", ({"role": "user", "content": "1+1?"},))


def test_a_raw_prompt_stays_as_it_is() -> None:
    task = taskset(ROW, prompt_type="raw", system_prompt="unused", reply_prefix=" =").task(0, 0)
    assert (task.prompt, task.messages) == ("1+1? =", ())


@pytest.mark.parametrize("changes", [{"messages_key": "chat"}, {"prompt_key": "chat"}])
def test_a_chat_column_keeps_its_system_prompt(changes: dict[str, str]) -> None:
    tasks = taskset({"chat": CHAT, "answer": 2}, system_prompt="general", **changes)
    tasks.check()
    assert tasks.task(0, 0).messages == tuple(CHAT)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_belong_to_its_task(as_text: bool) -> None:
    tools = [{"name": "add", "parameters": {"x": {"default": None}}}]
    row = {**ROW, "functions": json.dumps(tools) if as_text else tools}
    assert taskset(row, tools_key="functions").task(0, 0).tools == tuple(tools)
    assert taskset(row).task(0, 0).tools == ()
    with pytest.raises(DataError, match="row 0: column 'functions' holds dict, not a list of JSON schemas"):
        taskset({**ROW, "functions": {}}, tools_key="functions").task(0, 0)


def test_a_row_may_name_its_workflow_and_its_reward() -> None:
    rows = [{**ROW, "how": "simple_workflow", "score": ""}, {**ROW, "how": None, "score": "math_reward"}]
    tasks = taskset(*rows, workflow_key="how", reward_fn_key="score", reward_fn="accuracy_reward")
    assert [tasks.task(0, index).workflow for index in (0, 1)] == ["simple_workflow", "math_workflow"]
    assert [tasks.task(0, index).reward_fn for index in (0, 1)] == ["accuracy_reward", "math_reward"]
    assert [task.index for task in tasks.samples()] == [0, 1]
    assert [task.index for task in taskset(*rows, workflow_key="how").samples()] == [0, 1]
    assert [task.index for task in taskset(*rows).samples()] == [0]


def test_a_taskset_may_have_no_answers() -> None:
    tasks = taskset({"question": "Tell a story."}, response_key="")
    tasks.check()
    assert tasks.task(0, 0).truth == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt_key": "questions"},
            "no column 'questions', which format.prompt_key names; columns: .*nearest: 'question'",
        ),
        ({"response_key": "response"}, r'no column \'response\', which format.response_key names .*"" if there are no'),
        ({"workflow_key": "how"}, "no column 'how', which format.workflow_key names"),
        ({"reward_fn_key": "how"}, "no column 'how', which format.reward_fn_key names"),
        ({"system_prompt_key": "how"}, "no column 'how', which format.system_prompt_key names"),
    ],
)
def test_check_reports_a_missing_column_with_the_existing_ones(changes: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        taskset(ROW, **changes).check()


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"question": None, "answer": "2"}, {}, "row 1: column 'question' .* is empty"),
        ({"answer": "2"}, {}, "row 1: .* no column 'question'"),
        ({"question": [1], "answer": "2"}, {}, "row 1: column 'question' is not a list of messages"),
        ({"question": CHAT, "answer": "2"}, {"prompt_type": "plaintext"}, "row 1: .* plaintext needs text"),
        ({"question": CHAT, "answer": "2"}, {"prompt_type": "raw"}, "row 1: .* raw needs text"),
    ],
)
def test_check_names_a_row_that_does_not_fit(row: dict[str, Any], changes: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        taskset(ROW, row, **changes).check()


def test_all_rows_are_checked_and_a_few_may_be_bad(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**ROW, "answer": None if index in (30, 40) else "2"} for index in range(50)]
    bad = "row 30: column 'answer' .* is empty; rows with errors: 2 \\(30, 40\\)"
    for max_bad_rows in (0, 1):
        with pytest.raises(DataError, match=f"{bad}; fix the data, or raise buffer.max_bad_rows .{max_bad_rows}."):
            taskset(*rows).check(max_bad_rows)
    taskset(*rows).check(2)
    assert re.search(f"{bad}; all rollouts of such a task fail", caplog.text)


def test_a_bad_row_is_a_task_with_its_problem() -> None:
    tasks = taskset({**ROW, "answer": None}, ROW)
    assert tasks.task_or_problem(1, 1) == tasks.task(1, 1)
    bad = tasks.task_or_problem(1, 0)
    assert "row 0: column 'answer' (format.response_key) is empty" in bad.problem
    assert (bad.group_id, bad.workflow) == ("sums/1/0", "math_workflow")
    assert [task.index for task in tasks.samples()] == [1], "a trial takes the first usable row"


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("48+24 = 72\n#### 72", "72"),
        ("#### 1,000 \n", "1,000"),
        (" plain ", "plain"),
        ("#### A heading\nand then some text", "#### A heading\nand then some text"),
        (72, "72"),
        (0.5, "0.5"),
        (72.0, "72"),
        (-0.0, "0"),
        (1e-7, "0.0000001"),
        (1e22, "1" + 22 * "0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (np.float32(72.5), "72.5"),
        (np.int64(70), "70"),
        (Decimal("72.00"), "72"),
        (Decimal("700"), "700"),
        (Decimal("3.50"), "3.5"),
        (float("nan"), "nan"),
        (True, "True"),
        (b"72", "72"),
        (b"48+24 = 72\n#### 72", "72"),
        ([b"a", Decimal("2.50")], '["a", "2.5"]'),
        ({"target": 3, "numbers": [1, 2]}, '{"target": 3, "numbers": [1, 2]}'),
    ],
)
def test_the_truth_is_the_final_answer_as_text(answer: Any, truth: str) -> None:
    assert truth_text(answer) == truth


def test_bytes_that_are_no_text_are_refused_as_an_answer() -> None:
    with pytest.raises(DataError, match=r"row 0: column 'answer' .* holds bytes that are not UTF-8: b'\\xff'"):
        taskset({"question": "1+1?", "answer": b"\xff"}).task(0, 0)
    with pytest.raises(DataError, match="column 'style' holds bytes"):
        taskset({**ROW, "style": b"\xff"}, system_prompt_key="style").task(0, 0)


def test_a_mark_in_the_middle_is_not_a_final_answer() -> None:
    assert final_answer("#### 1\n#### 2") == "2"
    assert final_answer("#### 1\nbut no") == "#### 1\nbut no"


def test_environment_variables_are_filled_into_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a key")
    config = TasksetConfig(
        name="sums",
        path="sums.jsonl",
        format=FormatConfig(prompt_key="question", response_key="answer"),
        workflow_args={"judge": {"key": "${oc.env:JUDGE_KEY}"}, "turns": 2},
        reward_fn_args={"keys": ["${oc.env:JUDGE_KEY}!"]},
    )
    tasks = Taskset(config, RowsDataset([[ROW]], "f"))
    assert tasks.task(0, 0).workflow_args == {"judge": {"key": "a key"}, "turns": 2}
    assert tuple(tasks.task(0, 0).reward_fn_args["keys"]) == ("a key!",)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        tasks.task(0, 0)


def loaded(section: dict[str, Any], **source: Any) -> Taskset:
    tree = {"model": {"model_path": "none", "max_model_len": 64}, "buffer": {"explorer_input": source}}
    source["taskset"] = section
    [taskset] = load_config(tree).buffer.explorer_input.train_tasksets
    return Taskset(taskset)


def test_tasks_are_those_of_the_split_and_the_subset_of_the_path(tmp_path: Path) -> None:
    for name in ("easy/train", "easy/test", "hard/train", "hard/test"):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"prompt": name, "response": ""}) + "\n")
    tasks = loaded({"path": str(tmp_path), "subset_name": "hard", "split": "test"})
    assert [tasks.task(0, index).prompt for index in range(len(tasks))] == ["hard/test"]


@pytest.mark.parametrize("chosen", [{"subset_name": "sums"}, {"name": "sums"}])
def test_the_table_is_the_subset_or_else_the_name(tmp_path: Path, chosen: dict[str, str]) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in ("sums", "taskset_0"):
            connection.exec_driver_sql(f"create table {table} (id integer primary key, prompt text, response text)")
            connection.exec_driver_sql(f"insert into {table} values (1, 'of {table}', '1')")
    engine.dispose()
    assert loaded({"path": url, "storage_type": "sql", **chosen}).task(0, 0).prompt == "of sums"


def test_workflow_and_reward_default_to_the_common_ones(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1?", "response": "2"}) + "\n")
    names = {"default_workflow_type": "math_workflow", "default_reward_fn_type": "exact_reward"}
    source = {"taskset": {"path": str(file)}, "eval_tasksets": [{"path": str(file)}], **names}
    tree = {"model": {"model_path": "none", "max_model_len": 64}, "buffer": {"explorer_input": source}}

    def named(*overrides: str) -> list[tuple[str, str]]:
        """Workflow and reward function of a task to train on and of one of an evaluation."""
        found = load_config(tree, overrides).buffer.explorer_input
        tasks = [Taskset(section).task(0, 0) for section in (*found.train_tasksets, *found.eval_tasksets)]
        return [(task.workflow, task.reward_fn) for task in tasks]

    assert named() == [("math_workflow", "exact_reward")] * 2
    of_evaluations = named("buffer.explorer_input.default_eval_workflow_type=grid_workflow")
    assert of_evaluations == [("math_workflow", "exact_reward"), ("grid_workflow", "exact_reward")]
