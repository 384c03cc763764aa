"""Inputs and results of advantage functions, and vectorized statistics of groups.

There are N rows in any order: experiences, or turns for a function that compares turns. Token values are concatenated
row by row without padding, Q numbers. Knows nothing of losses. Invariant: an invalid row does not change the advantage
of any other row, and no advantage depends on the order of the rows or on which process has the tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.drop_reasons import DropReason, count_drops

ROUNDING = 1e-12
"""Standard deviation of a group, relative to its mean, below which its rewards count as equal. float64 rounds at
1e-16."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of one batch. Example, two tasks with two rollouts each, rows interleaved:
    `AdvantageInputs(rewards_N=tensor([1., 0., 0., 1.]), group_N=tensor([0, 1, 0, 1]))`.
    """

    rewards_N: Tensor
    """[N] float, reward of the rollout of the row."""
    group_N: Tensor
    """[N] int64, index of the task of the row, 0..G-1."""
    lengths_N: Tensor | None = None
    """[N] int64, trained tokens of the row."""
    valid_N: Tensor | None = None
    """[N] bool, False for a failed rollout: dropped and excluded from baselines. None: all valid."""
    expert_mask_N: Tensor | None = None
    """[N] bool, True for a demonstration: kept with advantage 0, excluded from baselines. None: no demonstrations."""
    rollout_N: Tensor | None = None
    """[N] int64, index of the rollout of the row, 0..R-1. None: each row is a rollout."""
    turn_N: Tensor | None = None
    """[N] int64, order of the row within its rollout. None: each row is a rollout."""
    state_N: Tensor | None = None
    """[N] int64, identity of the environment state before the turn; negative: unknown. For gigpo."""
    turn_rewards_N: Tensor | None = None
    """[N] float, immediate reward of the turn. None: 0. The last turn gets the difference to the reward of the rollout,
    so turn rewards always add up to it. For gigpo."""
    baseline_rewards_N: Tensor | None = None
    """[N] float, reward of the greedy rollout of the task. For remax."""
    tokens_N: Tensor | None = None
    """[N] int64, number of the row's values in each [Q] tensor below; 0 if another process has its tokens."""
    loss_mask_Q: Tensor | None = None
    """[Q] bool, True where the token is trained. For token-level functions, like the tensors below."""
    token_rewards_Q: Tensor | None = None
    """[Q] float, reward of each token. None: `rewards_N` on the last trained token."""
    values_Q: Tensor | None = None
    """[Q] float, value of the critic before the token."""
    rollout_logprobs_Q: Tensor | None = None
    policy_logprobs_Q: Tensor | None = None
    """[Q] float, under the weights before the step. For clipv."""
    ref_logprobs_Q: Tensor | None = None
    teacher_logprobs_Q: Tensor | None = None
    entropy_Q: Tensor | None = None
    """[Q] float, entropy in nats."""
    necs_Q: Tensor | None = None
    """[Q] float, E_v[p_v (H + log p_v)] over the vocabulary at this position. For clipv."""
    gather: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]
    """Gathers a tensor from all processes with tokens of the batch, in the same order everywhere; all tensors have one
    shape. Default: this process has all tokens."""
    step: int = 0
    """Training step; part of the seed of functions that draw random numbers."""
    uids: Sequence[str] | None = None
    """[N] names of the experiences, for error messages."""

    @cached_property
    def num_groups(self) -> int:
        """Number of groups G."""
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    @cached_property
    def used_N(self) -> Tensor:
        """[N] bool, True for rows in baselines: valid and not demonstrations."""
        used_N = torch.ones_like(self.group_N, dtype=torch.bool) if self.valid_N is None else self.valid_N
        return used_N if self.expert_mask_N is None else used_N & ~self.expert_mask_N

    @cached_property
    def row_Q(self) -> Tensor:
        """[Q] int64, row of each token."""
        assert self.tokens_N is not None, "token tensors require tokens_N"
        return torch.arange(len(self.tokens_N), device=self.tokens_N.device).repeat_interleave(self.tokens_N)

    @cached_property
    def used_mask_Q(self) -> Tensor:
        """[Q] bool, trained tokens of used rows."""
        assert self.loss_mask_Q is not None
        return self.loss_mask_Q & self.used_N[self.row_Q]

    def total(self, value: Tensor) -> Tensor:
        """Sum over all processes with tokens of the batch."""
        return torch.stack(list(self.gather(value))).sum(0)

    def row_sums(self, values_Q: Tensor) -> Tensor:
        """[N] float64 sums over the tokens of each row, in all processes."""
        return self.total(group_sums(values_Q, self.row_Q, len(self.rewards_N)))

    def token_rewards(self) -> Tensor:
        """[Q] reward of each token: `token_rewards_Q`, or `rewards_N` on the last trained token of the row."""
        if self.token_rewards_Q is not None:
            return self.token_rewards_Q
        self.check(("loss_mask_Q",))
        assert self.loss_mask_Q is not None
        positions_M = self.loss_mask_Q.nonzero().squeeze(-1)
        # Trained tokens are ordered by row, so the last of a row is followed by a token of another row.
        rows_M = self.row_Q[positions_M]
        is_last_M = torch.ones_like(positions_M, dtype=torch.bool)
        is_last_M[:-1] = rows_M[1:] != rows_M[:-1]
        rewards_Q = self.rewards_N.new_zeros(len(self.loss_mask_Q))
        rewards_Q[positions_M[is_last_M]] = self.rewards_N[rows_M[is_last_M]]
        return rewards_Q

    def check(self, needs: Sequence[str]) -> None:
        """Raises: ValueError: a field in `needs` is missing, or the reward of a used row is not finite."""
        counted = ("tokens_N",) if any(name.endswith("_Q") for name in needs) else ()
        missing = [name for name in (*needs, *counted) if getattr(self, name) is None]
        require(not missing, f"the advantage function needs {', '.join(missing)}")
        require(self.rewards_N.shape == self.group_N.shape, "rewards_N and group_N differ in length")
        require(bool((self.group_N >= 0).all()), "group_N must be >= 0")
        # Unused rows may hold anything, since a failed rollout has no reward.
        bad_N = self.used_N & ~torch.isfinite(self.rewards_N)
        if bool(bad_N.any()):
            row = int(bad_N.nonzero()[0])
            uid = f" (experience {self.uids[row]})" if self.uids is not None else ""
            raise ValueError(
                f"rewards_N is {float(self.rewards_N[row])} at row {row}{uid}; {int(bad_N.sum())} rows are not finite. "
                "Mark failed rollouts in valid_N, or fix the reward function"
            )


