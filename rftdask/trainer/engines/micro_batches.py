"""Micro-batches: the rows of a batch cut into mini-batches, one an update, dealt to ranks and cut into passes, and
given to models as tensors.

It knows neither models nor losses. How rows are dealt follows from their lengths, which all ranks know, so that they
agree without a word.

Letters: N rows of the batch; Q response tokens of those whose tokens this rank has; B rows of a micro-batch; T response
tokens of the longest of those rows; U units, which are neighbors in the batch that are never parted: pairs of rows, or
single ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageFn, AdvantageInputs, group_sums
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.source import random_order
from rftdask.config import Config
from rftdask.data.images import ImageProcessor
from rftdask.trainer.packing import PackedRows, pack_rows
from rftdask.trainer.ranks import Ranks


class BatchRows:
    """The response side of a batch, a number for each response token that is here and none beyond, row after row: [Q].
    Some rows of it are padded to the longest of them when a pass needs them, and their tokens are packed.

    Each rank has the tokens of the rows that it computes. What one of them finds out about the tokens of a row goes to
    the others that have it, too (`shared`), and to nobody else.

    Example, of responses of 2 and 1 tokens: rows.part(values_Q, [1, 0]) == [[values_Q[2], 0], values_Q[:2]]
    """

    def __init__(
        self,
        batch: TrainingBatch,
        device: torch.device,
        sequence: Ranks | None = None,
        *,
        lean: bool = False,
        processor: ImageProcessor | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """sequence, lean, processor: as of `pack_rows`. ranks: who have the rows together; None: this one has all."""
        self._batch, self._device, self._sequence, self._lean = batch, device, sequence, lean
        self._processor, self._ranks = processor, ranks or Ranks()
        self._tokens, self._experts = batch.row_tokens(), batch.row_experts()
        self._lengths = np.where(batch.is_held, batch.response_lengths, 0)
        # [N] places in Q at which the rows begin: the sum of the lengths before each.
        self._starts = self._lengths.cumsum() - self._lengths
        here = np.flatnonzero(batch.is_held)
        self._rows_of_ranks = [np.frombuffer(told, np.int64) for told in self._ranks.all_gather_bytes(here.tobytes())]
        # On the device once a batch; what a pass needs of them is indexed there.
        self.rollout_logprobs_Q = _tensor(np.asarray(batch.rollout_logprobs, np.float32)).to(device)
        self.loss_mask_Q = _tensor(np.asarray(batch.loss_mask, np.bool_)).to(device)
        self._num_trained_N = _tensor(batch.num_trained).to(device)
        self.experts_N = _tensor(batch.experts).to(device)
        self.rollouts_N = _tensor(batch.rollouts).to(device)
        self.rewards_N = _tensor(batch.rewards).to(device)
        self.kl_baseline: float | None = None
        """As of `LossInputs`; made by who has the models."""

    def by_turns(self) -> BatchRows:
        """The same response tokens with each turn as a row; these rows if each is one turn."""
        if len(self._batch.turns) == len(self._batch):
            return self
        return BatchRows(self._batch.by_turns(), self._device)

    def uids(self, members: np.ndarray) -> list[str]:
        """The names of some rows."""
        return [self._batch.uids[i] for i in members]

    def among(self, members: np.ndarray) -> Tensor:
        """[N] bool: whether a row is one of these."""
        return torch.from_numpy(np.isin(np.arange(len(self._batch)), members)).to(self._device)

    def places(self, members: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """([B, T] int64 places in Q of the tokens of some rows, any where there is none; [B, T] bool, whether there is
        one), on `device`; T is the longest response of these rows."""
        # Made on the host, which knows the lengths: asked of a GPU, each pass would wait for its own forward pass.
        lengths_B, starts_B = self._lengths[members], self._starts[members]
        column_T = np.arange(lengths_B.max(initial=0))
        there_BT = column_T < lengths_B[:, None]
        place_BT = np.where(there_BT, starts_B[:, None] + column_T, 0)
        return torch.from_numpy(place_BT).to(device), torch.from_numpy(there_BT).to(device)

    def part(self, values_Q: Tensor, members: np.ndarray) -> Tensor:
        """[B, T] of some rows, 0 beyond their ends."""
        place_BT, there_BT = self.places(members, values_Q.device)
        return values_Q[place_BT].masked_fill(~there_BT, 0)

    def tokens_of(self, members: np.ndarray) -> np.ndarray:
        """[M] places in Q of the tokens of some rows, row after row."""
        lengths_B = self._lengths[members]
        skipped_B = self._starts[members] - (lengths_B.cumsum() - lengths_B)
        places: np.ndarray = np.repeat(skipped_B, lengths_B) + np.arange(lengths_B.sum())
        return places

    def shared(self, values_Q: Tensor, computed: Sequence[np.ndarray]) -> Tensor:
        """[Q], or [Q, K], of what some rank knows of each token here. Called by all ranks.

        values_Q: right at the rows that this rank has computed. computed: those of each rank; each row is one's.
        """
        if self._ranks.size == 1:
            return values_Q
        given = [np.intersect1d(computed[self._ranks.rank], rows) for rows in self._rows_of_ranks]
        taken = [np.intersect1d(rows, self._rows_of_ranks[self._ranks.rank]) for rows in computed]
        sent_Q, found_Q = (
            torch.from_numpy(self.tokens_of(np.concatenate(rows))).to(self._device) for rows in (given, taken)
        )
        sizes = [[int(self._lengths[rows].sum()) for rows in each] for each in (given, taken)]
        # Row after row, as `found_Q` has their places.
        return torch.zeros_like(values_Q).index_copy_(0, found_Q, self._ranks.all_to_all(values_Q[sent_Q], *sizes))

    def sums(self, values_Q: Tensor) -> Tensor:
        """[N] float64 sums over the tokens of each row that are here."""
        row_Q = self.of_tokens(torch.arange(len(self._batch), device=values_Q.device))
        return group_sums(values_Q, row_Q, len(self._batch))

    def of_tokens(self, values_N: Tensor) -> Tensor:
        """[Q] what is said of each token's row."""
        lengths_N = torch.from_numpy(self._lengths).to(values_N.device)
        return values_N.repeat_interleave(lengths_N, output_size=int(self._lengths.sum()))

    def counts(self) -> Tensor:
        """[N] int64 trained tokens of each row, of all rows."""
        return self._num_trained_N

    def model_inputs(self, members: np.ndarray) -> dict[str, PackedRows]:
        """The token side of some rows, as `token_logprobs` takes it."""
        tokens = [self._tokens[i] for i in members]
        lengths, temperatures = self._batch.prompt_lengths[members], self._batch.temperatures[members]
        experts = None if self._experts is None else [self._experts[i] for i in members]
        return {
            "rows": pack_rows(
                tokens,
                lengths,
                temperatures,
                self._device,
                sequence=self._sequence,
                experts=experts,
                images=None if self._batch.images is None else [self._batch.images[i] for i in members],
                processor=self._processor,
                lean=self._lean,
            )
        }

    @torch.no_grad()
    def scored(self, parts: Sequence[np.ndarray], score: Callable[..., Tensor]) -> Tensor:
        """[Q], or [Q, K], float32 of what `score` says of every response token, given `model_inputs` of one part at a
        time."""
        values_Q = torch.zeros_like(self.rollout_logprobs_Q)
        for members in parts:
            values_BT = score(**self.model_inputs(members))
            if values_Q.ndim < values_BT.ndim - 1:
                # The first part tells how many numbers a token has: [Q] -> [Q, K].
                values_Q = values_Q.new_zeros((*values_Q.shape, *values_BT.shape[2:]))
            place_BT, there_BT = self.places(members, self._device)
            values_Q[place_BT[there_BT]] = values_BT[there_BT]
        return values_Q

    def advantage_inputs(self, step: int) -> AdvantageInputs:
        """What the rows themselves say, on the CPU; what is said of tokens is to be added. Only of a batch `by_turns`
        they have states and rewards of turns."""
        batch = self._batch
        are_turns = len(batch.turns) == len(batch)
        return AdvantageInputs(
            rewards_N=_tensor(batch.rewards),
            group_N=_tensor(batch.groups),
            lengths_N=self.counts().cpu(),
            expert_mask_N=_tensor(batch.experts),
            rollout_N=_tensor(batch.rollouts),
            turn_N=_tensor(batch.ordinals),
            state_N=_tensor(batch.states) if are_turns and batch.states is not None else None,
            turn_rewards_N=_tensor(batch.turn_rewards) if are_turns and batch.turn_rewards is not None else None,
            baseline_rewards_N=None if batch.baselines is None else _tensor(batch.baselines),
            step=step,
            uids=batch.uids,
        )

    def row_weights(
        self, config: Config, algorithm: Algorithm, members: np.ndarray | None = None, step: int = 0
    ) -> Tensor:
        """[N] weights of the tokens in the loss of some rows, or of all: those of the others weigh nothing."""
        counts_N = self.counts()
        return algorithm.row_weights(
            counts_N if members is None else counts_N * self.among(members),
            max_tokens=config.model.max_response_tokens,
            expert_mask_B=self.experts_N,
            rollout_B=self.rollouts_N,
            step=step,
        )

    def loss_inputs(
        self,
        config: Config,
        algorithm: Algorithm,
        members: np.ndarray,
        policy_BT: Tensor,
        weights_N: Tensor,
        scores: Mapping[str, Tensor],
        advantages: Callable[[np.ndarray], Tensor] | None,
        **more: Any,
    ) -> LossInputs:
        """What the loss takes of some rows.

        Args:
            policy_BT: logprobs by the weights that are trained, with gradient.
            weights_N, scores, advantages: as of `row_weights`, and as `advantages` takes and makes them.
            more: fields of `LossInputs` that are neither of the rows nor of the scores.
        """
        part = torch.from_numpy(members).to(self._device)
        mask_BT = self.part(self.loss_mask_Q, members)
        current_BT = policy_BT.detach()
        proximal_BT = None
        if keeps_proximal(config, algorithm):
            proximal_BT = self.part(scores["policy_logprobs_Q"], members)
        elif not config.algorithm.bypass_old_logprobs:
            proximal_BT = current_BT  # of the only update: the weights before it are the current ones
        ref_Q = scores.get("ref_logprobs_Q")
        return LossInputs(
            policy_logprobs_BT=policy_BT,
            # Without gradient: in the place of recorded logprobs it makes every ratio 1, the gradient that of log p.
            rollout_logprobs_BT=(
                self.part(self.rollout_logprobs_Q, members) if algorithm.schema == "experience" else current_BT
            ),
            loss_mask_BT=mask_BT,
            token_weights_BT=mask_BT * weights_N[part][:, None],
            advantages_BT=None if advantages is None else advantages(members),
            ref_logprobs_BT=None if ref_Q is None else self.part(ref_Q, members),
            expert_mask_B=self.experts_N[part],
            rewards_B=self.rewards_N[part],
            kl_baseline=self.kl_baseline,
            proximal_logprobs_BT=proximal_BT,
            uids=self.uids(members),
            **more,
        )

    def advantages(
        self,
        algorithm: Algorithm,
        scores: Mapping[str, Tensor],
        step: int,
        kl_coef: float,
        computed: Sequence[np.ndarray] | None = None,
    ) -> tuple[Callable[[np.ndarray], Tensor], Tensor | None, dict[str, float]]:
        """Advantages of some rows, [B, T], or [B, 1] where a row has one number; [Q] targets of a critic, and metrics.
        Takes tokens that the advantage function takes out of the loss out of these rows. Called by all ranks.

        Args:
            scores: [Q] of what models say of the rows, by the names that `AdvantageInputs` has for it.
            computed: as of `shared`; None: this rank has all rows.
        """
        # Of the whole batch on every rank, so that groups are whole, and on the CPU, so that all ranks agree. Of tokens
        # only where they are looked at, and then at those of the rows that this rank has computed.
        function = algorithm.advantage_fn
        # The same tokens in the same order, cut into turns or into rows.
        seen = self.by_turns() if function is not None and function.compares_turns else self
        given = seen.advantage_inputs(step)
        rows = None if computed is None or not takes_parts(function) else computed[self._ranks.rank]
        if algorithm.kl_penalty_fn.is_active or (function is not None and function.uses_tokens):
            given = replace(given, **self.token_inputs(seen, scores, rows))
        result = algorithm.compute_advantages(given, kl_coef=kl_coef)

        def here(values_M: Tensor) -> Tensor:
            """[Q] of what is said of the tokens that were given."""
            if rows is None or computed is None:
                return values_M.to(self._device)
            values_Q = values_M.new_zeros(len(self.loss_mask_Q))
            values_Q[self.tokens_of(np.sort(rows))] = values_M
            return self.shared(values_Q.to(self._device), computed)

        # Before the weights of the tokens are made: a token that was taken out is in no denominator.
        if result.keep_Q is not None:
            self.loss_mask_Q &= here(result.keep_Q)
            counts_N = self.sums(self.loss_mask_Q.cpu())
            if rows is not None:
                others = torch.from_numpy(~np.isin(np.arange(len(self._batch)), rows))
                counts_N = given.total(counts_N.masked_fill(others, 0))
            self._num_trained_N = counts_N.long().to(self._device)
        if result.advantages_Q is None and seen is self:
            advantages_N1 = result.advantages_N.to(self._device)[:, None]

            def advantages(members: np.ndarray) -> Tensor:
                # [B, 1], which spreads over the tokens of a row by itself.
                return advantages_N1[torch.from_numpy(members).to(self._device)]

        else:
            per_token_Q = (
                seen.of_tokens(result.advantages_N.to(self._device))
                if result.advantages_Q is None
                else here(result.advantages_Q)
            )
            advantages = partial(self.part, per_token_Q)
        returns_Q = None if result.returns_Q is None else here(result.returns_Q)
        return advantages, returns_Q, {name: float(value) for name, value in result.metrics.items()}

    def token_inputs(
        self, seen: BatchRows, scores: Mapping[str, Tensor], rows: np.ndarray | None = None
    ) -> dict[str, Any]:
        """What `AdvantageInputs` has of tokens, on the CPU: of all, or of these rows, of which every rank has others.

        seen: the rows, or their turns (`by_turns`). scores: as of `advantages`.
        """
        said = {"loss_mask_Q": self.loss_mask_Q, "rollout_logprobs_Q": self.rollout_logprobs_Q, **scores}
        if rows is None:
            return {name: value_Q.cpu() for name, value_Q in said.items()} | {"tokens_N": _tensor(seen._lengths)}
        places_M = torch.from_numpy(self.tokens_of(np.sort(rows)))
        given = np.isin(np.arange(len(self._batch)), rows)
        given = given if seen is self else np.repeat(given, self._batch.num_turns)

        def gather(own: Tensor) -> list[Tensor]:
            told = self._ranks.all_gather_bytes(own.contiguous().numpy().tobytes())
            return [torch.frombuffer(bytearray(data), dtype=own.dtype).view_as(own) for data in told]

        tokens = {name: value_Q.cpu()[places_M] for name, value_Q in said.items()}
        return {**tokens, "tokens_N": _tensor(seen._lengths * given), "gather": gather}


