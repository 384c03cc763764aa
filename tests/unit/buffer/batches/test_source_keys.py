"""Promises of the keys of what a run learns from: each has its effect on the rows, their order and their number, of
tasks as of datasets.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.replay_priority import DecayLimitRandomization, make_replay
from rftdask.buffer.batches.source import BatchSource
from rftdask.config import Config, load_config
from rftdask.data.tasksets import Taskset
from rftdask.errors import ConfigError
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.trainer.rank import build_algorithm, build_reader, build_source

_numbers = itertools.count()
BUFFER = "buffer.trainer_input.experience_buffer"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1)
    return folder


def config_for(toy: Path, algorithm: str, *overrides: str, **section: Any) -> Config:
    """A run that learns from `section`: tasks of grpo, rows of others."""
    inputs = {"explorer_input": {"taskset": {"path": "t.jsonl", **section}}}
    if algorithm != "grpo":
        inputs = {"trainer_input": {"experience_buffer": section}}
    tree = {
        "mode": "both" if algorithm == "grpo" else "train",
        "algorithm": {"algorithm_type": algorithm},
        "model": {"model_path": str(toy), "max_model_len": 64},
        "buffer": {"batch_size": 2, **inputs},
    }
    return load_config(tree, overrides)


@pytest.mark.parametrize("algorithm", ["grpo", "cpt"])
@pytest.mark.parametrize("key", ["path", "split", "subset_name", "storage_type"])
def test_rows_are_those_of_path_split_subset_and_table(tmp_path: Path, toy: Path, algorithm: str, key: str) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    for name in ("data/train", "data/test", "data/sub/train", "other/train"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "response": "1"}) + "\n")
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute("create table shown (prompt text, response text)")
        database.execute("insert into shown values ('table', '1')")
    database.close()
    own, found = {
        "path": ({"path": str(other)}, "other/train"),
        "split": ({"path": str(folder), "split": "test"}, "data/test"),
        "subset_name": ({"path": str(folder), "subset_name": "sub"}, "data/sub/train"),
        "storage_type": (
            {"path": f"sqlite:///{tmp_path}/rows.db", "storage_type": "sql", "subset_name": "shown"},
            "table",
        ),
    }[key]
    config = config_for(toy, algorithm, "buffer.total_epochs=1", **own)
    if algorithm == "grpo":
        assert config.buffer.explorer_input.taskset is not None
        dataset = Taskset(config.buffer.explorer_input.taskset).dataset
    else:
        section: Any = config.buffer.trainer_input.experience_buffer
        dataset, _ = build_reader(section, "cpt", config, None)  # type: ignore[arg-type]  # columns alone are read
    assert [row["prompt"] for row in (dataset[n] for n in range(len(dataset)))] == [found]


def rows_of(source: BatchSource, steps: int) -> list[tuple[int, ...]]:
    entries = [source.entry(step, 1.0) for step in range(1, steps + 1)]
    return [rows.rows for entry in entries if entry is not None for rows in entry.use]


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("buffer.total_epochs=2", [(0, 1), (2, 3), (0, 1), (2, 3)]),
        ("buffer.train_batch_size=4", [(0, 1, 2, 3)]),
        (f"{BUFFER}.data_selector.selector_type=shuffle", None),
        (f"{BUFFER}.data_selector={{selector_type: shuffle, seed: 5}}", None),
    ],
)
def test_batches_of_a_dataset_follow_its_keys(
    tmp_path: Path, toy: Path, override: str, changes: list[tuple[int, ...]] | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} and more"}) + "\n" for n in range(4)))

    def found(*overrides: str) -> list[tuple[int, ...]]:
        config = config_for(toy, "cpt", "buffer.train_batch_size=2", *overrides, path=str(path))
        storage = open_storage(f"memory://source-keys-{next(_numbers)}")
        return rows_of(build_source(config, storage, build_algorithm(config)), 5)

    assert found() == [(0, 1), (2, 3)]
    if changes is not None:
        assert found(override) == changes
        return
    orders = [tuple(row for rows in found(override, f"seed={seed}") for row in rows) for seed in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    # Drawn by its own seed, or else by that of the run.
    assert (len(set(orders)) == 1) is ("seed: 5" in override)


def test_a_log_is_waited_for_as_long_as_its_key_says(toy: Path) -> None:
    config = config_for(toy, "grpo", f"{BUFFER}.max_read_timeout=7.5", "buffer.total_steps=1")
    source = build_source(config, open_storage(f"memory://source-keys-{next(_numbers)}"), build_algorithm(config))
    assert isinstance(source, LogSource)
    assert source.max_read_timeout_s == 7.5


def test_replay_is_as_its_section_says(toy: Path) -> None:
    at = f"{BUFFER}.replay_buffer"
    usual = config_for(toy, "grpo", "buffer.total_steps=1")
    assert make_replay(usual) is None
    replay = make_replay(
        config_for(
            toy,
            "grpo",
            f"{at}={{enable: true, priority_fn: decay_limit_randomization, reuse_cooldown_time: 7}}",
            f"{at}.priority_fn_args={{decay: 0.25, use_count_limit: 3, sigma: 0.5}}",
            "synchronizer.sync_style=fully_async",
            "buffer.total_steps=1",
        )
    )
    assert replay is not None
    assert replay.priority_fn == DecayLimitRandomization(decay=0.25, use_count_limit=3, sigma=0.5)
    assert replay.reuse_cooldown_s == 7


def test_a_dataset_is_called_as_its_name_says(tmp_path: Path, toy: Path) -> None:
    config = config_for(toy, "sft", f"{BUFFER}.name=shown", "buffer.total_steps=1", path=str(tmp_path))
    assert config.dataset_name == "shown"


def test_images_are_of_tasks_and_features_of_no_order_of_rows(toy: Path) -> None:
    for override, why in (
        (f"{BUFFER}.format.image_key=image", "images are of tasks, and not of rows to learn from"),
        (f"{BUFFER}.data_selector={{selector_type: shuffle, kwargs: {{tau: 1}}}}", "shuffle takes no arguments"),
    ):
        with pytest.raises(ConfigError, match=why):
            config_for(toy, "sft", override, "buffer.total_steps=1", path="rows.jsonl")
