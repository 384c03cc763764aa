"""Promises of the rule that finds the task which kills its worker:

- every poisonous task of a batch is found, and no other one is blamed;
- all other tasks of the batch are run to their end;
- workers that are lost for other reasons blame nobody, unless the same task is alone on STRIKES of them in a row;
- the number of losses is bounded.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rftdask.explorer.bisection import STRIKES, Trial

BATCHES = st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=5)))


def judge(num_tasks: int, killers: set[int], accidents: list[int] | None = None) -> tuple[Trial, list[int], int]:
    """Run a batch to its end: the trial, the tasks that ended well, and the losses.

    accidents: before each piece runs through, so many losses that are nobody's fault.
    """
    trial, done, losses = Trial.of(num_tasks), [], 0
    accidents = list(accidents or [])
    while piece := trial.next_piece:
        by_chance = accidents.pop() if accidents else 0
        lost = bool(killers & set(piece)) or by_chance > 0
        if by_chance > 1:
            accidents.append(by_chance - 1)
        if lost:
            losses += 1
            trial = trial.lost()
        else:
            done += piece
            trial = trial.finished()
        assert losses < 10_000
    return trial, done, losses


@given(BATCHES)
def test_the_poisonous_tasks_are_found_and_all_others_run(batch: tuple[int, set[int]]) -> None:
    num_tasks, killers = batch
    trial, done, losses = judge(num_tasks, killers)
    assert set(trial.poisonous) == killers
    assert sorted(done) == sorted(set(range(num_tasks)) - killers)
    depth = math.ceil(math.log2(num_tasks)) if num_tasks > 1 else 0
    assert losses <= STRIKES + len(killers) * (depth + STRIKES) if killers else losses == 0


def test_one_of_four_is_found_as_the_text_says() -> None:
    trial = Trial.of(4)
    assert trial.is_whole and trial.lost().is_whole and trial.lost().lost().is_whole
    trial = trial.lost().lost().lost()
    assert trial.pieces == ((0, 1), (2, 3)) and not trial.is_whole
    trial = trial.finished().lost()
    assert trial.pieces == ((2,), (3,))
    trial = trial.lost().lost()
    assert trial.pieces == ((2,), (3,)) and trial.poisonous == ()
    trial = trial.lost()
    assert trial.pieces == ((3,),) and trial.poisonous == (2,)
    assert trial.finished().next_piece == ()


@given(BATCHES, st.lists(st.integers(0, STRIKES - 1), max_size=20))
def test_losses_by_chance_blame_nobody(batch: tuple[int, set[int]], accidents: list[int]) -> None:
    num_tasks, _ = batch
    trial = Trial.of(num_tasks)
    done: list[int] = []
    while piece := trial.next_piece:
        for _ in range(accidents.pop() if accidents else 0):
            trial = trial.lost()
        if trial.next_piece == piece:
            trial, done = trial.finished(), [*done, *piece]
    assert trial.poisonous == ()
    assert sorted(done) == list(range(num_tasks))


@given(st.integers(2, 70), st.integers(0, 69), st.lists(st.integers(0, STRIKES - 1), max_size=10))
def test_a_culprit_is_found_among_losses_by_chance(num_tasks: int, culprit: int, accidents: list[int]) -> None:
    trial, done, _ = judge(num_tasks, {culprit % num_tasks}, accidents)
    assert culprit % num_tasks in trial.poisonous
    assert sorted([*done, *trial.poisonous]) == list(range(num_tasks))


def test_a_task_that_is_the_whole_batch_has_no_more_chances_than_another() -> None:
    trial = Trial.of(1)
    for _ in range(STRIKES):
        assert trial.poisonous == ()
        trial = trial.lost()
    assert trial.poisonous == (0,)
