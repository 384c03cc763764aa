"""Promises of the loop: batch, train, publish, checkpoint, record; killed anywhere, the next ends in the same state."""

import json
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import pytest

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.errors import DamagedError, MismatchError, StorageError, WaitTimeout
from rftdask.monitor.events import Ended, Event, Started
from rftdask.storage import Storage
from rftdask.synchronizer.manifest import is_valid
from rftdask.synchronizer.published import (
    CHECKPOINT_POINTER,
    WEIGHTS_POINTER,
    latest_published,
    published_versions,
    read_pointer,
    read_published,
)
from rftdask.testing.crashtest.ending import read_weights
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import HF_FOLDER, checkpoint_steps, newest_valid_checkpoint
from rftdask.trainer.engines.fake import FakeTrainEngine
from tests.unit.trainer.trainer_cases import Sink, fill_log, make_trainer, new_storage, source_of

NUM_STEPS = 5
HELD_OUT = [supervised_batch([([1, 2], 1, None)], ["held-out"])]
WAIT_S = 60.0
"""Seconds that a thread waits for another one; never reached, even on a busy machine."""


def filled() -> Storage:
    store = new_storage()
    fill_log(store, NUM_STEPS)
    return store


@pytest.fixture
def storage() -> Storage:
    return filled()


def undisturbed(**options: Any) -> Storage:
    store = filled()
    make_trainer(store, **options).run()
    return store


def unsealed(steps: int = 1) -> Storage:
    store = new_storage()
    fill_log(store, steps, is_finished=False)
    return store


def exports(storage: Storage) -> list[int]:
    steps = checkpoint_steps(storage)
    return [step for step in steps if storage.exists(f"global_step_{step}/{HF_FOLDER}/model.safetensors")]


def final_state(storage: Storage) -> dict[str, Any]:
    """Results of a run that must not depend on how often it was killed."""
    last = checkpoint_steps(storage)[-1]
    ledger = Ledger(storage)
    return {
        "weights": read_weights(storage, last),
        "checkpoint": storage.get(f"global_step_{last}/actor/model.safetensors"),
        "export": storage.get(f"global_step_{last}/{HF_FOLDER}/model.safetensors"),
        "ledger": [ledger.read(step) for step in range(1, ledger.last_step() + 1)],
        "pointers": [read_pointer(storage, name) for name in (WEIGHTS_POINTER, CHECKPOINT_POINTER)],
        "checkpoints": checkpoint_steps(storage),
        "versions": published_versions(storage),
    }


def test_a_step_reads_trains_publishes_saves_then_records(storage: Storage) -> None:
    events: list[Any] = []

    def note(verb: str, path: str, stage: str) -> None:
        if verb in ("put", "put_new") and stage == "after":
            events.append(path)

    make_trainer(FaultyStorage(storage, note), events=events, total_steps=2, save_hf_checkpoint="never").run()
    readable = [
        e if isinstance(e, str) else f"{type(e).__name__} {vars(e).get('step', vars(e).get('version'))}" for e in events
    ]
    published = [e for e in readable if e.startswith(("weights/", WEIGHTS_POINTER, "WeightsPublished"))]
    # Another thread publishes in this order while the steps continue.
    assert published == [
        *("weights/1/model.safetensors", "weights/1/MANIFEST.json", WEIGHTS_POINTER, "WeightsPublished 1"),
        *("weights/2/model.safetensors", "weights/2/MANIFEST.json", WEIGHTS_POINTER, "WeightsPublished 2"),
    ]
    assert [e for e in readable if e not in published] == [
        "Started 0",
        "ledger/main/00000001.json",
        "StepFinished 1",
        "ledger/main/00000002.json",
        "global_step_2/actor/model.safetensors",
        "global_step_2/trainer_state.json",
        "global_step_2/MANIFEST.json",
        CHECKPOINT_POINTER,
        "CheckpointSaved 2",
        "StepFinished 2",
    ]