@dataclass(frozen=True)
class Turns:
    """Position of each row in its rollout, counting only used rows."""

    rollout_N: Tensor
    """[N] int64, rollout of the row, 0..R-1."""
    position_N: Tensor
    """[N] int64, 0 for the first used turn of the rollout."""
    count_N: Tensor
    """[N] float64, number of used turns in the rollout."""
    num_rollouts: int

    @property
    def is_last_N(self) -> Tensor:
        """[N] bool, True for the last used turn of a rollout."""
        return self.position_N == self.count_N - 1

    @staticmethod
    def of(inputs: AdvantageInputs) -> "Turns":
        """Turns from rollout_N and turn_N. Without them each row is a rollout of one turn."""
        used_N = inputs.used_N
        rollout_N = torch.arange(len(used_N), device=used_N.device) if inputs.rollout_N is None else inputs.rollout_N
        num_rollouts = int(rollout_N.max()) + 1 if len(rollout_N) else 0
        turn_N = torch.zeros_like(rollout_N) if inputs.turn_N is None else inputs.turn_N
        last = torch.iinfo(torch.int64).max
        # Unused turns rank last, so the positions of used turns have no gaps.
        position_N = ranks_in_group(torch.where(used_N, turn_N, last), rollout_N)
        return Turns(rollout_N, position_N, group_sums(used_N, rollout_N, num_rollouts)[rollout_N], num_rollouts)


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of all input rows in order; dropped rows have advantage 0."""

    advantages_N: Tensor
    """[N] float32. For token-level functions: mean over the trained tokens of the row."""
    drops_N: Tensor
    """[N] int8, `DropReason` codes."""
    metrics: dict[str, float] = field(default_factory=dict)
    advantages_Q: Tensor | None = None
    """[Q] float32, for token-level functions; 0 outside the loss mask."""
    returns_Q: Tensor | None = None
    """[Q] float32, targets of the critic; 0 outside the loss mask."""
    keep_Q: Tensor | None = None
    """[Q] bool, False for tokens removed from the loss (clipb, clipv). None: all are kept."""

    def per_token(self, inputs: AdvantageInputs) -> Tensor:
        """[Q] float32 advantage of each token, 0 outside the mask."""
        assert inputs.loss_mask_Q is not None
        advantages_Q = self.advantages_N[inputs.row_Q] if self.advantages_Q is None else self.advantages_Q
        return advantages_Q * inputs.loss_mask_Q


class AdvantageFn(ABC):
    """Base of advantage functions. The fields of the frozen dataclass are its arguments; a call returns the advantages
    of a batch. By default `compute` receives each rollout as one row, whatever its turns.

    A custom function is a subclass with `compute`, in a separate file:

        @dataclass(frozen=True)
        class Sign(AdvantageFn):
            threshold: float = 0.5

            def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
                return result(inputs, (inputs.rewards_N - self.threshold).sign(), metrics={})
    """

    advantage_name: ClassVar[str]
    """Name in a configuration. A function without one is named by its class."""
    deprecated_names: ClassVar[tuple[str, ...]] = ()
    """Old names, accepted with a warning."""
    ignored_args: ClassVar[tuple[str, ...]] = ()
    """Arguments of other systems without a meaning here, accepted with a warning."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Required optional fields of `AdvantageInputs`."""
    uses_critic: ClassVar[bool] = False
    """True if it needs `values_Q`, for which a critic is trained."""
    uses_groups: ClassVar[bool] = True
    """True if it compares the rollouts of a task, so that a single rollout has no effect."""
    only_selects: ClassVar[bool] = False
    """True if it only selects the rollouts to train, for losses without advantages."""
    token_level: ClassVar[bool] = False
    """True if it returns one number per token, `advantages_Q`, instead of one per row."""
    takes_parts: ClassVar[bool] = False
    """True if it works when each process has the tokens of only some rows. Sums over tokens of the batch must then use
    `total` and `row_sums` of the inputs. False: every process receives the tokens of all rows."""
    compares_turns: ClassVar[bool] = False
    """True if it compares turns and receives each turn as a row. False: rows are experiences and, unless it is
    token-level, `compute` receives one row per rollout, whose result applies to all rows of the rollout."""

    @property
    def uses_tokens(self) -> bool:
        """True if it reads token tensors, which are gathered for it."""
        return self.token_level or any(name.endswith("_Q") for name in self.needs)

    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages of all rows, without gradient.

        Raises: ValueError: a required field is missing, or the reward of a valid row is not finite.
        """
        inputs.check(self.needs)
        with torch.no_grad():
            if self.token_level or self.compares_turns:
                return self.compute(inputs)
            return of_rollouts(self.compute, inputs)

    def without_filtering(self) -> "AdvantageFn":
        """Function for rows that are already filtered by this one, which gives them the same advantages.

        Returns self if this function drops no rows.
        """
        return self

    @abstractmethod
    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages of checked inputs; see `result` for one number per row."""


