"""Promises of every policy loss: splits add up, the first step is exact, garbage and order have no effect, gradients
are correct, values that are not finite are never trained, and memory is bounded."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from tests.numerics import assert_close, shifted_seed
from tests.unit.algorithm.algorithm_cases import (
    ALGORITHMS,
    KL_FNS,
    POLICY_LOSS_FNS,
    gradient,
    inputs,
    loss_only,
    random_batch,
    take,
    type_for,
    with_weights,
)

LOSSES = sorted(name for name, cls in POLICY_LOSS_FNS.items() if not cls.uses_teacher)
"""The gradient of the others is through the logits, not the logprobs: test_jsd.py."""
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
    """Of 16,384 tokens in float32 they are 0.8 MiB, what the logits of a single token of a large vocabulary take."""
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


def test_the_entropy_bonus_reaches_the_entropy() -> None:
    algorithm, batch = whole("ppo", 0, "token-mean")
    loss, _ = algorithm.compute_loss(batch)
    assert batch.entropy_BT is not None
    (grad,) = torch.autograd.grad(loss, batch.entropy_BT)
    torch.testing.assert_close(grad, -0.01 * batch.token_weights_BT)


def test_without_gradients_the_value_is_the_same() -> None:
    algorithm, batch = whole("ppo", 0, "token-mean")
    loss, _ = algorithm.compute_loss(batch)
    with torch.no_grad():
        assert torch.equal(algorithm.compute_loss(batch)[0], loss.detach())


def test_m2po_bounds_the_second_moment_of_every_sequence() -> None:
    loss = POLICY_LOSS_FNS["m2po"](m2_threshold=0.04)
    batch = replace(random_batch(21, 8, 40), proximal_logprobs_BT=None).cleaned()
    log_r = (batch.policy_logprobs_BT - batch.rollout_logprobs_BT).detach()
    advantages = batch.advantages()
    dropped = loss.dropped(batch, log_r, advantages).bool()
    trusted = batch.loss_mask_BT & (advantages * log_r > 0)
    assert dropped.any() and (trusted & ~dropped).any() and not (dropped & ~trusted).any()
    for row in range(8):
        kept = log_r[row][(trusted & ~dropped)[row]].square()
        assert len(kept) == 0 or kept.mean() <= 0.04
        gone = log_r[row][dropped[row]].square()
        assert len(gone) == 0 or torch.cat([kept, gone.min()[None]]).mean() > 0.04


def test_sequence_masking_drops_only_distant_failures() -> None:
    batch = inputs([[-1.0, -1.0], [-1.0, -1.0]], [[-0.5, -0.5], [-1.0, -1.0]], [[-1.0, 1.0], [-1.0, 1.0]])
    loss, metrics = loss_only("ppo", enable_sequence_masking=True).compute_loss(batch)
    assert metrics["sequence_mask_frac"].item() == 0.25
    assert loss.item() == pytest.approx((-math.exp(-0.5) + 1.0 - 1.0) / 4)


def test_decoupled_ppo_clips_around_the_proximal_policy() -> None:
    batch = inputs([-1.0, -1.0], [-1.5, -9.0], [1.0, 1.0], proximal_logprobs_BT=torch.tensor([[-1.2, -1.2]]).double())
    per_token, metrics = POLICY_LOSS_FNS["decoupled_ppo"]()(batch)
    assert per_token.flatten().tolist() == pytest.approx([-math.exp(0.3) * 1.2, 0.0])
    assert metrics["behavior_cap_frac"].item() == 0.5


def test_rollout_correction_applies_only_to_the_policy_loss() -> None:
    more = {
        "proximal_logprobs_BT": torch.tensor([[-1.0, -1.0]]).double(),
        "ref_logprobs_BT": torch.zeros(1, 2).double(),
    }
    batch = inputs([-1.0, -1.0], [-1.0 - math.log(1.5), -1.0 - math.log(3.0)], [1.0, 1.0], **more)
    parts = {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}}
    algorithm = make_algorithm("grpo", rollout_correction={"method": "mask", "high": 2.0}, **parts)
    loss, metrics = algorithm.compute_loss(batch)
    assert loss.item() == pytest.approx(-(1.5 + 0.0) / 2 + 0.1 * 0.5)
    assert metrics["is_clip_frac"].item() == 0.5


@pytest.mark.parametrize("name", sorted(KL_FNS.keys() - {"none"}))
def test_the_reference_kl_is_float32_under_autocast(name: str) -> None:
    torch.manual_seed(4)
    policy, ref, old = (torch.randn(3, 5).float() - 3 for _ in range(3))
    expected = KL_FNS[name]().per_token(policy, ref, old)
    with torch.autocast("cpu", torch.bfloat16):
        found = KL_FNS[name]().per_token(policy, ref, old)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def enumerated(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[V] logits of a policy of eight words; the logprobs of it, of what sampled for it, far away, and of a
    reference."""
    draw = torch.Generator().manual_seed(shifted_seed(seed))
    logits_V, old_V, ref_V = (2.0 * torch.randn(8, generator=draw, dtype=torch.float64) for _ in range(3))
    logits_V.requires_grad_()
    return logits_V, logits_V.log_softmax(-1), old_V.log_softmax(-1), ref_V.log_softmax(-1)


