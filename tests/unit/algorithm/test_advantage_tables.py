"""Published and hand-computed numbers of the advantage functions, literally."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs, AdvantageResult
from rftdask.algorithm.drop_reasons import DropReason
from tests.numerics import shifted_seed
from tests.unit.algorithm.algorithm_cases import ADVANTAGE_FNS, side_by_side


def run(
    name: str, rewards: list[float], groups: list[int] | None = None, fn_args: Any = None, **more: Any
) -> AdvantageResult:
    """more: fields of the inputs; what is said of tokens side by side, [N, T], as is what comes back."""
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


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("sample", [0.9998, -0.9998, -0.9998, 0.9998, 0.0]),
        ("population", [1.118034, -1.118034, -1.118034, 1.118034, 0.0]),
    ],
)
def test_grpo_with_either_standard_deviation(std: str, expected: list[float]) -> None:
    epsilon = 1e-4 if std == "sample" else 0.0
    got = run("grpo", [1, 0, 0, 1, 0.5], fn_args={"std": std, "epsilon": epsilon})
    assert got.advantages_N.tolist() == close(expected)


def test_a_masked_rollout_is_in_no_baseline() -> None:
    valid = torch.tensor([True, False, True, True])
    centered = run("grpo", [1, 1, 0, 0], fn_args={"std": "none"}, valid_N=valid)
    assert centered.advantages_N.tolist() == close([0.666667, 0.0, -0.333333, -0.333333])
    scaled = run("grpo", [1, 1, 0, 0], fn_args={"epsilon": 0.0}, valid_N=valid)
    assert scaled.advantages_N.tolist() == close([1.154701, 0.0, -0.577350, -0.577350])
    assert run("rloo", [1, 1, 0, 0], valid_N=valid).advantages_N.tolist() == close([1.0, 0.0, -0.5, -0.5])
    assert centered.drops_N.tolist() == [0, DropReason.INVALID_ROLLOUT, 0, 0]
    assert centered.metrics["dropped/invalid_rollout"] == 1.0


def test_gae_of_one_response() -> None:
    fn_args = {"gamma": 0.9, "lam": 0.8, "whiten": False}
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = run("ppo", [1.0], fn_args=fn_args, values_NT=row([0.5, 0.4, 0.3]), loss_mask_NT=mask)
    assert rows_of(got.advantages_Q, 1)[0].tolist() == close([0.12928, 0.374, 0.7])
    assert rows_of(got.returns_Q, 1)[0].tolist() == close([0.62928, 0.774, 1.0])


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


def test_reinforceplusplus_whitens_the_reward_to_go() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    got = run("reinforceplusplus", [1.0, 0.0], [0, 1], {"gamma": 0.5}, loss_mask_NT=mask)
    assert rows_of(got.returns_Q, 2).tolist() == [[0.5, 1.0], [0.0, 0.0]]
    sigma = math.sqrt((0.125**2 + 0.625**2 + 2 * 0.375**2) / 3)
    assert rows_of(got.advantages_Q, 2)[0].tolist() == close([0.125 / sigma, 0.625 / sigma])


def test_remax_subtracts_the_greedy_reward() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    got = run("remax", [1.0, 0.0], loss_mask_NT=mask, baseline_rewards_N=torch.tensor([0.25, 0.25]))
    assert rows_of(got.advantages_Q, 2).tolist() == [[0.75, 0.75, 0.0], [-0.25, 0.0, -0.25]]


def test_opmd_baselines() -> None:
    assert run("opmd", [1.0, 0.0]).advantages_N.tolist() == close([0.5, -0.5])
    baseline = 0.5 * math.log((math.exp(2.0) + 1.0) / 2)
    got = run("opmd", [1.0, 0.0], fn_args={"opmd_baseline": "logavgexp", "tau": 0.5})
    assert got.advantages_N.tolist() == close([1.0 - baseline, -baseline])
    extreme = run("opmd", [1e4, 0.0], fn_args={"opmd_baseline": "logavgexp"})
    assert extreme.advantages_N.tolist() == close([math.log(2.0), -1e4 + math.log(2.0)], 1e-3)


def test_asymre_shifts_the_baseline() -> None:
    assert run("asymre", [1.0, 0.0]).advantages_N.tolist() == close([0.6, -0.4])


def test_reinforce_is_the_reward() -> None:
    assert run("reinforce", [1.0, -2.0]).advantages_N.tolist() == [1.0, -2.0]


def test_rec_drops_surplus_negatives_with_a_reason() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0]
    got = run("rec", rewards, fn_args={"drop": "balance"})
    assert sorted(got.drops_N.tolist()) == [0, 0] + [DropReason.SURPLUS_NEGATIVE] * 3
    assert got.advantages_N[0].item() == close(0.5)
    assert sorted(got.advantages_N.tolist())[:1] == close([-0.5])
    assert got.metrics["dropped/surplus_negative"] == 3.0
    again = run("rec", rewards, fn_args={"drop": "balance"})
    assert again.drops_N.tolist() == got.drops_N.tolist()


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


def test_batch_level_std_divides_all_groups_by_one_number() -> None:
    got = run("grpo", [1, 0, 5, 3], [0, 0, 1, 1], {"std_cal_level": "batch", "epsilon": 0.0})
    sigma = torch.tensor([1.0, 0.0, 5.0, 3.0]).std().item()
    assert got.advantages_N.tolist() == close([0.5 / sigma, -0.5 / sigma, 1 / sigma, -1 / sigma])


def test_rank_penalty_lowers_rewards_of_likely_rollouts() -> None:
    logprobs = torch.tensor([[-1.0, -1.0], [-3.0, 99.0]])
    mask = torch.tensor([[True, True], [True, False]])
    fn_args = {"rank_penalty": 0.5, "std": "none"}
    got = run("grpo", [1.0, 1.0], fn_args=fn_args, rollout_logprobs_NT=logprobs, loss_mask_NT=mask)
    assert got.advantages_N.tolist() == close([-0.125, 0.125])


def test_distillation_advantage_is_the_gap_to_the_teacher() -> None:
    student, teacher = row([-1.0, -2.0, 7.0]), row([-0.5, -3.0, math.nan])
    given: Any = {"loss_mask_NT": row([1, 1, 0]).bool(), "rollout_logprobs_NT": student, "teacher_logprobs_NT": teacher}
    distill = run("on_policy_distill", [0.0], fn_args={"kl_coef": 2.0}, **given)
    assert rows_of(distill.advantages_Q, 1)[0].tolist() == close([1.0, -2.0, 0.0])


def test_step_wise_grpo_gives_every_turn_the_advantage_of_its_rollout() -> None:
    # Two rollouts of one task: the first of three turns, shuffled, and the second of one.
    given: Any = {"rollout_N": torch.tensor([0, 1, 0, 0]), "turn_N": torch.tensor([2, 0, 0, 1])}
    fn_args = {"epsilon": 0.0}
    got = run("step_wise_grpo", [1.0, 0.0, 9.0, 9.0], [0, 0, 0, 0], fn_args, **given)
    half = math.sqrt(0.5)
    assert got.advantages_N.tolist() == close([half, -half, half, half])
    normed = run("step_wise_grpo", [1.0, 0.0, 9.0, 9.0], [0, 0, 0, 0], {**fn_args, "enable_step_norm": True}, **given)
    assert normed.advantages_N.tolist() == close([half / 3, -half, half / 3, half / 3])
    dropped = run("step_wise_grpo", [1.0, 1.0, 9.0, 9.0], [0, 0, 0, 0], {"std_threshold": 0.1}, **given)
    assert dropped.metrics["dropped/low_std"] == 4.0


def test_gigpo_adds_a_step_advantage_per_state() -> None:
    given: Any = {
        "rollout_N": torch.tensor([0, 0, 1, 1]),
        "turn_N": torch.tensor([0, 1, 0, 1]),
        "state_N": torch.tensor([7, 8, 7, 9]),
    }
    fn_args = {"gamma": 0.5, "omega": 2.0, "epsilon": 0.0}
    got = run("gigpo", [1.0, 1.0, 0.0, 0.0], [0] * 4, fn_args, **given)
    # Episode: totals 1 and 0. State 7: discounted returns 0.5 and 0. States 8 and 9 are seen once.
    assert got.advantages_N.tolist() == close([0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5])
    assert got.metrics["singleton_anchors"] == 2.0


def test_gigpo_gives_the_rest_of_the_reward_to_the_last_turn() -> None:
    given: Any = {
        "rollout_N": torch.tensor([0, 0, 1, 1]),
        "turn_N": torch.tensor([0, 1, 0, 1]),
        "state_N": torch.tensor([7, 8, 7, 8]),
        "turn_rewards_N": torch.tensor([0.5, 0.5, 0.25, 0.0]),
    }
    fn_args = {"gamma": 0.5, "epsilon": 0.0}
    # Turns of the second rollout: 0.25, then 0.75, which its reward of 1 has beyond their sum.
    got = run("gigpo", [1.0, 1.0, 1.0, 1.0], [0] * 4, fn_args, **given)
    # Episodes are even. State 7: 0.75 and 0.625; state 8: 0.5 and 0.75.
    assert got.advantages_N.tolist() == close([0.0625, -0.125, -0.0625, 0.125])


def test_gigpo_compares_states_within_the_task_by_default() -> None:
    given: Any = {"state_N": torch.tensor([1, 1]), "rollout_N": torch.tensor([0, 1]), "turn_N": torch.tensor([0, 0])}
    assert run("gigpo", [1.0, 0.0], [0, 1], **given).advantages_N.tolist() == close([0.0, 0.0])
    across = run("gigpo", [1.0, 0.0], [0, 1], {"anchor_scope": "batch"}, **given)
    assert across.advantages_N.tolist() == close([0.5, -0.5])


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
