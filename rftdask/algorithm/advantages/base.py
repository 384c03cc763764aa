"""What an advantage function takes and gives, and statistics of groups without a loop over groups.

Rows are experiences, or the turns of them for a function that tells turns apart; N of them, in any order. What is said
of tokens lies row after row without padding, Q numbers. Knows nothing of losses. Invariant: a row that is not valid
changes no other row's advantage, and no row's advantage depends on the order of the rows, nor on who has its tokens.
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
"""Spread of a group, relative to its mean, below which its rewards are equal; float64 rounds at 1e-16."""


@dataclass(frozen=True)
class AdvantageInputs:
    """One batch. Example, two tasks with two rollouts each, rows interleaved:
    `AdvantageInputs(rewards_N=tensor([1., 0., 0., 1.]), group_N=tensor([0, 1, 0, 1]))`.
    """

    rewards_N: Tensor
    """[N] float, reward of the row's rollout."""
    group_N: Tensor
    """[N] int64, index of the task the row is a rollout of, 0..G-1."""
    lengths_N: Tensor | None = None
    """[N] int64, trained tokens of the row."""
    valid_N: Tensor | None = None
    """[N] bool, False for a failed rollout: dropped, and absent from every baseline. None: all valid."""
    expert_mask_N: Tensor | None = None
    """[N] bool, True for a demonstration: kept, advantage 0, absent from every baseline. None: none."""
    rollout_N: Tensor | None = None
    """[N] int64, index of the rollout the row is a part of, 0..R-1. None: each row is a rollout."""
    turn_N: Tensor | None = None
    """[N] int64, order of the row within its rollout. None: each row is a rollout."""
    state_N: Tensor | None = None
    """[N] int64, identity of the environment's state before the turn; negative: unknown. For gigpo."""
    turn_rewards_N: Tensor | None = None
    """[N] float, immediate reward of the turn, None: 0. What `rewards_N` of the rollout's last turn is beyond the sum
    of its turns' is the last turn's, so a rollout's turns always add up to its reward. For gigpo."""
    baseline_rewards_N: Tensor | None = None
    """[N] float, reward of the greedy rollout of the row's task. For remax."""
    tokens_N: Tensor | None = None
    """[N] int64, how many of the Q numbers of each tensor below are of the row; 0 for rows whose tokens others have."""
    loss_mask_Q: Tensor | None = None
    """[Q] bool, True where the token is trained. For token-level functions, with the tensors below."""
    token_rewards_Q: Tensor | None = None
    """[Q] float, reward of each token; None: `rewards_N` on the last trained token."""
    values_Q: Tensor | None = None
    """[Q] float, the critic's value before the token."""
    rollout_logprobs_Q: Tensor | None = None
    policy_logprobs_Q: Tensor | None = None
    """[Q] float, under the weights before the step. For clipv."""
    ref_logprobs_Q: Tensor | None = None
    teacher_logprobs_Q: Tensor | None = None
    entropy_Q: Tensor | None = None
    """[Q] float, nats."""
    necs_Q: Tensor | None = None
    """[Q] float, E_v[p_v (H + log p_v)] over the tokens v that could have stood there. For clipv."""
    gather: Callable[[Tensor], Sequence[Tensor]] = lambda own: [own]
    """What everybody who has tokens of the batch gives for this call, in the same order everywhere; all give tensors of
    one shape. Whoever has all tokens gets the own one alone."""
    step: int = 0
    """Training step; part of the seed of functions that draw."""
    uids: Sequence[str] | None = None
    """[N] names of the experiences, for error messages."""

    @cached_property
    def num_groups(self) -> int:
        """G."""
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    @cached_property
    def used_N(self) -> Tensor:
        """[N] bool, the rows that enter baselines: valid and not demonstrations."""
        used_N = torch.ones_like(self.group_N, dtype=torch.bool) if self.valid_N is None else self.valid_N
        return used_N if self.expert_mask_N is None else used_N & ~self.expert_mask_N

    @cached_property
    def row_Q(self) -> Tensor:
        """[Q] int64, the row of each token."""
        assert self.tokens_N is not None, "what is said of tokens comes with their number in each row"
        return torch.arange(len(self.tokens_N), device=self.tokens_N.device).repeat_interleave(self.tokens_N)

    @cached_property
    def used_mask_Q(self) -> Tensor:
        """[Q] bool, trained tokens of used rows."""
        assert self.loss_mask_Q is not None
        return self.loss_mask_Q & self.used_N[self.row_Q]

    def total(self, value: Tensor) -> Tensor:
        """The sum over everybody who has tokens of the batch."""
        return torch.stack(list(self.gather(value))).sum(0)

    def row_sums(self, values_Q: Tensor) -> Tensor:
        """[N] float64 sums over the tokens of each row, also of those that others have."""
        return self.total(group_sums(values_Q, self.row_Q, len(self.rewards_N)))

    def token_rewards(self) -> Tensor:
        """[Q] reward of each token: `token_rewards_Q`, or `rewards_N` on the row's last trained token."""
        if self.token_rewards_Q is not None:
            return self.token_rewards_Q
        self.check(("loss_mask_Q",))
        assert self.loss_mask_Q is not None
        places_M = self.loss_mask_Q.nonzero().squeeze(-1)
        # Of the trained tokens, which lie row by row, the last of each row is followed by one of another.
        rows_M = self.row_Q[places_M]
        is_last_M = torch.ones_like(places_M, dtype=torch.bool)
        is_last_M[:-1] = rows_M[1:] != rows_M[:-1]
        rewards_Q = self.rewards_N.new_zeros(len(self.loss_mask_Q))
        rewards_Q[places_M[is_last_M]] = self.rewards_N[rows_M[is_last_M]]
        return rewards_Q

    def check(self, needs: Sequence[str]) -> None:
        """Raise ValueError if a needed field is missing, or a used row's reward is not finite, naming it."""
        counted = ("tokens_N",) if any(name.endswith("_Q") for name in needs) else ()
        missing = [name for name in (*needs, *counted) if getattr(self, name) is None]
        require(not missing, f"the advantage function needs {', '.join(missing)}")
        require(self.rewards_N.shape == self.group_N.shape, "rewards_N and group_N differ in length")
        require(bool((self.group_N >= 0).all()), "group_N must be >= 0")
        # Rows that do not count may hold anything: a failed rollout has no reward.
        bad_N = self.used_N & ~torch.isfinite(self.rewards_N)
        if bool(bad_N.any()):
            row = int(bad_N.nonzero()[0])
            uid = f" (experience {self.uids[row]})" if self.uids is not None else ""
            raise ValueError(
                f"rewards_N is {float(self.rewards_N[row])} at row {row}{uid}; {int(bad_N.sum())} such rows. Mark "
                "failed rollouts in valid_N, or repair the reward function"
            )


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
        # Without numbers every row is a rollout of its own, of one turn.
        rollout_N = torch.arange(len(used_N), device=used_N.device) if inputs.rollout_N is None else inputs.rollout_N
        num_rollouts = int(rollout_N.max()) + 1 if len(rollout_N) else 0
        turn_N = torch.zeros_like(rollout_N) if inputs.turn_N is None else inputs.turn_N
        last = torch.iinfo(torch.int64).max
        # Turns that do not count rank last; the numbers of the others have no gaps then.
        position_N = ranks_in_group(torch.where(used_N, turn_N, last), rollout_N)
        return Turns(rollout_N, position_N, group_sums(used_N, rollout_N, num_rollouts)[rollout_N], num_rollouts)


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of all rows of the input, in its order; dropped rows have advantage 0."""

    advantages_N: Tensor
    """[N] float32; for token-level functions the mean over the row's trained tokens."""
    drops_N: Tensor
    """[N] int8, `DropReason` codes."""
    metrics: dict[str, float] = field(default_factory=dict)
    advantages_Q: Tensor | None = None
    """[Q] float32, of token-level functions; 0 outside the loss mask."""
    returns_Q: Tensor | None = None
    """[Q] float32, targets of the critic; 0 outside the loss mask."""
    keep_Q: Tensor | None = None
    """[Q] bool, False for tokens the function takes out of the loss (clipb, clipv); None: all stay."""

    def per_token(self, inputs: AdvantageInputs) -> Tensor:
        """[Q] float32 advantages of the tokens; 0 outside the mask."""
        assert inputs.loss_mask_Q is not None
        of_tokens_Q = self.advantages_N[inputs.row_Q] if self.advantages_Q is None else self.advantages_Q
        return of_tokens_Q * inputs.loss_mask_Q


