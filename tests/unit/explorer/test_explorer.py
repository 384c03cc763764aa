"""Promises of the explorer's loop, with a fake of Dask's client: which units it submits, when, and to which workers."""

import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.errors import EngineError, ProcessLostError, RoleError, StorageError, StorageRefusedError
from rftdask.explorer import explorer
from rftdask.explorer.crash_suspects import MAX_CRASHES
from rftdask.explorer.explorer import MAX_ATTEMPTS, Explorer
from rftdask.explorer.unit_claims import Claims
from rftdask.monitor.events import Event, Note, StepFinished
from rftdask.rollouts.work_unit_task import ADMITTED_TOPIC
from rftdask.rollouts.work_units import RolloutResult, RolloutTask
from rftdask.run.run_folder import read_config
from rftdask.storage import open_storage
from rftdask.synchronizer.styles import WeightRequirement
from tests.unit.explorer.fake_dask import (
    WORKER,
    FakeClient,
    FakeFuture,
    Outcome,
    died,
    lost_with_the_result,
    told_to_end,
    under_way,
)
from tests.unit.synchronizer.sync_cases import publish_weights


def fails(error: Exception) -> Outcome:
    return lambda client, key, unit: error


def committed(client: FakeClient, key: str, unit: RolloutTask) -> RolloutResult:
    rows = [
        Experience("taskset_0", task.epoch, task.index, rollout, unit.explore_step, reward=1.0)
        for task in unit.tasks
        for rollout in range(unit.repeat_times)
    ]
    name = ParquetLog(open_storage(unit.url)).commit(rows, explore_step=unit.explore_step, unit=unit.unit_index)
    return RolloutResult(unit.key, (name.text,), 0, WORKER, num_rollouts=len(rows))


def stage(name: str, *overrides: str) -> Config:
    """A stage whose units have two tasks; one explore step of one unit unless `overrides` say otherwise."""
    tree: dict[str, Any] = {
        "mode": "explore",
        "checkpoint_root_dir": "memory://explorer-loop",
        "name": name,
        "model": {"model_path": "none", "max_model_len": 32},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"tasks_per_batch": 2},
        "synchronizer": {"sync_offset": 0},
    }
    return load_config(tree, overrides)


def run_stage(client: FakeClient, config: Config, cancelled: Callable[[], bool] = lambda: False) -> list[Event]:
    """Run the explorer of a stage. Returns: the emitted events. cancelled: called before every pass of the loop."""
    events: list[Event] = []
    explorer = make_explorer(client, config, events.append, cancelled)
    explorer.open()
    explorer.run()
    return events


def make_explorer(
    client: FakeClient,
    config: Config,
    emit: Callable[[Event], None],
    cancelled: Callable[[], bool] = lambda: False,
    claims: Claims | None = None,
) -> Explorer:
    source = config.buffer.explorer_input
    return Explorer(
        client,
        open_storage(f"memory://explorer-loop/{config.name}"),
        config,
        {taskset.name: 6 for taskset in (*source.train_tasksets, *source.eval_tasksets)},
        num_steps=config.buffer.total_steps or 0,
        threads=1,
        log_file=None,
        emit=emit,
        cancelled=cancelled,
        trainer_ended_at=lambda: None,
        claims=claims,
    )


def explore(client: FakeClient, name: str) -> list[str]:
    """Run an explore step of one unit of two tasks. Returns: the notes of the explorer."""
    return [event.text for event in run_stage(client, stage(name)) if isinstance(event, Note)]


def end_one_each_pass(client: FakeClient, look: Callable[[list[RolloutTask]], object]) -> Callable[[], bool]:
    """A `cancelled` that passes the running units to `look`, and ends the first of them."""

    def cancelled() -> bool:
        if client.pending:
            look([future.unit for future in client.pending])
            client.end_first()
        return False

    return cancelled


