"""Promises of the explorer's loop when it loses workers, with a fake of Dask's client:

- a worker that is lost after its unit had ended, before the result was fetched, is no failure of the unit;
- nor is one that was told to end, however often that happens to one unit;
- one that dies without a word is a suspicion, and after STRIKES in a row the unit runs task by task.
"""

from __future__ import annotations

import pickle

import pytest

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.config import load_config
from rftdask.errors import StorageError
from rftdask.explorer.explorer import MAX_ATTEMPTS, Explorer
from rftdask.explorer.poison import STRIKES
from rftdask.explorer.worker_task import RolloutTask
from rftdask.monitor.events import Note
from rftdask.run.run_folder import read_config
from rftdask.storage import open_storage
from rftdask.testing.fake_dask import FakeClient, Outcome, died, lost_with_the_result, told_to_end


def failed(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    return StorageError("the disk is full")


def explore(client: FakeClient, name: str) -> list[str]:
    """Run an explore step of one unit of two tasks; what the explorer noted."""
    tree = {
        "mode": "explore",
        "checkpoint_root_dir": "memory://lost-workers",
        "name": name,
        "model": {"model_path": "none", "max_model_len": 32},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"tasks_per_batch": 2},
    }
    config = load_config(tree)
    storage, notes = open_storage(f"memory://lost-workers/{name}"), []
    Explorer(
        client,
        storage,
        config,
        {config.buffer.explorer_input.train_tasksets[0].name: 2},
        num_steps=1,
        threads=1,
        log_file=None,
        emit=lambda event: notes.append(event.text if isinstance(event, Note) else ""),
        cancelled=lambda: False,
        trainer_ended_at=lambda: None,
    ).run()
    return [note for note in notes if note]


@pytest.mark.parametrize("loss", [lost_with_the_result, told_to_end])
def test_a_unit_is_never_blamed_for_workers_that_were_taken_away(loss: Outcome) -> None:
    client = FakeClient(*[loss] * (MAX_ATTEMPTS + STRIKES))
    assert explore(client, loss.__name__) == []
    assert len(client.submitted) == MAX_ATTEMPTS + STRIKES + 1
    assert {unit.slots for unit in client.submitted} == {None}, "it runs whole, so it samples the same bits"


def test_a_unit_whose_workers_die_without_a_word_runs_task_by_task() -> None:
    client = FakeClient(*[died] * STRIKES)
    assert "task by task" in explore(client, "died")[-1]
    assert [unit.slots for unit in client.submitted] == [*[None] * STRIKES, (0,), (1,)]


def test_a_task_that_ends_its_workers_is_set_aside_and_its_sibling_runs() -> None:
    client = FakeClient(*[died] * STRIKES, *[died] * STRIKES)  # the unit, then its first task alone
    notes = explore(client, "poison")
    assert [unit.slots for unit in client.submitted] == [*[None] * STRIKES, *[(0,)] * STRIKES, (1,)]
    assert all(", alone, runs again (" in note for note in notes[STRIKES : 2 * STRIKES - 1]), notes
    assert notes[-1].startswith("task taskset_0/0/0 is poisonous and was set aside"), notes
    (shard,) = ParquetLog(open_storage("memory://lost-workers/poison")).shards()
    assert shard.part is not None and shard.part.slots == (0,), "the sibling's rollouts are its worker's to commit"


def test_a_unit_that_raises_is_tried_a_few_times() -> None:
    with pytest.raises(Exception, match=f"failed {MAX_ATTEMPTS} times.*the disk is full"):
        explore(FakeClient(*[failed] * MAX_ATTEMPTS), "failed")


def test_a_unit_carries_the_fingerprint_of_the_config_and_not_the_config() -> None:
    client = FakeClient()
    explore(client, "fingerprint")
    (unit,) = client.submitted
    storage = open_storage(unit.url)
    assert read_config(storage, unit.config_fingerprint).name == "fingerprint"
    assert len(pickle.dumps(unit)) < 1000