def test_a_step_trains_while_the_version_before_it_is_written(storage: Storage) -> None:
    trains, in_time = threading.Event(), list[bool]()

    def note(verb: str, path: str, stage: str) -> None:
        if (verb, path, stage) == ("put", "weights/1/model.safetensors", "before"):
            in_time.append(trains.wait(WAIT_S))

    class Second(FakeTrainEngine):
        def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
            if step == 2:
                trains.set()
            return super().train_step(batch, step)

    make_trainer(FaultyStorage(storage, note), engine=Second(), total_steps=2).run()
    assert in_time == [True]
    assert read_pointer(storage, WEIGHTS_POINTER) == 2


def test_a_checkpoint_is_committed_after_its_publication(storage: Storage) -> None:
    written, seen = threading.Event(), list[str]()

    def note(verb: str, path: str, stage: str) -> None:
        if (verb, path, stage) == ("put", "global_step_2/trainer_state.json", "after"):
            written.set()  # all that comes before the manifest
        if (verb, path, stage) == ("put", "weights/2/model.safetensors", "before"):
            written.wait(WAIT_S)
        if verb == "put" and stage == "after" and path in (WEIGHTS_POINTER, "global_step_2/MANIFEST.json"):
            seen.append(path)

    make_trainer(FaultyStorage(storage, note), total_steps=2).run()
    assert seen == [WEIGHTS_POINTER, WEIGHTS_POINTER, "global_step_2/MANIFEST.json"]


def test_a_failed_publication_ends_a_waiting_run() -> None:
    storage = unsealed()

    def fail(verb: str, path: str, stage: str) -> None:
        if verb == "put" and path.startswith("weights/"):
            raise StorageError("the disk is full")

    with pytest.raises(StorageError, match="the disk is full"):
        make_trainer(FaultyStorage(storage, fail), source=source_of(storage, timeout_s=30.0)).run()
    assert read_pointer(storage, WEIGHTS_POINTER) is None


def test_a_run_trains_the_whole_log_and_saves_the_result(storage: Storage) -> None:
    sink = Sink()
    assert make_trainer(storage, sink=sink).run() == Ended(NUM_STEPS, stopped=False)
    state = final_state(storage)
    assert state["pointers"] == [5, 5]
    assert state["checkpoints"] == [2, 4, 5]
    assert state["versions"] == [1, 2, 3, 4, 5]
    assert state["weights"] == state["checkpoint"] == state["export"]
    assert [step for step, _ in sink.rows] == [1, 2, 3, 4, 5]
    assert sink.num_flushed == 5
    audit = audit_log(ParquetLog(storage), Ledger(storage), 1)
    assert (audit.committed, audit.trained, audit.waiting, audit.problems) == (10, 10, 0, ())


@pytest.mark.parametrize(("interval", "steps"), [(0, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5])])
def test_held_out_rows_are_evaluated_at_the_interval(storage: Storage, interval: int, steps: list[int]) -> None:
    sink = Sink()
    make_trainer(storage, eval_interval=interval, held_out=HELD_OUT, eval_metrics=sink).run()
    assert sink.rows == [(step, {"eval_loss": 0.0}) for step in steps] and sink.num_flushed == len(steps)


def test_a_resumed_run_does_not_repeat_the_first_evaluation(storage: Storage) -> None:
    make_trainer(storage, total_steps=2).run()
    sink = Sink()
    make_trainer(storage, held_out=HELD_OUT, eval_metrics=sink).run()
    assert [step for step, _ in sink.rows] == [5]


class Killed(StorageError):
    """Simulated death of the process."""


def run_killed_at(storage: Storage, kill_at: int, **options: Any) -> bool:
    """Run a trainer that dies before or after its `kill_at`-th write; returns True if it died."""
    count = 0

    def kill(verb: str, path: str, stage: str) -> None:
        nonlocal count
        if verb in ("put", "put_new", "remove"):
            count += 1
            if count == kill_at:
                raise Killed(f"{verb} {path} {stage}")

    try:
        make_trainer(FaultyStorage(storage, kill), **options).run()
    except Killed:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 1])