def takes_parts(function: AdvantageFn | None) -> bool:
    """Whether a rank may have the tokens of its own rows alone when it makes advantages."""
    return function is None or function.takes_parts or not function.uses_tokens


def _tensor(values: np.ndarray) -> Tensor:
    # A copy: arrays over the memory of a table cannot be written to, which torch does not know of.
    return torch.from_numpy(values.copy())


@dataclass(frozen=True)
class Passes:
    """What this rank computes of a batch."""

    ranks: Ranks
    counts: bool
    """Whether sums take what this rank says of rows: where several ranks compute the same rows, one of them does."""
    own: list[np.ndarray]
    """Row numbers of each pass over own rows."""
    num_idle: int
    """Passes over rows of no consequence, so that all ranks make the same number, or at least one."""
    filler: np.ndarray
    """The rows of an idle pass: few and short."""
    computed: list[np.ndarray]
    """Row numbers of all passes of each rank, of those whose sums count."""

    def scored(self, rows: BatchRows, score: Callable[..., Tensor]) -> Tensor:
        """[Q] float32 of what `score` says of every response token here; without gradients. Called by all ranks."""
        idle = [rows.scored([self.filler], score) for _ in range(self.num_idle)]
        return rows.shared(rows.scored(self.own, score) if self.own else idle[0], self.computed)

    def add_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sums of all passes of all ranks, by name."""
        return self.ranks.add_metrics(dict(sums) if self.counts else {})

    def idle_backward(self, rows: BatchRows, score: Callable[..., Tensor]) -> None:
        """The idle passes of an update: forward and backward, gradient 0."""
        for _ in range(self.num_idle):
            # Times 0 and not left out: the backward pass has to run, for its exchanges
            # with ranks that have more passes.
            (score(**rows.model_inputs(self.filler)) * 0.0).sum().backward()


def keeps_proximal(config: Config, algorithm: Algorithm) -> bool:
    """Whether what the policy says before a step is computed once for all its updates, of which all but the first have
    moved weights."""
    reads = algorithm.policy_loss_fn.uses_proximal or not config.algorithm.bypass_old_logprobs
    return reads and config.trainer.ppo_epochs * config.num_mini_batches > 1 and algorithm.schema == "experience"


def updates_of(batch: TrainingBatch, config: Config, step: int, unit: int) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the update in the run, counted from 1; its row numbers) of all updates of a step. unit: as of
    `mini_batches`."""
    count, epochs = config.num_mini_batches, config.trainer.ppo_epochs
    for epoch in range((step - 1) * epochs, step * epochs):
        parts = mini_batches(batch.experts, count, unit=unit, seed=config.seed, epoch=epoch)
        yield from enumerate(parts, epoch * count + 1)