class AdvantageFn(ABC):
    """The base of the advantage functions: the fields of a frozen dataclass are its arguments, a call is the advantages
    of a batch. Unless it says otherwise, `compute` sees each rollout as one row, whatever its turns.

    One of your own is a subclass with `compute`, in a file of its own:

        @dataclass(frozen=True)
        class Sign(AdvantageFn):
            threshold: float = 0.5

            def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
                return result(inputs, (inputs.rewards_N - self.threshold).sign(), metrics={})
    """

    advantage_name: ClassVar[str]
    """The name by which a configuration chooses it; one without is chosen by its class."""
    deprecated_names: ClassVar[tuple[str, ...]] = ()
    """Old names, each with one warning."""
    ignored_args: ClassVar[tuple[str, ...]] = ()
    """Arguments of other systems that mean nothing here: each is accepted with a warning."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Optional fields of `AdvantageInputs` that must be there."""
    uses_critic: ClassVar[bool] = False
    """Whether `values_Q` are needed, so that a critic is trained."""
    uses_groups: ClassVar[bool] = True
    """Whether the rollouts of a task are compared, so that one alone teaches nothing."""
    selects_alone: ClassVar[bool] = False
    """Whether it says which rollouts are trained and nothing more, for losses that take no advantages."""
    token_level: ClassVar[bool] = False
    """Whether it gives a number per token, `advantages_Q`, rather than one per row."""
    takes_parts: ClassVar[bool] = False
    """Whether it is right where each process has the tokens of some rows alone, which takes `total` and `row_sums` of
    its inputs wherever it adds up tokens of the batch. Else every process is given the tokens of all rows."""
    compares_turns: ClassVar[bool] = False
    """Whether it tells the turns of a rollout apart, and is given each as a row. Else rows are experiences, and, unless
    it is token-level, `compute` is given one row for each rollout; all of the rollout gets what it says."""

    @property
    def uses_tokens(self) -> bool:
        """Whether it looks at what is said of tokens, which is brought together then."""
        return self.token_level or any(name.endswith("_Q") for name in self.needs)

    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages of all rows, without gradient.

        Raises: ValueError: a needed field is missing, or a valid row's reward is not finite.
        """
        inputs.check(self.needs)
        with torch.no_grad():
            if self.token_level or self.compares_turns:
                return self.compute(inputs)
            return of_rollouts(self.compute, inputs)

    def without_drops(self) -> "AdvantageFn":
        """The same function for rows that are left after its own drops; itself if it drops none.

        With it the advantages of the rows that are left are those that this function gives them.
        """
        return self

    @abstractmethod
    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages of checked inputs; see `result` for one number per row."""


