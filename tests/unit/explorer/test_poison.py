"""Promises of what the explorer remembers of lost workers:

- a batch that waited on a lost worker is no suspect; one that ran there is, also if its worker had no time to say so,
  but not if the worker was told to end;
- a poisonous task is known again in later epochs; its siblings are not;
- what no task can be to blame for ends the run, with the numbers: losses without end, and task after task.
"""

from __future__ import annotations

import pytest

from rftdask.data.task_schedule import TaskRef
from rftdask.errors import RoleError
from rftdask.explorer.bisection import STRIKES, Trial
from rftdask.explorer.poison import MAX_IN_A_ROW, MAX_LOSSES, Suspects
from rftdask.explorer.worker_task import RolloutSpec

WORKER = "tcp://10.0.0.7:4711"


def spec(*tasks: int, step: int = 1, epoch: int = 0) -> RolloutSpec:
    return RolloutSpec(
        url="memory://run",
        config={},
        folder="experiences",
        explore_step=step,
        batch=0,
        tasks=tuple(TaskRef(0, epoch, index) for index in tasks),
        repeat_times=2,
        greedy_baseline=False,
        version=0,
        exact=True,
        threads=1,
        log_file=None,
    )


def find_poison(suspects: Suspects, batch: RolloutSpec) -> Trial:
    """Lose workers under the batch until its first task is blamed."""
    trial = Trial.of(len(batch.tasks))
    while not trial.poisonous:
        trial = suspects.lost(batch, was_running=True, cause="gone")
    suspects.set_aside(batch, trial.poisonous)
    return trial


def test_only_what_was_running_on_a_lost_worker_is_a_suspect() -> None:
    suspects = Suspects(takes_parts=True)
    suspects.began(WORKER, "one")
    assert suspects.was_running("one", on=WORKER)
    assert not suspects.was_running("waiting", on=WORKER)
    suspects.ended(WORKER, "the one before")
    assert not suspects.was_running("waiting", on=WORKER)
    suspects.ended(WORKER, "one")
    assert suspects.was_running("waiting", on=WORKER), "it may have begun and not come to say so"


def test_losses_of_a_batch_that_was_waiting_are_no_strikes() -> None:
    suspects = Suspects(takes_parts=True)
    for _ in range(MAX_LOSSES - 1):
        assert suspects.lost(spec(1, 2), was_running=False, cause="gone") == Trial.of(2)
    with pytest.raises(RoleError, match=f"{MAX_LOSSES} workers were lost that had rollout batch .*: gone"):
        suspects.lost(spec(1, 2), was_running=False, cause="gone")


def test_a_batch_that_ends_well_is_forgotten() -> None:
    suspects = Suspects(takes_parts=True)
    for _ in range(STRIKES - 1):
        suspects.lost(spec(1, 2), was_running=True, cause="gone")
    assert suspects.finished(spec(1, 2), num_rollouts=4).next_piece == ()
    assert suspects.lost(spec(1, 2), was_running=True, cause="gone").strikes == 1


def test_a_poisonous_task_is_known_in_later_epochs() -> None:
    suspects = Suspects(takes_parts=True)
    assert find_poison(suspects, spec(5, 6)).poisonous == (0,)
    again = suspects.begin(spec(7, 5, step=9, epoch=1))
    assert (again.pieces, again.poisonous) == (((0,),), (1,))
    assert suspects.begin(spec(6, 7, step=10, epoch=1)) == Trial.of(2)


def test_task_after_task_is_not_the_fault_of_tasks() -> None:
    suspects = Suspects(takes_parts=True)
    for number in range(MAX_IN_A_ROW):
        find_poison(suspects, spec(number, step=number + 1))
    with pytest.raises(RoleError, match="workers are lost whatever they run: 4 tasks in a row"):
        find_poison(suspects, spec(9, step=9))


def test_rollouts_that_end_well_between_them_clear_the_workers() -> None:
    suspects = Suspects(takes_parts=True)
    for number in range(3 * MAX_IN_A_ROW):
        find_poison(suspects, spec(number, step=number + 1))
        suspects.finished(spec(100, step=1000 + number), num_rollouts=2)


def test_a_log_without_parts_ends_the_run_in_place_of_a_search() -> None:
    suspects = Suspects(takes_parts=False)
    with pytest.raises(RoleError, match="cannot keep a part of it"):
        find_poison(suspects, spec(1, 2))


def test_a_worker_that_was_told_to_end_blames_nothing_that_it_ran() -> None:
    suspects = Suspects(takes_parts=True)
    suspects.began(WORKER, "one")
    suspects.leaves(WORKER)
    assert not suspects.was_running("one", on=WORKER)
    assert suspects.was_running("one", on="tcp://10.0.0.8:4711")
