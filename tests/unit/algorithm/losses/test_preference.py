"""Preference losses: value and gradient against hand-derived formulas, in float64 without autograd."""

import math
from typing import Any

import pytest
import torch

from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.preference import Dpo
from tests.unit.algorithm.algorithm_cases import gradient, inputs, loss_only, with_weights

CHOSEN, REJECTED = [-0.5, -1.0, -0.3], [-2.0, -0.7]
"""Logprobs of the tokens of one pair; the rejected response is shorter."""
MASK = [[1, 1, 1], [1, 1, 0]]


def close(expected: float | list[float]) -> Any:
    return pytest.approx(expected, abs=2e-6)


def one_pair(name: str, **args: float) -> tuple[float, list[list[float]]]:
    """The loss of the pair and its gradient by the logprobs."""
    algorithm = loss_only(name, **args)
    loss, grad = gradient(with_weights(inputs([CHOSEN, [*REJECTED, -9.0]], mask=MASK), algorithm), algorithm)
    return loss.item(), grad.tolist()


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_simpo_by_hand() -> None:
    beta, gamma = 2.5, 0.6
    # m = beta (mean_w - mean_l) - gamma, loss = log(1 + e^-m), d loss / d m = -sigmoid(-m).
    margin = beta * (sum(CHOSEN) / 3 - sum(REJECTED) / 2) - gamma
    slope = -sigmoid(-margin) * beta
    loss, grad = one_pair("simpo", beta=beta, gamma=gamma)
    assert loss == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-12)
    assert grad[0] == pytest.approx([slope / 3] * 3, abs=1e-12)
    assert grad[1] == pytest.approx([-slope / 2, -slope / 2, 0.0], abs=1e-12)


def test_orpo_by_hand() -> None:
    beta = 0.4
    a, b = sum(CHOSEN) / 3, sum(REJECTED) / 2
    odds = [math.exp(x) / (1.0 - math.exp(x)) for x in (a, b)]
    ratio = math.log(odds[0] / odds[1])
    # d log odds / d log P = 1 / (1 - P), equation 10 of the paper in other words.
    slopes = [-1.0 - beta * sigmoid(-ratio) / (1.0 - math.exp(a)), beta * sigmoid(-ratio) / (1.0 - math.exp(b))]
    loss, grad = one_pair("orpo", beta=beta)
    assert loss == pytest.approx(-a + beta * math.log1p(math.exp(-ratio)), abs=1e-12)
    assert grad[0] == pytest.approx([slopes[0] / 3] * 3, abs=1e-12)
    assert grad[1] == pytest.approx([slopes[1] / 2, slopes[1] / 2, 0.0], abs=1e-12)


@pytest.mark.parametrize(("loss_type", "lengths"), [("ipo_sum", (1, 1)), ("ipo", (3, 2))])
def test_ipo_by_hand(loss_type: str, lengths: tuple[int, int]) -> None:
    # The reference at -1 everywhere; of "ipo" the sums are divided by the lengths.
    beta = 0.4
    margin = (sum(CHOSEN) + 3) / lengths[0] - (sum(REJECTED) + 2) / lengths[1]
    slope = 2 * (margin - 1 / (2 * beta))
    algorithm = loss_only("dpo", beta=beta, loss_type=loss_type)
    batch = inputs([CHOSEN, [*REJECTED, -9.0]], mask=MASK, ref_logprobs_BT=-torch.ones(2, 3).double())
    loss, grad = gradient(with_weights(batch, algorithm), algorithm)
    assert loss.item() == pytest.approx((margin - 1 / (2 * beta)) ** 2, abs=1e-12)
    assert grad[0].tolist() == pytest.approx([slope / lengths[0]] * 3, abs=1e-12)
    assert grad[1].tolist() == pytest.approx([-slope / lengths[1]] * 2 + [0.0], abs=1e-12)


def test_bradley_terry_by_hand() -> None:
    # A reward model scores a row; all tokens of a row carry its score.
    chosen, rejected = 0.4, -0.9
    scores = inputs([[chosen] * 3, [rejected, rejected, 0.0]], mask=MASK)
    algorithm = loss_only("bradley_terry")
    loss, grad = gradient(with_weights(scores, algorithm), algorithm)
    assert loss.item() == pytest.approx(math.log1p(math.exp(rejected - chosen)), abs=1e-12)
    slope = sigmoid(rejected - chosen)  # -d loss / d margin, spread over the tokens of a row
    assert grad.sum(-1).tolist() == pytest.approx([-slope, slope], abs=1e-12)


def test_kto_by_hand() -> None:
    beta, z0 = 0.3, 0.25
    weights, labels = {1.0: 1.2, 0.0: 0.7}, [1.0, 0.0]
    # r of each response, the reference at -1 everywhere; the loss is the mean over rows of lambda (1 - sigmoid(s)),
    # s = +-beta (r - z0), whose slope is -lambda sigmoid(s) (1 - sigmoid(s)).
    r = [sum(CHOSEN) + 3, sum(REJECTED) + 2]
    sides = [beta * (r[0] - z0), beta * (z0 - r[1])]
    expected = sum(weights[label] * (1 - sigmoid(s)) for s, label in zip(sides, labels, strict=True)) / 2
    slopes = [weights[label] * sigmoid(s) * (1 - sigmoid(s)) * beta / 2 for s, label in zip(sides, labels, strict=True)]
    algorithm = loss_only("kto", beta=beta, desirable_weight=weights[1.0], undesirable_weight=weights[0.0])
    more = {"ref_logprobs_BT": -torch.ones(2, 3).double(), "rewards_B": torch.tensor(labels), "kl_baseline": z0}
    batch = with_weights(inputs([CHOSEN, [*REJECTED, -9.0]], mask=MASK, **more), algorithm)
    loss, grad = gradient(batch, algorithm)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert grad[0].tolist() == pytest.approx([-slopes[0]] * 3, abs=1e-12)
    assert grad[1].tolist() == pytest.approx([slopes[1], slopes[1], 0.0], abs=1e-12)
    _, metrics = algorithm.compute_loss(batch)
    assert metrics["kl_baseline"].item() == pytest.approx(z0)
    assert metrics["reward_accuracy"].item() == pytest.approx(1.0), "1.2 and -0.7 are on their sides of z0"


def test_orpo_of_a_certain_response_is_finite() -> None:
    batch = inputs(torch.tensor([[0.0, 0.0], [-1.0, -1.0]]), mode="seq-mean-token-mean")
    loss, grad = gradient(batch, loss_only("orpo"))
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


@pytest.mark.parametrize("name", ["orpo", "simpo", "reward_model"])
def test_reference_free_losses_need_no_reference(name: str) -> None:
    assert not make_algorithm(name).use_reference


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo"])
def test_a_better_margin_is_a_smaller_loss(name: str) -> None:
    """The sign of the gradient raises the chosen response and lowers the rejected one."""
    algorithm = loss_only(name)
    pair = inputs([CHOSEN, [*REJECTED, -9.0]], mask=MASK, ref_logprobs_BT=-torch.ones(2, 3).double())
    _, grad = gradient(with_weights(pair, algorithm), algorithm)
    assert (grad[0] < 0).all() and (grad[1, :2] > 0).all()
    _, metrics = algorithm.compute_loss(with_weights(pair, algorithm))
    assert metrics["reward_accuracy"].item() == pytest.approx(1.0)
    assert metrics["reward_chosen"] > metrics["reward_rejected"]


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
