"""Promises of the experience pipeline: before the commit it drops the same rows as when a batch is formed."""

import pickle
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.algorithm.compose import make_algorithm, make_part
from rftdask.algorithm.operators import ExperienceTable, Operator
from rftdask.buffer.batches.operator_pipeline import experience_table, filter_experiences, operators_of
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import load_config
from rftdask.errors import OperatorError
from rftdask.trainer.rank import AlgorithmFilter, build_batch_filter

make_operator = partial(make_part, "operator")


def group(task: int, rewards: list[float | None], **fields: Any) -> list[Experience]:
    """Rollouts of a task; one without a reward failed."""
    return [
        Experience(
            taskset="t",
            epoch=0,
            task_index=task,
            rollout=k,
            explore_step=1,
            tokens=(1, 2, 3),
            prompt_length=1,
            rollout_logprobs=(-1.0, -1.0),
            reward=reward,
            status=Status.OK if reward is not None else Status.FAILED,
            **fields,
        )
        for k, reward in enumerate(rewards)
    ]


@dataclass(frozen=True)
class FailsAt(Operator):
    """Raises when the rewards of a task are all as given."""

    reward: float

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        for number in range(table.num_groups):
            if bool((table.rewards_N[table.group_N == number] == self.reward).all()):
                raise ZeroDivisionError("division by zero")
        return table, {}


def test_dropped_rows_are_committed_as_filtered_with_a_reason() -> None:
    rows = [*group(0, [1.0, 1.0]), *group(1, [1.0, 0.0]), *group(2, [None, 0.5])]
    operators = [make_operator("reward_std_filter"), make_operator("reward_filter", {"threshold": 0.5})]
    found = filter_experiences(operators, rows, None)
    assert [e.uid for e in found] == [e.uid for e in rows]
    assert [(str(e.status), e.error) for e in found] == [
        ("filtered", "operator reward_std_filter: low_std"),
        ("filtered", "operator reward_std_filter: low_std"),
        ("ok", ""),
        ("filtered", "operator reward_filter: reward_range"),
        ("failed", ""),
        ("filtered", "operator reward_std_filter: low_std"),
    ]
    assert found[0].reward == 1.0


def test_the_turns_of_a_rollout_are_one_rollout_to_operators() -> None:
    rows = [*group(0, [1.0, 0.0]), *group(1, [1.0])]
    rows += [replace(row, turn=1) for row in rows if row.reward == 1.0]
    told = experience_table(experiences_to_table(rows, "run")).rollout_N
    assert told is not None and sorted(told.tolist()) == [0, 0, 1, 2, 2]
    found = filter_experiences([make_operator("reward_std_filter", {"threshold": -1.0})], rows, None)
    assert [str(e.status) for e in found] == ["ok", "ok", "filtered", "ok", "filtered"], "a lone rollout of two turns"


def test_a_changed_reward_keeps_the_original_as_a_metric() -> None:
    shaping = make_part(
        "operator", "reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "q", "weight": 0.5}]}
    )
    rows = [*group(0, [1.0], metrics={"q": 2.0}), *group(1, [1.0])]
    first, second = filter_experiences([shaping], rows, None)
    assert (first.reward, first.metrics) == (2.0, {"q": 2.0, "unshaped_reward": 1.0})
    assert second == rows[1]


def test_a_masked_response_is_committed_without_trained_tokens() -> None:
    rows = group(0, [1.0, 0.0])
    rows[1] = replace(rows[1], status=Status.TRUNCATED)
    first, second = filter_experiences([make_operator("mask_response_truncated")], rows, None)
    assert first == rows[0]
    assert (second.status, second.reward) == (Status.TRUNCATED, 0.0)
    assert not np.asarray(second.loss_mask).any() and len(np.asarray(second.loss_mask)) > 0


def test_greedy_rollouts_are_skipped() -> None:
    rows = group(0, [1.0, 1.0, 0.0])
    found = filter_experiences([make_operator("reward_std_filter")], rows, baseline_rollout=2)
    assert [str(e.status) for e in found] == ["filtered", "filtered", "ok"]


OPERATORS = [
    ("reward_filter", {"threshold": 0.5}),
    ("reward_std_filter", {}),
    ("dapo_dynamic_sampling", {}),
    ("invalid_reward_filter", {}),
]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.sampled_from(OPERATORS), max_size=3),
)
def test_both_places_drop_the_same_rows(rewards: list[list[float]], chosen: list[tuple[str, dict[str, Any]]]) -> None:
    operators = [make_operator(*each) for each in chosen]
    rows = [e for task, some in enumerate(rewards) for e in group(task, list(some))]
    at_batch = AlgorithmFilter(make_algorithm("grpo"), operators, None).reasons(experiences_to_table(rows), 1)
    per_task = [
        e for task, some in enumerate(rewards) for e in filter_experiences(operators, group(task, list(some)), None)
    ]
    assert [e.error.rpartition(": ")[2] for e in per_task] == at_batch


@pytest.mark.parametrize("place", ["commit", "batch"])
def test_an_operator_that_fails_is_named_with_the_task(place: str) -> None:
    rows = [*group(3, [1.0, 0.0]), *group(4, [0.5, 0.5])]
    with pytest.raises(OperatorError) as caught:
        if place == "commit":
            filter_experiences([FailsAt(0.5)], rows, None)
        else:
            curation = AlgorithmFilter(make_algorithm("grpo"), [FailsAt(0.5)], None)
            curation.reasons(experiences_to_table(rows), 1)
    assert str(caught.value) == "operator FailsAt failed on task t/0/4: ZeroDivisionError: division by zero"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_operators_run_in_one_place() -> None:
    pipeline = "data_processor.experience_pipeline"
    tree = {
        "model": {"model_path": "tiny", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    at_batch = load_config(tree, [f"{pipeline}.operators=[{{name: reward_std_filter}}]"])
    at_commit = load_config(at_batch.to_dict(), [f"{pipeline}.stage=commit"])
    assert operators_of(at_batch) == operators_of(at_commit) == [make_operator("reward_std_filter")]
    table = experiences_to_table(group(0, [1.0, 1.0]))
    assert build_batch_filter(at_batch, make_algorithm("grpo")).reasons(table, 1) == ["low_std"] * 2
    assert build_batch_filter(at_commit, make_algorithm("grpo")).reasons(table, 1) == ["", ""]