def test_a_lost_engine_makes_a_suspect_but_an_error_does_not() -> None:
    [lost] = explore(FakeClient(fails(ProcessLostError("engine-fake (pid 7) ended"))), "lost-engine")
    assert lost.endswith(f"(1 of {MAX_CRASHES} losses in a row): ProcessLostError: engine-fake (pid 7) ended")
    [failed] = explore(FakeClient(fails(RoleError("logits that are not numbers"))), "failed-engine")
    assert failed.endswith(f"runs again (1 of {MAX_ATTEMPTS}): RoleError: logits that are not numbers")
    with pytest.raises(RoleError, match=f"failed {MAX_ATTEMPTS} times; the last time: RoleError: logits"):
        explore(FakeClient(then=fails(RoleError("logits that are not numbers"))), "failing-engine")


HEADS = "engine 'vllm' failed on request {}: RuntimeError: Unsupported CPU attention configuration: head_dim=16"
ENDED = "engine-vllm (pid {}) ended with code {}; its last lines:"


def finished(client: FakeClient, key: str, unit: RolloutTask) -> RolloutResult:
    return RolloutResult(unit.key, ("shard",), 0, WORKER, num_rollouts=4)


@pytest.mark.parametrize(
    "errors",
    [
        # Before it had work, or with a reason: the same unit again is enough.
        [EngineError(HEADS.format(1)), EngineError(HEADS.format(2))],
        # In its work: of two units.
        [ProcessLostError(ENDED.format(7, -11), -11), ProcessLostError(ENDED.format(8, -11), -11)],
    ],
)
def test_two_engines_that_fail_for_one_reason_end_the_run(errors: list[Exception]) -> None:
    config = stage(f"unable-{type(errors[0]).__name__}", "buffer.batch_size=4")
    client = FakeClient(*map(fails, errors))
    with pytest.raises(RoleError, match="two failed for the same reason") as raised:
        run_stage(client, config)
    assert str(errors[1]) in str(raised.value)
    assert not ParquetLog(open_storage(f"memory://explorer-loop/{config.name}")).shards(), "nothing is set aside"


def test_unrelated_engine_failures_do_not_end_the_run() -> None:
    first, second = EngineError(HEADS.format(1)), EngineError("engine 'vllm' failed on request 1: out of memory")
    kills = [ProcessLostError(ENDED.format(pid, -9), -9) for pid in (7, 8)]
    client = FakeClient(fails(first), fails(second), finished, fails(first), *map(fails, kills), then=finished)
    run_stage(client, stage("able", "buffer.batch_size=4", "buffer.total_steps=3"))
    assert client.submitted[-1].explore_step == 3


def test_a_unit_whose_engines_crash_runs_task_by_task() -> None:
    client = FakeClient(*[fails(ProcessLostError(ENDED.format(7, -11), -11))] * MAX_CRASHES)
    assert "task by task" in explore(client, "crashing")[-1]


