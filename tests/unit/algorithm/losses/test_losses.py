"""Promises of the policy losses. Sources of VALUES: the tests of NeMo-RL, SkyRL, slime, OpenRLHF, Trinity-RFT and
prime-rl (their input, re-computed in float64), and our own. KL estimates are in test_kl.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.ratio import Sapo
from rftdask.algorithm.losses.reinforce import Vespo
from tests.numerics import assert_close, shifted_seed
from tests.unit.algorithm.algorithm_cases import (
    ALGORITHMS,
    KL_FNS,
    POLICY_LOSS_FNS,
    from_ratios,
    gradient,
    inputs,
    loss_only,
    random_batch,
    take,
    type_for,
    with_weights,
)

LOSSES = sorted(name for name, cls in POLICY_LOSS_FNS.items() if not cls.uses_teacher)
"""The gradient of the others is through the logits, not the logprobs: test_imitation_jsd.py."""
PAIRED = {name for name, loss in POLICY_LOSS_FNS.items() if loss.schema == "dpo"}
MOST = 12
"""Tensors that a loss may keep for backward()."""
RATIO_LOSSES = ["ppo", "gspo", "cispo", "sapo", "importance_sampling", "decoupled_ppo", "m2po", "dppo", "vespo"]
EVERYTHING = {
    "kl_loss_fn": "k3",
    "kl_loss_fn_args": {"kl_coef": 0.1},
    "entropy_loss_fn": "default",
    "entropy_loss_fn_args": {"entropy_coef": 0.01},
}


def close(expected: float | list[float], tolerance: float = 2e-6) -> Any:
    return pytest.approx(expected, abs=tolerance)


OLD = [-1.0, -1.0, -1.0]
NEAR = inputs([-1.69315, -1.0, -0.59453], OLD, [1.0, -1.0, 2.0])  # ratios 0.5, 1, 1.5
FAR = from_ratios([0.5, 1.0, 10.0], [1.0, -1.0, -4.0])
CLIP = {"clip_range_low": 0.2, "clip_range_high": 0.2}
GEOMETRIC_MEAN = 0.908561
VALUES: list[tuple[str, dict[str, Any], LossInputs, Any, dict[str, Any]]] = [
    # Loss, arguments, batch, loss of each token (or their sum, where only that is published), metrics.
    ("ppo", {"clip_range": 0.2}, NEAR, [-0.5, 1.0, -2.4], {"clip_frac": close(1 / 3)}),
    ("ppo", {"clip_ratio_c": 3.0}, FAR, [-0.5, 1.0, 12.0], {"dual_clip_frac": close(1 / 3)}),
    ("ppo", {"clip_ratio_c": None}, FAR, [-0.5, 1.0, 40.0], {}),
    ("ppo", {"clip_ratio_c": 1.5}, from_ratios([2.0, 2.0, 0.5], [2.0, -2.0, 2.0]), [-2.4, 3.0, -1.0], {}),
    (
        "ppo",  # only failures in distant sequences are dropped
        {"enable_sequence_masking": True},
        inputs([OLD[:2]] * 2, [[-0.5, -0.5], OLD[:2]], [[-1.0, 1.0], [-1.0, 1.0]]),
        [0.0, -math.exp(-0.5), 1.0, -1.0],
        {"sequence_mask_frac": 0.25},
    ),
    ("gspo", CLIP, NEAR, [-GEOMETRIC_MEAN, GEOMETRIC_MEAN, -2 * GEOMETRIC_MEAN], {}),
    ("cispo", CLIP, NEAR, [1.35452, -1.0, 1.426872], {}),
    (
        "cispo",
        CLIP,
        inputs([-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0]),
        close(-2.99305, 4e-6),
        {},
    ),
    (
        "dppo",
        {"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3},
        inputs([-0.2, -1.0, -2.0, -0.5], [-0.9, -1.0, -1.0, -0.4], [1.0, 1.0, -1.0, -1.0]),
        [0.00049, -1.0, 0.001, 0.904847],
        {},
    ),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 2.0}, inputs([-1.5, -0.8, -1.1], OLD, [1.0, -1.0, 0.5]), close(-1.346130), {}),
    ("sapo", {}, from_ratios([0.5, 1.0, 1.5], [1.0, 1.0, 1.0]), [-1.510163, -2.0, -2.489837], {}),
    ("sapo", {}, from_ratios([0.5, 1.5], [-1.0, -1.0]), [1.415938, 2.393585], {}),
    (
        "decoupled_ppo",  # clips around the proximal policy
        {},
        inputs([-1.0, -1.0], [-1.5, -9.0], [1.0, 1.0], proximal_logprobs_BT=torch.tensor([[-1.2, -1.2]]).double()),
        [-math.exp(0.3) * 1.2, 0.0],
        {"behavior_cap_frac": 0.5},
    ),
]


@pytest.mark.parametrize(("name", "args", "batch", "expected", "expected_metrics"), VALUES)
def test_a_loss_has_its_published_values(
    name: str, args: Any, batch: LossInputs, expected: Any, expected_metrics: dict[str, Any]
) -> None:
    tokens = POLICY_LOSS_FNS[name](**args)(batch)[0].detach().flatten()
    if isinstance(expected, list):
        assert tokens.tolist() == close(expected)
    else:
        assert tokens.sum().item() == expected
    loss, metrics = loss_only(name, **args).compute_loss(batch)
    assert loss.item() == close(tokens.mean().item())
    assert {key: metrics[key].item() for key in expected_metrics} == expected_metrics


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([1.0, 1.14, 1.28, 0.8], [0.7, -0.684, 1.024, -1.68]), ([1.0, 3.0, 5.0, 0.4], [0.7, -1.8, 4.0, -0.84])],
)
def test_cispo_gradient_passes_only_through_the_logprob(ratios: list[float], expected: list[float]) -> None:
    advantages, logprobs = [1.0, -0.5, 2.0, -1.0], [-0.7, -1.2, -0.4, -2.1]
    rollout = (torch.tensor(logprobs, dtype=torch.float64) - torch.tensor(ratios, dtype=torch.float64).log())[None]
    batch = inputs(logprobs, rollout, advantages)
    loss, _ = POLICY_LOSS_FNS["cispo"](clip_range_low=1.0, clip_range_high=10.0)(batch)
    assert loss.detach().flatten().tolist() == close(expected)
    (got,) = torch.autograd.grad(loss.sum(), batch.policy_logprobs_BT)
    want = [-ratio * advantage for ratio, advantage in zip(ratios, advantages, strict=True)]
    assert got.flatten().tolist() == close(want)


def test_sapo_gradient_fades_far_from_ratio_one() -> None:
    batch = from_ratios([1.0, 10.0], [1.0, 1.0])
    (got,) = torch.autograd.grad(Sapo()(batch)[0].sum(), batch.policy_logprobs_BT)
    assert got.flatten().tolist() == close([-1.0, -0.004935], 1e-5)


def test_vespo_weight_is_one_at_one_and_falls_on_both_sides() -> None:
    log_w = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64).log()
    one = torch.ones(3, dtype=torch.float64)
    assert Vespo().phi(log_w, one).tolist() == close([1.120422, 1.0, 0.502043])
    assert Vespo().phi(log_w, -one).tolist() == close([0.339785, 1.0, 1.241593])


# ---- golden values of Trinity-RFT: its test draws these tensors from seed 42, shape (5, 20), in this order.
#
# Its GSPO golden is for seq-mean-token-mean, as in the paper. Its DPO golden is one logit for all pairs, so here all
# even rows are one chosen sequence and all odd rows one rejected sequence. Its MIX golden multiplies each part with its
# number of rows. Its PPO and MIX goldens are older than its dual clip, so they are for clip_ratio_c None.


def golden_metrics(name: str, **args: Any) -> tuple[dict[str, float], LossInputs]:
    generator = torch.Generator().manual_seed(42)
    shape = (5, 20)
    policy, rollout, ref = (2 * torch.rand(shape, generator=generator) - 1 for _ in range(3))
    mask = torch.rand(shape, generator=generator) > 0.5
    advantages = 2 * torch.rand(shape, generator=generator) - 1
    expert = torch.rand(shape[0], generator=generator) > 0.5
    algorithm = loss_only(name, **args)
    if name == "gspo":
        algorithm = replace(algorithm, loss_agg_mode="seq-mean-token-mean")
    if name == "dpo":
        pair = (policy, rollout, mask, advantages, ref)
        # Two rows: the even ones one after another, then the odd ones and padding.
        policy, rollout, mask, advantages, ref = (
            torch.stack([rows[0::2].flatten(), torch.cat([rows[1::2], torch.zeros_like(rows[:1])]).flatten()])
            for rows in pair
        )
    weights = algorithm.token_weights(mask, expert_mask_B=expert)
    batch = LossInputs(policy, rollout, mask, weights, advantages, ref, None, expert)
    return {key: value.item() for key, value in algorithm.compute_loss(batch)[1].items()}, batch


@pytest.mark.parametrize(
    ("name", "args", "golden"),
    [
        (
            "ppo",
            {"clip_ratio_c": None},
            {"loss": 0.28560468554496765, "clip_frac": 0.3541666567, "ppo_kl": -0.2166344672},
        ),
        ("ppo", {"clip_ratio_c": 2.0}, {"loss": 0.2230827361345291}),
        ("gspo", {}, {"loss": 0.27235108613967896}),
        ("sft", {}, {"loss": -0.07560186833143234}),
        ("opmd", {}, {"loss": -0.009589947760105133}),
        ("dpo", {}, {"loss": 0.5406752228736877, "reward_chosen": 0.7082431316, "reward_rejected": 0.3757950783}),
    ],
)
def test_metrics_equal_the_golden_values(name: str, args: dict[str, Any], golden: dict[str, float]) -> None:
    metrics, _ = golden_metrics(name, **args)
    assert {key: metrics[key] for key in golden} == pytest.approx(golden, rel=1e-5, abs=1e-7)


def test_mix_equals_the_golden_value_times_rows() -> None:
    metrics, batch = golden_metrics("mix", clip_ratio_c=None)
    assert batch.expert_mask_B is not None
    num_experts = int(batch.expert_mask_B.sum())
    usual, expert = metrics["usual_loss"] * (5 - num_experts), metrics["expert_loss"] * num_experts
    assert usual + expert == pytest.approx(0.6581965088844299, rel=1e-5)
    assert usual / 0.9 == pytest.approx(0.7236452102661133, rel=1e-5)


def whole(name: str, seed: int, mode: str | None = None) -> tuple[Any, LossInputs]:
    """The loss with KL and entropy terms, in an aggregation, and a random batch with its weights."""
    mode = POLICY_LOSS_FNS[name].only_agg_mode or mode
    more = {} if POLICY_LOSS_FNS[name].scores_sequences else EVERYTHING  # a reward model has no logprobs to compare
    algorithm = make_algorithm(type_for(name), policy_loss_fn=name, loss_agg_mode=mode, **more)
    return algorithm, with_weights(random_batch(seed), algorithm)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(AGGREGATIONS), cut=st.integers(1, 2))
def test_any_split_adds_up_to_the_whole_batch(name: str, seed: int, mode: str, cut: int) -> None:
    algorithm, batch = whole(name, seed, mode)
    loss, metrics = algorithm.compute_loss(batch)
    (expected,) = torch.autograd.grad(loss, batch.policy_logprobs_BT)
    parts = [algorithm.compute_loss(take(batch, rows)) for rows in (slice(0, 2 * cut), slice(2 * cut, None))]
    total = sum(part[0] for part in parts)
    (got,) = torch.autograd.grad(total, batch.policy_logprobs_BT)
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(got, expected)
    for key, value in metrics.items():
        torch.testing.assert_close(sum(part[1][key] for part in parts), value)


# Their weights are detached by definition, so the gradient is not the value's; it is checked by its formula further
# down.
DETACHED = {"topr", "cispo", "rec", "vespo", "sft_is", "sft_phi", "sppo", "mix_chord", "gspo"}


@pytest.mark.parametrize("name", sorted(set(LOSSES) - DETACHED))
def test_gradient_matches_finite_differences(name: str) -> None:
    algorithm, batch = whole(name, 11, "token-mean")

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return algorithm.compute_loss(replace(batch, policy_logprobs_BT=logprobs))[0]

    assert torch.autograd.gradcheck(total, (batch.policy_logprobs_BT,), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("topr", lambda p, r, a: torch.where(a <= 0, r.clamp(max=1), 1.0) * a),
        ("cispo", lambda p, r, a: r.clamp(0.0, 1.28) * a),
        ("rec", lambda p, r, a: a),
        ("sppo", lambda p, r, a: torch.where((r >= 1 / 1.3) & (r <= 1.3), a, 0.0)),
        ("sft_is", lambda p, r, a: p),
        ("sft_phi", lambda p, r, a: p * (1 - p)),
    ],
)
def test_gradient_of_a_detached_weight_is_minus_the_weight(name: str, weight: Any) -> None:
    algorithm = loss_only(name)
    batch = with_weights(replace(random_batch(5), proximal_logprobs_BT=None), algorithm)
    _, grad = gradient(batch, algorithm)
    assert batch.advantages_BT is not None
    policy = batch.policy_logprobs_BT.detach()
    expected = -weight(policy.exp(), (policy - batch.rollout_logprobs_BT).exp(), batch.advantages_BT)
    torch.testing.assert_close(grad, expected * batch.token_weights_BT)


def test_gspo_and_vespo_gradients_are_the_sequence_weight() -> None:
    batch = inputs([[-1.0, -1.3], [-1.0, -0.5]], [[-1.1, -1.1], [-1.0, -1.1]], [[1.0, 1.0], [2.0, 2.0]])
    log_r = (batch.policy_logprobs_BT - batch.rollout_logprobs_BT).detach()
    weight = log_r.mean(-1, keepdim=True).exp() * batch.advantages()
    _, grad = gradient(batch, loss_only("gspo", clip_range_low=0.9, clip_range_high=9.0))
    torch.testing.assert_close(grad, -weight / 4)
    phi = POLICY_LOSS_FNS["vespo"]().phi(log_r.sum(-1, keepdim=True), batch.advantages())
    _, grad = gradient(batch, loss_only("vespo"))
    torch.testing.assert_close(grad, -phi * batch.advantages() / 4)


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_on_policy_the_ratio_is_one_and_the_kl_zero(name: str) -> None:
    algorithm = loss_only(name)
    batch = random_batch(2, dtype=torch.float32)
    same = batch.policy_logprobs_BT.detach().clone()
    batch = replace(batch, rollout_logprobs_BT=same, ref_logprobs_BT=same, proximal_logprobs_BT=None)
    batch = with_weights(batch, algorithm)
    loss, metrics = algorithm.compute_loss(batch)
    (grad,) = torch.autograd.grad(loss, batch.policy_logprobs_BT)
    assert batch.advantages_BT is not None
    assert_close(grad, -batch.advantages_BT * batch.token_weights_BT, roundings=8)
    assert metrics["ppo_kl"].item() == 0.0
    assert metrics.get("clip_frac", torch.tensor(0.0)).item() == 0.0
    for estimator in KL_FNS.values():
        assert estimator().per_token(same, same, same).abs().sum().item() == 0.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_positions_change_nothing(name: str, garbage: float) -> None:
    algorithm, batch = whole(name, 7, "token-mean")
    loss, grad = gradient(batch, algorithm)
    changes = {
        key: value.masked_fill(~batch.loss_mask_BT, garbage)
        for key, value in vars(batch).items()
        if key.endswith("_BT") and isinstance(value, torch.Tensor) and value.is_floating_point()
        if key != "token_weights_BT"
    }
    changes["policy_logprobs_BT"] = changes["policy_logprobs_BT"].detach().requires_grad_()
    dirty_loss, dirty_grad = gradient(replace(batch, **changes), algorithm)
    assert torch.equal(dirty_loss, loss)
    assert torch.equal(dirty_grad, grad)
    assert (dirty_grad[~batch.loss_mask_BT] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_sequence_without_trained_tokens_changes_nothing(name: str) -> None:
    algorithm, batch = whole(name, 13, "seq-mean-token-mean")
    rows = [0, 1, 4, 5] if name in PAIRED else [0, 1, 3, 4, 5]  # row 2 is empty, and its pair with it
    kept = take(batch, torch.tensor(rows))
    kept = with_weights(replace(kept, policy_logprobs_BT=kept.policy_logprobs_BT.detach().requires_grad_()), algorithm)
    loss, grad = gradient(batch, algorithm)
    kept_loss, kept_grad = gradient(kept, algorithm)
    if name in PAIRED:
        batch_rest = grad[2:4]
        assert batch_rest.abs().sum() == 0.0
    torch.testing.assert_close(kept_loss, loss)
    torch.testing.assert_close(kept_grad, grad[rows])


@pytest.mark.parametrize("name", sorted(set(LOSSES) - PAIRED))
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    algorithm, batch = whole(name, 17, "seq-mean-token-mean")
    order = torch.randperm(6, generator=torch.Generator().manual_seed(shifted_seed(0)))
    loss, grad = gradient(batch, algorithm)
    shuffled = with_weights(take(batch, order), algorithm)
    shuffled_loss, _ = algorithm.compute_loss(shuffled)
    (shuffled_grad,) = torch.autograd.grad(shuffled_loss, batch.policy_logprobs_BT)
    torch.testing.assert_close(shuffled_loss, loss)
    torch.testing.assert_close(shuffled_grad, grad)


@pytest.mark.parametrize("field", ["policy_logprobs_BT", "rollout_logprobs_BT", "advantages_BT", "ref_logprobs_BT"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_error_by_name(field: str, bad: float) -> None:
    algorithm = make_algorithm("grpo")
    batch = random_batch(1)
    value = getattr(batch, field).detach().clone()
    value[1, 3] = bad
    dirty = replace(batch, **{field: value}, uids=[f"run/task-{row}" for row in range(6)])
    with pytest.raises(ValueError, match=rf"{field} is .* at row 1, position 3 \(experience run/task-1\)"):
        algorithm.compute_loss(dirty)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"jsd"}))
def test_every_algorithm_type_runs_by_its_name(name: str) -> None:
    algorithm = make_algorithm(name)
    batch = with_weights(random_batch(0), algorithm)
    loss, grad = gradient(batch, algorithm)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and grad.abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    batch = random_batch(4, dtype=torch.float32)
    algorithm = loss_only(name)
    far = batch.policy_logprobs_BT.detach() + torch.tensor([-500.0, 500.0] * 3)[:, None]
    batch = with_weights(replace(batch, rollout_logprobs_BT=far, proximal_logprobs_BT=far), algorithm)
    loss, grad = gradient(batch, algorithm)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_backward_keeps_a_bounded_number_of_tensors(name: str) -> None:
    """The tensors of 16,384 tokens take 0.8 MiB in float32, like the logits of one token of a large vocabulary."""
    algorithm = loss_only(name)
    batch = with_weights(random_batch(0, 16, 64), algorithm)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        algorithm.compute_loss(batch)
    own = batch.policy_logprobs_BT.untyped_storage().nbytes()
    assert sum(kept.values()) <= MOST * own


def test_without_gradients_the_value_is_the_same() -> None:
    algorithm, batch = whole("ppo", 0, "token-mean")
    loss, _ = algorithm.compute_loss(batch)
    with torch.no_grad():
        assert torch.equal(algorithm.compute_loss(batch)[0], loss.detach())
