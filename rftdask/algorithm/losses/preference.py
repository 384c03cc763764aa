"""Preference losses: pairs of a chosen and a rejected response, or single responses with a verdict.

Shapes: [B, T] tokens of B sequences, [P] pairs. Sequences 2i and 2i + 1 are one pair, chosen first. Invariant: one
logit per pair, so the loss of a pair does not depend on the others; a pair with an empty side has weight 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class PairLoss(PolicyLoss):
    """Base of pair losses: a reward for each response, and a loss for each pair of rewards.

    Every token of both sides carries the loss of its pair; with seq-mean-token-mean the sum is the mean over pairs.
    Metrics are means over pairs: reward_chosen, reward_rejected, and reward_accuracy, the share of pairs whose chosen
    response has the higher reward.
    """

    uses_advantages = False
    schema = "dpo"
    only_agg_mode = "seq-mean-token-mean"

    @abstractmethod
    def rewards(self, inputs: LossInputs) -> Tensor:
        """[B] reward of each response, differentiable in `policy_logprobs_BT`."""

    @abstractmethod
    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """[P] loss of each pair. rewards_P2: [P, 2], the chosen response first."""

    def row_weights(self, counts_B: Tensor, mode: str, **arguments: Any) -> Tensor:
        """[B] weights, 0 for both sides of a pair with an empty side. Raises: ValueError: an odd number of rows."""
        num_rows = len(counts_B)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        # [B] -> [P, 2] -> [P] -> [B].
        whole_B = (counts_B > 0).view(-1, 2).all(-1).repeat_interleave(2)
        return super().row_weights(counts_B * whole_B, mode, **arguments)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        num_rows = len(inputs.policy_logprobs_BT)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        # Rows are split into ranks and micro-batches in pairs, so both sides are present.
        rewards_P2 = self.rewards(inputs).view(-1, 2)
        chosen_P, rejected_P = rewards_P2.unbind(-1)

        def spread(values_P: Tensor) -> Tensor:
            return inputs.spread(values_P.repeat_interleave(2))

        values_P = {
            "reward_chosen": chosen_P,
            "reward_rejected": rejected_P,
            "reward_accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
        }
        metrics = {name: inputs.weighted(spread(value_P)) for name, value_P in values_P.items()}
        return spread(self.per_pair(rewards_P2)), metrics


# ---- DPO and variants: the chosen response becomes more likely than the rejected one, relative to the reference.


@dataclass(frozen=True)
class Dpo(PairLoss):
    """-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), s the label smoothing. DPO, arXiv:2305.18290, equation 7.

    d = sum over tokens of log p_policy - log p_ref of the chosen response, minus that of the rejected one. loss_type
    "hinge": max(0, 1 - beta d), SLiC, arXiv:2305.10425. "ipo_sum": (d - 1 / (2 beta))^2, IPO, arXiv:2310.12036,
    equation 17, whose h is d, as in OpenRLHF. "ipo": the same with means over tokens instead of sums, as in TRL: the
    margin applies per token, whatever the length. Label smoothing: cDPO, Mitchell 2023.

    Metrics: reward_chosen, reward_rejected (beta times the log-ratio), reward_accuracy.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    loss_name = "dpo"
    uses_reference = True

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        require(
            0.0 <= self.label_smoothing < 0.5, f"label_smoothing must be within [0, 0.5), got {self.label_smoothing}"
        )
        one_of("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo", "ipo_sum"))
        require(
            self.label_smoothing == 0.0 or self.loss_type == "sigmoid", "label_smoothing requires loss_type 'sigmoid'"
        )

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Implicit reward beta log(pi / pi_ref)."""
        if inputs.ref_logprobs_BT is None:
            raise ValueError("dpo needs ref_logprobs_BT, the logprobs of the frozen reference")
        # Sums over whole responses; "ipo" uses means, so that the margin applies per token.
        summed = inputs.sequence_means if self.loss_type == "ipo" else inputs.sequence_sums
        return self.beta * summed(inputs.policy_logprobs_BT - inputs.ref_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """Loss of the margin beta d."""
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        if self.loss_type == "hinge":
            return torch.relu(1.0 - margin_P)
        if self.loss_type in ("ipo", "ipo_sum"):
            # margin = beta d, so this is (d - 1 / (2 beta))^2.
            return ((margin_P - 0.5) / self.beta).square()
        smoothing = self.label_smoothing
        return -(1.0 - smoothing) * functional.logsigmoid(margin_P) - smoothing * functional.logsigmoid(-margin_P)


class DpoAlgorithm(AlgorithmType):
    """Pairs of responses. No KL term, since the loss is already relative to the reference."""

    algorithm_type = "dpo"
    schema = "dpo"
    repeat_times = 2
    advantage_fn = None
    policy_loss_fn = "dpo"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-mean"


# ---- SimPO: makes the chosen response more likely by a margin per token, without a reference.


@dataclass(frozen=True)
class SimPo(PairLoss):
    """-log sigmoid(beta / |y_w| log pi(y_w | x) - beta / |y_l| log pi(y_l | x) - gamma). SimPO, arXiv:2405.14734,
    equation 6.

    |y| is the number of trained tokens. gamma is the margin; the tables of the paper often list gamma / beta.

    Metrics: reward_chosen, reward_rejected (beta times the mean logprob of each side), reward_accuracy.
    """

    beta: float = 2.0
    gamma: float = 1.0

    loss_name = "simpo"

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        require(self.gamma >= 0.0, f"gamma must be >= 0, got {self.gamma}")

    def rewards(self, inputs: LossInputs) -> Tensor:
        """beta times the mean logprob, which does not depend on the length."""
        return self.beta * inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """Bradley-Terry loss with margin gamma."""
        return -functional.logsigmoid(rewards_P2[:, 0] - rewards_P2[:, 1] - self.gamma)


class SimPoAlgorithm(DpoAlgorithm):
    """Pairs of responses without a reference model."""

    algorithm_type = "simpo"
    policy_loss_fn = "simpo"


# ---- ORPO: SFT on the chosen response plus an odds ratio against the rejected one, without a reference.


_CERTAIN = 1e-7
"""Minimum distance of a mean logprob from 0, since a response of probability 1 has infinite odds."""


@dataclass(frozen=True)
class Orpo(PairLoss):
    """-log P(y_w | x) - beta log sigmoid(log odds(y_w | x) - log odds(y_l | x)), odds = P / (1 - P). ORPO,
    arXiv:2403.07691, equations 4, 6 and 7.

    log P is the mean over the trained tokens of a response, as in equation 2 of the paper. The SFT term uses the same
    mean, without the prompt. beta is lambda in the paper.

    Metrics: reward_chosen, reward_rejected (log P of each side), reward_accuracy.
    """

    beta: float = 0.1

    loss_name = "orpo"

    def __post_init__(self) -> None:
        require(self.beta >= 0.0, f"beta must be >= 0, got {self.beta}")

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Mean logprob log P."""
        return inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """SFT loss of the chosen side plus the log odds ratio."""
        # The clamp has no gradient beyond the bound, where only the SFT term moves the response.
        log_p_P2 = rewards_P2.clamp(max=-_CERTAIN)
        # log(1 - P) as log(-expm1(log P)), since 1 - P loses its digits where P is near 1.
        log_odds_P2 = log_p_P2 - torch.log(-torch.expm1(log_p_P2))
        return -rewards_P2[:, 0] - self.beta * functional.logsigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])


