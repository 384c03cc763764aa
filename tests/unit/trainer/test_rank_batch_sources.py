"""Promises of the trainer's data: a config section names dataset, columns and order, and section `buffer` the sizes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rftdask.algorithm.compose import build_algorithm
from rftdask.config import Config, load_config
from rftdask.config.plan import plan_work
from rftdask.data.tokenizer import load_tokenizer
from rftdask.driver.preflight import check_inputs
from rftdask.errors import DataError, WaitTimeout
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.trainer.rank import build_source

RAW = {"prompt_type": "raw"}
ROWS = [{"prompt": f"{n}", "response": "!"} for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_toy_model(folder, num_layers=1)
    return folder


def config(
    folder: Path, model: Path, algorithm: str = "sft", buffer: dict[str, Any] | None = None, **section: Any
) -> Config:
    return load_config(
        {
            "mode": "train",
            "checkpoint_root_dir": str(folder / "runs"),
            "model": {"model_path": str(model), "max_model_len": 64},
            "algorithm": {"algorithm_type": algorithm},
            "buffer": {"batch_size": 2, "trainer_input": {"experience_buffer": section}, **(buffer or {})},
        }
    )


def batches(stage: Config) -> list[list[str]]:
    """Texts of the sequences, by batch."""
    source = build_source(stage, open_storage(stage.checkpoint_job_dir), build_algorithm(stage))
    tokenizer = load_tokenizer(stage)
    found: list[list[str]] = []
    while (entry := source.entry(len(found) + 1)) is not None:
        batch = source.read(entry)
        ends = np.cumsum(batch.lengths)
        rows = np.split(batch.tokens, ends[:-1])
        found.append([tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows])
    return found


def write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rows_come_from_the_split_and_subset_of_the_path(tmp_path: Path, model: Path) -> None:
    for name, prompt in (("easy/train", "a"), ("easy/test", "b"), ("hard/train", "c"), ("hard/test", "d")):
        write(tmp_path / "data" / f"{name}.jsonl", [{"prompt": prompt, "response": f"{n}"} for n in range(2)])
    section: dict[str, Any] = {"path": str(tmp_path / "data"), "subset_name": "hard", "split": "test", "format": RAW}
    assert batches(config(tmp_path, model, **section)) == [["d0", "d1"]]


@pytest.mark.parametrize("chosen", [{"subset_name": "sums"}, {"name": "sums"}])
def test_a_table_is_the_subset_or_else_the_name(tmp_path: Path, model: Path, chosen: dict[str, str]) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in ("sums", "others"):
            connection.exec_driver_sql(f"create table {table} (id integer primary key, prompt text, response text)")
            connection.exec_driver_sql(f"insert into {table} values (1, '{table}', '1'), (2, '{table}', '2')")
    engine.dispose()
    section: dict[str, Any] = {"path": url, "storage_type": "sql", "format": RAW, **chosen}
    assert batches(config(tmp_path, model, **section)) == [["sums1", "sums2"]]


def test_columns_are_those_that_the_format_names(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"q": f"{n}", "a": "!", "worse": "?"} for n in range(2)])
    columns = {**RAW, "prompt_key": "q", "response_key": "a"}
    assert batches(config(tmp_path, model, path=str(file), format=columns)) == [["0!", "1!"]]
    columns = {**RAW, "prompt_key": "q", "chosen_key": "a", "rejected_key": "worse"}
    found = batches(config(tmp_path / "dpo", model, "dpo", path=str(file), format=columns))
    assert found == [["0!", "0?", "1!", "1?"]]


def test_chats_and_tools_come_from_the_named_columns(tmp_path: Path, model: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [{"chat": chat, "functions": [{"name": "add"}]}] * 2
    tools = tmp_path / "template.jinja"
    tools.write_text(
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    stage = config(
        tmp_path,
        model,
        path=str(write(tmp_path / "rows.jsonl", rows)),
        format={"messages_key": "chat", "tools_key": "functions"},
    )
    stage = load_config(stage.to_dict(), [f"model.chat_template_path={tools}"])
    assert batches(stage) == [["[add]<hi><yo>"] * 2]


def test_a_shuffle_has_the_order_of_its_seed(tmp_path: Path, model: Path) -> None:
    path = str(write(tmp_path / "rows.jsonl", ROWS))
    orders = []
    for number, selector in enumerate(
        ({"selector_type": "sequential"}, *({"selector_type": "shuffle", "seed": seed} for seed in (1, 2, 1)))
    ):
        stage = config(tmp_path / str(number), model, path=path, format=RAW, data_selector=selector)
        orders.append([text for batch in batches(stage) for text in batch])
    assert orders[0] == [f"{n}!" for n in range(6)]
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[1] == orders[3] and len({tuple(order) for order in orders}) == 3


def test_the_sizes_of_the_buffer_cut_the_dataset(tmp_path: Path, model: Path) -> None:
    section: dict[str, Any] = {"path": str(write(tmp_path / "rows.jsonl", ROWS)), "format": RAW}
    sizes = [
        [len(batch) for batch in batches(config(tmp_path / str(number), model, buffer=buffer, **section))]
        for number, buffer in enumerate(({"batch_size": 3}, {"train_batch_size": 4}, {"total_epochs": 2}))
    ]
    assert sizes == [[3, 3], [4], [2] * 6]


def test_the_steps_of_the_buffer_decide_in_place_of_its_epochs(tmp_path: Path, model: Path) -> None:
    section: dict[str, Any] = {"path": str(write(tmp_path / "rows.jsonl", ROWS)), "format": RAW}
    stage = config(tmp_path, model, buffer={"batch_size": 4, "total_steps": 2}, **section)
    assert [text for batch in batches(stage) for text in batch] == [f"{n}!" for n in (0, 1, 2, 3, 4, 5, 0, 1)]
    assert plan_work(stage, {"dataset": len(ROWS)}).train_steps == 2
    [inputs] = check_inputs([load_config(stage.to_dict(), ["buffer.batch_size=8", "buffer.train_batch_size=8"])])
    assert inputs.sizes == {"dataset": len(ROWS)}


def test_waiting_too_long_for_experiences_raises(tmp_path: Path, model: Path) -> None:
    stage = config(tmp_path, model, "grpo", max_read_timeout=0.05)
    source = build_source(stage, open_storage(stage.checkpoint_job_dir), build_algorithm(stage))
    with pytest.raises(WaitTimeout, match="max_read_timeout"):
        source.entry(1, patience_s=1.0)


def test_a_row_without_use_is_reported_with_its_dataset(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": "7", "response": None}])
    with pytest.raises(DataError, match=f"dataset {path}: row 1: column 'response' holds NoneType, not text"):
        batches(config(tmp_path, model, path=str(path), format=RAW))
