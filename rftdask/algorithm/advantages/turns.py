"""Advantages of rollouts with several turns: each turn is a row, the task compares rollouts.

Knows nothing of tokens. Invariant: a rollout counts once in its task's baseline, however many turns it has.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import (
    AdvantageFn,
    AdvantageInputs,
    AdvantageResult,
    base_drops,
    group_stats,
    group_sums,
    ranks_in_group,
    result,
)
from rftdask.algorithm.advantages.group import Grpo
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require


@dataclass(frozen=True)
class Turns:
    """Where each row stands in its rollout; only used rows count."""

    rollout_N: Tensor
    """[N] int64, 0..R-1."""
    position_N: Tensor
    """[N] int64, 0 for the first used turn of the rollout."""
    count_N: Tensor
    """[N] float64, used turns of the row's rollout."""
    num_rollouts: int

    @property
    def is_last_N(self) -> Tensor:
        """[N] bool, the last used turn of its rollout."""
        return self.position_N == self.count_N - 1

    @staticmethod
    def of(inputs: AdvantageInputs) -> "Turns":
        """From rollout_N and turn_N; without them each row is a rollout of one turn."""
        used_N = inputs.used_N
        rollout_N = torch.arange(len(used_N), device=used_N.device) if inputs.rollout_N is None else inputs.rollout_N
        num_rollouts = int(rollout_N.max()) + 1 if len(rollout_N) else 0
        turn_N = torch.zeros_like(rollout_N) if inputs.turn_N is None else inputs.turn_N
        last = torch.iinfo(torch.int64).max
        # Turns that do not count rank last; the numbers of the others have no gaps then.
        position_N = ranks_in_group(torch.where(used_N, turn_N, last), rollout_N)
        return Turns(rollout_N, position_N, group_sums(used_N, rollout_N, num_rollouts)[rollout_N], num_rollouts)


