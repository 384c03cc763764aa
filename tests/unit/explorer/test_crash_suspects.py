"""Promises of the search for a crashing task: it is found with a bounded number of losses, and no other is blamed."""

import pickle
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.errors import EngineError, RoleError
from rftdask.explorer import crash_suspects
from rftdask.explorer.crash_suspects import MAX_CRASHES, MAX_IN_A_ROW, MAX_LOSSES, CrashSuspect, CrashTracker
from rftdask.rollouts.work_units import RolloutTask
from tests.unit.rollouts.rollout_cases import work_unit

WORKER = "tcp://10.0.0.7:4711"
UNITS = st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=5)))


class Story:
    """A unit that runs to its end on workers, some of which are lost."""

    def __init__(self, num_tasks: int, killers: set[int] = frozenset(), accidents: list[int] | None = None) -> None:  # type: ignore[assignment]
        """accidents: numbers of unrelated losses before the successive runs succeed."""
        suspect, accidents = CrashSuspect(num_tasks), list(accidents or [])
        self.set_aside: list[int] = []
        self.committed: list[int] = []
        self.num_losses = 0
        while not suspect.is_over:
            running = range(num_tasks) if suspect.next_slots is None else suspect.next_slots
            num_accidents = accidents.pop() if accidents else 0
            while (killers & set(running) or num_accidents > 0) and not suspect.is_over:
                num_accidents -= 1
                self.num_losses += 1
                before, suspect = suspect, suspect.lost()
                self.set_aside += suspect.to_set_aside
                if suspect.next_slots != before.next_slots:
                    break  # something else runs next
            else:
                self.committed += running
                suspect = suspect.finished()
            assert self.num_losses < 10_000


@given(UNITS)
def test_all_crashing_tasks_are_found_and_all_others_run(unit: tuple[int, set[int]]) -> None:
    num_tasks, killers = unit
    story = Story(num_tasks, killers)
    assert set(story.set_aside) == killers and len(story.set_aside) == len(killers)
    assert sorted(story.committed) == sorted(set(range(num_tasks)) - killers)
    whole = MAX_CRASHES if num_tasks > 1 and killers else 0
    assert story.num_losses == whole + MAX_CRASHES * len(killers)


def test_one_of_three_is_found_as_in_the_docstring() -> None:
    suspect = CrashSuspect(num_tasks=3)
    assert suspect.is_whole and suspect.lost().is_whole and suspect.lost().lost().is_whole
    suspect = suspect.lost().lost().lost()
    assert (suspect.isolated_tasks, suspect.next_slots, suspect.is_whole) == ((0, 1, 2), (0,), False)
    suspect = suspect.finished().lost().lost()
    assert (suspect.isolated_tasks, suspect.to_set_aside) == ((1, 2), ())
    suspect = suspect.lost()
    assert (suspect.isolated_tasks, suspect.to_set_aside) == ((2,), (1,))
    assert suspect.finished().is_over and suspect.finished().to_set_aside == ()


@given(UNITS, st.lists(st.integers(0, MAX_CRASHES - 1), max_size=20))
def test_random_losses_blame_no_task(unit: tuple[int, set[int]], accidents: list[int]) -> None:
    num_tasks, _ = unit
    story = Story(num_tasks, accidents=accidents)
    assert story.set_aside == []
    assert sorted(story.committed) == list(range(num_tasks))
    assert story.num_losses == sum(accidents[-1:]), "the unit ends well after the first of them"


@given(st.integers(2, 70), st.integers(0, 69), st.lists(st.integers(0, MAX_CRASHES - 1), max_size=10))
def test_a_crashing_task_is_found_among_random_losses(num_tasks: int, culprit: int, accidents: list[int]) -> None:
    story = Story(num_tasks, {culprit % num_tasks}, accidents)
    assert story.set_aside == [culprit % num_tasks]
    assert sorted([*story.committed, *story.set_aside]) == list(range(num_tasks))


def test_a_unit_of_one_task_has_as_many_chances() -> None:
    suspect = CrashSuspect(1)
    for _ in range(MAX_CRASHES):
        assert suspect.to_set_aside == () and suspect.next_slots is None
        suspect = suspect.lost()
    assert suspect.to_set_aside == (0,) and suspect.is_over


def lose(tracker: CrashTracker, unit: RolloutTask, was_running: bool = True) -> CrashSuspect:
    return tracker.lost(unit, was_running, cause="gone")


def blame_first_task(tracker: CrashTracker, unit: RolloutTask) -> CrashSuspect:
    """Lose workers under the unit until its first task is set aside."""
    suspect = CrashSuspect(len(unit.tasks))
    while not suspect.to_set_aside:
        suspect = lose(tracker, unit)
    tracker.set_aside(unit, suspect.to_set_aside)
    return suspect


