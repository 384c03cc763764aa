"""Published and hand-computed numbers of the policy losses, KL estimators, corrections and aggregations, literally.

Sources: the tests of NeMo-RL, SkyRL, slime, OpenRLHF, Trinity-RFT and prime-rl (their input, re-computed in
float64), and our own.
"""

import math

import pytest
import torch

from rftdask.algorithm.aggregation import row_weights
from rftdask.algorithm.correction import Correction
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.preference import Dpo
from rftdask.algorithm.losses.ratio import Sapo
from rftdask.algorithm.losses.reinforce import Vespo
from tests.unit.algorithm.algorithm_cases import KL_FNS, POLICY_LOSS_FNS, from_ratios, inputs, loss_only, rows

OLD = [-1.0, -1.0, -1.0]
NEW = [-1.69315, -1.0, -0.59453]  # ratios 0.5, 1, 1.5
ADVANTAGES = [1.0, -1.0, 2.0]


def tokens(name: str, batch: LossInputs, **args: object) -> list[float]:
    """Loss of each token of a one-row batch."""
    loss, _ = POLICY_LOSS_FNS[name](**args)(batch)  # type: ignore[arg-type]
    return loss.detach().flatten().tolist()


def close(expected: float | list[float], tolerance: float = 2e-6) -> object:
    return pytest.approx(expected, abs=tolerance)


def test_ppo_clips_each_side_by_the_sign_of_the_advantage() -> None:
    batch = inputs(NEW, OLD, ADVANTAGES)
    assert tokens("ppo", batch, clip_range=0.2) == close([-0.5, 1.0, -2.4])
    loss, metrics = loss_only("ppo").compute_loss(batch)
    assert loss.item() == close(-0.6333333)
    assert metrics["clip_frac"].item() == close(1 / 3)


def test_gspo_uses_the_geometric_mean_ratio_of_the_sequence() -> None:
    batch = inputs(NEW, OLD, ADVANTAGES)
    args = {"clip_range_low": 0.2, "clip_range_high": 0.2}
    assert tokens("gspo", batch, **args) == close([-0.908561, 0.908561, -2 * 0.908561])
    assert loss_only("gspo", **args).compute_loss(batch)[0].item() == close(-0.605707)


def test_cispo_clips_the_weight_on_both_sides() -> None:
    args = {"clip_range_low": 0.2, "clip_range_high": 0.2}
    batch = inputs(NEW, OLD, ADVANTAGES)
    assert tokens("cispo", batch, **args) == close([1.35452, -1.0, 1.426872])
    assert loss_only("cispo", **args).compute_loss(batch)[0].item() == close(0.593797)
    far = inputs([-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0])
    assert sum(tokens("cispo", far, **args)) == close(-2.99305, 4e-6)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    batch = from_ratios([0.5, 1.0, 10.0], [1.0, -1.0, -4.0])
    assert tokens("ppo", batch, clip_ratio_c=3.0) == close([-0.5, 1.0, 12.0])
    loss, metrics = loss_only("ppo").compute_loss(batch)
    assert loss.item() == close(4.166667)
    assert metrics["dual_clip_frac"].item() == close(1 / 3)
    slime = from_ratios([2.0, 2.0, 0.5], [2.0, -2.0, 2.0])
    assert tokens("ppo", slime, clip_ratio_c=1.5) == close([-2.4, 3.0, -1.0])
    assert tokens("ppo", batch, clip_ratio_c=None) == close([-0.5, 1.0, 40.0])


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
    loss.sum().backward()
    assert batch.policy_logprobs_BT.grad is not None
    want = [-ratio * advantage for ratio, advantage in zip(ratios, advantages, strict=True)]
    assert batch.policy_logprobs_BT.grad.flatten().tolist() == close(want)


def test_dppo_drops_by_change_of_probability() -> None:
    batch = inputs([-0.2, -1.0, -2.0, -0.5], [-0.9, -1.0, -1.0, -0.4], [1.0, 1.0, -1.0, -1.0])
    got = tokens("dppo", batch, mask_low=0.2, mask_high=0.2, kl_tau=1e-3)
    assert got == close([0.00049, -1.0, 0.001, 0.904847])
    assert sum(got) == close(-0.093663)


def test_sapo_gate_and_loss() -> None:
    batch = inputs([-1.5, -0.8, -1.1], OLD, [1.0, -1.0, 0.5])
    assert sum(tokens("sapo", batch, tau_pos=1.0, tau_neg=2.0)) == close(-1.346130)
    gates = [-loss for loss in tokens("sapo", from_ratios([0.5, 1.0, 1.5], [1.0, 1.0, 1.0]))]
    assert gates == close([1.510163, 2.0, 2.489837])
    assert tokens("sapo", from_ratios([0.5, 1.5], [-1.0, -1.0])) == close([1.415938, 2.393585])


def test_sapo_gradient_fades_far_from_ratio_one() -> None:
    batch = from_ratios([1.0, 10.0], [1.0, 1.0])
    loss, _ = Sapo()(batch)
    loss.sum().backward()
    assert batch.policy_logprobs_BT.grad is not None
    assert batch.policy_logprobs_BT.grad.flatten().tolist() == close([-1.0, -0.004935], 1e-5)


def test_vespo_weight_is_one_at_one_and_falls_on_both_sides() -> None:
    log_w = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64).log()
    one = torch.ones(3, dtype=torch.float64)
    assert Vespo().phi(log_w, one).tolist() == close([1.120422, 1.0, 0.502043])
    assert Vespo().phi(log_w, -one).tolist() == close([0.339785, 1.0, 1.241593])


