"""Promises of the rule that finds the task which ends its workers, and of what the explorer remembers of them:

- every poisonous task of a unit is found, and no other one is blamed; all others are run to their end;
- workers that are lost for other reasons blame nobody, unless the same task is alone on STRIKES of them in a row;
- the number of losses is bounded: STRIKES for the unit, STRIKES for each poisonous task;
- a unit that waited on a lost worker is not suspected; one that ran there is, also if its worker had no time to say so,
  but not if the worker was told to end;
- units that overlapped on a lost worker are all suspected once, and then run alone; of their engine they tell once;
- a poisonous task is known again in later epochs; its siblings are not;
- what no task can be to blame for ends the run, with the numbers: losses without end, and task after task.
"""

from __future__ import annotations

import pickle
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.data.task_schedule import TaskRef
from rftdask.errors import EngineError, RoleError
from rftdask.explorer import crash_suspects as poison
from rftdask.explorer.crash_suspects import MAX_IN_A_ROW, MAX_LOSSES, STRIKES, PoisonTracker, Trial
from rftdask.rollouts.work_units import RolloutTask
from rftdask.synchronizer.styles import WeightRequirement

WORKER = "tcp://10.0.0.7:4711"
UNITS = st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=5)))


class Story:
    """A unit that is run to its end, on workers some of which are lost."""

    def __init__(self, num_tasks: int, killers: set[int] = frozenset(), accidents: list[int] | None = None) -> None:  # type: ignore[assignment]
        """accidents: before each run of something ends well, so many losses that are nobody's fault."""
        trial, accidents = Trial(num_tasks), list(accidents or [])
        self.poisonous: list[int] = []
        self.committed: list[int] = []
        self.num_losses = 0
        while not trial.is_over:
            running = range(num_tasks) if trial.next_slots is None else trial.next_slots
            num_accidents = accidents.pop() if accidents else 0
            while (killers & set(running) or num_accidents > 0) and not trial.is_over:
                num_accidents -= 1
                self.num_losses += 1
                before, trial = trial, trial.lost()
                self.poisonous += trial.poisonous
                if trial.next_slots != before.next_slots:
                    break  # something else runs next
            else:
                self.committed += running
                trial = trial.finished()
            assert self.num_losses < 10_000


@given(UNITS)
def test_the_poisonous_tasks_are_found_and_all_others_run(unit: tuple[int, set[int]]) -> None:
    num_tasks, killers = unit
    story = Story(num_tasks, killers)
    assert set(story.poisonous) == killers and len(story.poisonous) == len(killers)
    assert sorted(story.committed) == sorted(set(range(num_tasks)) - killers)
    whole = STRIKES if num_tasks > 1 and killers else 0
    assert story.num_losses == whole + STRIKES * len(killers)


def test_one_of_three_is_found_as_the_text_says() -> None:
    trial = Trial(num_tasks=3)
    assert trial.is_whole and trial.lost().is_whole and trial.lost().lost().is_whole
    trial = trial.lost().lost().lost()
    assert (trial.singles, trial.next_slots, trial.is_whole) == ((0, 1, 2), (0,), False)
    trial = trial.finished().lost().lost()
    assert (trial.singles, trial.poisonous) == ((1, 2), ())
    trial = trial.lost()
    assert (trial.singles, trial.poisonous) == ((2,), (1,))
    assert trial.finished().is_over and trial.finished().poisonous == ()


@given(UNITS, st.lists(st.integers(0, STRIKES - 1), max_size=20))
def test_losses_by_chance_blame_nobody(unit: tuple[int, set[int]], accidents: list[int]) -> None:
    num_tasks, _ = unit
    story = Story(num_tasks, accidents=accidents)
    assert story.poisonous == []
    assert sorted(story.committed) == list(range(num_tasks))
    assert story.num_losses == sum(accidents[-1:]), "the unit ends well after the first of them"


@given(st.integers(2, 70), st.integers(0, 69), st.lists(st.integers(0, STRIKES - 1), max_size=10))
def test_a_culprit_is_found_among_losses_by_chance(num_tasks: int, culprit: int, accidents: list[int]) -> None:
    story = Story(num_tasks, {culprit % num_tasks}, accidents)
    assert story.poisonous == [culprit % num_tasks]
    assert sorted([*story.committed, *story.poisonous]) == list(range(num_tasks))


def test_a_task_that_is_the_whole_unit_has_no_more_chances_than_another() -> None:
    trial = Trial(1)
    for _ in range(STRIKES):
        assert trial.poisonous == () and trial.next_slots is None
        trial = trial.lost()
    assert trial.poisonous == (0,) and trial.is_over


# ---- what the explorer remembers


def work_unit(*tasks: int, step: int = 1, epoch: int = 0) -> RolloutTask:
    return RolloutTask(
        url="memory://run",
        config_fingerprint="",
        folder="experiences",
        explore_step=step,
        unit_index=0,
        tasks=tuple(TaskRef(0, epoch, index) for index in tasks),
        repeat_times=2,
        greedy_baseline=False,
        weights=WeightRequirement(0, exact=True),
        threads=1,
        log_file=None,
    )


def find_poison(tracker: PoisonTracker, unit: RolloutTask) -> Trial:
    """Lose workers under the unit until its first task is blamed."""
    trial = Trial(len(unit.tasks))
    while not trial.poisonous:
        trial = tracker.lost(unit, was_running=True, cause="gone")
    tracker.set_aside(unit, trial.poisonous)
    return trial


