"""Formulas without an installed peer: an independent implementation from the papers, token by token, in float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import make_part
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.operators import ExperienceTable
from rftdask.testing.conformance.cases import Batch, Case, advantages_of, loss_of


def cases() -> list[Case]:
    bounds = {"sequence": 0.04, "batch": 0.3}
    return [
        Case(
            f"m2po loss, second moment of each {scope} at most {bound}",
            loss_of("m2po", policy_loss_fn_args={"scope": scope, "m2_threshold": bound}),
            m2po(scope, bound),
        )
        for scope, bound in bounds.items()
    ] + [
        Case("drpo advantage, lambda 0.5", advantages_of("drpo"), drpo(0.5), float32_only=True),
        Case("best_of_n advantage (raft)", advantages_of("best_of_n"), best_of_n, float32_only=True),
        Case("dapo's filter of tasks, as an operator", kept_by_operator, dynamic_sampling),
        Case("dapo's filter of tasks, as an advantage function", kept_by_threshold, dynamic_sampling),
    ]


def drpo(temperature: float) -> Callable[[Batch], Tensor]:
    """Reward minus the mean of its task, times a length weight. arXiv:2510.04474, section 4.

    The weight of a correct rollout is exp(-l / (lambda L)) divided by its mean over the task's correct rollouts, where
    L is the longest of them. The weight of an incorrect rollout (r <= 0) is 1.
    """

    def formula(batch: Batch) -> Tensor:
        rewards, lengths = batch.rewards.double().tolist(), batch.mask.sum(-1).tolist()
        advantages = []
        for row, group in enumerate(batch.groups.tolist()):
            task = [other for other, its in enumerate(batch.groups.tolist()) if its == group]
            correct = [other for other in task if rewards[other] > 0]
            longest = max([1, *(lengths[other] for other in correct)])
            brevity = {other: math.exp(-lengths[other] / (temperature * longest)) for other in correct}
            weight = brevity[row] * len(correct) / sum(brevity.values()) if row in brevity else 1.0
            advantages.append(weight * (rewards[row] - sum(rewards[other] for other in task) / len(task)))
        return torch.tensor(advantages, dtype=torch.float64)[:, None] * batch.mask

    return formula


def best_of_n(batch: Batch) -> Tensor:
    """1 for the tokens of the first rollout with the largest reward of its task. RAFT, arXiv:2304.06767, section 3."""
    best: dict[int, int] = {}
    for row, group in enumerate(batch.groups.tolist()):
        if group not in best or batch.rewards[row] > batch.rewards[best[group]]:
            best[group] = row
    return torch.tensor([[float(row in best.values())] for row in range(len(batch.rewards))]) * batch.mask


def solved(batch: Batch) -> Tensor:
    """[B] rewards of 0 and 1. One task is solved by all of its rollouts, another by none."""
    rewards = (batch.rewards > 0).double()
    return torch.where(batch.groups == 0, 1.0, torch.where(batch.groups == 1, 0.0, rewards))


def dynamic_sampling(batch: Batch) -> Tensor:
    """1 for the rollouts of tasks with 0 < (number of correct ones) < G. DAPO, arXiv:2503.14476, equation 11."""
    rewards, kept = solved(batch), []
    for group in batch.groups.tolist():
        task = [float(rewards[other]) for other, its in enumerate(batch.groups.tolist()) if its == group]
        kept.append(float(0 < sum(value == 1.0 for value in task) < len(task)))
    return torch.tensor(kept)


def kept_by_operator(batch: Batch) -> Tensor:
    operator = make_part("operator", "dapo_dynamic_sampling", {"metric_key": "reward"})
    kept_N: Tensor = operator(ExperienceTable(solved(batch), batch.groups))[0].keep_N
    return kept_N.double()


def kept_by_threshold(batch: Batch) -> Tensor:
    """Rollouts kept by the advantage function of `dapo`."""
    function = make_part("advantage_fn", "grpo", {"std_threshold": 0.0})
    drops_N: Tensor = function(AdvantageInputs(solved(batch), batch.groups)).drops_N
    return (drops_N == DropReason.KEPT).double()


def m2po(scope: str, bound: float) -> Callable[[Batch], Tensor]:
    """Mean of -A r over the tokens that algorithm 1 of arXiv:2510.01161 does not mask.

    While the mean of (log r)^2 over the tokens that PPO could clip is above the bound, the largest one is masked.
    """

    def formula(batch: Batch) -> Tensor:
        places = [(int(row), int(column)) for row, column in batch.mask.nonzero()]
        log_r = {place: batch.policy.double()[place] - batch.old.double()[place] for place in places}
        moved = {place: float(value.detach()) for place, value in log_r.items()}
        clippable = {place for place in places if float(batch.advantages[place]) * moved[place] > 0}
        masked: set[tuple[int, int]] = set()
        for row in range(len(batch.mask)) if scope == "sequence" else [None]:
            left = [place for place in clippable if row in (None, place[0])]
            left.sort(key=lambda place: moved[place] ** 2)
            while left and sum(moved[place] ** 2 for place in left) / len(left) > bound:
                masked.add(left.pop())
        gains = [batch.advantages[place] * log_r[place].exp() for place in places if place not in masked]
        return -torch.stack([*gains, batch.policy.sum() * 0.0]).sum() / len(places)

    return formula