def of_rollouts(compute: Callable[[AdvantageInputs], AdvantageResult], inputs: AdvantageInputs) -> AdvantageResult:
    """Result of `compute` over rollouts as rows, spread to all turns.

    A baseline is over rollouts: over rows, a rollout with nine turns would count nine times in the mean of its task. A
    rollout has the reward of its last used turn, the total length, and the concatenated tokens of its turns. It is used
    if one of its turns is.
    """
    turns = Turns.of(inputs)
    rollout_N, num_rollouts, num_rows = turns.rollout_N, turns.num_rollouts, len(turns.rollout_N)
    # One turn each: rows are rollouts.
    if bool((turns.count_N <= 1).all()) and num_rollouts == num_rows:
        return compute(inputs)
    # Row of each rollout: its last used turn. A rollout without one is unused, whatever its row.
    row_R = rollout_N.new_zeros(num_rollouts)
    last_N = inputs.used_N & turns.is_last_N
    row_R[rollout_N[last_N]] = last_N.nonzero().squeeze(-1)
    changes: dict[str, Any] = {"rollout_N": None, "turn_N": None, "state_N": None, "turn_rewards_N": None, "uids": None}
    if inputs.tokens_N is not None:
        # Rows are sorted by rollout and position, together with their tokens.
        order_N = torch.argsort(turns.position_N, stable=True)
        order_N = order_N[torch.argsort(rollout_N[order_N], stable=True)]
        lengths_N = inputs.tokens_N[order_N]
        starts_N = (inputs.tokens_N.cumsum(0) - inputs.tokens_N)[order_N] - (lengths_N.cumsum(0) - lengths_N)
        order_Q = starts_N.repeat_interleave(lengths_N) + torch.arange(len(inputs.row_Q), device=rollout_N.device)
        changes["tokens_N"] = group_sums(inputs.tokens_N, rollout_N, num_rollouts).long()
    for name in (f.name for f in fields(inputs) if f.name not in changes):
        value = getattr(inputs, name)
        if isinstance(value, Tensor):
            changes[name] = value[order_Q] if name.endswith("_Q") else value[row_R]
    if inputs.lengths_N is not None:
        lengths_N = torch.where(inputs.used_N, inputs.lengths_N, 0)
        changes["lengths_N"] = group_sums(lengths_N, rollout_N, num_rollouts).to(lengths_N.dtype)
    valid_R = torch.zeros_like(row_R, dtype=torch.bool).index_fill(0, rollout_N[last_N], True)
    outcome = compute(replace(inputs, **{**changes, "valid_N": valid_R, "expert_mask_N": None}))
    # Unused turns have their own reason, the others that of their rollout.
    drops_N = torch.where(inputs.used_N, outcome.drops_N[rollout_N], base_drops(inputs))
    # Drops are counted again below, over rows.
    counts = {name: value for name, value in outcome.metrics.items() if not name.startswith("dropped/")}
    return result(inputs, outcome.advantages_N[rollout_N], counts, drops_N)