def test_a_run_killed_at_any_write_ends_in_the_same_state(keep: int) -> None:
    expected = final_state(undisturbed(keep=keep))
    expected["ledger"] = [(entry.step, entry.positions) for entry in expected["ledger"]]
    kill_at = 0
    was_killed = True
    while was_killed:
        kill_at += 1
        storage = filled()
        was_killed = run_killed_at(storage, kill_at, keep=keep)
        before = [read_pointer(storage, name) or 0 for name in (WEIGHTS_POINTER, CHECKPOINT_POINTER)]
        assert before[1] == 0 or is_valid(storage, f"global_step_{before[1]}"), "the pointer names what is complete"
        assert before[0] == 0 or latest_published(storage) is not None
        make_trainer(storage, keep=keep).run()
        found = final_state(storage)
        found["ledger"] = [(entry.step, entry.positions) for entry in found["ledger"]]
        assert found == expected, f"killed at write {kill_at}"
        assert audit_log(ParquetLog(storage), Ledger(storage), 1).problems == ()
    assert kill_at > 60, "the run has that many writes, before and after"


def test_killed_again_and_again_a_run_still_ends(storage: Storage) -> None:
    kills = 0
    while run_killed_at(storage, 25):
        kills += 1
    assert kills >= 2
    assert final_state(storage)["weights"] == final_state(undisturbed())["weights"]


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(storage: Storage) -> None:
    make_trainer(storage, total_steps=4).run()
    data = storage.get("global_step_4/actor/model.safetensors")
    storage.put("global_step_4/actor/model.safetensors", data[:-1])
    events: list[Event] = []
    make_trainer(storage, events=events).run()
    assert events[0] == Started(2)
    assert final_state(storage)["weights"] == final_state(undisturbed())["weights"]
    assert is_valid(storage, "global_step_4")


@pytest.mark.parametrize(
    ("total_steps", "save_interval", "exported"),
    [(4, 2, [4]), (3, 2, [3]), (None, 2, [5]), (None, 5, [5]), (None, 0, [5]), (99, 1, [5])],
)
def test_the_last_checkpoint_has_the_export_at_an_early_end(
    storage: Storage, total_steps: int | None, save_interval: int, exported: list[int]
) -> None:
    make_trainer(storage, total_steps=total_steps, save_interval=save_interval).run()
    assert exports(storage) == exported
    assert all(is_valid(storage, f"global_step_{step}") for step in checkpoint_steps(storage))


@pytest.mark.parametrize(("save", "exported"), [("always", [2, 4, 5]), ("never", [])])
def test_exports_can_be_forced_or_disabled(storage: Storage, save: str, exported: list[int]) -> None:
    make_trainer(storage, save_hf_checkpoint=save).run()
    assert exports(storage) == exported


def test_a_later_start_that_ends_earlier_still_makes_the_export(storage: Storage) -> None:
    run_killed_at(storage, 45)
    assert newest_valid_checkpoint(storage) == 2
    assert make_trainer(storage, total_steps=2).run() == Ended(2, stopped=False)
    assert exports(storage) == [2]


def test_timed_checkpoints_are_saved_and_removed(storage: Storage) -> None:
    seen: list[list[int]] = []
    at_each_step = lambda *_: seen.append(checkpoint_steps(storage)) or True  # noqa: E731
    make_trainer(storage, save_interval=3, save_minutes=1e-9, publish_due=at_each_step).run()
    assert checkpoint_steps(storage) == [3, 4, 5], "3 is of the interval, 5 the last, and 4 the newest other"
    assert [1] in seen and [1, 2] in seen
    assert exports(storage) == [5]