def test_kl_estimators() -> None:
    policy, ref = torch.full((3,), -1.0, dtype=torch.float64), torch.tensor([0.0, -15.0, -30.0], dtype=torch.float64)
    values = {name: KL_FNS[name]().per_token(policy, ref).tolist() for name in ("k1", "k2", "abs", "low_var_kl")}
    assert values["k1"] == close([-1.0, 14.0, 29.0])
    assert values["k2"] == close([0.5, 98.0, 420.5])
    assert values["abs"] == close([1.0, 14.0, 29.0])
    assert values["low_var_kl"] == close([0.718282, 10.0, 10.0])
    assert KL_FNS["k3"]().per_token(policy, ref).tolist() == close([0.718282, 13.000001, 28.0])
    bounded = {name: KL_FNS[name](max_kl=10.0).per_token(policy, ref).tolist() for name in ("k1", "k2", "k3")}
    assert bounded == {"k1": close([-1.0, 10.0, 10.0]), "k2": close([0.5, 10.0, 10.0]), "k3": close([0.718282, 10, 10])}


def correction(log_w: list[float], mask: list[int] | None = None, **args: object) -> list[float]:
    batch = inputs([0.0] * len(log_w), [-x for x in log_w], mask=mask)
    factors, _ = Correction(**args).factors(batch)  # type: ignore[arg-type]
    return factors.flatten().tolist()


def test_icepop_drops_weights_outside_its_band() -> None:
    log_w = [-0.5, 2.5, -0.2]
    weights = correction(log_w, method="mask", low=0.5, high=5.0)
    assert weights == close([0.606531, 0.0, 0.818731])
    mean = -sum(w * a for w, a in zip(weights, [1.0, -1.0, 2.0], strict=True)) / 3
    assert mean == close(-0.747997)


def test_truncated_importance_sampling_by_token_and_sequence() -> None:
    log_w = [0.5, -0.5, 1.0]
    batch = inputs([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5])
    factors, metrics = Correction(method="truncate", high=2.0).factors(batch)
    assert factors.flatten().tolist() == close([1.648721, 0.606531, 2.0])
    assert metrics["is_clip_frac"].item() == close(1 / 3)
    assert correction(log_w, method="truncate", level="sequence", high=5.0) == close([math.e] * 3)
    assert correction(log_w, [1, 0, 1], method="truncate", level="sequence", high=10.0) == close([4.481689] * 3)
    assert correction([1.0, 1.0, 1.0], method="truncate", level="sequence", high=5.0) == close([5.0] * 3)
    assert correction([1.0, 0.0, 0.1], method="mask", high=2.0) == close([0.0, 1.0, math.exp(0.1)])


def test_geometric_mask_keeps_or_drops_whole_sequences() -> None:
    band = {"method": "geometric_mask", "low": 0.9, "high": 1.1}
    assert correction([0.1, -0.1, 0.0], **band) == [1.0, 1.0, 1.0]
    assert correction([0.3, 0.3, 0.0], **band) == [0.0, 0.0, 0.0]


def masked_mean(values: list[list[float]], lengths: list[int], mode: str, max_tokens: int | None = None) -> float:
    mask = torch.arange(len(values[0]))[None] < torch.tensor(lengths)[:, None]
    weights = row_weights(mask.sum(-1), mode, max_tokens=max_tokens, dtype=torch.float64)
    return float((rows(values) * mask * weights[:, None]).sum())


def test_aggregations() -> None:
    openrlhf = ([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [7.0, 0.0, 0.0]], [2, 3, 1])
    assert masked_mean(*openrlhf, "token-mean") == close(22 / 6)
    uneven = ([[1.0, 3.0, 9.0], [2.0, 4.0, 0.0], [8.0, 0.0, 0.0]], [2, 2, 1])
    assert masked_mean(*uneven, "seq-mean-token-mean") == close(4.333333)
    ours = ([[-1.0, 2.0, 0.0], [0.5, 1.0, -3.0]], [2, 3])
    assert masked_mean(*ours, "token-mean") == close(-0.1)
    assert masked_mean(*ours, "seq-mean-token-sum") == close(-0.25)
    assert masked_mean(*ours, "seq-mean-token-mean") == close(0.0)
    assert masked_mean(*ours, "seq-mean-token-sum-norm", 4) == close(-0.0625)


def test_dpo_of_one_pair_by_its_difference() -> None:
    def rewards(*deltas: float) -> torch.Tensor:
        """Return rewards for beta 0.1."""
        return torch.tensor([[0.1 * delta, 0.0] for delta in deltas], dtype=torch.float64)

    by_delta = Dpo(beta=0.1).per_pair(rewards(0.0, 1.0, 5.0, -5.0))
    assert by_delta.tolist() == close([0.693147, 0.644397, 0.474077, 0.974077])
    assert Dpo(beta=0.1, loss_type="ipo").per_pair(rewards(0.0)).tolist() == close([25.0])
    assert Dpo(beta=0.1, loss_type="hinge").per_pair(rewards(0.0, 5.0, 20.0)).tolist() == close([1.0, 0.5, 0.0])


def test_dpo_does_not_add_pairs_up_before_the_sigmoid() -> None:
    difference = torch.tensor([[1.0], [0.0], [5.0], [0.0], [0.0], [5.0], [0.0], [0.0]], dtype=torch.float64)
    batch = inputs(difference - 9.0, ref_logprobs_BT=torch.full_like(difference, -9.0), mode="seq-mean-token-mean")
    loss, metrics = loss_only("dpo").compute_loss(batch)
    assert loss.item() == close((0.644397 + 0.474077 + 0.974077 + 0.693147) / 4)
    assert metrics["reward_accuracy"].item() == close(0.5)