def kl(of_V: Tensor, to_V: Tensor) -> Tensor:
    """KL of one distribution from another, from logprobs."""
    return (of_V.exp() * (of_V - to_V)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_corrected_k3_is_the_kl_for_any_sampling_policy(seed: int) -> None:
    logits_V, policy_V, old_V, ref_V = enumerated(seed)
    assert (policy_V - old_V).max() > math.log(2.0)  # where Trinity-RFT's bound begins
    wanted = kl(policy_V, ref_V)
    found = (old_V.exp() * KL_FNS["corrected_k3"]().per_token(policy_V, ref_V, old_V)).sum()
    assert_close([found.item()], [wanted.item()])
    (wanted_V,) = torch.autograd.grad(wanted, logits_V, retain_graph=True)
    (found_V,) = torch.autograd.grad(found, logits_V)
    assert_close(found_V, wanted_V)


DESCENDS = {
    "k1": lambda policy_V, ref_V: 0.0 * policy_V.sum(),
    "k2": kl,
    "k3": lambda policy_V, ref_V: kl(ref_V, policy_V),
    "abs": lambda policy_V, ref_V: (policy_V.exp() - ref_V.exp()).abs().sum(),
    "corrected_k3": kl,
}
"""Estimate -> what its mean gradient in a loss is the gradient of, where the policy itself samples."""


@pytest.mark.parametrize("name", sorted(DESCENDS))
def test_gradients_of_kl_estimates_in_a_loss(name: str) -> None:
    logits_V, policy_V, _, ref_V = enumerated(0)
    sampled_V = policy_V.detach()
    loss = (sampled_V.exp() * KL_FNS[name]().per_token(policy_V, ref_V, sampled_V)).sum()
    (found_V,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    (wanted_V,) = torch.autograd.grad(DESCENDS[name](policy_V, ref_V), logits_V)
    assert_close(found_V, wanted_V, size=10.0)


PENALIZES = {
    "k1": kl,
    # The others hold nothing: 0 to second order near the reference, or of the sign of d.
    "k2": lambda policy_V, ref_V: (policy_V.exp() * ((policy_V - ref_V).square() / 2 - (policy_V - ref_V))).sum(),
    "k3": lambda policy_V, ref_V: kl(policy_V, ref_V) - kl(ref_V, policy_V),
    "abs": lambda policy_V, ref_V: (
        (policy_V - ref_V).sign() * (policy_V.exp() * (policy_V - ref_V - 1) + ref_V.exp())
    ).sum(),
}
"""Estimate -> what a policy descends whose rewards pay for it."""


@pytest.mark.parametrize("name", sorted(PENALIZES))
def test_gradients_of_kl_estimates_as_a_reward_penalty(name: str) -> None:
    logits_V, policy_V, _, ref_V = enumerated(0)
    cost_V = KL_FNS[name]().per_token(policy_V, ref_V).detach()
    (found_V,) = torch.autograd.grad((policy_V.detach().exp() * cost_V * policy_V).sum(), logits_V, retain_graph=True)
    (wanted_V,) = torch.autograd.grad(PENALIZES[name](policy_V, ref_V), logits_V)
    assert_close(found_V, wanted_V, size=10.0)
