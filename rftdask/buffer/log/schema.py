"""Experience: one trainable token sequence, and the Parquet schema that stores it.

A rollout is generated at least once and trained at most once. It is identified by its `uid`, which is known before the
rollout starts. This module knows neither storage nor shards.

Shapes: L = tokens of prompt and response, P = prompt tokens, R = L - P = response tokens.

Rows become columns without a Python loop over tokens. Token ids and logprobs in numpy arrays cost one copy; other
sequences cost about 30 times as much, but make the same experience.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = "1.5"
"""major.minor. A minor change only adds nullable columns; a reader refuses another major version."""
ADDED_COLUMNS = ("env_state", "turn_reward", "turns", "routed_experts", "images", "version_starts", "session")
"""Columns that shards of schema 1.0 lack; read from those, they are null. `turns` was added in 1.2, `routed_experts` in
1.3, `images` in 1.4, the last two in 1.5, the others in 1.1."""
EXPERTS_COLUMN = "routed_experts.list.element"
"""Parquet path of the values of column routed_experts."""


class Status(StrEnum):
    """How a rollout ended. Only OK and TRUNCATED may enter a loss or a baseline."""

    OK = "ok"
    TRUNCATED = "truncated"  # the response reached its token limit
    FAILED = "failed"  # the workflow, the reward or the engine raised; see `error`
    TIMEOUT = "timeout"  # the attempt's deadline passed
    FILTERED = "filtered"  # an operator dropped it; see `error`
    POISONED = "poisoned"  # its task was given up after repeatedly crashing the workers that ran it; see `error`

    @property
    def trainable(self) -> bool:
        """True if a row of this status may enter a loss or a baseline."""
        return self in (Status.OK, Status.TRUNCATED)


@dataclass(frozen=True)
class Turn:
    """One call of the policy in a row with several calls: tokens added before it, then the tokens that it sampled.

    Example: Turn(number=1, start=14, end=20, text_start=40, text_end=61, source="tool", seed=7): the second call of its
    rollout sampled tokens 14 to 19 of the response. The tokens between the previous turn and token 14 came from a tool.
    """

    number: int
    """Place among the calls of the rollout, from 0."""
    start: int
    end: int
    """Sampled tokens: response tokens start to end - 1 of the row, counted from 0 after the prompt."""
    text_start: int
    text_end: int
    """The same range in characters of `response_text`."""
    source: str
    """Role of the last message before the turn, such as "user" or "tool"; "": a text without roles."""
    seed: int
    min_policy_version: int = 0
    max_policy_version: int = 0
    """Versions of the oldest and newest weights that sampled a token."""
    env_state: str | None = None
    turn_reward: float | None = None
    """See `Experience`."""


@dataclass(frozen=True, eq=False)
class Experience:
    """One trainable token sequence, or the record that a rollout produced none.

    A conversation is one experience as long as each prompt continues the previous turn: the first prompt, then all
    sampled tokens and, untrained, all tokens added between turns. Another prompt begins a new experience.

    Example: Experience(taskset="gsm8k", epoch=0, task_index=17, rollout=3, explore_step=5, tokens=[...],
    prompt_length=40,
             rollout_logprobs=[...], reward=1.0, min_policy_version=4, max_policy_version=4)
    """

    taskset: str
    epoch: int
    task_index: int
    """Row of the task in its taskset, before any shuffling."""
    rollout: int
    """Number in its group, 0 <= rollout < repeat_times. `repeat_times`: the greedy rollout, which is not trained."""
    explore_step: int
    """The explore step that ran the task, counted from 1."""
    turn: int = 0
    """Ordinal of the row in its rollout. Up to schema 1.1 each call of the policy was a row."""
    attempt: int = 0
    """Number of the attempt that produced this row; not part of the uid."""
    status: Status = Status.OK
    tokens: Sequence[int] | np.ndarray = ()
    """[L] token ids of prompt and response, exactly as the engine saw and sampled them; int32 if an array."""
    prompt_length: int = 0
    """P."""
    rollout_logprobs: Sequence[float] | np.ndarray = ()
    """[R] natural-log probabilities of the response tokens under softmax(logits / temperature) when sampled; 0 for
    tokens that were not sampled."""
    loss_mask: Sequence[bool] | np.ndarray | None = None
    """[R] True where the token is trained; None trains the whole response."""
    reward: float | None = None
    """None if the rollout failed: a failure is not a reward of zero."""
    min_policy_version: int = 0
    max_policy_version: int = 0
    """Versions of the oldest and newest weights that sampled a token; equal unless weights changed in flight."""
    weights_hash: str = ""
    """Content hash of the newest of those weights; a version does not identify weights across runs."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    prompt_text: str = ""
    response_text: str = ""
    truth: str = ""
    """Reference answer of the task as text; "": there is none."""
    error: str = ""
    """For FAILED, TIMEOUT and FILTERED: the reason in one line."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    env_state: str | None = None
    """Name of the environment state before the turn, the same for equal states; None: unknown."""
    turn_reward: float | None = None
    """Reward of the turn; None: unknown. The part of `reward` beyond the sum over turns belongs to the last turn."""
    turns: Sequence[Turn] | None = None
    """Calls of the policy in the row, in order. None: one call, number `turn` of its rollout, whose tokens are the
    whole response. A row has either `turns`, or its own env_state and turn_reward."""
    routed_experts: np.ndarray | None = None
    """[L - 1, X] int16: experts of each token but the last, X of all layers together, first layer first; None: not
    recorded."""
    images: Sequence[str] | None = None
    """Names of the images in its prompts, in order: SHA-256 of files in media/ of the run folder, with prefix `video:`
    for videos. Their tokens are among `tokens` (data/images.py). None: there are none."""
    version_starts: Sequence[tuple[int, int]] | None = None
    """(place among the response tokens, policy version), in order: tokens from that place to the next one were sampled
    by that version. None: if `min_policy_version` is also the newest version, it sampled all tokens; otherwise the
    version of a token is unknown."""
    session: str | None = None
    """Name of its `rftdask serve` session; None: it was not served."""

    @property
    def group_id(self) -> str:
        """Id of the rollouts of one task in one explore step, whose rewards are compared with each other."""
        return f"{self.taskset}/{self.epoch}/{self.task_index}"

    @property
    def uid(self) -> str:
        """Id that is known before the rollout starts."""
        # Not by `group_id`: this is computed for every row of a shard.
        return f"{self.taskset}/{self.epoch}/{self.task_index}/{self.rollout}/{self.turn}"

    def __eq__(self, other: object) -> bool:
        """Compare the values of every field, in arrays or in other sequences."""
        if not isinstance(other, Experience):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(
            np.array_equal(left, right) and (left is None) == (right is None)
            if isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
            else left == right
            for left, right in pairs
        )

    __hash__ = None  # type: ignore[assignment]  # metrics are a mapping


def sampled_spans(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return [start, end) of the response tokens that each turn of a row (of a table of `SCHEMA`) sampled."""
    if row["turns"] is None:
        return [(0, len(row["rollout_logprobs"]))]
    return [(turn["start"], turn["end"]) for turn in row["turns"]]


