"""Promises of the order of tasks: each taskset has its own selector, and the difficulty is read from the rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftdask.config import Config, load_config
from rftdask.errors import ConfigError, DataError
from rftdask.explorer.task_order import fixed_order

EASY = [0.1, 0.9, 0.5, 0.9]
EASY_TO_HARD = [3, 1, 2, 0]


def config(folder: Path, selectors: list[dict[str, Any]], easy: list[Any] | None = None) -> Config:
    rows = [{"prompt": f"{i}", "response": "x", "easy": value} for i, value in enumerate(easy or EASY)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasksets = [{"path": str(folder / "tasks.jsonl"), "data_selector": selector} for selector in selectors]
    return load_config(
        {
            "model": {"model_path": "none", "max_model_len": 64},
            "buffer": {"batch_size": 4, "explorer_input": {"tasksets": tasksets}},
        }
    )


def epoch(config: Config, number: int) -> dict[int, list[int]]:
    tasksets = config.buffer.explorer_input.train_tasksets
    sizes = {taskset.name: len(EASY) for taskset in tasksets}
    tasks = fixed_order(tasksets, sizes, batch_size=sum(sizes.values()))(number + 1)
    return {n: [task.index for task in tasks if task.taskset_number == n] for n in range(len(tasksets))}


EASY2HARD = {"selector_type": "offline_easy2hard", "feature_keys": ["easy"]}


def test_easy_to_hard_is_the_same_in_every_epoch(tmp_path: Path) -> None:
    stage = config(tmp_path, [EASY2HARD])
    assert [epoch(stage, k)[0] for k in (0, 1)] == [EASY_TO_HARD, EASY_TO_HARD]


def test_each_taskset_has_its_own_selector(tmp_path: Path) -> None:
    shuffle = {"selector_type": "shuffle", "seed": 3}
    stage = config(tmp_path, [EASY2HARD, {"selector_type": "sequential"}, shuffle])
    epochs = [epoch(stage, k) for k in range(6)]
    assert all(orders[0] == EASY_TO_HARD and orders[1] == [0, 1, 2, 3] for orders in epochs)
    assert len({tuple(orders[2]) for orders in epochs}) > 1


def test_a_shuffle_depends_on_its_seed(tmp_path: Path) -> None:
    seeds = (3, 4, 3)
    orders = [
        [epoch(config(tmp_path, [{"selector_type": "shuffle", "seed": seed}]), k)[0] for k in range(6)]
        for seed in seeds
    ]
    assert orders[0] == orders[2] != orders[1]


def test_task_selector_is_an_old_name_of_data_selector(tmp_path: Path) -> None:
    tree = config(tmp_path, [{}]).to_dict()
    [taskset] = tree["buffer"]["explorer_input"]["tasksets"]
    del taskset["data_selector"]
    taskset["task_selector"] = EASY2HARD
    assert epoch(load_config(tree), 0)[0] == EASY_TO_HARD


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        ([{"selector_type": "random"}, {}], "random cannot be mixed"),
        ([{"selector_type": "shuffle", "seed": 1}, {"selector_type": "shuffle", "seed": 2}], "seed differs"),
        ([{"selector_type": "offline_easy2hard"}], "feature_keys is required"),
        ([{"selector_type": "difficulty_based", "feature_keys": ["easy"]}], "must be 2 columns"),
        ([{"selector_type": "difficulty_based", "feature_keys": ["easy", "easy"]}, {}], "takes one taskset, not 2"),
        ([{"selector_type": "shuffle", "kwargs": {"tau": 1}}], "shuffle takes no arguments"),
        ([{"selector_type": "shufle"}], "unknown selector 'shufle'; did you mean shuffle"),
        (
            [{"selector_type": "difficulty_based", "feature_keys": ["easy", "easy"], "kwargs": {"taw": 1}}],
            "kwargs.taw: unknown argument; did you mean tau",
        ),
    ],
)
def test_incompatible_selectors_are_refused(tmp_path: Path, selectors: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, selectors)


def test_easy_to_hard_is_for_training_tasks_only(tmp_path: Path) -> None:
    tree = config(tmp_path, [{}]).to_dict()
    tree["buffer"]["trainer_input"]["experience_buffer"]["data_selector"] = EASY2HARD
    with pytest.raises(ConfigError, match="is for training tasksets"):
        load_config(tree)


@pytest.mark.parametrize("cell", [None, "hard", float("nan"), True])
def test_a_non_numeric_difficulty_is_named_with_its_row(tmp_path: Path, cell: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: column 'easy' \(data_selector.feature_keys\) is "):
        epoch(config(tmp_path, [EASY2HARD], easy=[0.1, cell, 0.5, 0.9]), 0)


def test_a_missing_column_is_named_with_its_key(tmp_path: Path) -> None:
    selector = {"selector_type": "offline_easy2hard", "feature_keys": ["easi"]}
    with pytest.raises(DataError, match=r"no column 'easi', which data_selector.feature_keys names.*nearest: 'easy'"):
        epoch(config(tmp_path, [selector]), 0)
