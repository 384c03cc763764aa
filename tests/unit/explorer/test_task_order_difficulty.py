"""Promises of the learned order: it depends only on earlier steps and is the same after a restart."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import load_config
from rftdask.data.task_schedule import TaskRef
from rftdask.errors import DamagedError, UserError
from rftdask.explorer.task_order import LearnedOrder, choice_path, pass_rates, read_choice, store_choice
from rftdask.storage import Storage, open_storage

NUM_TASKS, BATCH_SIZE, REPEAT_TIMES = 12, 4, 2


class World:
    """A run folder with explorers; each step has two work units of two tasks."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        rows = [{"prompt": f"{i}", "response": "x", "weak": 0.0, "strong": 1.0} for i in range(NUM_TASKS)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.storage: Storage = open_storage(folder / "run")
        self.log = ParquetLog(self.storage)
        self.kwargs = {"target_reward": 0.5, "do_sample": True, **kwargs}
        self.tasks_file = folder / "tasks.jsonl"

    def explorer(self) -> LearnedOrder:
        selector = {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"], "kwargs": self.kwargs}
        taskset = {"name": "t", "path": str(self.tasks_file), "data_selector": selector}
        config = load_config(
            {
                "model": {"model_path": "none", "max_model_len": 64},
                "algorithm": {"repeat_times": REPEAT_TIMES},
                "buffer": {"batch_size": BATCH_SIZE, "explorer_input": {"tasksets": [taskset]}},
                "explorer": {"tasks_per_batch": BATCH_SIZE // 2},
            }
        )
        [section] = config.buffer.explorer_input.train_tasksets
        return LearnedOrder(self.storage, self.log, config, section)

    def run(self, step: int, tasks: list[TaskRef] | None) -> None:
        """Commit the step's rollouts; tasks of an even row pass."""
        assert tasks is not None
        for batch in range(2):
            part = tasks[2 * batch : 2 * batch + 2]
            rows = [rollout(t.index, k, float(t.index % 2 == 0), step) for t in part for k in range(REPEAT_TIMES)]
            self.log.commit(rows, explore_step=step, unit=batch)


def rollout(index: int, number: int, reward: float | None, step: int = 1, **fields: Any) -> Experience:
    return Experience(
        taskset="t", epoch=step - 1, task_index=index, rollout=number, explore_step=step, reward=reward, **fields
    )


def test_a_restarted_explorer_makes_the_same_choices(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "new")]
    schedules = []
    for folder, restarts in zip(folders, (False, True), strict=True):
        folder.mkdir()
        world = World(folder)
        explorer = world.explorer()
        for step in range(1, 7):
            if restarts:
                explorer = world.explorer()
            world.run(step, explorer.tasks(step, known=max(0, step - 2)))
        schedules.append([read_choice(world.storage, step) for step in range(1, 7)])
    assert schedules[0] == schedules[1]


def test_results_beyond_the_known_steps_are_ignored(tmp_path: Path) -> None:
    world = World(tmp_path, target_reward=1.0, tau=0.0, do_sample=False, rho=0.0)
    world.run(1, [TaskRef(0, 0, index) for index in (0, 1, 2, 3)])
    world.run(2, [TaskRef(0, 1, index) for index in (4, 6, 8, 10)])
    chosen = world.explorer().tasks(3, known=1)
    world.storage.remove(choice_path(3))
    assert world.explorer().tasks(3, known=1) == chosen
    world.storage.remove(choice_path(3))
    assert world.explorer().tasks(3, known=2) != chosen


def test_tasks_near_the_target_are_chosen_without_repeats(tmp_path: Path) -> None:
    world = World(tmp_path, target_reward=1.0, tau=0.0, do_sample=False, rho=0.0)
    explorer = world.explorer()
    seen: list[TaskRef] = []
    for step in range(1, 7):
        tasks = explorer.tasks(step, known=step - 1)
        assert tasks is not None and len({task.index for task in tasks}) == BATCH_SIZE
        world.run(step, tasks)
        seen += tasks
    assert len(set(seen)) == len(seen)
    assert [task.index % 2 for task in seen[-BATCH_SIZE:]] == [0] * BATCH_SIZE, "the tasks that pass"


def test_a_stored_choice_stays_even_if_the_results_change(tmp_path: Path) -> None:
    world = World(tmp_path)
    written = [TaskRef(0, 4, index) for index in (3, 1, 7, 5)]
    assert store_choice(world.storage, 5, written, learned_from=3) == written
    assert store_choice(world.storage, 5, written[::-1], learned_from=4) == written, "only the first counts"
    assert world.explorer().tasks(5, known=3) == written, "no result is needed"


def test_a_damaged_result_is_quarantined_and_awaited(tmp_path: Path) -> None:
    world = World(tmp_path)
    tasks = world.explorer().tasks(1, known=0)
    world.run(1, tasks)
    name = world.log.shards()[0]
    world.storage.put(world.log.path(name), b"other bytes")
    explorer = world.explorer()
    assert explorer.tasks(2, known=1) is None
    assert world.log.num_quarantined() == 1
    assert explorer.tasks(2, known=1) is None, "one of two batches is missing"
    assert read_choice(world.storage, 2) is None
    world.run(1, tasks)
    assert explorer.tasks(2, known=1) is not None


@pytest.mark.parametrize("data", [b"{", b'{"step": 2}', b'{"step": 3, "tasks": []}'])
def test_a_damaged_choice_is_never_guessed(tmp_path: Path, data: bytes) -> None:
    world = World(tmp_path)
    world.storage.put("schedule/00000002.json", data)
    with pytest.raises(DamagedError, match="00000002"):
        world.explorer().tasks(2, known=0)


def test_an_unknown_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target_rewards"):
        World(tmp_path, target_rewards=1.0).explorer()


def test_pass_rates_use_accuracy_before_reward() -> None:
    rows = [
        rollout(7, 0, 1.0),
        rollout(7, 0, 1.0, turn=1),  # the same rollout, which counts once
        rollout(7, 1, -0.5),
        rollout(3, 0, 0.1, metrics={"accuracy": 0.0}),
        rollout(3, 1, None, status=Status.FAILED),
        rollout(3, 2, 1.0),  # the greedy one
        rollout(5, 0, None, status=Status.TIMEOUT),
        rollout(9, 0, 1.0, metrics={"accuracy": float("nan")}),
    ]
    assert pass_rates([experiences_to_table(rows, "run")], repeat_times=2) == {3: 0.0, 7: 0.5, 9: 1.0}
