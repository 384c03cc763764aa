"""Experience: one trainable token sequence, and the Parquet schema in which it rests.

A rollout task is generated at least once and trained at most once: both are decided by the `uid`, which is known
before the rollout starts. This module knows neither storage nor shards.

Shapes: L = tokens of prompt and response, P = prompt tokens, R = L - P = response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = "1.0"
"""major.minor: a minor change adds nullable columns only; a reader refuses another major."""


class Status(StrEnum):
    """How a rollout ended. Only OK and TRUNCATED may enter a loss or a baseline."""

    OK = "ok"
    TRUNCATED = "truncated"  # the response met its token limit
    FAILED = "failed"  # the workflow, the reward or the engine raised; see `error`
    TIMEOUT = "timeout"  # the attempt's deadline passed
    FILTERED = "filtered"  # an operator set it aside; see `error`

    @property
    def trainable(self) -> bool:
        return self in (Status.OK, Status.TRUNCATED)


@dataclass(frozen=True)
class Experience:
    """One trainable token sequence, or the record that a rollout gave none.

    Example: Experience(taskset="gsm8k", epoch=0, task_index=17, rollout=3, explore_step=5, tokens=[...],
    prompt_length=40,
             rollout_logprobs=[...], reward=1.0, min_policy_version=4, max_policy_version=4)
    """

    taskset: str
    epoch: int
    task_index: int
    """Row of the task in its taskset, before any shuffling."""
    rollout: int
    """0 <= rollout < repeat_times: which sibling of its group. `repeat_times`: the greedy one, which is not trained."""
    explore_step: int
    """The explore step that ran the task, counted from 1."""
    turn: int = 0
    attempt: int = 0
    """Which try gave this row; not part of the uid."""
    status: Status = Status.OK
    tokens: Sequence[int] = ()
    """[L] token ids of prompt and response, exactly as the engine saw and sampled them."""
    prompt_length: int = 0
    """P."""
    rollout_logprobs: Sequence[float] = ()
    """[R] natural-log probabilities of the response tokens under softmax(logits / temperature) when sampled."""
    loss_mask: Sequence[bool] | None = None
    """[R] True where the token is trained; None trains all of the response."""
    reward: float | None = None
    """None when the rollout failed: a failure is not a reward of zero."""
    min_policy_version: int = 0
    max_policy_version: int = 0
    """Oldest and newest weights that sampled a token of it; equal unless weights changed in flight."""
    weights_hash: str = ""
    """Content hash of the newest of those weights; the integer alone does not name weights."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    prompt_text: str = ""
    response_text: str = ""
    truth: str = ""
    """The task's reference answer as text, empty if there is none."""
    error: str = ""
    """For FAILED, TIMEOUT and FILTERED: the reason in one line."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def group_id(self) -> str:
        return f"{self.taskset}/{self.epoch}/{self.task_index}"

    @property
    def uid(self) -> str:
        return f"{self.group_id}/{self.rollout}/{self.turn}"


def _list_of(kind: pa.DataType) -> pa.DataType:
    # Non-null elements cost no definition levels: 1.5-2x faster to read.
    return pa.list_(pa.field("element", kind, nullable=False))


def _column(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


SCHEMA = pa.schema(
    [
        _column("uid", pa.string()),
        _column("taskset", pa.string()),
        _column("epoch", pa.int32()),
        _column("task_index", pa.int64()),
        _column("rollout", pa.int32()),
        _column("turn", pa.int32()),
        _column("attempt", pa.int32()),
        _column("explore_step", pa.int64()),
        _column("status", pa.string()),
        _column("tokens", _list_of(pa.int32())),
        _column("prompt_length", pa.int32()),
        _column("rollout_logprobs", _list_of(pa.float32())),
        # Run lengths, beginning with a trained run: [3, 2, 4] = 3 trained, 2 not, 4 trained. Empty = all trained.
        _column("loss_mask_runs", _list_of(pa.int32())),
        _column("reward", pa.float32(), nullable=True),
        _column("min_policy_version", pa.int64()),
        _column("max_policy_version", pa.int64()),
        _column("weights_hash", pa.string()),
        _column("temperature", pa.float32()),
        _column("top_p", pa.float32()),
        _column("top_k", pa.int32()),
        _column("seed", pa.int64()),
        _column("prompt_text", pa.string()),
        _column("response_text", pa.string()),
        _column("truth", pa.string()),
        _column("error", pa.string()),
        _column("metrics", pa.map_(pa.string(), pa.float64())),
    ],
    metadata={"rftdask.schema": SCHEMA_VERSION},
)


def mask_to_runs(mask: Sequence[bool] | None) -> list[int]:
    """Run lengths of `mask`, the first run counting True; [] for None or a mask that is all True."""
    if mask is None or all(mask):
        return []
    runs, current, count = [], True, 0
    for trained in mask:
        if bool(trained) != current:
            runs.append(count)
            current, count = not current, 0
        count += 1
    return [*runs, count]


def runs_to_mask(runs: Sequence[int], length: int) -> list[bool]:
    """Inverse of `mask_to_runs` for a response of `length` tokens."""
    if not len(runs):
        return [True] * length
    return [number % 2 == 0 for number, count in enumerate(runs) for _ in range(count)]


def experiences_to_table(experiences: Sequence[Experience], run: str = "") -> pa.Table:
    """The rows as a table of `SCHEMA`, in the order given. Raises: ValueError: lengths that do not fit."""
    for experience in experiences:
        _check(experience)
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for experience in experiences:
        for name in SCHEMA.names:
            columns[name].append(_value(experience, name))
    metadata = {**(SCHEMA.metadata or {}), b"rftdask.run": json.dumps(run).encode()}
    return pa.table(columns, schema=SCHEMA.with_metadata(metadata))


def _value(experience: Experience, name: str) -> Any:
    if name == "loss_mask_runs":
        return mask_to_runs(experience.loss_mask)
    value = getattr(experience, name)
    return list(value.items()) if name == "metrics" else value


def _check(experience: Experience) -> None:
    response_length = len(experience.tokens) - experience.prompt_length
    if len(experience.rollout_logprobs) != response_length:
        raise ValueError(
            f"experience {experience.uid}: {len(experience.rollout_logprobs)} rollout_logprobs for "
            f"{response_length} response tokens"
        )
    if experience.loss_mask is not None and len(experience.loss_mask) != response_length:
        raise ValueError(
            f"experience {experience.uid}: loss_mask of {len(experience.loss_mask)} for {response_length} "
            f"response tokens"
        )
    if experience.status.trainable and experience.reward is None:
        raise ValueError(f"experience {experience.uid}: status {experience.status} without a reward")
