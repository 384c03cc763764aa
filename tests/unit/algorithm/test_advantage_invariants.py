"""Promises of every advantage function: any order of rows, no effect of failed rows and demonstrations, equality with a
plain loop over groups, errors that name the experience, and the KL penalty on rewards."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftdask.algorithm.advantages import tokens
from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.errors import UserError
from tests.numerics import shifted_seed
from tests.unit.algorithm.algorithm_cases import ADVANTAGE_FNS, side_by_side

NAMES = sorted(ADVANTAGE_FNS)
WIDTH = 5


def random_inputs(seed: int, num_rows: int = 24, num_groups: int = 5) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(shifted_seed(seed))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    group = torch.randint(0, num_groups, (num_rows // 2,), generator=generator)
    mask = torch.rand(num_rows, WIDTH, generator=generator) > 0.3
    return AdvantageInputs(
        rewards_N=draw(num_rows // 2).round(decimals=1).repeat_interleave(2),
        group_N=group.repeat_interleave(2),
        lengths_N=mask.sum(-1),
        rollout_N=torch.arange(num_rows) // 2,
        turn_N=torch.arange(num_rows) % 2,
        state_N=torch.randint(-1, 3, (num_rows,), generator=generator),
        baseline_rewards_N=draw(num_rows),
        **side_by_side(
            loss_mask_NT=mask,
            values_NT=draw(num_rows, WIDTH),
            rollout_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            policy_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            ref_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            teacher_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            entropy_NT=draw(num_rows, WIDTH).abs(),
            necs_NT=draw(num_rows, WIDTH),
        ),
    )


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
    inputs = random_inputs(seed)
    order = torch.randperm(len(inputs.rewards_N), generator=torch.Generator().manual_seed(shifted_seed(seed)))
    torch.testing.assert_close(advantages(name, take(inputs, order)), advantages(name, inputs)[order])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reward", [0.0, 1e6, math.nan])
def test_a_failed_rollout_is_dropped_and_affects_no_other_row(name: str, reward: float) -> None:
    inputs = random_inputs(1)
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
    inputs = random_inputs(2)
    expert = torch.zeros(24, dtype=torch.bool)
    expert[:2] = True
    result = ADVANTAGE_FNS[name]()(replace(inputs, expert_mask_N=expert))
    assert (result.drops_N[:2] == DropReason.KEPT).all() and (result.advantages_N[:2] == 0).all()
    got = result.per_token(inputs).view(-1, WIDTH)
    torch.testing.assert_close(got[2:], advantages(name, take(inputs, ~expert)))


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_finite_is_an_error_by_name(name: str) -> None:
    inputs = random_inputs(3)
    rewards = inputs.rewards_N.clone()
    rewards[7] = math.nan
    dirty = replace(inputs, rewards_N=rewards, uids=[f"task-{row}" for row in range(24)])
    with pytest.raises(ValueError, match=r"nan at row 7 \(experience task-7\)"):
        ADVANTAGE_FNS[name]()(dirty)


@pytest.mark.parametrize("name", sorted(name for name in NAMES if ADVANTAGE_FNS[name].needs))
def test_a_missing_field_is_an_error_that_names_it(name: str) -> None:
    for field in ADVANTAGE_FNS[name].needs:
        with pytest.raises(ValueError, match=field):
            ADVANTAGE_FNS[name]()(replace(random_inputs(0), **{field: None}))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), population=st.booleans())
def test_grpo_equals_a_plain_loop_over_groups(seed: int, population: bool) -> None:
    inputs = random_inputs(seed)
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
    inputs = random_inputs(5)
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


@pytest.mark.parametrize("algorithm_type", ["grpo", "reinforceplusplus"])
def test_the_kl_penalty_lowers_the_rewards_before_the_advantages(algorithm_type: str) -> None:
    algorithm = make_algorithm(algorithm_type, kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.5})
    assert algorithm.use_reference and algorithm.advantage_fn is not None
    inputs = random_inputs(8)
    assert inputs.rollout_logprobs_Q is not None and inputs.ref_logprobs_Q is not None
    assert inputs.loss_mask_Q is not None
    kl = torch.where(inputs.loss_mask_Q, inputs.rollout_logprobs_Q - inputs.ref_logprobs_Q, 0.0)
    # Summed over the two turns, since the penalty applies to the reward of the rollout.
    of_rollout = kl.view(-1, 2 * WIDTH).sum(-1).repeat_interleave(2)
    penalized: dict[str, Any] = {"rewards_N": inputs.rewards_N - 0.5 * of_rollout}
    if algorithm_type == "reinforceplusplus":
        penalized = {"token_rewards_Q": inputs.token_rewards() - 0.5 * kl}
    want = algorithm.advantage_fn(replace(inputs, **penalized))
    got = algorithm.compute_advantages(inputs)
    torch.testing.assert_close(got.per_token(inputs), want.per_token(inputs))
    assert got.metrics["kl_penalty"] == pytest.approx((kl.sum() / inputs.loss_mask_Q.sum()).item(), rel=1e-5)
    with pytest.raises(ValueError, match="ref_logprobs_Q"):
        algorithm.compute_advantages(replace(inputs, ref_logprobs_Q=None))


def test_the_adaptive_coefficient_follows_the_measured_kl() -> None:
    args = {"kl_coef": 0.1, "adaptive": True, "target_kl": 0.01, "horizon": 1000}
    controller = make_algorithm("grpo", kl_loss_fn_args=args).kl_loss_fn
    assert controller.next_coef(0.1, 0.011, 100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert controller.next_coef(0.1, 9.0, 100) == pytest.approx(0.1 * 1.02)
    assert controller.next_coef(0.1, 0.0, 100) == pytest.approx(0.1 * 0.98)
    assert make_algorithm("grpo").kl_loss_fn.next_coef(0.1, 9.0, 100) == 0.1


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
    once = random_inputs(5)
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


def test_the_kl_penalty_covers_all_turns_of_a_rollout() -> None:
    algorithm = make_algorithm(
        "grpo", kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 1.0}, advantage_fn_args={"std": "none"}
    )
    # One task: a rollout of two turns, which drift by 0.25 and 0.5 nats, and one of a turn that does not.
    given = AdvantageInputs(
        rewards_N=torch.tensor([1.0, 1.0, 0.0]),
        group_N=torch.zeros(3, dtype=torch.int64),
        rollout_N=torch.tensor([0, 0, 1]),
        turn_N=torch.tensor([0, 1, 0]),
        tokens_N=torch.ones(3, dtype=torch.int64),
        loss_mask_Q=torch.ones(3, dtype=torch.bool),
        rollout_logprobs_Q=torch.tensor([-0.75, -0.5, -1.0]),
        ref_logprobs_Q=torch.full((3,), -1.0),
    )
    assert algorithm.compute_advantages(given).advantages_N.tolist() == [0.125, 0.125, -0.125]


def test_a_kl_coefficient_can_follow_a_schedule() -> None:
    args: dict[str, Any] = {"kl_coef": 0.4, "final_coef": 0.0, "schedule_steps": 4}
    linear = make_algorithm("grpo", kl_loss_fn_args=args).kl_loss_fn
    assert [linear.coef_at(step, 9.0) for step in range(1, 8)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0])
    cosine = make_algorithm("grpo", kl_loss_fn_args={**args, "schedule": "cosine"}).kl_loss_fn
    want = [0.4 * (1 + math.cos(math.pi * min(step, 4) / 4)) / 2 for step in range(6)]
    assert [cosine.coef_at(step, 9.0) for step in range(1, 7)] == pytest.approx(want)
    assert make_algorithm("grpo").kl_loss_fn.coef_at(5, 0.25) == 0.25, "without one it is what it was"
    # It may begin at 0, and needs the reference from the start.
    assert make_algorithm(
        "grpo", kl_loss_fn_args={"kl_coef": 0.0, "final_coef": 0.1, "schedule_steps": 2}
    ).use_reference
    for wrong, message in (
        ({"final_coef": 0.1}, "final_coef and schedule_steps must be set together"),
        ({"final_coef": 0.1, "schedule_steps": 0}, "schedule_steps must be > 0"),
        ({**args, "schedule": "wavy"}, "schedule"),
        ({**args, "adaptive": True, "target_kl": 0.1, "horizon": 10}, "adaptive"),
    ):
        with pytest.raises(UserError, match=message):
            make_algorithm("grpo", kl_loss_fn_args=wrong)


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