def test_a_stop_that_turns_out_to_be_the_end_is_kept_for_good(storage: Storage) -> None:
    asked: list[int] = []
    make_trainer(storage, should_stop=lambda: len(asked) == 2 or asked.append(1) is not None, save_interval=0).run()
    assert make_trainer(storage, save_interval=0, total_steps=2).run() == Ended(2, stopped=False)
    assert is_valid(storage, "global_step_2")
    make_trainer(storage, save_interval=0, save_minutes=1e-9).run()
    assert checkpoint_steps(storage) == [2, 4, 5], "2 was the end of a run; 3 and 4 came by the clock"


def test_save_minutes_0_saves_nothing_by_the_clock(storage: Storage) -> None:
    make_trainer(storage, save_interval=0, save_minutes=0).run()
    assert checkpoint_steps(storage) == [NUM_STEPS]
    by_default = undisturbed(save_interval=0)
    assert checkpoint_steps(by_default) == [NUM_STEPS], "steps of milliseconds, and it is every 10 minutes"


def test_a_run_killed_between_timed_saves_ends_the_same() -> None:
    whole = undisturbed()
    for kill_at in range(5, 90, 7):
        killed = filled()
        run_killed_at(killed, kill_at, save_interval=0, save_minutes=1e-9)
        make_trainer(killed, save_interval=0, save_minutes=1e-9).run()
        assert final_state(killed)["weights"] == final_state(whole)["weights"]
        assert checkpoint_steps(killed) == [4, 5]


def test_a_killed_run_with_deltas_ends_like_one_without() -> None:
    storage, deltas = undisturbed(), undisturbed(full_publish_interval=3)
    expected = {**final_state(storage), "ledger": None}  # names of shards differ from log to log
    assert {**final_state(deltas), "ledger": None} == expected
    found = [read_published(deltas, version) for version in range(1, NUM_STEPS + 1)]
    assert [one and one.delta and one.delta.base for one in found] == [None, 1, 2, None, None], "the last is whole"
    assert found == [read_published(storage, version) for version in range(1, NUM_STEPS + 1)], "of the same names"
    for kill_at in range(5, 60, 6):
        killed = filled()
        run_killed_at(killed, kill_at, full_publish_interval=3)
        newest = latest_published(killed)
        assert newest is None or read_weights(killed, newest.version) == read_weights(storage, newest.version)
        make_trainer(killed, full_publish_interval=3).run()
        assert {**final_state(killed), "ledger": None} == expected


def test_a_waiting_trainer_writes_requested_full_weights(storage: Storage) -> None:
    asked: list[int] = []

    def is_asked(version: int) -> int:
        asked.append(version)
        return version if version == NUM_STEPS - 1 and asked.count(version) == 1 else 0

    make_trainer(storage, full_publish_interval=9, whole_requested=is_asked).run()
    found = [read_published(storage, version) for version in range(1, NUM_STEPS + 1)]
    assert [one and one.delta and one.delta.base for one in found] == [None, 1, 2, None, None]
    assert is_valid(storage, f"weights/{NUM_STEPS - 1}", NUM_STEPS - 1)


def test_a_stop_on_request_ends_after_the_step_with_a_checkpoint(storage: Storage) -> None:
    asked: list[int] = []
    trainer = make_trainer(storage, should_stop=lambda: len(asked) == 3 or asked.append(1) is not None, save_interval=0)
    assert trainer.run() == Ended(step=3, stopped=True), "it is asked before each batch"
    assert checkpoint_steps(storage) == [3]
    assert read_pointer(storage, WEIGHTS_POINTER) == 3
    assert make_trainer(storage).run() == Ended(NUM_STEPS, stopped=False)
    assert final_state(storage)["weights"] == final_state(undisturbed())["weights"]


def test_a_stop_before_the_first_batch_writes_nothing() -> None:
    storage = new_storage()
    fill_log(storage, 0)
    assert make_trainer(storage, should_stop=lambda: True).run() == Ended(0, stopped=True)
    assert checkpoint_steps(storage) == published_versions(storage) == []


