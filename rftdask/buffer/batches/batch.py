"""TrainingBatch: the rows of one optimizer step as flat numpy arrays. No padding, no torch, no storage.

Letters: N rows; L_i = tokens of row i; R_i = response tokens of row i; S = sum of L_i; Q = sum of R_i; K turns of all
rows; X experts per token (all layers together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class TrainingBatch:
    """Rows to train, in the order of the ledger.

    Example: two rows of 3 and 2 tokens, with one prompt token each: tokens [5, 6, 7, 5, 8], lengths [3, 2],
    prompt_lengths [1, 1], loss_mask [True, True, True].
    """

    tokens: np.ndarray
    """[S] int32, row after row; only of rows that are `held`."""
    lengths: np.ndarray
    """[N] int64, L_i."""
    prompt_lengths: np.ndarray
    """[N] int64."""
    rollout_logprobs: np.ndarray
    """[Q] float32, only of rows that are `held`; zeros where nothing was sampled (supervised rows, tokens added between
    turns)."""
    loss_mask: np.ndarray
    """[Q] bool, only of rows that are `held`."""
    rewards: np.ndarray
    """[N] float32."""
    groups: np.ndarray
    """[N] int64: number of the group of each row, from 0."""
    temperatures: np.ndarray
    """[N] float32."""
    min_policy_versions: np.ndarray
    """[N] int64."""
    rollouts: np.ndarray
    """[N] int64: number of the rollout that contains each row, from 0."""
    ordinals: np.ndarray
    """[N] int64: place of the row in its rollout."""
    num_turns: np.ndarray
    """[N] int64, at least 1: number of turns of each row. The [K] fields list the turns row by row."""
    turns: np.ndarray
    """[K] int64: place of the turn in its rollout."""
    turn_lengths: np.ndarray
    """[K] int64: response tokens from the end of the previous turn to the end of this one; they sum to R_i per row."""
    experts: np.ndarray
    """[N] bool: rows of a dataset, which have neither rewards nor logprobs nor a policy version."""
    uids: tuple[str, ...]
    baselines: np.ndarray | None = None
    """[N] float32: reward of the greedy rollout of the row's task; None if there are no greedy rollouts."""
    states: np.ndarray | None = None
    """[K] int64: number of the environment state before the turn, -1: unknown. None: all are unknown."""
    turn_rewards: np.ndarray | None = None
    """[K] float32: reward of the turn, 0 if unknown. None: all are unknown."""
    routed_experts: np.ndarray | None = None
    """[S, X] int16: experts that each token was routed to when it was sampled, -1: unknown, as for the last token of
    each row. None: all are unknown."""
    images: tuple[tuple[str, ...], ...] | None = None
    """[N] names of the images of each row, in their order; None: no row has images."""
    held: np.ndarray | None = None
    """[N] bool: rows whose token-level data is in this batch; the others are on other ranks. None: all rows."""
    trained_of_turns: np.ndarray | None = None
    """[K] int64: trained tokens of each turn, if not all rows are held; see `num_trained_of_turns`."""
    logprob_sums: np.ndarray | None = None
    """[N] float64: sums of trained logprobs, if not all rows are held; see `trained_logprobs`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sampled(self) -> bool:
        """True if some rows are rollouts."""
        return not bool(self.experts.all())

    @property
    def response_lengths(self) -> np.ndarray:
        """[N] int64, R_i."""
        lengths: np.ndarray = self.lengths - self.prompt_lengths
        return lengths

    @property
    def num_trained_of_turns(self) -> np.ndarray:
        """[K] int64: trained tokens of each turn, of held and other rows."""
        return _sums(self.loss_mask, self.turn_lengths) if self.trained_of_turns is None else self.trained_of_turns

    @property
    def num_trained(self) -> np.ndarray:
        """[N] int64: trained tokens of each row, held or not."""
        return _sums(self.num_trained_of_turns, self.num_turns)

    @property
    def trained_logprobs(self) -> np.ndarray:
        """[N] float64: sum of `rollout_logprobs` over the trained tokens of each row, held or not."""
        if self.logprob_sums is not None:
            return self.logprob_sums
        return _sums(np.where(self.loss_mask, self.rollout_logprobs, 0.0).astype(np.float64), self.response_lengths)

    def rollout_rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ([M] rewards, [M] groups) of the M sampled rollouts, ordered by number, each from its first row."""
        # Every row of a rollout has its reward. `unique` sorts by rollout number.
        _, first = np.unique(self.rollouts[~self.experts], return_index=True)
        return self.rewards[~self.experts][first], self.groups[~self.experts][first]

    def group_reward_stds(self) -> np.ndarray:
        """Return the population standard deviation of the rollout rewards within each of the G groups, [G]."""
        rewards, groups = self.rollout_rewards()
        _, groups = np.unique(groups, return_inverse=True)
        counts = np.bincount(groups)
        # In two passes, as in `group_stats`: the mean of squares minus the square of the mean would lose digits.
        means = np.bincount(groups, rewards) / counts
        stds: np.ndarray = np.sqrt(np.bincount(groups, (rewards - means[groups]) ** 2) / counts)
        return stds

    @property
    def is_held(self) -> np.ndarray:
        """[N] bool: rows whose tokens are in this batch."""
        return np.ones(len(self), bool) if self.held is None else self.held

    def row_tokens(self) -> list[np.ndarray]:
        """Views of the tokens of every row, [L_i]; [0] for rows that are not held."""
        return self._split(self.tokens, self.lengths)

    def row_experts(self) -> list[np.ndarray] | None:
        """Views of the experts of every row, [L_i, X]; [0, X] for rows that are not held. None: all unknown."""
        return None if self.routed_experts is None else self._split(self.routed_experts, self.lengths)

    def row_logprobs(self) -> list[np.ndarray]:
        """Views of the rollout logprobs of every row, [R_i]; [0] for rows that are not held."""
        return self._split(self.rollout_logprobs, self.response_lengths)

    def row_masks(self) -> list[np.ndarray]:
        """Views of the loss mask of every row, [R_i]; [0] for rows that are not held."""
        return self._split(self.loss_mask, self.response_lengths)

    def _split(self, values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        return np.split(values, np.cumsum(lengths * self.is_held)[:-1])

    def holding(self, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
        """Return the same batch, holding tokens only of those of `rows` that are held now."""
        held, keep = self.is_held, np.isin(np.arange(len(self)), rows) & self.is_held
        kept = np.repeat(keep[held], self.lengths[held])
        kept_responses = np.repeat(keep[held], self.response_lengths[held])
        return replace(
            self,
            tokens=self.tokens[kept],
            rollout_logprobs=self.rollout_logprobs[kept_responses],
            loss_mask=self.loss_mask[kept_responses],
            routed_experts=None if self.routed_experts is None else self.routed_experts[kept],
            held=keep,
            trained_of_turns=self.num_trained_of_turns,
            logprob_sums=self.trained_logprobs,
        )

    def by_turns(self) -> TrainingBatch:
        """Return a batch with one row per turn: its response tokens, and those added before it. For comparing turns."""

        def of_row(values: np.ndarray) -> np.ndarray:
            return np.repeat(values, self.num_turns)

        count = len(self.turns)
        response = np.concatenate([t[p:] for t, p in zip(self.row_tokens(), self.prompt_lengths, strict=True)])
        numbers = [number for turns in self.num_turns for number in range(turns)]
        uids = [uid for uid, turns in zip(self.uids, self.num_turns, strict=True) for _ in range(turns)]
        return replace(
            self,
            tokens=response,
            lengths=self.turn_lengths,
            prompt_lengths=np.zeros(count, np.int64),
            **{
                name: of_row(getattr(self, name))
                for name in ("rewards", "groups", "temperatures", "min_policy_versions", "rollouts", "experts")
            },
            ordinals=self.turns,
            num_turns=np.ones(count, np.int64),
            uids=tuple(f"{uid}, turn {number}" for uid, number in zip(uids, numbers, strict=True)),
            baselines=None if self.baselines is None else of_row(self.baselines),
            routed_experts=None,
            images=None,
            held=None if self.held is None else of_row(self.held),
            logprob_sums=None,
        )


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums of consecutive runs of `values` with these lengths; int64 for bools."""
    ends = np.concatenate([[0], np.cumsum(values)])
    stops = np.cumsum(lengths)
    sums: np.ndarray = ends[stops] - ends[stops - lengths]
    return sums


GROUP_KEY = ("taskset", "epoch", "task_index")
"""Columns that identify the group of a row."""
BATCH_COLUMNS = (
    *("uid", *GROUP_KEY, "rollout", "turn", "tokens", "prompt_length", "rollout_logprobs", "loss_mask_runs"),
    *("reward", "min_policy_version", "temperature", "env_state", "turn_reward", "turns"),
    *("routed_experts", "images"),
)
"""Columns of the schema of experiences that a batch needs."""


def batch_from_table(table: pa.Table, baselines: pa.Table | None = None) -> TrainingBatch:
    """Make a batch from the rows of `table` (at least `BATCH_COLUMNS`), in its order.

    Groups and rollouts are numbered by first appearance. No Python loop runs over tokens.
    Args: baselines: rows whose rewards are the baselines of their groups; the last row of a group counts.
    """
    # Arrow stores lists as flat values and lengths, as the batch does.
    tokens = _array(table.column("tokens"))
    lengths = numbers_of(tokens.value_lengths()).astype(np.int64)
    prompt_lengths = numbers_of(table.column("prompt_length")).astype(np.int64)
    groups = _numbers(table, GROUP_KEY, np.zeros(len(table), np.int64))

    baseline_rewards = None
    if baselines is not None:
        keys = [zip(*(t.column(c).to_pylist() for c in GROUP_KEY), strict=True) for t in (baselines, table)]
        # By key and not by group number: the baselines are another table, with other codes.
        reward_of_group = dict(zip(keys[0], baselines.column("reward").to_pylist(), strict=True))
        # nan: a group without a baseline, whose rows filters drop before anything is computed from it.
        baseline_rewards = np.array([reward_of_group.get(key, np.nan) for key in keys[1]], dtype=np.float32)

    num_turns, turns, turn_lengths, states, turn_rewards = _turns(table, lengths - prompt_lengths)
    # Columns that most workflows leave empty are None, so that nothing is computed from them.
    state_numbers = rewards_of_turns = None
    if states.null_count < len(states):
        # Codes instead of texts: states are only compared for equality.
        state_numbers = numbers_of(states.dictionary_encode().indices.fill_null(-1)).astype(np.int64)
    if turn_rewards.null_count < len(turn_rewards):
        rewards_of_turns = numbers_of(turn_rewards.fill_null(0.0)).astype(np.float32)

    images = table.column("images")
    return TrainingBatch(
        tokens=_flat(tokens, np.int32),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        rollout_logprobs=_flat(_array(table.column("rollout_logprobs")), np.float32),
        loss_mask=_expand_masks(_array(table.column("loss_mask_runs")), lengths - prompt_lengths),
        rewards=numbers_of(table.column("reward")).astype(np.float32),
        groups=groups,
        temperatures=numbers_of(table.column("temperature")).astype(np.float32),
        min_policy_versions=numbers_of(table.column("min_policy_version")).astype(np.int64),
        rollouts=_numbers(table, ("rollout",), groups),
        ordinals=numbers_of(table.column("turn")).astype(np.int64),
        num_turns=num_turns,
        turns=turns,
        turn_lengths=turn_lengths,
        experts=np.zeros(len(table), bool),
        uids=tuple(table.column("uid").to_pylist()),
        baselines=baseline_rewards,
        states=state_numbers,
        turn_rewards=rewards_of_turns,
        routed_experts=_experts(_array(table.column("routed_experts")), lengths),
        images=None if images.null_count == len(images) else tuple(tuple(names or ()) for names in images.to_pylist()),
    )


def _experts(column: pa.ListArray, lengths: np.ndarray) -> np.ndarray | None:
    """[S, X] experts of rows of `lengths` tokens. Rows that recorded them have values for all but their last token."""
    recorded = numbers_of(pc.indices_nonzero(column.is_valid())).astype(np.int64)
    values, num_tokens = _flat(column, np.int16), int((lengths[recorded] - 1).sum())
    if not len(values):
        return None
    experts = np.full((int(lengths.sum()), len(values) // num_tokens), -1, np.int16)
    is_recorded = np.repeat(np.isin(np.arange(len(lengths)), recorded), lengths)
    is_recorded[np.cumsum(lengths) - 1] = False
    experts[is_recorded] = values.reshape(num_tokens, -1)
    return experts


def _turns(
    table: pa.Table, response_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, pa.Array, pa.Array]:
    """Return ([N] number of turns, [K] places in the rollout, [K] lengths, [K] states, [K] turn rewards).

    response_lengths: [N]. A row whose `turns` is null is one turn.
    """
    column = _array(table.column("turns"))
    states, rewards = _array(table.column("env_state")), _array(table.column("turn_reward"))
    ordinals = numbers_of(table.column("turn")).astype(np.int64)
    if column.null_count == len(column):
        return np.ones(len(table), np.int64), ordinals, response_lengths, states, rewards
    counts = numbers_of(column.value_lengths().fill_null(0)).astype(np.int64)
    recorded = column.flatten()
    num_turns = np.maximum(counts, 1)
    starts = np.cumsum(num_turns) - num_turns
    # [K]: True for a turn that its row lists; the others are whole rows.
    is_recorded = np.repeat(counts > 0, num_turns)
    first = np.zeros(len(is_recorded), bool)
    first[starts] = True

    def merged(of_row: np.ndarray, name: str) -> np.ndarray:
        values = np.repeat(of_row, num_turns)
        values[is_recorded] = recorded.field(name).to_numpy(zero_copy_only=False)
        return values

    ends = merged(response_lengths, "end")
    # A turn begins where the previous one ends, the first of a row at 0.
    lengths = ends - np.where(first, 0, np.roll(ends, 1))
    # Object arrays for the two columns that may be null: they are short, and null in most runs.
    objects = [np.array(values.to_pylist(), object) for values in (states, rewards)]
    merged_states = pa.array(merged(objects[0], "env_state"), pa.string(), from_pandas=True)
    merged_rewards = pa.array(merged(objects[1], "turn_reward"), pa.float32(), from_pandas=True)
    return num_turns, merged(ordinals, "number"), lengths, merged_states, merged_rewards


def numbers_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the values of a numeric column, nan for nulls; read-only.

    Avoids Arrow's `to_numpy`, as `column_of` avoids `pa.array`: at their first use these import pandas, which a rank
    does not need otherwise before its first batch.
    """
    array = _array(column) if isinstance(column, pa.ChunkedArray) else column
    return np.from_dlpack(array) if not array.null_count else array.to_numpy(zero_copy_only=False)


def column_of(numbers: np.ndarray) -> pa.Array:
    """Return `numbers` ([N], any type but bool) as an Arrow array, without a copy if they are contiguous."""
    values = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, values])


