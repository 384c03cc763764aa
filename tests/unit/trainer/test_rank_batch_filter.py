"""Promises of the batch filter: each drop has its reason, dropped rows influence nothing, and the remaining rows have
the advantages of the whole group.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import make_algorithm, make_part
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.errors import UserError
from rftdask.storage import open_storage
from rftdask.trainer.rank import AlgorithmFilter
from tests.unit.buffer.buffer_cases import experience

make_operator = partial(make_part, "operator")


def table(rewards: list[list[float]], **changes: dict[tuple[int, int], Any]) -> pa.Table:
    """Rows of groups of rollouts; `changes`: by field, its value for (task, rollout)."""
    rows = [
        Experience(
            **{
                "taskset": "t",
                "epoch": 0,
                "task_index": task,
                "rollout": k,
                "explore_step": 1,
                "tokens": (1, 2, 3),
                "prompt_length": 1,
                "rollout_logprobs": (-1.0, -1.0),
                "reward": reward,
                **{name: values[task, k] for name, values in changes.items() if (task, k) in values},
            }
        )
        for task, group in enumerate(rewards)
        for k, reward in enumerate(group)
    ]
    return experiences_to_table(rows)


def curation(
    name: str = "grpo", *operators: tuple[str, dict[str, Any]], baseline: int | None = None, **parts: Any
) -> AlgorithmFilter:
    return AlgorithmFilter(make_algorithm(name, **parts), [make_operator(n, a) for n, a in operators], baseline)


def test_most_algorithms_drop_nothing() -> None:
    assert curation("grpo").reasons(table([[1.0, 1.0], [0.0]]), 1) == ["", "", ""]
    assert curation("sft").rewards(table([[1.0, 0.5]])).tolist() == [1.0, 0.5]


def test_dapo_drops_tasks_without_a_difference() -> None:
    assert curation("dapo").reasons(table([[1.0, 1.0], [1.0, 0.0]]), 1) == ["low_std", "low_std", "", ""]


def test_operators_come_before_the_algorithm_in_their_order() -> None:
    operators = [("reward_filter", {"threshold": 0.5}), ("reward_std_filter", {})]
    reasons = curation("grpo", *operators).reasons(table([[1.0, 0.0, 0.8], [1.0, 1.0, 0.2]]), 1)
    assert reasons == ["", "reward_range", "", "low_std", "low_std", "reward_range"]
    reasons = curation("dapo", ("reward_filter", {"threshold": 0.5})).reasons(table([[1.0, 0.0, 1.0]]), 1)
    assert reasons == ["low_std", "reward_range", "low_std"], "what an operator dropped makes no difference any more"


def test_operators_see_truncation_and_metrics() -> None:
    statuses = {(0, 1): Status.TRUNCATED}
    metrics = {
        (0, 0): {"accuracy": 1.0},
        (0, 1): {"accuracy": 0.0},
        (1, 0): {"accuracy": 1.0},
        (1, 1): {"accuracy": 1.0},
    }
    rows = table([[5.0, 5.0], [1.0, 0.0]], status=statuses, metrics=metrics)
    masking = curation("grpo", ("mask_response_truncated", {}))
    assert masking.reasons(rows, 1) == [""] * 4, "its reward is a part of the baseline"
    assert masking.masked(rows).tolist() == [False, True, False, False]
    assert masking.masked(rows.slice(1, 1)).tolist() == [True], "whatever rows are there"
    assert not curation("grpo").masked(rows).any()
    assert curation("grpo", ("dapo_dynamic_sampling", {})).reasons(rows, 1) == ["", "", "low_std", "low_std"]


def test_shaped_rewards_are_trained_and_seen_by_operators() -> None:
    shaping = (
        "reward_shaping_mapper",
        {"reward_shaping_configs": [{"stats_key": "bonus", "op_type": "ADD", "weight": 2.0}]},
    )
    rows = table([[0.0, 0.0]], metrics={(0, 1): {"bonus": 0.5}})
    curated = curation("dapo", shaping, ("reward_filter", {"threshold": -1.0}))
    assert curated.rewards(rows).tolist() == [0.0, 1.0]
    assert curated.rewards(rows.slice(1, 1)).tolist() == [1.0], "whatever rows are left"
    assert curated.reasons(rows, 1) == ["", ""], "they differ by what was added"


def test_groups_without_their_greedy_baseline_are_dropped() -> None:
    rows = table([[1.0, 0.0], [1.0]])
    assert curation("remax", baseline=1).reasons(rows, 1) == ["", "baseline", "no_baseline"]


def test_raft_keeps_good_enough_best_rollouts() -> None:
    rows = table([[0.5, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.2]])
    rest = "not_best"
    assert curation("raft").reasons(rows, 1) == [rest, "", rest, rest, rest, rest, rest, ""], "of equals the first"
    strict = curation("raft", advantage_fn_args={"threshold": 0.5})
    assert strict.reasons(rows, 1) == [rest, "", rest, *["reward_range"] * 5]
    every = curation("raft", advantage_fn_args={"best": None, "threshold": 0.5})
    assert every.reasons(rows, 1) == ["", "", "", *["reward_range"] * 5]
    with pytest.raises(UserError, match="best and threshold are both None"):
        curation("raft", advantage_fn_args={"best": None})


def test_rec_drops_surplus_negatives_by_step() -> None:
    rows = table([[0.0] * 7 + [1.0]])
    parts: dict[str, Any] = {"advantage_fn_args": {"drop": "balance"}}
    reasons = [curation("rec", **parts).reasons(rows, step) for step in (1, 1, 2)]
    assert reasons[0] == reasons[1] != reasons[2]
    assert [r.count("surplus_negative") for r in reasons] == [6, 6, 6]
    assert reasons[0][7] == ""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dapo", {}),
        ("raft", {"advantage_fn_args": {"best": 2, "threshold": 0.3}}),
        ("rec", {"advantage_fn_args": {"drop": "balance", "std_normalize": True}}),
        ("multi_step_grpo", {"advantage_fn_args": {"std_threshold": 0.2}}),
    ],
)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_remaining_rows_keep_their_advantages(name: str, parts: dict[str, Any], rewards: list[list[float]]) -> None:
    algorithm = make_algorithm(name, **parts)
    groups = torch.tensor([task for task, group in enumerate(rewards) for _ in group])
    values = torch.tensor([reward for group in rewards for reward in group])
    inputs = AdvantageInputs(rewards_N=values, group_N=groups, step=3)
    whole = algorithm.compute_advantages(inputs)
    kept = whole.drops_N == DropReason.KEPT
    rest = AdvantageInputs(rewards_N=values[kept], group_N=groups[kept], step=3)
    again = algorithm.without_filtering().compute_advantages(rest)
    assert bool((again.drops_N == DropReason.KEPT).all())
    np.testing.assert_allclose(again.advantages_N, whole.advantages_N[kept], atol=1e-6)


_BATCH = """
import sys
from rftdask.storage import open_storage
from tests.unit.buffer.buffer_cases import batch_of, make_source
from tests.unit.trainer.test_rank_batch_filter import curation
_, batch = batch_of(make_source(open_storage(sys.argv[1]), batch_filter=curation("dapo")), 1)
print(batch.rewards.tolist(), "pandas" in sys.modules)
"""


def test_a_rank_imports_no_pandas_for_its_first_batch(tmp_path: Path) -> None:
    rows = [experience(task, k, reward=float(task * k)) for task in range(2) for k in range(2)]
    ParquetLog(open_storage(str(tmp_path))).commit(rows, explore_step=1, unit=0)
    done = subprocess.run(
        [sys.executable, "-c", _BATCH, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[0.0, 1.0] False", "of two groups one is flat, and dropped"
