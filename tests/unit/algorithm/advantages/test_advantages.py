"""Promises of the advantage functions: published and hand-computed values, and rules that hold for each function."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftdask.algorithm.advantages import tokens
from rftdask.algorithm.advantages.base import AdvantageInputs, AdvantageResult
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.data.seeds import derived_seed
from tests.numerics import shifted_seed
from tests.unit.algorithm.algorithm_cases import ADVANTAGE_FNS, WIDTH, random_advantage_inputs, side_by_side


def run(
    name: str, rewards: list[float], groups: list[int] | None = None, fn_args: Any = None, **more: Any
) -> AdvantageResult:
    """Compute advantages. more: fields of the inputs; values of tokens are padded, [N, T], in inputs and result."""
    group = torch.tensor(groups or [0] * len(rewards))
    padded = {key: more.pop(key) for key in list(more) if key.endswith("_NT")}
    given = AdvantageInputs(torch.tensor(rewards), group, **more, **(side_by_side(**padded) if padded else {}))
    return ADVANTAGE_FNS[name](**(fn_args or {}))(given)


def rows_of(values_Q: Tensor | None, num_rows: int) -> Tensor:
    assert values_Q is not None
    return values_Q.view(num_rows, -1)


def close(expected: object, tolerance: float = 2e-6) -> Any:
    return pytest.approx(expected, abs=tolerance)


def row(values: list[float]) -> Tensor:
    return torch.tensor([values])


TURNS = {"rollout_N": torch.tensor([0, 0, 1, 1]), "turn_N": torch.tensor([0, 1, 0, 1])}
STATES = {"rollout_N": torch.tensor([0, 1]), "turn_N": torch.tensor([0, 0]), "state_N": torch.tensor([1, 1])}
LIKELY = {"rollout_logprobs_NT": torch.tensor([[-1.0, -1.0], [-3.0, 99.0]])}
INPUTS: dict[str, Any] = {
    "": {},
    "second failed": {"valid_N": torch.tensor([True, False, True, True])},
    "logprobs": {**LIKELY, "loss_mask_NT": torch.tensor([[True, True], [True, False]])},
    "two tasks": {"groups": [0, 0, 1, 1]},
    "three turns and one": {"rollout_N": torch.tensor([0, 1, 0, 0]), "turn_N": torch.tensor([2, 0, 0, 1])},
    "states 7 8, 7 9": {**TURNS, "state_N": torch.tensor([7, 8, 7, 9])},
    "states 7 8, 7 8": {
        **TURNS,
        "state_N": torch.tensor([7, 8, 7, 8]),
        "turn_rewards_N": torch.tensor([0.5, 0.5, 0.25, 0.0]),
    },
    "state 1 in both tasks": {**STATES, "groups": [0, 1]},
}
# Of step_wise_grpo, all turns have the advantage of their rollout. Of gigpo, the first row has totals 1 and 0, and in
# state 7 the discounted returns 0.5 and 0; the second one has equal totals, the turn rewards 0.25 and 0.75 (the rest)
# in its second rollout, and the returns 0.75 and 0.625 in state 7, 0.5 and 0.75 in state 8.
VALUES = """
grpo           | epsilon: 0.0001                     | 1 0 0 1 0.5 |                       | 0.9998 -0.9998 -0.9998 0.9998 0
grpo           | std: population, epsilon: 0         | 1 0 0 1 0.5 |                       | 1.118034 -1.118034 -1.118034 1.118034 0
grpo           | std: none                           | 1 1 0 0     | second failed         | 0.666667 0 -0.333333 -0.333333
grpo           | epsilon: 0                          | 1 1 0 0     | second failed         | 1.154701 0 -0.577350 -0.577350
grpo           | std_cal_level: batch, epsilon: 0    | 1 0 5 3     | two tasks             | 0.225494 -0.225494 0.450988 -0.450988
grpo           | rank_penalty: 0.5, std: none        | 1 1         | logprobs              | -0.125 0.125
rloo           |                                     | 1 1 0 0     | second failed         | 1 0 -0.5 -0.5
asymre         |                                     | 1 0         |                       | 0.6 -0.4
opmd           |                                     | 1 0         |                       | 0.5 -0.5
opmd           | opmd_baseline: logavgexp, tau: 0.5  | 1 0         |                       | 0.283110 -0.716890
step_wise_grpo | epsilon: 0                          | 1 0 9 9     | three turns and one   | 0.707107 -0.707107 0.707107 0.707107
step_wise_grpo | epsilon: 0, enable_step_norm: true  | 1 0 9 9     | three turns and one   | 0.235702 -0.707107 0.235702 0.235702
gigpo          | gamma: 0.5, omega: 2, epsilon: 0    | 1 1 0 0     | states 7 8, 7 9       | 1 0.5 -1 -0.5
gigpo          | gamma: 0.5, epsilon: 0              | 1 1 1 1     | states 7 8, 7 8       | 0.0625 -0.125 -0.0625 0.125
gigpo          |                                     | 1 0         | state 1 in both tasks | 0 0
gigpo          | anchor_scope: batch                 | 1 0         | state 1 in both tasks | 0.5 -0.5
"""  # noqa: E501
"""Function, arguments, rewards, further inputs, advantages."""


@pytest.mark.parametrize("line", VALUES.strip().splitlines())
def test_rollouts_have_their_published_advantages(line: str) -> None:
    name, args, rewards, inputs, expected = (cell.strip() for cell in line.split("|"))
    got = run(
        name, [float(reward) for reward in rewards.split()], fn_args=yaml.safe_load(f"{{{args}}}"), **INPUTS[inputs]
    )
    assert got.advantages_N.tolist() == close([float(number) for number in expected.split()])


def test_reinforce_is_the_reward_and_extremes_do_not_overflow() -> None:
    assert run("reinforce", [1.0, -2.0]).advantages_N.tolist() == [1.0, -2.0]
    extreme = run("opmd", [1e4, 0.0], fn_args={"opmd_baseline": "logavgexp"})
    assert extreme.advantages_N.tolist() == close([math.log(2.0), -1e4 + math.log(2.0)], 1e-3)


R_SIGMA = math.sqrt((0.125**2 + 0.625**2 + 2 * 0.375**2) / 3)
TOKEN_VALUES: list[tuple[str, dict[str, Any], list[float], dict[str, Any], Any, Any]] = [
    # Function, arguments, rewards of tasks of one rollout, inputs, advantages, returns.
    (
        "ppo",
        {"gamma": 0.9, "lam": 0.8, "whiten": False},
        [1.0],
        {"values_NT": row([0.5, 0.4, 0.3]), "loss_mask_NT": torch.ones(1, 3, dtype=torch.bool)},
        close([0.12928, 0.374, 0.7]),
        close([0.62928, 0.774, 1.0]),
    ),
    (
        "reinforceplusplus",
        {"gamma": 0.5},
        [1.0, 0.0],
        {"loss_mask_NT": torch.ones(2, 2, dtype=torch.bool)},
        close([0.125 / R_SIGMA, 0.625 / R_SIGMA, -0.375 / R_SIGMA, -0.375 / R_SIGMA]),
        [0.5, 1.0, 0.0, 0.0],
    ),
    (
        "remax",
        {},
        [1.0, 0.0],
        {
            "loss_mask_NT": torch.tensor([[True, True, False], [True, False, True]]),
            "baseline_rewards_N": torch.tensor([0.25, 0.25]),
        },
        [0.75, 0.75, 0.0, -0.25, 0.0, -0.25],
        None,
    ),
    (
        "on_policy_distill",
        {"kl_coef": 2.0},
        [0.0],
        {
            "loss_mask_NT": row([1, 1, 0]).bool(),
            "rollout_logprobs_NT": row([-1.0, -2.0, 7.0]),
            "teacher_logprobs_NT": row([-0.5, -3.0, math.nan]),
        },
        close([1.0, -2.0, 0.0]),
        None,
    ),
]


@pytest.mark.parametrize(("name", "args", "rewards", "more", "expected", "returns"), TOKEN_VALUES)
def test_tokens_have_their_published_advantages(
    name: str, args: Any, rewards: list[float], more: Any, expected: Any, returns: Any
) -> None:
    got = run(name, rewards, list(range(len(rewards))), args, **more)
    assert got.advantages_Q is not None and got.advantages_Q.tolist() == expected
    if returns is not None:
        assert got.returns_Q is not None and got.returns_Q.tolist() == returns


def test_dropped_turns_and_states_seen_once_are_counted() -> None:
    dropped = run("step_wise_grpo", [1.0, 1.0, 9.0, 9.0], None, {"std_threshold": 0.1}, **INPUTS["three turns and one"])
    assert dropped.metrics["dropped/low_std"] == 4.0
    seen_once = run("gigpo", [1.0, 1.0, 0.0, 0.0], **INPUTS["states 7 8, 7 9"])
    assert seen_once.metrics["singleton_anchors"] == 2.0


@pytest.mark.parametrize("elsewhere", [0.0, 100.0, math.nan])
def test_gae_skips_untrained_tokens(elsewhere: float) -> None:
    mask = row([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]).bool()
    values = torch.where(mask, row([0, 0, 4, 5, 6, 0, 0, 7, 9, 0, 0]).float(), elsewhere)
    rewards = row([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0])
    fn_args = {"gamma": 0.9, "lam": 0.8, "whiten": False}
    got = run("ppo", [1.0], fn_args=fn_args, values_NT=values, loss_mask_NT=mask, token_rewards_NT=rewards)
    advantages_NT = rows_of(got.advantages_Q, 1)
    assert advantages_NT[mask].tolist() == close([-0.534651, -1.575904, -2.8832, -4.56, -8.0])
    assert advantages_NT[~mask].abs().sum() == 0.0


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(shifted_seed(0))) > 0.3
    values = torch.randn(5, 9, generator=torch.Generator().manual_seed(shifted_seed(1)))
    got = run("ppo", [1, 0, 0.5, 2, -1], [0, 1, 2, 3, 4], values_NT=values, loss_mask_NT=mask)
    trained = rows_of(got.advantages_Q, 5)[mask]
    assert trained.mean().item() == close(0.0)
    assert trained.var().item() == close(1.0)


def test_rec_drops_surplus_negatives_with_a_reason() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0]
    got = run("rec", rewards, fn_args={"drop": "balance"})
    assert sorted(got.drops_N.tolist()) == [0, 0] + [DropReason.SURPLUS_NEGATIVE] * 3
    assert got.advantages_N[0].item() == close(0.5)
    assert sorted(got.advantages_N.tolist())[:1] == close([-0.5])
    assert got.metrics["dropped/surplus_negative"] == 3.0
    again = run("rec", rewards, fn_args={"drop": "balance"})
    assert again.drops_N.tolist() == got.drops_N.tolist()


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -(2**31), -(2**63), 2**200])
def test_torch_accepts_the_seed_of_every_step(seed: int) -> None:
    for step in (1, 2**31):
        torch.Generator().manual_seed(derived_seed(seed, "train_step", step))


def test_seeds_differ_by_seed_purpose_and_step() -> None:
    seeds = (0, 42, 2**32, 2**63 - 1)
    cases = [(seed, purpose, step) for seed in seeds for purpose in ("a", "b") for step in (1, 2)]
    # PyTorch's CPU generator reads only the lower half.
    assert len({derived_seed(*case) % 2**32 for case in cases}) == len(cases)


def test_every_seed_of_a_run_can_draw_the_surplus() -> None:
    for seed in (2**32, 2**63 - 1):
        got = run("rec", [1.0, 0.0, 0.0, 0.0, 0.0], fn_args={"drop": "balance", "seed": seed})
        assert got.metrics["dropped/surplus_negative"] == 3.0


def test_drpo_never_penalizes_a_correct_response_for_length() -> None:
    lengths = torch.tensor([10, 100, 1000, 50, 50, 50])
    got = run("drpo", [1, 1, 1, 0, 0, 0], lengths_N=lengths).advantages_N
    assert (got[:3] > 0).all() and got[0] > got[1] > got[2]
    assert got[:3].mean().item() == close(0.5)
    assert got[3:].tolist() == close([-0.5] * 3)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opmd", "rec", "step_wise_grpo", "gigpo"])
def test_a_single_rollout_has_advantage_zero_and_is_counted(name: str) -> None:
    got = run(name, [3.0, 1.0, 0.0], [0, 1, 1])
    assert got.advantages_N[0].item() == close(0.0)
    assert got.metrics["singleton_groups"] == 1.0
    assert torch.isfinite(got.advantages_N).all()


def test_std_threshold_drops_whole_groups_with_a_reason() -> None:
    got = run("grpo", [1, 1, 1, 0, 5], [0, 0, 1, 1, 2], {"std_threshold": 0.0})
    assert got.drops_N.tolist() == [DropReason.LOW_STD, DropReason.LOW_STD, 0, 0, DropReason.LOW_STD]
    assert got.metrics["dropped/low_std"] == 3.0


def test_clipb_and_clipv_mask_tokens_of_failed_rollouts() -> None:
    width = 40
    logprobs = torch.full((2, width), -1.0)
    entropy = torch.full((2, width), 1.0)
    entropy[:, 3] = -50.0
    given: Any = {
        "loss_mask_NT": torch.ones(2, width, dtype=torch.bool),
        "rollout_logprobs_NT": logprobs,
        "entropy_NT": entropy,
    }
    got = run("clipb", [1.0, 0.0], **given)
    assert (~rows_of(got.keep_Q, 2)).nonzero().tolist() == [[1, 3]]
    given |= {"rollout_logprobs_NT": None, "policy_logprobs_NT": logprobs, "necs_NT": torch.zeros(2, width)}
    clipv = run("clipv", [1.0, 0.0], fn_args={"mu": 2.5, "max_frac": 0.02}, **given)
    assert (~rows_of(clipv.keep_Q, 2)).nonzero().tolist() == [[1, 3]]


NAMES = sorted(ADVANTAGE_FNS)


def take(inputs: AdvantageInputs, rows: Tensor) -> AdvantageInputs:
    """Some rows; all have WIDTH tokens."""
    fields = {f.name: value for f in dataclasses.fields(inputs) if isinstance(value := getattr(inputs, f.name), Tensor)}
    taken = {
        key: value.view(-1, WIDTH)[rows].flatten() if key.endswith("_Q") else value[rows]
        for key, value in fields.items()
    }
    return replace(inputs, **taken)


def advantages(name: str, inputs: AdvantageInputs) -> Tensor:
    return ADVANTAGE_FNS[name]()(inputs).per_token(inputs).view(-1, WIDTH)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_rows_changes_nothing(name: str, seed: int) -> None:
    inputs = random_advantage_inputs(seed)
    order = torch.randperm(len(inputs.rewards_N), generator=torch.Generator().manual_seed(shifted_seed(seed)))
    torch.testing.assert_close(advantages(name, take(inputs, order)), advantages(name, inputs)[order])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reward", [0.0, 1e6, math.nan])
def test_a_failed_rollout_is_dropped_and_affects_no_other_row(name: str, reward: float) -> None:
    inputs = random_advantage_inputs(1)
    failed = torch.zeros(24, dtype=torch.bool)
    failed[4:6] = True  # both turns of one rollout
    alone = advantages(name, take(inputs, ~failed))
    dirty = replace(inputs, rewards_N=inputs.rewards_N.masked_fill(failed, reward), valid_N=~failed)
    result = ADVANTAGE_FNS[name]()(dirty)
    got = result.per_token(inputs).view(-1, WIDTH)
    torch.testing.assert_close(got[~failed], alone)
    assert (got[failed] == 0).all()
    assert (result.drops_N[failed] == DropReason.INVALID_ROLLOUT).all()
    assert result.metrics["dropped/invalid_rollout"] == 2.0


@pytest.mark.parametrize("name", NAMES)
def test_a_demonstration_is_kept_and_in_no_baseline(name: str) -> None:
    inputs = random_advantage_inputs(2)
    expert = torch.zeros(24, dtype=torch.bool)
    expert[:2] = True
    result = ADVANTAGE_FNS[name]()(replace(inputs, expert_mask_N=expert))
    assert (result.drops_N[:2] == DropReason.KEPT).all() and (result.advantages_N[:2] == 0).all()
    got = result.per_token(inputs).view(-1, WIDTH)
    torch.testing.assert_close(got[2:], advantages(name, take(inputs, ~expert)))


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_finite_is_an_error_by_name(name: str) -> None:
    inputs = random_advantage_inputs(3)
    rewards = inputs.rewards_N.clone()
    rewards[7] = math.nan
    dirty = replace(inputs, rewards_N=rewards, uids=[f"task-{row}" for row in range(24)])
    with pytest.raises(ValueError, match=r"nan at row 7 \(experience task-7\)"):
        ADVANTAGE_FNS[name]()(dirty)


@pytest.mark.parametrize("name", sorted(name for name in NAMES if ADVANTAGE_FNS[name].needs))
def test_a_missing_field_is_an_error_that_names_it(name: str) -> None:
    for field in ADVANTAGE_FNS[name].needs:
        with pytest.raises(ValueError, match=field):
            ADVANTAGE_FNS[name]()(replace(random_advantage_inputs(0), **{field: None}))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), population=st.booleans())
def test_grpo_equals_a_plain_loop_over_groups(seed: int, population: bool) -> None:
    inputs = random_advantage_inputs(seed)
    got = ADVANTAGE_FNS["grpo"](std="population" if population else "sample")(inputs).advantages_N
    for group in inputs.group_N.unique():
        rows = inputs.group_N == group
        assert inputs.turn_N is not None
        rewards = inputs.rewards_N[rows & (inputs.turn_N == 0)].double()  # of each rollout, once
        spread = rewards.std(unbiased=not population) if len(rewards) > 1 else 0.0
        want = (rewards - rewards.mean()) / (spread + 1e-6)
        torch.testing.assert_close(got[rows], want.float().repeat_interleave(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "rec", "opmd"])
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    inputs = random_advantage_inputs(5)
    got = ADVANTAGE_FNS[name]()(inputs).advantages_N
    for group in inputs.group_N.unique():
        assert got[inputs.group_N == group].sum().item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, -1e6])
@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_equal_rewards_have_advantage_zero_and_are_filtered(reward: float, count: int) -> None:
    inputs = AdvantageInputs(torch.full((count,), reward), torch.zeros(count, dtype=torch.int64))
    result = ADVANTAGE_FNS["grpo"](epsilon=0.0, std_threshold=0.0)(inputs)
    assert result.drops_N.tolist() == [DropReason.LOW_STD] * count
    kept = ADVANTAGE_FNS["grpo"](epsilon=0.0)(inputs)
    assert kept.advantages_N.tolist() == [0.0] * count


def test_an_empty_batch_is_not_an_error() -> None:
    empty = AdvantageInputs(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert len(ADVANTAGE_FNS["grpo"]()(empty).advantages_N) == 0


COMPARED = ["grpo", "rloo", "opmd", "asymre", "drpo", "rec", "clipb", "clipv", "step_wise_grpo"]
MORE: dict[str, dict[str, Any]] = {
    "opmd": {"opmd_baseline": "logavgexp"},
    "rec": {"drop": "balance", "std_normalize": True},
    "grpo": {"rank_penalty": 0.3, "std_threshold": 0.1},
}


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", COMPARED)
def test_a_rollout_counts_once_in_its_baseline(name: str, more: bool) -> None:
    fn = ADVANTAGE_FNS[name](**(MORE.get(name, {}) if more else {}))
    once = random_advantage_inputs(5)
    once = replace(once, rollout_N=torch.arange(24), turn_N=torch.zeros(24, dtype=torch.int64))
    # The same rollouts split into turns: a rollout of n tokens is n rows with the same reward.
    assert once.loss_mask_Q is not None
    trained = once.loss_mask_Q.view(-1, WIDTH)
    row, token = trained.nonzero(as_tuple=True)
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(3))
    row, token = row[order], token[order]
    cut = {
        key: value.view(-1, WIDTH)[row, token]
        for key, value in vars(once).items()
        if key.endswith("_Q") and isinstance(value, Tensor) and key in {f.name for f in dataclasses.fields(once)}
    }
    ones = torch.ones_like(row)
    turns = replace(take(once, row), **cut, tokens_N=ones, lengths_N=ones, rollout_N=row, turn_N=token)
    # A rollout without a trained token has no turn; it is only in the baseline of the other batch.
    once = replace(once, valid_N=trained.any(-1))
    want, got = fn(once), fn(turns)
    torch.testing.assert_close(got.advantages_N, want.per_token(once).view(-1, WIDTH)[row, token])
    assert torch.equal(got.drops_N, want.drops_N[row])
    if name not in ("clipb", "clipv"):
        assert got.metrics["num_groups"] == want.metrics["num_groups"]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.97, 1.0])
def test_discounted_sums_equal_a_backward_loop(gamma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CACHED", 20)  # a row or two at a time
    for width in (0, 1, 2, 3, 8, 9, 50):
        generator = torch.Generator().manual_seed(shifted_seed(width))
        values_NT = torch.randn(5, width, generator=generator, dtype=torch.float64)
        mask_NT = torch.rand(5, width, generator=generator) > 0.3
        wanted_NT, behind_N = torch.zeros(5, width, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        for t in reversed(range(width)):
            behind_N = torch.where(mask_NT[:, t], values_NT[:, t] + gamma * behind_N, behind_N)
            wanted_NT[:, t] = torch.where(mask_NT[:, t], behind_N, 0.0)
        given = AdvantageInputs(torch.zeros(5), torch.arange(5), **side_by_side(loss_mask_NT=mask_NT))
        found_Q = tokens.discounted_sums(given, values_NT.flatten(), gamma)
        torch.testing.assert_close(found_Q.view(5, width), wanted_NT, rtol=1e-12, atol=1e-12)