@dataclass(frozen=True)
class StepWiseGrpo(AdvantageFn):
    """GRPO over the rewards of the rollouts' last turns; every turn gets its rollout's advantage. As in rLLM and
    Trinity-RFT."""

    epsilon: float = 1e-6
    enable_step_norm: bool = False
    """Divide by the number of the rollout's turns."""
    std_cal_level: str = "group"
    std_threshold: float | None = None
    """Drop tasks whose sigma is at or below it; None: drop none."""
    std: str = "sample"

    advantage_name = "step_wise_grpo"

    def __post_init__(self) -> None:
        self._grpo()

    def without_drops(self) -> AdvantageFn:
        """The same with no threshold."""
        return replace(self, std_threshold=None)

    def _grpo(self) -> Grpo:
        return Grpo(
            epsilon=self.epsilon, std=self.std, std_threshold=self.std_threshold, std_cal_level=self.std_cal_level
        )

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Rows of one rollout get one advantage, and are dropped together."""
        turns = Turns.of(inputs)
        last_N = inputs.used_N & turns.is_last_N
        # GRPO sees one row of each rollout, so that a long one does not weigh more in the baseline.
        ends = self._grpo()(replace(inputs, valid_N=last_N, expert_mask_N=None))
        index_R = torch.zeros(turns.num_rollouts, dtype=torch.int64, device=last_N.device)
        # The row of each rollout's last turn; one without a used row points at row 0, and none of its rows is used.
        index_R[turns.rollout_N[last_N]] = last_N.nonzero().squeeze(-1)
        source_N = index_R[turns.rollout_N]
        advantages_N = ends.advantages_N[source_N]
        if self.enable_step_norm:
            advantages_N = advantages_N / turns.count_N.clamp(min=1.0)
        # To GRPO the earlier turns looked invalid; here they share the fate of the last one.
        drops_N = torch.where(inputs.used_N, ends.drops_N[source_N], base_drops(inputs))
        # Its counts of drops are of rollouts; `result` counts rows.
        metrics = {key: value for key, value in ends.metrics.items() if not key.startswith("dropped/")}
        return result(inputs, advantages_N, metrics, drops_N)


class MultiStepGrpoAlgorithm(AlgorithmType):
    """GRPO for rollouts of several turns."""

    algorithm_type = "multi_step_grpo"
    advantage_fn = "step_wise_grpo"


@dataclass(frozen=True)
class Gigpo(AdvantageFn):
    """A_episode + omega A_step. GiGPO, arXiv:2505.10978.

    A_episode compares the rollouts' total rewards within the task; A_step compares the discounted returns of all
    turns of the task taken from the same environment state. Both are x - mean, divided by sigma + epsilon if fnorm
    is "std". A state seen once, or not told by the workflow: A_step 0. A lone rollout: A_episode 0.
    """

    omega: float = 1.0
    gamma: float = 1.0
    """Discount per turn."""
    fnorm: str = "none"
    """"none" or "std" (sample)."""
    epsilon: float = 1e-6
    anchor_scope: str = "task"
    """Turns compared: "task" (the paper), or "batch": equal states of all tasks."""

    advantage_name = "gigpo"

    def __post_init__(self) -> None:
        one_of("fnorm", self.fnorm, ("none", "std"))
        one_of("anchor_scope", self.anchor_scope, ("task", "batch"))
        require(0.0 <= self.gamma <= 1.0, f"gamma must be within [0, 1], got {self.gamma}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Needs rollout_N and turn_N for rollouts of several turns; state_N [N] is negative where none was told."""
        turns = Turns.of(inputs)
        rewards_N = inputs.rewards_N.double()
        if inputs.turn_rewards_N is not None:
            # What the turns leave of the rollout's reward is the last turn's, so they add up to it.
            given_N = torch.where(inputs.used_N, inputs.turn_rewards_N.double(), 0.0)
            rest_N = rewards_N - group_sums(given_N, turns.rollout_N, turns.num_rollouts)[turns.rollout_N]
            rewards_N = given_N + torch.where(turns.is_last_N, rest_N, 0.0)
        else:
            rewards_N = torch.where(turns.is_last_N, rewards_N, 0.0)
        rewards_N = torch.where(inputs.used_N, rewards_N, 0.0)
        totals_R = group_sums(rewards_N, turns.rollout_N, turns.num_rollouts)
        # One row of each rollout makes the statistics, so a long one does not weigh more.
        first_N = inputs.used_N & (turns.position_N == 0)
        episode_N, stats = self._centered(totals_R[turns.rollout_N], inputs.group_N, first_N, inputs.num_groups)
        advantages_N = episode_N
        metrics = stats
        if inputs.state_N is not None:
            # The sum over later turns k of gamma^(k - t) r_k, by one vector operation for each number of a turn.
            returns_N, ahead_R = torch.zeros_like(rewards_N), rewards_N.new_zeros(turns.num_rollouts)
            for position in range(int(turns.count_N.max()) - 1 if len(rewards_N) else -1, -1, -1):
                rows = ((turns.position_N == position) & (turns.position_N < turns.count_N)).nonzero().squeeze(-1)
                returns_N[rows] = rewards_N[rows] + self.gamma * ahead_R[turns.rollout_N[rows]]
                ahead_R[turns.rollout_N[rows]] = returns_N[rows]
            known_N = inputs.used_N & (inputs.state_N >= 0)
            scope_N = inputs.group_N if self.anchor_scope == "task" else torch.zeros_like(inputs.group_N)
            # Anchor groups: the turns of a task (or of the batch) that were taken from equal states.
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
        divisor_N = stats.std_G[group_N] if self.fnorm == "std" else torch.ones_like(values_N)
        centered_N = (values_N - stats.mean_G[group_N]) / (divisor_N + self.epsilon)
        return torch.where(stats.count_G[group_N] > 1, centered_N, 0.0), stats.metrics()


class GigpoAlgorithm(AlgorithmType):
    """PPO's loss with groups within groups: rollouts of a task, turns from one state."""

    algorithm_type = "gigpo"
    advantage_fn = "gigpo"