def of_rollouts(compute: Callable[[AdvantageInputs], AdvantageResult], inputs: AdvantageInputs) -> AdvantageResult:
    """What `compute` says of the rollouts, each as one row, at every turn of them.

    So a baseline is over rollouts: over rows, one of nine turns would count nine times in the mean of its task, and
    draw the baseline to its own reward. A rollout has the reward of its last used turn, the length of all of them, and
    their tokens side by side; it is used if one of its turns is.
    """
    turns = Turns.of(inputs)
    rollout_N, num_rollouts, num_rows = turns.rollout_N, turns.num_rollouts, len(turns.rollout_N)
    # One turn each: rows are rollouts, and nothing has to be joined or spread.
    if bool((turns.count_N <= 1).all()) and num_rollouts == num_rows:
        return compute(inputs)
    # The row that stands for each rollout: its last used turn; one without is not used, whatever row it shows.
    row_R = rollout_N.new_zeros(num_rollouts)
    last_N = inputs.used_N & turns.is_last_N
    row_R[rollout_N[last_N]] = last_N.nonzero().squeeze(-1)
    changes: dict[str, Any] = {"rollout_N": None, "turn_N": None, "state_N": None, "turn_rewards_N": None, "uids": None}
    if inputs.tokens_N is not None:
        # Turns side by side in their order: rows sorted by rollout and place, their tokens with them.
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
    found = compute(replace(inputs, **{**changes, "valid_N": valid_R, "expert_mask_N": None}))
    # A turn that is not used is dropped for itself, and the others with their rollout.
    drops_N = torch.where(inputs.used_N, found.drops_N[rollout_N], base_drops(inputs))
    # Drops are counted again below, over rows.
    counts = {name: value for name, value in found.metrics.items() if not name.startswith("dropped/")}
    return result(inputs, found.advantages_N[rollout_N], counts, drops_N)