def token_versions(row: Mapping[str, Any]) -> list[int | None]:
    """Return the policy version that sampled each response token of a row (of a table of `SCHEMA`).

    None: the token was added between turns, or its version is unknown.
    """
    versions: list[int | None] = [None] * len(row["rollout_logprobs"])
    # A turn within which no weights were loaded has one version, even in rows older than `version_starts`.
    turns = row["turns"] or [row]
    for turn, (begin, end) in zip(turns, sampled_spans(row), strict=True):
        if turn["min_policy_version"] == turn["max_policy_version"]:
            versions[begin:end] = [turn["min_policy_version"]] * (end - begin)
            continue
        for start in row["version_starts"] or ():
            first = max(start["start"], begin)
            versions[first:end] = [start["policy_version"]] * (end - first)
    return versions


def conversation(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Split the texts of a row (of a table of `SCHEMA`) into (label, text) parts.

    The first is ("prompt", ...). For each turn follow the text added before it, labeled by its source ("tool", ...),
    and the text that the policy wrote ("turn 1", ...), numbered within the rollout.
    """
    parts, end = [("prompt", row["prompt_text"])], 0
    if row["turns"] is None:
        return [*parts, ("response", row["response_text"])]
    for turn in row["turns"]:
        if turn["text_start"] > end:
            parts.append((turn["source"] or "added", row["response_text"][end : turn["text_start"]]))
        end = turn["text_end"]
        parts.append((f"turn {turn['number']}", row["response_text"][turn["text_start"] : end]))
    return parts


def _list_of(kind: pa.DataType) -> pa.DataType:
    # Without nulls there are no definition levels, which makes reading 1.5 to 2 times faster.
    return pa.list_(pa.field("element", kind, nullable=False))


_COLUMNS = {
    "uid": pa.string(),
    "taskset": pa.string(),
    "epoch": pa.int32(),
    "task_index": pa.int64(),
    "rollout": pa.int32(),
    "turn": pa.int32(),
    "attempt": pa.int32(),
    "explore_step": pa.int64(),
    "status": pa.string(),
    "tokens": _list_of(pa.int32()),
    "prompt_length": pa.int32(),
    "rollout_logprobs": _list_of(pa.float32()),
    # Run lengths, the first one trained: [3, 2, 4] = 3 trained, 2 not, 4 trained. Empty = all trained.
    "loss_mask_runs": _list_of(pa.int32()),
    "reward": pa.float32(),
    "min_policy_version": pa.int64(),
    "max_policy_version": pa.int64(),
    "weights_hash": pa.string(),
    **dict.fromkeys(("temperature", "top_p"), pa.float32()),
    "top_k": pa.int32(),
    "seed": pa.int64(),
    **dict.fromkeys(("prompt_text", "response_text", "truth", "error"), pa.string()),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "env_state": pa.string(),
    "turn_reward": pa.float32(),
    # The fields of `Turn`, in order.
    "turns": _list_of(
        pa.struct(
            [
                pa.field(name, kind, nullable=name in ADDED_COLUMNS)
                for name, kind in {
                    **dict.fromkeys(("number", "start", "end", "text_start", "text_end"), pa.int32()),
                    "source": pa.string(),
                    **dict.fromkeys(("seed", "min_policy_version", "max_policy_version"), pa.int64()),
                    "env_state": pa.string(),
                    "turn_reward": pa.float32(),
                }.items()
            ]
        )
    ),
    # Token by token, the same number for each.
    "routed_experts": _list_of(pa.int16()),
    "images": _list_of(pa.string()),
    "version_starts": _list_of(
        pa.struct(
            [pa.field("start", pa.int32(), nullable=False), pa.field("policy_version", pa.int64(), nullable=False)]
        )
    ),
    "session": pa.string(),
}
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name in ("reward", *ADDED_COLUMNS)) for name, kind in _COLUMNS.items()],
    metadata={"rftdask.schema": SCHEMA_VERSION},
)


_ALL_TRAINED: tuple[int, ...] = ()
"""Runs of most rows; a new list per row would trigger the garbage collector for every shard."""


def mask_to_runs(mask: Sequence[bool] | np.ndarray | None) -> list[int]:
    """Return the run lengths of `mask`, the first run counting True; [] for None or a mask that is all True."""
    if mask is None:
        return []
    array = np.asarray(mask, bool)
    if array.all():
        return []
    # Places where one run ends and the next begins.
    edges = np.flatnonzero(array[1:] != array[:-1]) + 1
    runs: list[int] = np.diff(edges, prepend=0, append=len(array)).tolist()
    return runs if array[0] else [0, *runs]


def runs_to_mask(runs: Sequence[int], length: int) -> list[bool]:
    """Inverse of `mask_to_runs` for a response of `length` tokens."""
    if not len(runs):
        return [True] * length
    return [number % 2 == 0 for number, count in enumerate(runs) for _ in range(count)]


def experiences_to_table(experiences: Sequence[Experience], run: str = "") -> pa.Table:
    """Make a table of `SCHEMA` with one row per experience, in the same order.

    Raises: ValueError: inconsistent lengths, or a trainable row without a reward; OverflowError: a token id beyond
    int32, or more tokens than one shard can address.
    """
    # Checked before anything is written: a shard is immutable.
    for e in experiences:
        response_length = len(e.tokens) - e.prompt_length
        if len(e.rollout_logprobs) != response_length:
            raise ValueError(
                f"experience {e.uid}: {len(e.rollout_logprobs)} rollout_logprobs for {response_length} response tokens"
            )
        if e.loss_mask is not None and len(e.loss_mask) != response_length:
            raise ValueError(
                f"experience {e.uid}: loss_mask of {len(e.loss_mask)} for {response_length} response tokens"
            )
        if e.turns is not None and [turn.end for turn in e.turns[-1:]] != [response_length]:
            raise ValueError(
                f"experience {e.uid}: its last turn does not end with its {response_length} response tokens"
            )
        if e.routed_experts is not None and len(e.routed_experts) != len(e.tokens) - 1:
            raise ValueError(
                f"experience {e.uid}: routed_experts of {len(e.routed_experts)} tokens, not of all but the last of "
                f"{len(e.tokens)}"
            )
        starts = [start for start, _ in e.version_starts or ()]
        if starts and not 0 == starts[0] <= starts[-1] < response_length:
            raise ValueError(
                f"experience {e.uid}: version_starts at {starts} do not begin with its first of {response_length} "
                "response tokens, or end behind its last"
            )
        if e.reward is None and e.status.trainable:
            raise ValueError(f"experience {e.uid}: status {e.status} without a reward")

    # Lists and maps are built from flat arrays, the other columns below from one attribute per row.
    metrics = [experience.metrics for experience in experiences]
    metrics_type = SCHEMA.field("metrics").type
    masks = [_ALL_TRAINED if e.loss_mask is None else mask_to_runs(e.loss_mask) for e in experiences]
    columns: dict[str, pa.Array] = {
        "uid": pa.array([e.uid for e in experiences], pa.string()),
        "tokens": _lists([e.tokens for e in experiences], np.int32),
        "rollout_logprobs": _lists([e.rollout_logprobs for e in experiences], np.float32),
        "loss_mask_runs": _lists(masks, np.int32),
        "routed_experts": _experts([e.routed_experts for e in experiences]),
        "turns": pa.array(
            [None if e.turns is None else list(map(vars, e.turns)) for e in experiences], SCHEMA.field("turns").type
        ),
        "version_starts": pa.array(
            [
                None if e.version_starts is None else [{"start": s, "policy_version": v} for s, v in e.version_starts]
                for e in experiences
            ],
            SCHEMA.field("version_starts").type,
        ),
        "metrics": pa.MapArray.from_arrays(
            pa.array(_offsets(metrics)),
            pa.array(list(chain.from_iterable(metrics)), metrics_type.key_type),
            pa.array(list(chain.from_iterable(row.values() for row in metrics)), metrics_type.item_type),
            type=metrics_type,
        ),
    }
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        if name not in columns:
            # attrgetter and map loop in C: this runs for every column of every shard.
            columns[name] = pa.array(list(map(attrgetter(name), experiences)), kind)
    schema = SCHEMA.with_metadata({**(SCHEMA.metadata or {}), b"rftdask.run": json.dumps(run).encode()})
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=schema)


def _lists(rows: Sequence[Sequence[Any] | np.ndarray], dtype: type[np.number[Any]]) -> pa.Array:
    """Make a list column of `dtype`. Raises: OverflowError: an integer that does not fit."""

    def as_array(row: Sequence[Any] | np.ndarray) -> np.ndarray:
        if isinstance(row, np.ndarray) and row.dtype != dtype and np.issubdtype(dtype, np.integer):
            return np.array(row.tolist(), dtype)  # a cast between arrays would wrap around
        return np.asarray(row, dtype)

    filled = [row for row in rows if len(row)]
    try:
        # casting="no" raises TypeError if a row must be converted.
        values = np.concatenate(filled, dtype=dtype, casting="no") if filled else np.zeros(0, dtype)
    except TypeError:
        values = np.concatenate([as_array(row) for row in filled])
    kind = pa.from_numpy_dtype(dtype)
    return pa.ListArray.from_arrays(pa.array(_offsets(rows)), pa.array(values, kind), type=_list_of(kind))


def _experts(rows: Sequence[np.ndarray | None]) -> pa.Array:
    kind = SCHEMA.field("routed_experts").type
    if all(row is None for row in rows):
        return pa.nulls(len(rows), kind)
    lists = _lists([() if row is None else row.reshape(-1) for row in rows], np.int16)
    return pa.ListArray.from_arrays(lists.offsets, lists.values, kind, mask=pa.array([row is None for row in rows]))


def _offsets(rows: Sequence[Any]) -> np.ndarray:
    """Return the begin of each row, [N + 1] int32. Raises: OverflowError: more values than a list can address."""
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{ends[-1]} values in one shard; lower explorer.tasks_per_batch")
    return ends.astype(np.int32)