def test_engines_of_leaving_workers_do_not_count() -> None:
    def fails_leaving(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
        told_to_end(client, key, unit)
        return EngineError(HEADS.format(1))

    client = FakeClient(*[fails_leaving] * (MAX_ATTEMPTS - 1))
    explore(client, "leaving-engines")
    assert len(client.submitted) == MAX_ATTEMPTS


def test_units_are_submitted_once_in_order_within_the_window() -> None:
    client, sizes = FakeClient(then=under_way, num_engines=4), []
    config = stage("window", "buffer.batch_size=4", "buffer.total_steps=9", "explorer.eval_on_startup=false")
    run_stage(client, config, end_one_each_pass(client, lambda units: sizes.append(len(units))))
    keys = [(unit.explore_step, unit.unit_index) for unit in client.submitted]
    assert keys == [(step, index) for step in range(1, 10) for index in range(2)]
    assert max(sizes) == 7, "one and a half for each of four engines, and one more"
    assert ParquetLog(open_storage("memory://explorer-loop/window")).sealed_at() == 9


def test_the_explorer_describes_what_it_waits_for() -> None:
    client, texts = FakeClient(then=under_way, num_engines=1), list[str]()
    config = stage("waits", "buffer.batch_size=4", "buffer.total_steps=1", "explorer.eval_on_startup=false")

    def cancelled() -> bool:
        texts.append(explorer.waits_for())
        if client.pending:
            client.end_first()
        return False

    explorer = make_explorer(client, config, lambda event: None, cancelled)
    explorer.open()
    explorer.run()
    assert texts[0] == "an explorer worker to join"
    assert any(text.startswith("2 work units on 1 worker (the oldest, experiences 1.0, for ") for text in texts), texts


def test_a_unit_whose_rollouts_all_have_slots_admits_the_next() -> None:
    client, sizes = FakeClient(then=under_way, num_engines=2), list[int]()
    config = stage("overlap", "buffer.total_steps=9", "synchronizer.sync_style=fully_async")

    # All that come are admitted, and stay under way, until there are six; then they end in their order.
    def cancelled() -> bool:
        if len(client.pending) < 6 and len(client.submitted) < 9:
            for future in client.pending:
                client.report(ADMITTED_TOPIC, future.key)
        elif client.pending:
            sizes.append(len(client.pending))
            client.end_first()
        return False

    run_stage(client, config, cancelled)
    assert [unit.explore_step for unit in client.submitted] == list(range(1, 10))
    assert max(sizes) == 7, "a window of two, and five that were admitted"


class Joining(FakeClient):
    """A client with several workers, which a test can change."""

    def __init__(self, *outcomes: Outcome, then: Outcome | None = None) -> None:
        super().__init__(*outcomes, then=then)
        self.there = ["tcp://10.0.0.1:1"]
        self.allowed: list[tuple[str, ...]] = []
        self._passes = count()

    def moves_in_the_second_pass(self) -> bool:
        """A `cancelled` that replaces the worker by another one."""
        if next(self._passes) == 1:
            self.there = ["tcp://10.0.0.3:1"]
        return False

    def scheduler_info(self, n_workers: int) -> Mapping[str, Any]:
        return {"workers": {address: {"name": address, "resources": {"explorer": 1}} for address in self.there}}

    def submit(self, func: Any, unit: Any, /, *, key: str, **options: Any) -> Any:
        if isinstance(unit, RolloutTask):
            self.allowed.append(tuple(options["workers"]))
        return super().submit(func, unit, key=key, **options)


@pytest.mark.parametrize("outcome", [RolloutResult(("warm", 0, 0), (), 0, ""), EngineError("no such model")])
def test_a_joining_worker_receives_units_once_warm(outcome: RolloutResult | Exception) -> None:
    client = Joining(then=under_way)
    first, second = client.there[0], "tcp://10.0.0.2:1"
    ended: list[str] = []

    def cancelled() -> bool:
        if len(client.submitted) == 6:
            client.there = [first, second]
        if len(client.submitted) >= 12 and not ended:
            assert set(client.allowed) == {(first,)}
            (key,) = client.warming
            assert second in key
            ended.append(key)
            client.warming[key].end(outcome)
        if client.pending:
            client.end_first()
        return False

    run_stage(client, stage(f"joins-{type(outcome).__name__}", "buffer.total_steps=20"), cancelled)
    assert set(client.allowed[-3:]) == {(first, second)}
    assert list(client.warming) == ended, "once"


def test_a_new_only_worker_receives_units_at_once() -> None:
    client = Joining(died, then=finished)
    run_stage(client, stage("alone", "buffer.total_steps=4"), client.moves_in_the_second_pass)
    assert not client.warming and ("tcp://10.0.0.3:1",) in client.allowed


def test_a_unit_whose_workers_are_gone_is_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "_VANISHED_S", 0.0)
    client = Joining(under_way, then=finished)
    run_stage(client, stage("vanished"), client.moves_in_the_second_pass)
    assert client.allowed == [("tcp://10.0.0.1:1",), ("tcp://10.0.0.3:1",)]
    assert [unit.key for unit in client.submitted] == [("experiences", 1, 0)] * 2