def result(
    inputs: AdvantageInputs, advantages_N: Tensor, metrics: dict[str, float], drops_N: Tensor | None = None
) -> AdvantageResult:
    """Result of a sequence-level function: zeros and codes for rows that are not used, counters, float32."""
    drops_N = base_drops(inputs) if drops_N is None else drops_N
    # By where and not by a product: what a row that does not count holds may be nan.
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
    """Statistics over the used rows of each group, float64, [G]. An empty group has count 0, mean 0, std 0."""

    count_G: Tensor
    mean_G: Tensor
    std_G: Tensor
    """Sample (n - 1) or population (n) as asked; 0 for one row."""

    def metrics(self) -> dict[str, float]:
        """Counters of groups: those that have rows, and those that have one. Rewards are the trainer's to tell."""
        return {"num_groups": float((self.count_G > 0).sum()), "singleton_groups": float((self.count_G == 1).sum())}


def group_sums(values_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """[G] sums of a float64 [N] by group; float64 so that the order of rows changes nothing a float32 can show."""
    return torch.zeros(num_groups, dtype=torch.float64, device=values_N.device).index_add_(
        0, group_N, values_N.double()
    )


def group_stats(
    values_N: Tensor, group_N: Tensor, used_N: Tensor, num_groups: int, *, sample: bool = True
) -> GroupStats:
    """Count, mean and standard deviation of the used rows of each group; two passes, float64."""
    count_G = group_sums(used_N, group_N, num_groups)
    # By where, not by a product: nan * 0 is nan.
    values_N = torch.where(used_N, values_N, 0.0).double()
    mean_G = group_sums(values_N, group_N, num_groups) / count_G.clamp(min=1.0)
    centered_N = torch.where(used_N, values_N - mean_G[group_N], 0.0)
    divisor_G = (count_G - 1.0 if sample else count_G).clamp(min=1.0)
    # Of squares of what was centered first: the mean of squares less the square of the mean would lose digits.
    std_G = (group_sums(centered_N.square(), group_N, num_groups) / divisor_G).sqrt()
    # Equal rewards have no spread: what is left is the rounding of their mean, which must not be divided by.
    std_G = torch.where(std_G > ROUNDING * mean_G.abs(), std_G, 0.0)
    return GroupStats(count_G, mean_G, std_G)


def ranks_in_group(keys_N: Tensor, group_N: Tensor) -> Tensor:
    """[N] int64, rank of each row's key within its group, 0 for the smallest; ties by position."""
    # Two stable sorts in place of one by both: by key, then by group, which keeps the order of the keys.
    order_N = torch.argsort(keys_N, stable=True)
    order_N = order_N[torch.argsort(group_N[order_N], stable=True)]
    sorted_group_N = group_N[order_N]
    counts_G = torch.bincount(group_N)
    # Where each group begins in that order.
    starts_G = counts_G.cumsum(0) - counts_G
    ranks_N = torch.empty_like(order_N)
    # A row's place in the whole order, less where its group begins, is its rank.
    ranks_N[order_N] = torch.arange(len(order_N), device=order_N.device) - starts_G[sorted_group_N]
    return ranks_N