def result(
    inputs: AdvantageInputs, advantages_N: Tensor, metrics: dict[str, float], drops_N: Tensor | None = None
) -> AdvantageResult:
    """Result of a sequence-level function in float32, with zeros and codes for unused rows, and counters."""
    drops_N = base_drops(inputs) if drops_N is None else drops_N
    # torch.where instead of a product, since unused rows may hold nan.
    live_N = inputs.used_N & (drops_N == DropReason.KEPT)
    advantages_N = torch.where(live_N, advantages_N, 0.0).to(torch.float32)
    return AdvantageResult(advantages_N, drops_N, {**metrics, **count_drops(drops_N)})


def base_drops(inputs: AdvantageInputs) -> Tensor:
    """[N] int8 codes: failed rollouts dropped, all others kept."""
    drops_N = torch.zeros_like(inputs.group_N, dtype=torch.int8)
    if inputs.valid_N is not None:
        drops_N[~inputs.valid_N] = DropReason.INVALID_ROLLOUT
    return drops_N


@dataclass(frozen=True)
class GroupStats:
    """Float64 statistics over the used rows of each group, [G]. An empty group has count 0, mean 0, std 0."""

    count_G: Tensor
    mean_G: Tensor
    std_G: Tensor
    """Sample (n - 1) or population (n) standard deviation; 0 for one row."""

    def metrics(self) -> dict[str, float]:
        """Number of groups with rows, and of groups with one row."""
        return {"num_groups": float((self.count_G > 0).sum()), "singleton_groups": float((self.count_G == 1).sum())}


def group_sums(values_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """[G] float64 sums by group, so that the order of rows does not matter in float32."""
    return torch.zeros(num_groups, dtype=torch.float64, device=values_N.device).index_add_(
        0, group_N, values_N.double()
    )


def group_stats(
    values_N: Tensor, group_N: Tensor, used_N: Tensor, num_groups: int, *, sample: bool = True
) -> GroupStats:
    """Count, mean and standard deviation of the used rows of each group; two passes, float64."""
    count_G = group_sums(used_N, group_N, num_groups)
    # torch.where instead of a product: nan * 0 is nan.
    values_N = torch.where(used_N, values_N, 0.0).double()
    mean_G = group_sums(values_N, group_N, num_groups) / count_G.clamp(min=1.0)
    centered_N = torch.where(used_N, values_N - mean_G[group_N], 0.0)
    divisor_G = (count_G - 1.0 if sample else count_G).clamp(min=1.0)
    # Squares of centered values; the mean of squares minus the square of the mean would lose digits.
    std_G = (group_sums(centered_N.square(), group_N, num_groups) / divisor_G).sqrt()
    # For equal rewards the rest is rounding of the mean, which must not become a divisor.
    std_G = torch.where(std_G > ROUNDING * mean_G.abs(), std_G, 0.0)
    return GroupStats(count_G, mean_G, std_G)


def ranks_in_group(keys_N: Tensor, group_N: Tensor) -> Tensor:
    """[N] int64 rank of each key within its group, 0 for the smallest; ties by position."""
    # Two stable sorts: by key, then by group.
    order_N = torch.argsort(keys_N, stable=True)
    order_N = order_N[torch.argsort(group_N[order_N], stable=True)]
    sorted_group_N = group_N[order_N]
    counts_G = torch.bincount(group_N)
    starts_G = counts_G.cumsum(0) - counts_G
    ranks_N = torch.empty_like(order_N)
    # Position in the sorted order minus the start of the group.
    ranks_N[order_N] = torch.arange(len(order_N), device=order_N.device) - starts_G[sorted_group_N]
    return ranks_N