def test_ended_futures_are_released_after_the_next_submit() -> None:
    """Dask would pause for 10 ms between the release and the next submit."""
    story: list[tuple[str, int]] = []

    class Telling(FakeClient):
        def submit(self, func: Any, unit: Any, /, *, key: str, **options: Any) -> Any:
            future = super().submit(func, unit, key=key, **options)
            if isinstance(unit, RolloutTask):
                story.append(("sent", unit.explore_step))
                weakref.finalize(future, story.append, ("let go", unit.explore_step))
            return future

    client = Telling(then=under_way)
    config = stage("let-go", "mode=both", "buffer.total_steps=4", "synchronizer.sync_style=fixed")
    end_one = end_one_each_pass(client, lambda units: None)
    run_stage(client, config, lambda: end_one() or (len(client.submitted) == 4 and not client.pending))
    sent = [("sent", 1)]
    assert story[:7] == sent + [each for step in (2, 3, 4) for each in (("sent", step), ("let go", step - 1))]


def test_evaluations_take_half_of_the_engines_during_training() -> None:
    client, num_evals = FakeClient(then=under_way, num_engines=4), list[int]()
    evals = "buffer.explorer_input.eval_tasksets=[{name: held_out, path: held_out.jsonl, repeat_times: 2}]"
    config = stage("evals", "buffer.batch_size=4", "buffer.total_steps=6", evals)

    # Units of training end first, so that those of the evaluation are under way to the end.
    def look(units: list[RolloutTask]) -> None:
        if sum(not unit.is_eval for unit in client.submitted) < 12:  # units of training are left to submit
            num_evals.append(sum(unit.is_eval for unit in units))
        client.pending.sort(key=lambda future: future.unit.is_eval)

    run_stage(client, config, end_one_each_pass(client, look))
    assert set(num_evals) == {2}
    assert sum(unit.is_eval for unit in client.submitted) == 3, "six tasks, two to a unit, each once"


def test_a_unit_waits_for_the_steps_that_train_its_weights() -> None:
    client, steps = FakeClient(then=under_way, num_engines=4), []
    both = ("mode=both", "buffer.batch_size=4", "buffer.train_batch_size=8", "buffer.total_steps=5")
    config = stage("fixed", *both, "synchronizer.sync_style=fixed", "explorer.eval_on_startup=false")
    end_one = end_one_each_pass(client, lambda units: steps.append({unit.explore_step for unit in units}))
    run_stage(client, config, lambda: end_one() or (len(client.submitted) == 10 and not client.pending))
    assert all(len(under_way_now) == 1 for under_way_now in steps), "on policy: a step at a time"
    assert [unit.weights.version for unit in client.submitted] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("style", "required"),
    [("fully_async", WeightRequirement(5, exact=False)), ("trainer_driven", WeightRequirement(9, exact=True))],
)
def test_weights_with_a_trainer_in_another_process(style: str, required: WeightRequirement) -> None:
    config = stage(f"beside-{style}", f"synchronizer.sync_style={style}", "synchronizer.max_staleness=4")
    publish_weights(open_storage(f"memory://explorer-loop/{config.name}"), 9, b"weights")
    client = FakeClient()
    run_stage(client, config)
    assert [unit.weights for unit in client.submitted if not unit.is_eval] == [required]


def test_a_restarted_explorer_runs_only_missing_units() -> None:
    config = stage("restart", "buffer.batch_size=4", "buffer.total_steps=3")
    first = FakeClient(then=committed)
    events = run_stage(first, config)
    assert len(first.submitted) == 6 and [e.step for e in events if isinstance(e, StepFinished)] == [1, 2, 3]
    again = FakeClient(then=committed)
    assert run_stage(again, config) == [] and again.submitted == []
    log = ParquetLog(open_storage("memory://explorer-loop/restart"))
    (lost,) = (name for name in log.shards() if (name.explore_step, name.unit) == (2, 1))
    log.quarantine(lost, "bit rot")
    run_stage(again, config)
    assert [unit.key for unit in again.submitted] == [("experiences", 2, 1)]
    assert again.submitted[0].tasks == first.submitted[3].tasks


def test_opening_removes_the_seal_of_a_log_that_will_grow() -> None:
    run_stage(FakeClient(committed), stage("seal"))
    log = ParquetLog(open_storage("memory://explorer-loop/seal"))
    assert log.sealed_at() == 1
    make_explorer(FakeClient(), stage("seal"), print).open()
    assert log.sealed_at() == 1
    make_explorer(FakeClient(), stage("seal", "buffer.total_steps=2"), print).open()
    assert log.sealed_at() is None