def test_a_run_that_is_done_does_nothing_when_started_again(storage: Storage) -> None:
    make_trainer(storage, total_steps=NUM_STEPS).run()
    before = final_state(storage)
    writes: list[str] = []

    def note(verb: str, path: str, stage: str) -> None:
        if verb in ("put", "put_new", "remove"):
            writes.append(path)

    events: list[Event] = []
    make_trainer(FaultyStorage(storage, note), events=events, total_steps=NUM_STEPS).run()
    assert final_state(storage) == before
    assert writes == []
    assert events == [Started(5)]


@pytest.mark.parametrize(
    ("publish_due", "versions"), [(lambda step, published: step % 3 == 0, [3, 5]), (None, [])], ids=["due", "no reader"]
)
def test_weights_are_published_when_due_and_at_the_end(storage: Storage, publish_due: Any, versions: list[int]) -> None:
    make_trainer(storage, publish_due=publish_due).run()
    assert published_versions(storage) == versions


def test_requested_weights_are_published_while_the_trainer_waits() -> None:
    storage = unsealed()
    looks: list[list[int]] = []

    def should_stop() -> bool:
        looks.append(published_versions(storage))
        return looks[-1] == [1]

    def publish_due(step: int, published: int) -> bool:
        return len(looks) >= 3  # asked for while batch 2 is waited for

    source = source_of(storage, timeout_s=30.0)
    ended = make_trainer(storage, source=source, publish_due=publish_due, should_stop=should_stop).run()
    assert ended == Ended(1, stopped=True)
    assert looks[:3] == [[], [], []] and looks[-1] == [1]  # how many between, the writing thread decides


def test_step_metrics_describe_the_batch(storage: Storage) -> None:
    sink = Sink()
    make_trainer(storage, sink=sink, total_steps=3).run()
    step, row = sink.rows[2]
    assert step == 3
    expected = {
        "num_rows": 2.0,
        "num_tokens": 6.0,
        "num_trained_tokens": 4.0,
        "num_rollouts": 2.0,
        "response_length": 2.0,
        "num_turns": 1.0,
        "reward": 0.5,
        "reward_std": 0.5,
        "flat_groups": 0.0,
        "staleness": 2.0,
        "staleness_max": 2.0,
        "rollout_entropy": 1.5,
        "loss": 0.0,
    }
    assert {name: row[name] for name in expected} == expected
    times = {"wait_s", "train_s", "publish_s", "checkpoint_s", "step_s", "tokens_per_s"}
    assert set(row) == set(expected) | times


def test_rewards_and_lengths_are_those_of_rollouts_not_of_turns() -> None:
    # Eight rollouts, half of one turn with reward 1, half of nine turns with reward 0; an engine's numbers of the same
    # name, which are of rows, do not replace them.
    class OfRows(FakeTrainEngine):
        def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
            return {"reward": float(batch.rewards.mean()), "reward_std": 0.3}

    new, sink = new_storage(), Sink()
    turns = [(k, turn) for k in range(8) for turn in range(1 if k < 4 else 9)]
    rows = [
        Experience(
            "t", 0, 0, k, 1, turn=turn, tokens=(1, 2, 3), prompt_length=1, rollout_logprobs=(-1.0, -2.0),
            reward=float(k < 4),
        )
        for k, turn in turns
    ]  # fmt: skip
    log = ParquetLog(new)
    log.commit(rows, explore_step=1, unit=0)
    log.seal(1)
    make_trainer(new, sink=sink, engine=OfRows()).run()
    ((_, row),) = sink.rows
    names = ("reward", "reward_std", "flat_groups", "num_rollouts", "num_rows", "response_length")
    assert [row[name] for name in names] == [0.5, 0.5, 0.0, 8, 40, 10]


def test_data_that_does_not_come_is_an_error_of_the_run() -> None:
    storage = unsealed()
    with pytest.raises(WaitTimeout, match="batch 2 was not complete"):
        make_trainer(storage).run()
    assert read_pointer(storage, WEIGHTS_POINTER) == 1


