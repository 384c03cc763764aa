"""Advantages of rollouts with several turns. Each turn is a row; a task compares rollouts.

Knows nothing of tokens. Invariant: a rollout counts once in its task's baseline, however many turns it has.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import (
    AdvantageFn,
    AdvantageInputs,
    AdvantageResult,
    Turns,
    group_stats,
    group_sums,
    of_rollouts,
    result,
)
from rftdask.algorithm.advantages.group import Grpo
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require


@dataclass(frozen=True)
class StepWiseGrpo(Grpo):
    """GRPO over rollouts, which gives every turn the advantage of its rollout, optionally divided by the number of
    turns. As in rLLM and Trinity-RFT."""

    enable_step_norm: bool = False
    """Divide by the number of turns, so that a long rollout has no more weight than a short one."""

    advantage_name = "step_wise_grpo"
    deprecated_names = ()
    compares_turns = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        result = of_rollouts(super().compute, inputs)
        if not self.enable_step_norm:
            return result
        return replace(result, advantages_N=result.advantages_N / Turns.of(inputs).count_N.clamp(min=1.0).float())


class MultiStepGrpoAlgorithm(AlgorithmType):
    """GRPO for rollouts of several turns."""

    algorithm_type = "multi_step_grpo"
    advantage_fn = "step_wise_grpo"


@dataclass(frozen=True)
class Gigpo(AdvantageFn):
    """A_episode + omega A_step. GiGPO, arXiv:2505.10978.

    A_episode compares the rollouts' total rewards within the task; A_step compares the discounted returns of all
    turns of the task that start in the same environment state. Both are x - mean, divided by sigma + epsilon if fnorm
    is "std". A state that occurs once or is unknown: A_step 0. A single rollout: A_episode 0.
    """

    omega: float = 1.0
    gamma: float = 1.0
    """Discount per turn."""
    fnorm: str = "none"
    """"none" or "std" (sample)."""
    epsilon: float = 1e-6
    anchor_scope: str = "task"
    """Scope of the comparison of turns: "task" as in the paper, or "batch": equal states of all tasks."""

    advantage_name = "gigpo"
    compares_turns = True

    def __post_init__(self) -> None:
        one_of("fnorm", self.fnorm, ("none", "std"))
        one_of("anchor_scope", self.anchor_scope, ("task", "batch"))
        require(0.0 <= self.gamma <= 1.0, f"gamma must be within [0, 1], got {self.gamma}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages. Needs rollout_N and turn_N for rollouts of several turns. state_N [N]: negative if unknown."""
        turns = Turns.of(inputs)
        rewards_N = inputs.rewards_N.double()
        if inputs.turn_rewards_N is not None:
            # The last turn gets the rest of the reward, so that turn rewards add up to it.
            given_N = torch.where(inputs.used_N, inputs.turn_rewards_N.double(), 0.0)
            rest_N = rewards_N - group_sums(given_N, turns.rollout_N, turns.num_rollouts)[turns.rollout_N]
            rewards_N = given_N + torch.where(turns.is_last_N, rest_N, 0.0)
        else:
            rewards_N = torch.where(turns.is_last_N, rewards_N, 0.0)
        rewards_N = torch.where(inputs.used_N, rewards_N, 0.0)
        totals_R = group_sums(rewards_N, turns.rollout_N, turns.num_rollouts)
        # One row per rollout enters the statistics, so that long rollouts do not weigh more.
        first_N = inputs.used_N & (turns.position_N == 0)
        episode_N, stats = self._centered(totals_R[turns.rollout_N], inputs.group_N, first_N, inputs.num_groups)
        advantages_N = episode_N
        metrics = stats
        if inputs.state_N is not None:
            # Sum over later turns k of gamma^(k - t) r_k, with one vector operation per turn number.
            returns_N, ahead_R = torch.zeros_like(rewards_N), rewards_N.new_zeros(turns.num_rollouts)
            for position in range(int(turns.count_N.max()) - 1 if len(rewards_N) else -1, -1, -1):
                rows = ((turns.position_N == position) & (turns.position_N < turns.count_N)).nonzero().squeeze(-1)
                # ahead_R: return of the following turn of each rollout.
                returns_N[rows] = rewards_N[rows] + self.gamma * ahead_R[turns.rollout_N[rows]]
                ahead_R[turns.rollout_N[rows]] = returns_N[rows]
            known_N = inputs.used_N & (inputs.state_N >= 0)
            scope_N = inputs.group_N if self.anchor_scope == "task" else torch.zeros_like(inputs.group_N)
            # Anchor groups: turns of a task (or of the batch) that start in equal states.
            _, anchor_N = torch.unique(torch.stack([scope_N, inputs.state_N]), dim=1, return_inverse=True)
            num_anchors = int(anchor_N.max()) + 1
            step_N, anchors = self._centered(returns_N, anchor_N, known_N, num_anchors)
            advantages_N = episode_N + self.omega * torch.where(known_N, step_N, 0.0)
            metrics = {**stats, "num_anchors": anchors["num_groups"], "singleton_anchors": anchors["singleton_groups"]}
        return result(inputs, advantages_N, metrics)

    def _centered(
        self, values_N: Tensor, group_N: Tensor, used_N: Tensor, num_groups: int
    ) -> tuple[Tensor, dict[str, float]]:
        """[N] value minus its group's mean (statistics over `used_N` rows), normalized; 0 where the group has one
        row."""
        stats = group_stats(values_N, group_N, used_N, num_groups)
        # Without normalization the divisor is 1.
        divisor_N = stats.std_G[group_N] if self.fnorm == "std" else torch.ones_like(values_N)
        centered_N = (values_N - stats.mean_G[group_N]) / (divisor_N + self.epsilon)
        return torch.where(stats.count_G[group_N] > 1, centered_N, 0.0), stats.metrics()


class GigpoAlgorithm(AlgorithmType):
    """PPO's loss with nested groups: rollouts of a task, and turns from one state."""

    algorithm_type = "gigpo"
    advantage_fn = "gigpo"