class OrpoAlgorithm(DpoAlgorithm):
    """Pairs of responses without a reference model: SFT and preference in one loss."""

    algorithm_type = "orpo"
    policy_loss_fn = "orpo"


# ---- Bradley-Terry: a reward model that scores the chosen response of a pair higher.


@dataclass(frozen=True)
class BradleyTerry(PairLoss):
    """-log sigmoid(s(x, y_w) - s(x, y_l)), s the score of the whole sequence. InstructGPT, arXiv:2203.02155, equation
    1; Bradley and Terry, 1952.

    The model has a head with one output instead of vocabulary logits, read at the last token. Starting from a language
    model the head is 0, and the loss log 2.

    Metrics: reward_chosen, reward_rejected (the scores), reward_accuracy.
    """

    loss_name = "bradley_terry"
    scores_sequences = True

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Score of each row, which all its tokens carry."""
        # The mean of equal numbers reads the score from any row.
        return inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """Negative log-likelihood of the preference, with probability sigmoid(margin)."""
        return -functional.logsigmoid(rewards_P2[:, 0] - rewards_P2[:, 1])


class RewardModelAlgorithm(DpoAlgorithm):
    """A reward model from pairs of responses."""

    algorithm_type = "reward_model"
    policy_loss_fn = "bradley_terry"


# ---- KTO: single responses with a verdict, weighted by a model of human utility.


@dataclass(frozen=True)
class Kto(PolicyLoss):
    """lambda_y - v(x, y), with v = lambda_D sigmoid(beta (r - z0)) for a desirable response and lambda_U sigmoid(beta
    (z0 - r)) for an undesirable one. KTO, arXiv:2402.01306, equations 7 and 8.

    r = sum over tokens of log p_policy - log p_ref. z0, without gradient, estimates KL(policy, reference): the mean of
    r, at least 0, over the prompts of the whole batch, each paired with the response of another prompt, as in the paper
    and TRL. desirable_weight and undesirable_weight are lambda_D and lambda_U; the paper recommends
    lambda_D n_D / (lambda_U n_U) between 1 and 3/2, where n is the number of rows.

    Metrics: kl_baseline, z0; reward_accuracy, the share of rows whose r is on the side of z0 that matches the verdict.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    loss_name = "kto"
    uses_advantages = False
    uses_reference = True
    uses_kl_baseline = True
    schema = "kto"
    only_agg_mode = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        weights = (self.desirable_weight, self.undesirable_weight)
        require(min(weights) >= 0.0, f"desirable_weight and undesirable_weight must be >= 0, got {weights}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs.ref_logprobs_BT is None or inputs.rewards_B is None or inputs.kl_baseline is None:
            raise ValueError("kto needs ref_logprobs_BT, rewards_B (1 desirable, 0 undesirable) and kl_baseline")
        r_B, z0 = inputs.sequence_sums(inputs.policy_logprobs_BT - inputs.ref_logprobs_BT), inputs.kl_baseline
        desirable_B = (inputs.rewards_B > 0).to(r_B.dtype)
        lambda_B = self.desirable_weight * desirable_B + self.undesirable_weight * (1.0 - desirable_B)
        # 2 d - 1 is the sign of the verdict, for both cases of v.
        loss_B = lambda_B * (1.0 - torch.sigmoid(self.beta * (2.0 * desirable_B - 1.0) * (r_B - z0)))
        right_B = ((r_B > z0).to(r_B.dtype) == desirable_B).to(r_B.dtype)
        metrics = {
            "kl_baseline": inputs.weighted(inputs.spread(torch.full_like(r_B, z0))),
            "reward_accuracy": inputs.weighted(inputs.spread(right_B)),
        }
        # Every token carries the loss of its row; weights sum to 1 / B per row, which gives the mean over rows.
        return inputs.spread(loss_B), metrics


class KtoAlgorithm(DpoAlgorithm):
    """Responses with a verdict, without pairs."""

    algorithm_type = "kto"
    schema = "kto"
    repeat_times = 1
    policy_loss_fn = "kto"
