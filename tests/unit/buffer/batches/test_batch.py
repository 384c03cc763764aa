"""Promises of a batch: its flat arrays contain exactly the values of the rows, in the order of the rows."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.buffer.batches.batch import (
    BATCH_COLUMNS,
    batch_from_table,
    column_of,
    join_batches,
    mismatched,
    numbers_of,
    supervised_batch,
)
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience
from tests.unit.buffer.buffer_cases import experience

TOLD = [("a", 0.5), (None, None), ("b", -1.0), ("a", None)]
"""State and reward of the turns of one rollout."""


@st.composite
def experiences(draw: Any) -> Experience:
    prompt = draw(st.lists(st.integers(0, 10**6), max_size=4))
    response = draw(st.lists(st.integers(0, 10**6), max_size=6))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
    version = draw(st.integers(0, 9))
    return experience(
        draw(st.integers(0, 3)),
        draw(st.integers(0, 99)),
        taskset=draw(st.sampled_from(("a", "b"))),
        epoch=draw(st.integers(0, 1)),
        tokens=prompt + response,
        prompt_length=len(prompt),
        rollout_logprobs=[draw(st.floats(-9, 0, width=32)) for _ in response],
        loss_mask=mask,
        reward=draw(st.floats(-2, 2, width=32)),
        min_policy_version=version,
        max_policy_version=version,
        temperature=draw(st.sampled_from((0.5, 1.0))),
    )


@settings(max_examples=60)
@given(st.lists(experiences(), min_size=1, max_size=8))
def test_arrays_are_those_of_the_rows_one_by_one(rows: list[Experience]) -> None:
    batch = batch_from_table(experiences_to_table(rows).select(BATCH_COLUMNS))
    assert len(batch) == len(rows)
    assert batch.uids == tuple(row.uid for row in rows)
    seen: list[str] = []
    for i, row in enumerate(rows):
        if row.group_id not in seen:
            seen.append(row.group_id)
        response = len(row.tokens) - row.prompt_length
        assert batch.row_tokens()[i].tolist() == list(row.tokens)
        assert batch.lengths[i] == len(row.tokens)
        assert batch.prompt_lengths[i] == row.prompt_length
        assert batch.response_lengths[i] == response
        assert batch.row_logprobs()[i].tolist() == list(row.rollout_logprobs)
        assert batch.row_masks()[i].tolist() == ([True] * response if row.loss_mask is None else list(row.loss_mask))
        assert batch.rewards[i] == np.float32(row.reward)
        assert batch.groups[i] == seen.index(row.group_id)
        assert batch.temperatures[i] == np.float32(row.temperature)
        assert batch.min_policy_versions[i] == row.min_policy_version
    assert (batch.tokens.dtype, batch.loss_mask.dtype, batch.groups.dtype) == (np.int32, np.bool_, np.int64)
    assert len(batch.tokens) == batch.lengths.sum()
    assert len(batch.loss_mask) == len(batch.rollout_logprobs) == batch.response_lengths.sum()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_reward_deviation_is_per_group(tasks: list[int]) -> None:
    rows = [experience(task, number, reward=float(number * number)) for number, task in enumerate(tasks)]
    stds = batch_from_table(experiences_to_table(rows)).group_reward_stds()
    order = list(dict.fromkeys(tasks))
    expected = [np.std([r.reward for r in rows if r.task_index == task]) for task in order]
    np.testing.assert_allclose(stds, expected)


def test_a_rollout_has_one_reward_for_any_number_of_turns() -> None:
    # Two tasks: in each, two rollouts of one turn that got 1 and two of nine turns that got 0.
    rows = [
        experience(task, rollout, turn=turn, reward=float(rollout < 2))
        for task in (0, 1)
        for rollout in range(4)
        for turn in range(1 if rollout < 2 else 9)
    ]
    batch = join_batches([batch_from_table(experiences_to_table(rows)), supervised_batch([((1, 2), 1, None)], ("d",))])
    rewards, groups = batch.rollout_rewards()
    assert (rewards.tolist(), groups.tolist()) == ([1, 1, 0, 0] * 2, [0] * 4 + [1] * 4)
    assert batch.group_reward_stds().tolist() == [0.5, 0.5]


def test_states_are_numbered_and_missing_ones_are_unknown() -> None:
    rows = [experience(0, 0, turn=i, env_state=s, turn_reward=r) for i, (s, r) in enumerate(TOLD)]
    batch = batch_from_table(experiences_to_table(rows))
    assert batch.states is not None and batch.turn_rewards is not None
    assert batch.states.tolist() == [0, -1, 1, 0]
    assert batch.turn_rewards.tolist() == [0.5, 0.0, -1.0, 0.0]
    shown = supervised_batch([((1, 2, 3), 1, None)], ["a"])
    joined = join_batches([batch, shown])
    assert joined.states is not None and joined.turn_rewards is not None
    assert (joined.states.tolist()[-1], joined.turn_rewards.tolist()[-1]) == (-1, 0.0)
    silent = batch_from_table(experiences_to_table([experience()]))
    assert (silent.states, silent.turn_rewards, join_batches([silent, shown]).states) == (None, None, None)


def test_experts_align_with_tokens_and_may_be_unknown() -> None:
    def of(task: int, length: int, **told: Any) -> Experience:
        return experience(task, tokens=(5,) * length, prompt_length=1, rollout_logprobs=(-0.5,) * (length - 1), **told)

    rows = [
        of(0, 2, routed_experts=np.array([[3, 1]], np.int16)),
        of(1, 2),
        of(2, 3, routed_experts=np.array([[0, 2], [299, 4]], np.int16)),
    ]
    batch = batch_from_table(experiences_to_table(rows))
    none = [-1, -1]
    assert batch.routed_experts is not None
    assert batch.routed_experts.tolist() == [[3, 1], none, none, none, [0, 2], [299, 4], none]
    assert [row.tolist() for row in batch.row_experts() or ()][2] == [[0, 2], [299, 4], none]
    assert batch_from_table(experiences_to_table(rows[1:2])).routed_experts is None
    assert batch.by_turns().routed_experts is None


def test_supervised_rows_have_no_rewards_and_no_logprobs() -> None:
    batch = supervised_batch([((1, 2, 3), 1, None), ((4, 5), 0, (True, False))], ["a", "b"])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.loss_mask.tolist() == [True, True, True, False]
    assert batch.rollout_logprobs.tolist() == [0.0] * 4
    assert batch.rewards.tolist() == [0.0, 0.0]
    assert batch.groups.tolist() == [0, 1]
    assert not batch.sampled


def test_mismatched_joins_prompts_with_the_previous_group() -> None:
    rows = [((1, 2, 10), 2, None, 1.0), ((3, 20, 21), 1, (True, False), 0.0), ((4, 5, 30), 2, None, 1.0)]
    other = mismatched(supervised_batch(rows, ["a", "b", "c"]), max_tokens=3)
    assert [row.tolist() for row in other.row_tokens()] == [[1, 2, 30], [3, 10], [4, 5, 20]]
    assert [row.tolist() for row in other.row_masks()] == [[True], [True], [True]]
    pairs = supervised_batch([((p, 10 * p + side), 1, None) for p in (1, 2) for side in (0, 1)], list("abcd"), 2)
    assert [row.tolist() for row in mismatched(pairs, 9).row_tokens()] == [[1, 20], [1, 21], [2, 10], [2, 11]]


def test_columns_are_arrays_and_arrays_columns() -> None:
    column = pa.chunked_array([pa.array([1.0, None], pa.float32()), pa.array([3.0], pa.float32())])
    np.testing.assert_array_equal(numbers_of(column), np.array([1.0, np.nan, 3.0], np.float32))
    np.testing.assert_array_equal(numbers_of(pa.array(range(5)).slice(2, 2)), [2, 3])
    assert len(numbers_of(pa.chunked_array([], pa.int32()))) == 0
    every_second = np.arange(6, dtype=np.int32)[::2]
    assert column_of(every_second).equals(pa.array([0, 2, 4], pa.int32()))
    assert column_of(np.zeros(0)).equals(pa.array([], pa.float64()))