def answer_slowly(monkeypatch: pytest.MonkeyPatch, go_on: threading.Event) -> None:
    """Make the first result that is fetched arrive only when `go_on` is set."""
    fetched, result = list[str](), FakeFuture.result

    def slow_result(future: FakeFuture) -> RolloutResult:
        fetched.append(future.key)
        if len(fetched) == 1:
            go_on.wait(20)
        return result(future)

    monkeypatch.setattr(FakeFuture, "result", slow_result)


def test_a_result_that_is_slow_delays_no_other_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, steps = threading.Event(), list[int]()
    answer_slowly(monkeypatch, go_on)

    def emit(event: Event) -> None:
        if isinstance(event, StepFinished):
            steps.append(event.step)
            if len(steps) == 2:
                go_on.set()

    client = FakeClient(then=finished, num_engines=4)
    loop = make_explorer(client, stage("slow-result", "buffer.total_steps=3"), emit)
    loop.open()
    loop.run()
    assert steps == [2, 3, 1] and len(client.submitted) == 3


def test_a_unit_whose_result_does_not_arrive_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "_RESULT_S", 0.2)
    go_on, client = threading.Event(), FakeClient()
    answer_slowly(monkeypatch, go_on)
    assert explore(client, "no-result") == []
    go_on.set()
    assert [unit.key for unit in client.submitted] == [("experiences", 1, 0)] * 2


@pytest.mark.parametrize("loss", [lost_with_the_result, told_to_end])
def test_a_unit_is_not_blamed_for_workers_that_were_taken_away(loss: Outcome) -> None:
    client = FakeClient(*[loss] * (MAX_ATTEMPTS + MAX_CRASHES))
    assert explore(client, loss.__name__) == []
    assert len(client.submitted) == MAX_ATTEMPTS + MAX_CRASHES + 1
    assert {unit.slots for unit in client.submitted} == {None}, "it runs whole, so it samples the same bits"


def test_a_unit_whose_workers_die_runs_task_by_task() -> None:
    client = FakeClient(*[died] * MAX_CRASHES)
    assert "task by task" in explore(client, "died")[-1]
    assert [unit.slots for unit in client.submitted] == [*[None] * MAX_CRASHES, (0,), (1,)]
    assert [unit.isolated for unit in client.submitted] == [False, *[True] * (MAX_CRASHES + 1)]


def test_a_crashing_task_is_set_aside_and_its_sibling_runs() -> None:
    client = FakeClient(*[died] * MAX_CRASHES, *[died] * MAX_CRASHES)  # the unit, then its first task isolated
    notes = explore(client, "crashes")
    assert [unit.slots for unit in client.submitted] == [*[None] * MAX_CRASHES, *[(0,)] * MAX_CRASHES, (1,)]
    retries = notes[MAX_CRASHES : 2 * MAX_CRASHES - 1]
    assert all(note.startswith("an isolated task of ") for note in retries), notes
    assert notes[-1].startswith("task taskset_0/0/0 crashed its workers and was set aside"), notes
    (shard,) = ParquetLog(open_storage("memory://explorer-loop/crashes")).shards()
    assert shard.part is not None and shard.part.slots == (0,), "the sibling's rollouts are its worker's to commit"


def test_a_unit_that_raises_is_retried_a_few_times() -> None:
    with pytest.raises(Exception, match=f"failed {MAX_ATTEMPTS} times.*the server is away"):
        explore(FakeClient(*[fails(StorageError("the server is away"))] * MAX_ATTEMPTS), "failed")


def test_a_unit_that_the_storage_refuses_ends_the_run() -> None:
    client = FakeClient(fails(StorageRefusedError("the disk is full")))
    with pytest.raises(StorageRefusedError, match="the disk is full"):
        explore(client, "refused")
    assert len(client.submitted) == 1


def test_a_unit_carries_only_the_fingerprint_of_the_config() -> None:
    client = FakeClient()
    explore(client, "fingerprint")
    (unit,) = client.submitted
    storage = open_storage(unit.url)
    assert read_config(storage, unit.config_fingerprint).name == "fingerprint"
    assert len(pickle.dumps(unit)) < 1000
