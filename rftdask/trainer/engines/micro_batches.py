"""Micro-batches: a batch cut into mini-batches, one per update, dealt to the ranks and cut into micro-batches.

Rows are dealt by their lengths, which all ranks know, so ranks agree without communication.

Letters: N rows of the batch; Q response tokens of the rows whose tokens this rank has; B rows of a micro-batch; T
response tokens of the longest of them; U units: neighbors in the batch that are never separated, pairs or single rows.
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
from rftdask.processes.ranks import Ranks
from rftdask.trainer.packing import PackedRows, pack_rows


class DeviceBatch:
    """Response tokens of a batch on the device, without padding: [Q], row after row.

    A micro-batch gets its rows padded to the longest of them (`select`), and their tokens packed (`model_inputs`). Each
    rank has the tokens of the rows that it computes; `exchange` shares results between the ranks that have a row.

    Example, responses of 2 and 1 tokens: batch.select(values_Q, [1, 0]) == [[values_Q[2], 0], values_Q[:2]]
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
        """sequence, lean, processor: as in `pack_rows`. ranks: they hold the rows together; None: this rank has all."""
        self._batch, self._device, self._sequence, self._lean = batch, device, sequence, lean
        self._processor, self._ranks = processor, ranks or Ranks()
        self._tokens, self._experts = batch.row_tokens(), batch.row_experts()
        self._lengths = np.where(batch.is_held, batch.response_lengths, 0)
        # [N] positions in Q at which the rows begin.
        self._starts = self._lengths.cumsum() - self._lengths
        held = np.flatnonzero(batch.is_held).tobytes()
        self._rows_of_ranks = [np.frombuffer(data, np.int64) for data in self._ranks.all_gather_bytes(held)]
        self.rollout_logprobs_Q = _tensor(np.asarray(batch.rollout_logprobs, np.float32)).to(device)
        self.loss_mask_Q = _tensor(np.asarray(batch.loss_mask, np.bool_)).to(device)
        self.num_trained_N = _tensor(batch.num_trained).to(device)
        """int64 trained tokens of all rows, including rows whose tokens are on other ranks."""
        self.experts_N = _tensor(batch.experts).to(device)
        self.rollouts_N = _tensor(batch.rollouts).to(device)
        self.rewards_N = _tensor(batch.rewards).to(device)
        self.kl_baseline: float | None = None
        """See `LossInputs`; set by the engine, which has the models."""

    def by_turns(self) -> DeviceBatch:
        """Return the same response tokens with each turn as a row; `self` if each row is one turn."""
        is_same = len(self._batch.turns) == len(self._batch)
        return self if is_same else DeviceBatch(self._batch.by_turns(), self._device)

    def positions(self, indices: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ([B, T] int64 positions in Q of some rows' tokens, [B, T] bool: True if they exist) on `device`."""
        # Computed on the host, which knows the lengths: reading them from a GPU would wait for its forward pass.
        lengths_B, starts_B = self._lengths[indices], self._starts[indices]
        column_T = np.arange(lengths_B.max(initial=0))
        exists_BT = column_T < lengths_B[:, None]
        position_BT = np.where(exists_BT, starts_B[:, None] + column_T, 0)
        return torch.from_numpy(position_BT).to(device), torch.from_numpy(exists_BT).to(device)

    def select(self, values_Q: Tensor, indices: np.ndarray) -> Tensor:
        """Return [B, T] values of some rows, 0 beyond their ends."""
        position_BT, exists_BT = self.positions(indices, values_Q.device)
        return values_Q[position_BT].masked_fill(~exists_BT, 0)

    def token_indices(self, indices: np.ndarray) -> np.ndarray:
        """Return [M] positions in Q of the tokens of some rows, row after row."""
        lengths_B = self._lengths[indices]
        skipped_B = self._starts[indices] - (lengths_B.cumsum() - lengths_B)
        positions: np.ndarray = np.repeat(skipped_B, lengths_B) + np.arange(lengths_B.sum())
        return positions

    def exchange(self, values_Q: Tensor, computed: Sequence[np.ndarray]) -> Tensor:
        """Return [Q], or [Q, K], with the values of rows that other ranks computed filled in. Called by all ranks.

        values_Q: valid at the rows that this rank computed; computed: row numbers by rank, each row in one rank's.
        """
        if self._ranks.size == 1:
            return values_Q
        send = [np.intersect1d(computed[self._ranks.rank], rows) for rows in self._rows_of_ranks]
        receive = [np.intersect1d(rows, self._rows_of_ranks[self._ranks.rank]) for rows in computed]
        sent_Q, received_Q = (
            torch.from_numpy(self.token_indices(np.concatenate(rows))).to(self._device) for rows in (send, receive)
        )
        sizes = [[int(self._lengths[rows].sum()) for rows in by_rank] for by_rank in (send, receive)]
        return torch.zeros_like(values_Q).index_copy_(0, received_Q, self._ranks.all_to_all(values_Q[sent_Q], *sizes))

    def row_sums(self, values_Q: Tensor) -> Tensor:
        """Return [N] float64 sums over the tokens of each row that this rank has."""
        row_Q = self.per_token(torch.arange(len(self._batch), device=values_Q.device))
        return group_sums(values_Q, row_Q, len(self._batch))

    def per_token(self, values_N: Tensor) -> Tensor:
        """Return [Q]: the value of each token's row."""
        lengths_N = torch.from_numpy(self._lengths).to(values_N.device)
        return values_N.repeat_interleave(lengths_N, output_size=int(self._lengths.sum()))

    def model_inputs(self, indices: np.ndarray) -> dict[str, PackedRows]:
        """Return the tokens of some rows, packed as arguments of `token_logprobs`."""
        return {
            "rows": pack_rows(
                [self._tokens[i] for i in indices],
                self._batch.prompt_lengths[indices],
                self._batch.temperatures[indices],
                self._device,
                sequence=self._sequence,
                experts=None if self._experts is None else [self._experts[i] for i in indices],
                images=None if self._batch.images is None else [self._batch.images[i] for i in indices],
                processor=self._processor,
                lean=self._lean,
            )
        }

    @torch.no_grad()
    def score_tokens(self, micro_batches: Sequence[np.ndarray], score: Callable[..., Tensor]) -> Tensor:
        """Return [Q], or [Q, K], float32 values of `score`, called with the `model_inputs` of each micro-batch."""
        values_Q = torch.zeros_like(self.rollout_logprobs_Q)
        for indices in micro_batches:
            values_BT = score(**self.model_inputs(indices))
            if values_Q.ndim < values_BT.ndim - 1:  # several numbers per token: [Q] -> [Q, K]
                values_Q = values_Q.new_zeros((*values_Q.shape, *values_BT.shape[2:]))
            position_BT, exists_BT = self.positions(indices, self._device)
            values_Q[position_BT[exists_BT]] = values_BT[exists_BT]
        return values_Q

    def advantage_inputs(self, step: int) -> AdvantageInputs:
        """Return the row-level inputs of an advantage function, on the CPU; `token_inputs` gives those of tokens."""
        batch = self._batch
        # States and rewards of turns only for a batch `by_turns`.
        are_turns = len(batch.turns) == len(batch)
        return AdvantageInputs(
            rewards_N=_tensor(batch.rewards),
            group_N=_tensor(batch.groups),
            lengths_N=self.num_trained_N.cpu(),
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
        self, config: Config, algorithm: Algorithm, indices: np.ndarray | None = None, step: int = 0
    ) -> Tensor:
        """Return [N] loss weights of the rows' tokens. indices: rows of a mini-batch; others weigh 0. None: all."""
        counts_N = self.num_trained_N
        if indices is not None:
            is_trained = np.isin(np.arange(len(self._batch)), indices)
            counts_N = counts_N * torch.from_numpy(is_trained).to(self._device)
        return algorithm.row_weights(
            counts_N,
            max_tokens=config.model.max_response_tokens,
            expert_mask_B=self.experts_N,
            rollout_B=self.rollouts_N,
            step=step,
        )

    def loss_inputs(
        self,
        config: Config,
        algorithm: Algorithm,
        indices: np.ndarray,
        policy_BT: Tensor,
        weights_N: Tensor,
        scores: Mapping[str, Tensor],
        advantages: Callable[[np.ndarray], Tensor] | None,
        **model_fields: Any,
    ) -> LossInputs:
        """Return the inputs of the loss for some rows.

        Args:
            weights_N: result of `row_weights`.
            scores, advantages: argument and first result of `advantages`.
            model_fields: fields of `LossInputs` that come neither from the rows nor from the scores.
        """
        rows_B = torch.from_numpy(indices).to(self._device)
        mask_BT = self.select(self.loss_mask_Q, indices)
        current_BT = policy_BT.detach()
        proximal_BT = None
        if keeps_proximal(config, algorithm):
            proximal_BT = self.select(scores["policy_logprobs_Q"], indices)
        elif not config.algorithm.bypass_old_logprobs:
            proximal_BT = current_BT  # a single update starts from the current weights
        ref_Q = scores.get("ref_logprobs_Q")
        return LossInputs(
            policy_logprobs_BT=policy_BT,
            # Detached policy logprobs in place of recorded ones make every ratio 1, with the gradient of log p.
            rollout_logprobs_BT=(
                self.select(self.rollout_logprobs_Q, indices) if algorithm.schema == "experience" else current_BT
            ),
            loss_mask_BT=mask_BT,
            token_weights_BT=mask_BT * weights_N[rows_B][:, None],
            advantages_BT=None if advantages is None else advantages(indices),
            ref_logprobs_BT=None if ref_Q is None else self.select(ref_Q, indices),
            expert_mask_B=self.experts_N[rows_B],
            rewards_B=self.rewards_N[rows_B],
            kl_baseline=self.kl_baseline,
            proximal_logprobs_BT=proximal_BT,
            uids=[self._batch.uids[i] for i in indices],
            **model_fields,
        )

    def advantages(
        self,
        algorithm: Algorithm,
        scores: Mapping[str, Tensor],
        step: int,
        kl_coef: float,
        computed: Sequence[np.ndarray] | None = None,
    ) -> tuple[Callable[[np.ndarray], Tensor], Tensor | None, dict[str, float]]:
        """Return (function from row numbers to [B, T] advantages, or [B, 1] if a row has one; [Q] targets of a critic;
        metrics). Called by all ranks.

        Dropped tokens are removed from `loss_mask_Q` and `num_trained_N`.

        Args:
            scores: [Q] values of the models, by their names in `AdvantageInputs`.
            computed: as in `exchange`; None: this rank has all rows.
        """
        # Computed for the whole batch on every rank, so that groups are whole, and on the CPU, so that ranks agree.
        # Token values are passed only if they are used, and only those of the rows that this rank computed.
        function = algorithm.advantage_fn
        view = self.by_turns() if function is not None and function.compares_turns else self
        inputs = view.advantage_inputs(step)
        rows = None if computed is None or not takes_parts(function) else computed[self._ranks.rank]
        if algorithm.kl_penalty_fn.is_active or (function is not None and function.uses_tokens):
            inputs = replace(inputs, **self.token_inputs(view, scores, rows))
        result = algorithm.compute_advantages(inputs, kl_coef=kl_coef)

        def to_device(values_M: Tensor) -> Tensor:
            """Return [Q] values on the device, exchanged with the other ranks if `values_M` covers only `rows`."""
            if rows is None or computed is None:
                return values_M.to(self._device)
            values_Q = values_M.new_zeros(len(self.loss_mask_Q))
            values_Q[self.token_indices(np.sort(rows))] = values_M
            return self.exchange(values_Q.to(self._device), computed)

        # Before token weights are computed: a dropped token is in no denominator.
        if result.keep_Q is not None:
            self.loss_mask_Q &= to_device(result.keep_Q)
            counts_N = self.row_sums(self.loss_mask_Q.cpu())
            if rows is not None:
                other_rows = torch.from_numpy(~np.isin(np.arange(len(self._batch)), rows))
                counts_N = inputs.total(counts_N.masked_fill(other_rows, 0))
            self.num_trained_N = counts_N.long().to(self._device)
        if result.advantages_Q is None and view is self:
            advantages_N1 = result.advantages_N.to(self._device)[:, None]

            def advantages(indices: np.ndarray) -> Tensor:
                return advantages_N1[torch.from_numpy(indices).to(self._device)]

        else:
            per_token_Q = (
                view.per_token(result.advantages_N.to(self._device))
                if result.advantages_Q is None
                else to_device(result.advantages_Q)
            )
            advantages = partial(self.select, per_token_Q)
        returns_Q = None if result.returns_Q is None else to_device(result.returns_Q)
        return advantages, returns_Q, {name: float(value) for name, value in result.metrics.items()}

    def token_inputs(
        self, view: DeviceBatch, scores: Mapping[str, Tensor], rows: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Return the token-level inputs of an advantage function, on the CPU.

        Args: view: the rows, or their turns (`by_turns`). rows: those to include, disjoint between ranks; None: all.
        """
        values = {"loss_mask_Q": self.loss_mask_Q, "rollout_logprobs_Q": self.rollout_logprobs_Q, **scores}
        if rows is None:
            return {name: value_Q.cpu() for name, value_Q in values.items()} | {"tokens_N": _tensor(view._lengths)}
        tokens_M = torch.from_numpy(self.token_indices(np.sort(rows)))
        is_included = np.isin(np.arange(len(self._batch)), rows)
        is_included = is_included if view is self else np.repeat(is_included, self._batch.num_turns)

        def gather(tensor: Tensor) -> list[Tensor]:
            parts = self._ranks.all_gather_bytes(tensor.contiguous().numpy().tobytes())
            return [torch.frombuffer(bytearray(data), dtype=tensor.dtype).view_as(tensor) for data in parts]

        tokens = {name: value_Q.cpu()[tokens_M] for name, value_Q in values.items()}
        return {**tokens, "tokens_N": _tensor(view._lengths * is_included), "gather": gather}


def takes_parts(function: AdvantageFn | None) -> bool:
    """True if a rank can compute advantages from the tokens of its own rows."""
    return function is None or function.takes_parts or not function.uses_tokens


def _tensor(values: np.ndarray) -> Tensor:
    # Copied: arrays over the memory of a table are read-only, which torch does not support.
    return torch.from_numpy(values.copy())


@dataclass(frozen=True)
class MicroBatchPlan:
    """Forward passes of this rank over a batch or mini-batch."""

    ranks: Ranks
    reports_sums: bool
    """True if this rank's sums are added up; of several ranks that compute the same rows, one reports them."""
    micro_batches: list[np.ndarray]
    """Row numbers of each pass."""
    num_idle: int
    """Extra passes without effect, so that all ranks make the same number of passes, or at least one."""
    filler: np.ndarray
    """Row numbers of an idle pass: few and short."""
    computed_rows: list[np.ndarray]
    """Row numbers of all passes, by rank; empty for ranks that do not report sums."""

    def score_tokens(self, batch: DeviceBatch, score: Callable[..., Tensor]) -> Tensor:
        """Return [Q] float32 values of `score` for every response token, without gradients. Called by all ranks."""
        idle = [batch.score_tokens([self.filler], score) for _ in range(self.num_idle)]
        values_Q = batch.score_tokens(self.micro_batches, score) if self.micro_batches else idle[0]
        return batch.exchange(values_Q, self.computed_rows)

    def add_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all passes of all ranks, by name."""
        return self.ranks.add_metrics(dict(sums) if self.reports_sums else {})

    def idle_backward(self, batch: DeviceBatch, score: Callable[..., Tensor]) -> None:
        """Make the idle passes of an update: forward and backward, with gradient 0."""
        for _ in range(self.num_idle):
            # The backward pass must run: it communicates with ranks that have more passes.
            (score(**batch.model_inputs(self.filler)) * 0.0).sum().backward()


def keeps_proximal(config: Config, algorithm: Algorithm) -> bool:
    """True if the policy's logprobs before a step are computed once for all its updates."""
    reads = algorithm.policy_loss_fn.uses_proximal or not config.algorithm.bypass_old_logprobs
    return reads and config.trainer.ppo_epochs * config.num_mini_batches > 1 and algorithm.schema == "experience"


def split_mini_batches(batch: TrainingBatch, config: Config, step: int, unit: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the update in the run, counted from 1; row numbers of its mini-batch) for a step."""
    count, epochs = config.num_mini_batches, config.trainer.ppo_epochs
    for epoch in range((step - 1) * epochs, step * epochs):
        batches = mini_batches(batch.experts, count, unit=unit, seed=config.seed, epoch=epoch)
        yield from enumerate(batches, epoch * count + 1)


def mini_batches(experts_N: np.ndarray, count: int, *, unit: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the row numbers, ascending, of at most `count` mini-batches of one epoch over a batch; none is empty.

    Args:
        experts_N: [N] bool, True for demonstrations; every mini-batch gets its share of them.
        unit: rows in a unit, neighbors that are never separated.
        epoch: number of the epoch in the run; the order depends on it, and is the same on all ranks.
    """
    order = random_order(len(experts_N) // unit, seed, epoch)
    # Dealt like cards, demonstrations last: sizes and shares differ by at most one unit. The sort is stable.
    order = order[np.argsort(experts_N[::unit][order], kind="stable")]
    return [rows_of_units(np.sort(order[first::count]), unit) for first in range(min(count, len(order)))]


def plan_micro_batches(
    lengths: np.ndarray,
    indices: np.ndarray,
    ranks: Ranks,
    *,
    hidden_size: int,
    max_tokens: float,
    max_rows: int | None,
    unit: int,
    together: bool,
    group: Ranks | None = None,
    siblings: np.ndarray | None = None,
) -> MicroBatchPlan:
    """Deal rows to the ranks by cost, then cut the rows of each rank into micro-batches.

    Args:
        lengths: tokens of each row of the batch.
        indices: row numbers to plan for, whole units.
        unit: rows in a unit, neighbors that are never separated.
        together: all ranks must make the same number of passes.
        group: ranks that compute the same rows as this one; rows are dealt to such groups. None: to single ranks.
        siblings: group number of each row of the batch; neighbors with the same number stay together if micro-batches
            and ranks keep about the same cost. None: no row has siblings.
    """
    num_parts = ranks.size // (1 if group is None else group.size)
    lengths = lengths[indices]
    costs = row_costs(lengths, hidden_size)
    units = [rows_of_units(np.array([number]), unit) for number in range(len(indices) // unit)]
    if siblings is not None:
        units = _joined(units, siblings[indices], lengths, costs, costs.sum() / (8 * num_parts), max_tokens, max_rows)
    by_group: list[list[np.ndarray]] = []
    # Every rank deals for all groups, so it knows how many passes the others make.
    for unit_numbers in deal(np.array([costs[rows].sum() for rows in units]), num_parts):
        # Micro-batches of about the same cost keep the peak memory low.
        group_units = [units[number] for number in unit_numbers]
        batches = micro_batches(lengths, group_units, max_tokens=max_tokens, max_rows=max_rows, costs=costs)
        by_group.append([indices[rows] for rows in batches])
    group_size = ranks.size // num_parts
    own_batches = by_group[ranks.rank // group_size]
    nothing = np.array([], np.int64)
    # The first rank of a group reports the rows that the whole group computes.
    computed_rows = [
        np.concatenate([nothing, *by_group[r // group_size]]) if r % group_size == 0 else nothing
        for r in range(ranks.size)
    ]
    # A rank without rows makes one pass, to know the shapes of the values that it adds nothing to.
    num_idle = max(map(len, by_group)) - len(own_batches) if together else int(not own_batches)
    # The cheapest unit of the batch, which every rank knows.
    shortest = np.array([int(np.argmin(lengths.reshape(-1, unit).max(axis=1)))])
    filler = indices[rows_of_units(shortest, unit)]
    return MicroBatchPlan(ranks, group is None or group.is_rank0, own_batches, num_idle, filler, computed_rows)


def _joined(
    units: Sequence[np.ndarray],
    siblings: np.ndarray,
    lengths: np.ndarray,
    costs: np.ndarray,
    max_cost: float,
    max_tokens: float,
    max_rows: int | None,
) -> list[np.ndarray]:
    """Join neighboring units whose first rows are siblings, up to the limits."""
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
    """Return the row numbers of micro-batches of about the same cost, as few as the limits allow.

    Args:
        lengths: tokens of each row.
        units: row numbers that are never separated; a unit beyond a limit gets a micro-batch of its own. None: each row
            is a unit.
        costs: cost of each row; None: its tokens.
    """
    units = [np.array([row]) for row in range(len(lengths))] if units is None else units
    costs = lengths if costs is None else costs
    tokens_U, costs_U, rows_U = (
        np.array([v[rows].sum() for rows in units]) for v in (lengths, costs, np.ones_like(lengths))
    )
    # A lower bound on the number of micro-batches; fitting the units may take more.
    most_rows = math.inf if max_rows is None else max_rows
    fewest = max(1, math.ceil(rows_U.sum() / most_rows), math.ceil(tokens_U.sum() / max_tokens))
    limits = ((tokens_U, max_tokens), (rows_U, most_rows))
    # A generator: mostly the first try fits.
    tries = (deal(costs_U, number, limits) for number in range(fewest, len(units)))
    parts = next(filter(None, tries), [np.array([unit]) for unit in range(len(units))])
    return [np.sort(np.concatenate([units[number] for number in part])) for part in parts if len(part)]


def deal(costs_U: np.ndarray, num_parts: int, limits: Sequence[tuple[np.ndarray, float]] = ()) -> list[np.ndarray]:
    """Deal units to parts, the most expensive first, each to the cheapest part with room for it.

    Without limits no part costs more than the mean plus the most expensive unit.

    Args: limits: ([U] amount of each unit, most that a part may hold) pairs; a unit beyond a limit gets its own part.
    Returns: unit numbers of each part, ascending; empty: a unit does not fit anywhere.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    cost_P = np.zeros(num_parts)
    held = [np.zeros(num_parts) for _ in limits]
    # Greedy: close to the optimum. The stable sort makes ties the same on every rank.
    for unit in np.argsort(-costs_U, kind="stable"):
        fits_P = np.ones(num_parts, bool)
        for held_P, (amounts_U, most) in zip(held, limits, strict=True):
            fits_P &= held_P + amounts_U[unit] <= most
        # An empty part takes any unit, also one beyond the limits: it must be computed somewhere.
        fits_P |= [not part for part in parts]
        if not fits_P.any():
            return []
        chosen = int(np.where(fits_P, cost_P, np.inf).argmin())
        parts[chosen].append(int(unit))
        cost_P[chosen] += costs_U[unit]
        for held_P, (amounts_U, _) in zip(held, limits, strict=True):
            held_P[chosen] += amounts_U[unit]
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def row_costs(lengths_N: np.ndarray, hidden_size: int) -> np.ndarray:
    """Return [N] costs in units of H per layer: 12 H^2 L for products with weights, H L^2 for causal attention."""
    return lengths_N * (12.0 * hidden_size + lengths_N)


def rows_of_units(units: np.ndarray, unit: int) -> np.ndarray:
    """Return the row numbers of some units: unit u is rows u * unit, u * unit + 1, ..."""
    return np.asarray((units[:, None] * unit + np.arange(unit)).reshape(-1))