def test_only_what_was_running_on_a_lost_worker_is_suspected() -> None:
    tracker = PoisonTracker()
    tracker.began(WORKER, "one")
    assert tracker.was_running("one", on=WORKER)
    assert not tracker.was_running("waiting", on=WORKER)
    tracker.ended(WORKER, "the one before")
    assert not tracker.was_running("waiting", on=WORKER)
    tracker.ended(WORKER, "one")
    assert tracker.was_running("waiting", on=WORKER), "it may have begun and not come to say so"


def test_all_that_overlapped_on_a_lost_worker_are_suspected_and_then_run_alone() -> None:
    tracker = PoisonTracker()
    tracker.began(WORKER, "one")
    tracker.began(WORKER, "two")
    assert tracker.was_running("one", on=WORKER) and tracker.was_running("two", on=WORKER)
    assert not tracker.was_running("waiting", on=WORKER)
    tracker.ended(WORKER, "one")
    assert not tracker.was_running("one", on=WORKER) and tracker.was_running("two", on=WORKER)
    assert not tracker.begin(work_unit(1, 2)).runs_alone
    trial = tracker.lost(work_unit(1, 2), was_running=True, cause="gone")
    assert (trial.runs_alone, trial.next_slots) == (True, None)
    assert not tracker.lost(work_unit(3, 4, step=2), was_running=False, cause="gone").runs_alone


def test_units_that_overlapped_in_one_engine_tell_of_its_failure_once() -> None:
    def failure(engine: str) -> EngineError:
        error = EngineError("logits that are not numbers")
        error.engine = engine
        return cast(EngineError, pickle.loads(pickle.dumps(error)))  # as it comes from a worker

    tracker = PoisonTracker()
    for number in range(4):
        tracker.engine_failed(work_unit(1, step=number + 1), f"key-{number}", failure("node/7"))
    with pytest.raises(RoleError, match="two failed for the same reason"):
        tracker.engine_failed(work_unit(1, step=9), "key-9", failure("node/8"))


def test_losses_of_a_unit_that_was_waiting_are_no_strikes() -> None:
    tracker = PoisonTracker()
    for _ in range(MAX_LOSSES - 1):
        assert tracker.lost(work_unit(1, 2), was_running=False, cause="gone") == Trial(2)
    with pytest.raises(RoleError, match=f"{MAX_LOSSES} workers were lost that had work unit .*: gone"):
        tracker.lost(work_unit(1, 2), was_running=False, cause="gone")


def test_a_unit_that_ends_well_is_forgotten() -> None:
    tracker = PoisonTracker()
    for _ in range(STRIKES - 1):
        tracker.lost(work_unit(1, 2), was_running=True, cause="gone")
    assert tracker.finished(work_unit(1, 2), num_rollouts=4).is_over
    assert tracker.lost(work_unit(1, 2), was_running=True, cause="gone").strikes == 1


def test_a_task_is_told_of_as_poisonous_once() -> None:
    tracker = PoisonTracker()
    assert find_poison(tracker, work_unit(1, 2)).poisonous == (0,)
    assert tracker.lost(work_unit(1, 2), was_running=False, cause="gone").poisonous == ()
    assert tracker.lost(work_unit(1, 2), was_running=True, cause="gone").poisonous == ()
    assert tracker.finished(work_unit(1, 2), num_rollouts=2).poisonous == ()


def test_a_unit_whose_last_task_was_poisonous_is_forgotten_too() -> None:
    tracker = PoisonTracker()
    assert find_poison(tracker, work_unit(1)).is_over
    assert tracker.lost(work_unit(1), was_running=True, cause="a damaged shard: it runs again") == Trial(1, strikes=1)


def test_a_poisonous_task_is_known_in_later_epochs() -> None:
    tracker = PoisonTracker()
    assert find_poison(tracker, work_unit(5, 6)).poisonous == (0,)
    again = tracker.begin(work_unit(7, 5, step=9, epoch=1))
    assert (again.singles, again.poisonous) == ((0,), (1,))
    assert tracker.begin(work_unit(6, 7, step=10, epoch=1)) == Trial(2)


def test_task_after_task_is_not_the_fault_of_tasks() -> None:
    tracker = PoisonTracker()
    for number in range(MAX_IN_A_ROW):
        find_poison(tracker, work_unit(number, step=number + 1))
    with pytest.raises(RoleError, match="workers are lost whatever they run: 4 tasks in a row"):
        find_poison(tracker, work_unit(9, step=9))


def test_rollouts_that_end_well_between_them_clear_the_workers() -> None:
    tracker = PoisonTracker()
    for number in range(3 * MAX_IN_A_ROW):
        find_poison(tracker, work_unit(number, step=number + 1))
        tracker.finished(work_unit(100, step=1000 + number), num_rollouts=2)


def test_a_unit_too_large_for_parts_ends_the_run_in_place_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "MAX_PART_TASKS", 1)
    tracker = PoisonTracker()
    with pytest.raises(RoleError, match="cannot keep a part of it"):
        find_poison(tracker, work_unit(1, 2))


def test_a_worker_that_was_told_to_end_blames_nothing_that_it_ran() -> None:
    tracker = PoisonTracker()
    tracker.began(WORKER, "one")
    tracker.leaves(WORKER)
    assert not tracker.was_running("one", on=WORKER)
    assert tracker.was_running("one", on="tcp://10.0.0.8:4711")
