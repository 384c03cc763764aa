"""Experience: one trainable token sequence, and the version of the Parquet schema that stores it.

A rollout is generated at least once and trained at most once. It is identified by its `uid`, which is known before the
rollout starts. This module knows neither storage nor shards.

Shapes: L = tokens of prompt and response, P = prompt tokens, R = L - P = response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

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

    @property
    def equals_truth(self) -> bool:
        """True if a complete response is the reference answer, except for blanks around it."""
        return self.status is Status.OK and self.response_text.strip() == self.truth.strip() != ""

    def __eq__(self, other: object) -> bool:
        """Compare the values of every field, in arrays or in other sequences."""
        if not isinstance(other, Experience):
            return NotImplemented
        import numpy as np  # late: heavy, and readers of names and counts do not need it

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