def _array(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array; `combine_chunks` would copy even a single chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _flat(array: pa.ListArray, dtype: type) -> np.ndarray:
    return numbers_of(array.flatten()).astype(dtype, copy=False)


def _numbers(table: pa.Table, names: Sequence[str], numbers: np.ndarray) -> np.ndarray:
    """Number the rows by the combination of `numbers` and these columns: [N] int64, by first appearance."""
    for name in names:
        codes = _array(table.column(name)).dictionary_encode()
        if len(codes.dictionary) > 1:  # otherwise the column is constant
            # Two numbers in one: the previous ones in the high part, this column's in the low part.
            pairs = numbers * len(codes.dictionary) + numbers_of(codes.indices)
            numbers = numbers_of(column_of(pairs).dictionary_encode().indices).astype(np.int64)  # dense again
    return numbers


def _expand_masks(runs: pa.ListArray, response_lengths: np.ndarray) -> np.ndarray:
    """Expand run lengths, the first of each row trained, to [Q] bool; rows without runs are all True."""
    counts = numbers_of(runs.value_lengths()).astype(np.int64)
    if not counts.any():
        return np.ones(int(response_lengths.sum()), dtype=bool)
    lengths = numbers_of(runs.flatten()).astype(np.int64)
    # A row without runs becomes one run of its whole length, inserted at `where`.
    where = np.repeat(np.cumsum(counts) - counts, counts == 0)
    lengths = np.insert(lengths, where, response_lengths[counts == 0])
    counts = np.where(counts == 0, 1, counts)
    # A run is trained if its number within its row is even.
    number_in_row = np.arange(len(lengths)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(number_in_row % 2 == 0, lengths)


SupervisedRow = (
    tuple[Sequence[int], int, Sequence[bool] | None] | tuple[Sequence[int], int, Sequence[bool] | None, float]
)
"""(tokens, prompt length, loss mask of the response or None for all of it), with a reward if the row has one."""


def supervised_batch(rows: Sequence[SupervisedRow], uids: Sequence[str], group_size: int = 1) -> TrainingBatch:
    """Make a batch of supervised rows. Logprobs are zeros, as are the rewards of rows without one.

    group_size: number of consecutive rows that form a group; 2 for pairs.
    """
    lengths = np.array([len(row[0]) for row in rows], dtype=np.int64)
    prompts = np.array([row[1] for row in rows], dtype=np.int64)
    # Only responses have masks and logprobs; the prompt is context.
    responses = lengths - prompts
    masks = [np.ones(r, bool) if row[2] is None else np.asarray(row[2]) for row, r in zip(rows, responses, strict=True)]
    count = len(rows)
    return TrainingBatch(
        tokens=np.concatenate([np.asarray(row[0], np.int32) for row in rows]),
        lengths=lengths,
        prompt_lengths=prompts,
        rollout_logprobs=np.zeros(int(responses.sum()), np.float32),
        loss_mask=np.concatenate(masks, dtype=bool),
        rewards=np.array([row[3] if len(row) == 4 else 0.0 for row in rows], np.float32),
        groups=np.arange(count, dtype=np.int64) // group_size,
        temperatures=np.ones(count, np.float32),
        min_policy_versions=np.zeros(count, np.int64),
        rollouts=np.arange(count, dtype=np.int64),
        ordinals=np.zeros(count, np.int64),
        num_turns=np.ones(count, np.int64),
        turns=np.zeros(count, np.int64),
        turn_lengths=responses,
        experts=np.ones(count, bool),
        uids=tuple(uids),
    )


def mismatched(batch: TrainingBatch, max_tokens: int) -> TrainingBatch:
    """Join each prompt with the response of the same row of the previous group, the first group with the last one.

    Sequences are cut to `max_tokens`. All groups must have the same size, so that the response belongs to another
    prompt, unless there is only one group.
    """
    # A whole group: a smaller shift would pair a prompt with another response to itself.
    shift = int((batch.groups == batch.groups[0]).sum())
    tokens, masks, rows = batch.row_tokens(), batch.row_masks(), list[SupervisedRow]()
    for row, prompt in enumerate(batch.prompt_lengths.tolist()):
        other = (row - shift) % len(batch)
        joined = np.concatenate([tokens[row][:prompt], tokens[other][batch.prompt_lengths[other] :]])[:max_tokens]
        rows.append((joined.tolist(), prompt, masks[other][: len(joined) - prompt].tolist()))
    return supervised_batch(rows, batch.uids)


_UNKNOWN = {"baselines": 0.0, "states": -1, "turn_rewards": 0.0, "routed_experts": -1, "held": True}
"""Fill values for the rows, turns or tokens of a part without the field, such as demonstrations."""
_LENGTH_FIELDS = {"states": "turns", "turn_rewards": "turns", "routed_experts": "tokens"}
"""Field of the same length, for fields that do not have one value per row."""
_COUNTED = {"trained_of_turns": "num_trained_of_turns", "logprob_sums": "trained_logprobs"}
"""Field -> property that has its value for every row of a part."""


def join_batches(parts: Sequence[TrainingBatch]) -> TrainingBatch:
    """Concatenate the rows of all parts; groups and rollouts are renumbered by first appearance."""
    joined: dict[str, Any] = {"uids": tuple(uid for part in parts for uid in part.uids), "images": None}
    if any(part.images is not None for part in parts):
        joined["images"] = tuple(names for part in parts for names in part.images or ((),) * len(part))
    for name in (f.name for f in fields(TrainingBatch) if f.name not in joined):
        values = [getattr(part, name) for part in parts]
        if name in ("groups", "rollouts"):
            # A uid ends with the numbers of the rollout and of the row: its prefix identifies group or rollout across
            # parts. Rows of a dataset have no such uid, and their groups are never split.
            num_suffixes = 2 if name == "groups" else 1
            keys = [
                ("", number, int(group)) if expert else (uid.rsplit("/", num_suffixes)[0], 0, 0)
                for number, (part, value) in enumerate(zip(parts, values, strict=True))
                for uid, group, expert in zip(part.uids, value, part.experts, strict=True)
            ]
            numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            joined[name] = np.array([numbers[key] for key in keys], dtype=np.int64)
            continue
        # Equal states of two parts get different numbers: states are only compared within a group, and no group is in
        # two parts.
        if name == "states":
            begin = 0
            for i, value in enumerate(values):
                if value is not None and len(value):
                    values[i] = np.where(value < 0, value, value + begin)
                    begin += int(value.max()) + 1
        known = next((value for value in values if value is not None), None)
        if known is None:
            joined[name] = None
            continue
        if name in _COUNTED:
            joined[name] = np.concatenate([getattr(part, _COUNTED[name]) for part in parts])
            continue
        counted = _LENGTH_FIELDS.get(name, "lengths")
        filled = [
            np.full((len(getattr(part, counted)), *known.shape[1:]), _UNKNOWN[name], known.dtype)
            if value is None
            else value
            for value, part in zip(values, parts, strict=True)
        ]
        joined[name] = np.concatenate(filled)
    return TrainingBatch(**joined)