def mini_batches(experts_N: np.ndarray, count: int, *, unit: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Row numbers, ascending, of the updates of one pass over a batch: at most `count`, none of them empty.

    Args:
        experts_N: [N] bool: demonstrations, of which every mini-batch has its share.
        unit: neighbors that are never parted.
        epoch: which pass of the run it is; each has an order of its own, on all ranks the same.
    """
    order = random_order(len(experts_N) // unit, seed, epoch)
    # Dealt like cards, demonstrations last: sizes differ by a unit at most, and so do shares.
    # Stable, so that both kinds stay shuffled among themselves.
    order = order[np.argsort(experts_N[::unit][order], kind="stable")]
    return [rows_of_units(np.sort(order[part::count]), unit) for part in range(min(count, len(order)))]


def plan_passes(
    lengths: np.ndarray,
    members: np.ndarray,
    ranks: Ranks,
    *,
    hidden_size: int,
    max_tokens: float,
    max_rows: int | None,
    unit: int,
    together: bool,
    group: Ranks | None = None,
    siblings: np.ndarray | None = None,
) -> Passes:
    """Rows dealt to the ranks by cost, then cut into micro-batches.

    Args:
        lengths: tokens of each row of the batch.
        members: numbers of the rows to plan for, whole units.
        unit: neighbors that are never parted.
        together: all ranks must make the same number of passes.
        group: the ranks that compute the same rows with this one; the rows are dealt to such groups. None: no other.
        siblings: a number for each row of the batch; neighbors of one number stay together where that leaves passes and
            ranks of about the same cost. None: nobody has any.
    """
    num_parts = ranks.size // (1 if group is None else group.size)
    lengths = lengths[members]
    costs = row_costs(lengths, hidden_size)
    units = [rows_of_units(np.array([number]), unit) for number in range(len(members) // unit)]
    if siblings is not None:
        units = _joined(units, siblings[members], lengths, costs, costs.sum() / (8 * num_parts), max_tokens, max_rows)
    cut: list[list[np.ndarray]] = []
    # Every rank deals for all of them, by lengths alone, and so knows how many passes the others make.
    for part in deal(np.array([costs[rows].sum() for rows in units]), num_parts):
        # Within a rank by cost, too: passes of about the same cost keep the peak of the memory low.
        own_units = [units[number] for number in part]
        parts = micro_batches(lengths, own_units, max_tokens=max_tokens, max_rows=max_rows, costs=costs)
        cut.append([members[rows] for rows in parts])
    group_size = ranks.size // num_parts
    own = cut[ranks.rank // group_size]
    nothing = np.array([], np.int64)
    # What several ranks compute alike is counted once, as what the first of them says.
    computed = [
        np.concatenate([nothing, *cut[r // group_size]]) if r % group_size == 0 else nothing for r in range(ranks.size)
    ]
    # A rank without rows makes a pass all the same, to know the shapes of what it adds nothing to.
    num_idle = max(len(parts) for parts in cut) - len(own) if together else int(not own)
    # The cheapest unit of the batch, which every rank knows.
    shortest = np.array([int(np.argmin(lengths.reshape(-1, unit).max(axis=1)))])
    filler = members[rows_of_units(shortest, unit)]
    return Passes(ranks, group is None or group.is_rank0, own, num_idle, filler, computed)


def _joined(
    units: Sequence[np.ndarray],
    siblings: np.ndarray,
    lengths: np.ndarray,
    costs: np.ndarray,
    max_cost: float,
    max_tokens: float,
    max_rows: int | None,
) -> list[np.ndarray]:
    """Neighboring units whose first rows are siblings as one, up to the limits."""
    joined: list[np.ndarray] = []
    for rows in units:
        both = np.concatenate([joined[-1], rows]) if joined else rows
        if (
            joined
            and siblings[both[0]] == siblings[rows[0]]
            and costs[both].sum() <= max_cost
            and lengths[both].sum() <= max_tokens
            and (max_rows is None or len(both) <= max_rows)
        ):
            joined[-1] = both
        else:
            joined.append(rows)
    return joined


def micro_batches(
    lengths: np.ndarray,
    units: Sequence[np.ndarray] | None = None,
    *,
    max_tokens: float = math.inf,
    max_rows: int | None = None,
    costs: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Row numbers of each forward pass: as few as the limits on tokens and rows allow, of about the same cost.

    Args:
        lengths: tokens of each row.
        units: numbers of rows that are never parted. A unit beyond a limit goes alone. None: each row is one.
        costs: of each row; None: its tokens.
    """
    units = [np.array([row]) for row in range(len(lengths))] if units is None else units
    costs = lengths if costs is None else costs
    tokens_U, costs_U, rows_U = (
        np.array([v[rows].sum() for rows in units]) for v in (lengths, costs, np.ones_like(lengths))
    )
    # A lower bound on the number of passes by rows and by tokens; packing them may take more.
    most_rows = math.inf if max_rows is None else max_rows
    fewest = max(1, math.ceil(rows_U.sum() / most_rows), math.ceil(tokens_U.sum() / max_tokens))
    limits = ((tokens_U, max_tokens), (rows_U, most_rows))
    # A generator: mostly the first try fits.
    tries = (deal(costs_U, number, limits) for number in range(fewest, len(units)))
    # The first number of passes into which all fit; at the worst each unit alone.
    parts = next(filter(None, tries), [np.array([unit]) for unit in range(len(units))])
    return [np.sort(np.concatenate([units[number] for number in part])) for part in parts if len(part)]


def deal(costs_U: np.ndarray, num_parts: int, limits: Sequence[tuple[np.ndarray, float]] = ()) -> list[np.ndarray]:
    """Units of each part, ascending: the dearest first, each to the part that is cheapest so far among those with room
    for it. Empty: one fits nowhere. A unit beyond a limit has a part alone.

    Without limits no part costs more than the mean plus the dearest unit.

    Args: limits: ([U] what each unit has of something, the most that a part may have).
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    cost_P = np.zeros(num_parts)
    held = [np.zeros(num_parts) for _ in limits]
    # Greedy, the dearest first: near the optimum, and, ties going by number, the same on every rank.
    for unit in np.argsort(-costs_U, kind="stable"):
        fits_P = np.ones(num_parts, bool)
        for of_parts, (of_units, most) in zip(held, limits, strict=True):
            fits_P &= of_parts + of_units[unit] <= most
        # An empty part takes any unit, also one beyond the limits: it has to be computed somewhere.
        fits_P |= [not part for part in parts]
        if not fits_P.any():
            return []
        place = int(np.where(fits_P, cost_P, np.inf).argmin())
        parts[place].append(int(unit))
        cost_P[place] += costs_U[unit]
        for of_parts, (of_units, _) in zip(held, limits, strict=True):
            of_parts[place] += of_units[unit]
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def row_costs(lengths_N: np.ndarray, hidden_size: int) -> np.ndarray:
    """[N] cost of each row: products with weights, 12 H^2 L a layer, and of attention, H L^2 (causal).

    In units of H a layer; the factor that both have, and the backward pass triples, is left out.
    """
    return lengths_N * (12.0 * hidden_size + lengths_N)


def rows_of_units(units: np.ndarray, unit: int) -> np.ndarray:
    """Row numbers of these units."""
    # [U, 1] + [unit] -> [U, unit] -> [U * unit]: unit u is rows u * unit, u * unit + 1, ...
    return np.asarray((units[:, None] * unit + np.arange(unit)).reshape(-1))