def test_an_engine_error_gets_a_note_that_names_the_step(storage: Storage) -> None:
    class Failing(FakeTrainEngine):
        def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
            if step == 2:
                raise ValueError("shapes do not fit")
            return super().train_step(batch, step)

    with pytest.raises(ValueError, match="shapes do not fit") as caught:
        make_trainer(storage, engine=Failing()).run()
    *_, last = "".join(traceback.format_exception(caught.value)).splitlines()
    assert last.startswith("while training step 2; if that can never be trained: rftdask skip ")


def test_rollouts_of_another_policy_are_not_skipped(storage: Storage) -> None:
    class Comparing(FakeTrainEngine):
        def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
            if self.compares_first_update:
                raise MismatchError("another policy")
            return super().train_step(batch, step)

    def run() -> Ended:
        engine = Comparing()
        engine.compares_first_update = True
        return make_trainer(storage, engine=engine).run()

    with pytest.raises(MismatchError) as caught:
        run()
    assert not hasattr(caught.value, "__notes__")
    make_trainer(storage, total_steps=2).run()
    assert run() == Ended(NUM_STEPS, stopped=False)  # not compared after a checkpoint


def test_a_checkpoint_holds_everything_a_new_process_needs(storage: Storage) -> None:
    make_trainer(storage, total_steps=2).run()
    state = json.loads(storage.get("global_step_2/trainer_state.json"))
    assert state == {"step": 2, "lineage": "main", "published": 2, "source": {"low": 3, "beyond": []}}


@pytest.mark.parametrize("data", [b"1\n", b"7\n", None])
@pytest.mark.parametrize("damaged", [WEIGHTS_POINTER, CHECKPOINT_POINTER, f"weights/{NUM_STEPS}/model.safetensors"])
def test_restarting_a_finished_run_restores_its_pointers(storage: Storage, damaged: str, data: bytes | None) -> None:
    make_trainer(storage).run()
    expected = final_state(storage)
    storage.remove(damaged) if data is None else storage.put(damaged, data)
    make_trainer(storage).run()
    assert final_state(storage) == expected


def test_a_checkpoint_in_the_folder_of_another_step_is_none(storage: Storage) -> None:
    make_trainer(storage, total_steps=2).run()
    for name in ("MANIFEST.json", "actor/model.safetensors", "trainer_state.json"):
        storage.put(f"global_step_4/{name}", storage.get(f"global_step_2/{name}"))
    assert newest_valid_checkpoint(storage) == 2


def test_a_ledger_with_a_hole_is_an_error_and_not_filled(storage: Storage) -> None:
    make_trainer(storage, total_steps=3, save_interval=0).run()
    for path in ("ledger/main/00000002.json", "global_step_3/MANIFEST.json"):
        storage.remove(path)
    with pytest.raises(DamagedError, match=r"ledger/main/00000002.json is missing, and the ledger goes on to step 3"):
        make_trainer(storage).run()
    assert Ledger(storage).read(2) is None


def test_shards_that_came_since_are_read_while_a_step_trains() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    read_in_time: list[bool] = []
    fill_log(storage, 2)
    last = log.shards()[-1]
    kept = storage.get(log.path(last))
    storage.remove(log.path(last))  # comes once the first batch is there
    was_read = threading.Event()

    def note(verb: str, path: str, stage: str) -> None:
        if (verb, path, stage) == ("get", log.path(last), "after"):
            was_read.set()

    class Late(LogSource):
        def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
            batch = super().read(entry, places)
            if entry.step == 1:
                storage.put(log.path(last), kept)
            return batch

    class Waiting(FakeTrainEngine):
        def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
            read_in_time.append(was_read.wait(WAIT_S))
            return super().train_step(batch, step)

    source = source_of(FaultyStorage(storage, note), timeout_s=WAIT_S, kind=Late)
    assert make_trainer(storage, engine=Waiting(), source=source).run() == Ended(2, False)
    assert read_in_time == [True, True]