def test_only_tasks_running_on_a_lost_worker_are_suspects() -> None:
    tracker = CrashTracker()

    def suspects() -> list[str]:
        return [key for key in ("one", "two", "waiting") if tracker.was_running(key, on=WORKER)]

    tracker.began(WORKER, "one")
    assert suspects() == ["one"]
    tracker.ended(WORKER, "the one before")
    assert suspects() == ["one"]
    tracker.began(WORKER, "two")
    assert suspects() == ["one", "two"]
    tracker.ended(WORKER, "one")
    assert suspects() == ["two"]
    tracker.ended(WORKER, "two")
    assert suspects() == ["one", "two", "waiting"], "any may have begun without a report"
    tracker.began(WORKER, "one")
    tracker.leaves(WORKER)
    assert suspects() == [], "the worker was requested to end"
    assert tracker.was_running("one", on="tcp://10.0.0.8:4711")


def test_overlapping_units_become_suspects_and_run_isolated() -> None:
    tracker = CrashTracker()
    assert not tracker.begin(work_unit(1, 2)).is_isolated
    suspect = lose(tracker, work_unit(1, 2))
    assert (suspect.is_isolated, suspect.next_slots) == (True, None)
    assert not lose(tracker, work_unit(3, 4, step=2), was_running=False).is_isolated


def test_overlapping_units_count_an_engine_failure_once() -> None:
    def failure(engine: str) -> EngineError:
        error = EngineError("logits that are not numbers")
        error.engine = engine
        return cast(EngineError, pickle.loads(pickle.dumps(error)))  # as from a worker

    tracker = CrashTracker()
    for number in range(4):
        tracker.engine_failed(work_unit(1, step=number + 1), f"key-{number}", failure("node/7"))
    with pytest.raises(RoleError, match="two failed for the same reason"):
        tracker.engine_failed(work_unit(1, step=9), "key-9", failure("node/8"))


def test_losses_of_a_waiting_unit_are_not_crashes() -> None:
    tracker = CrashTracker()
    for _ in range(MAX_LOSSES - 1):
        assert lose(tracker, work_unit(1, 2), was_running=False) == CrashSuspect(2)
    with pytest.raises(RoleError, match=f"work unit .* lost {MAX_LOSSES} workers; the last time: gone"):
        lose(tracker, work_unit(1, 2), was_running=False)


def test_a_completed_unit_is_forgotten() -> None:
    tracker = CrashTracker()
    for _ in range(MAX_CRASHES - 1):
        lose(tracker, work_unit(1, 2))
    assert tracker.finished(work_unit(1, 2), num_rollouts=4).is_over
    assert lose(tracker, work_unit(1, 2)).num_crashes == 1


def test_a_task_is_reported_for_setting_aside_once() -> None:
    tracker = CrashTracker()
    assert blame_first_task(tracker, work_unit(1, 2)).to_set_aside == (0,)
    assert lose(tracker, work_unit(1, 2), was_running=False).to_set_aside == ()
    assert lose(tracker, work_unit(1, 2)).to_set_aside == ()
    assert tracker.finished(work_unit(1, 2), num_rollouts=2).to_set_aside == ()


def test_a_unit_whose_last_task_was_set_aside_is_forgotten() -> None:
    tracker = CrashTracker()
    assert blame_first_task(tracker, work_unit(1)).is_over
    assert lose(tracker, work_unit(1)) == CrashSuspect(1, num_crashes=1), "a damaged shard: it runs again"


def test_a_task_stays_set_aside_in_later_epochs() -> None:
    tracker = CrashTracker()
    assert blame_first_task(tracker, work_unit(5, 6)).to_set_aside == (0,)
    again = tracker.begin(work_unit(7, 5, step=9, epoch=1))
    assert (again.isolated_tasks, again.to_set_aside) == ((0,), (1,))
    assert tracker.begin(work_unit(6, 7, step=10, epoch=1)) == CrashSuspect(2)


def test_too_many_culprits_in_a_row_end_the_run() -> None:
    tracker = CrashTracker()
    for number in range(MAX_IN_A_ROW):
        blame_first_task(tracker, work_unit(number, step=number + 1))
    with pytest.raises(RoleError, match="workers are lost whatever they run: 4 tasks in a row"):
        blame_first_task(tracker, work_unit(9, step=9))


def test_successful_rollouts_between_culprits_clear_workers() -> None:
    tracker = CrashTracker()
    for number in range(3 * MAX_IN_A_ROW):
        blame_first_task(tracker, work_unit(number, step=number + 1))
        tracker.finished(work_unit(100, step=1000 + number), num_rollouts=2)


def test_a_crashing_unit_too_large_to_split_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_suspects, "MAX_PART_TASKS", 1)
    tracker = CrashTracker()
    with pytest.raises(RoleError, match="they cannot run one at a time to find the cause"):
        blame_first_task(tracker, work_unit(1, 2))
