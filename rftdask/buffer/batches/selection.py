"""Sampling: which waiting groups make the next batch. Pure rules over groups; no storage, no clock, no tensors.

Invariants: a group is used whole or not at all; a group whose oldest token is staler than the bound is never used; what
is set aside has a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Position = tuple[int, int]
"""(explore step, slot): which task of which step a group is of. Slots count from 0."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one task, as rows of one shard.

    Example: Group(position=(12, 3), source="00000012-...parquet", trainable_rows=(24, 25), other_rows={"failed":
    (26,)}, min_policy_version=11)
    """

    position: Position
    source: str
    trainable_rows: tuple[int, ...]
    other_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(reason, rows) of rows that may not be trained: their status is the reason."""
    min_policy_version: int = 0
    """Over the trainable rows."""


@dataclass(frozen=True)
class UsedGroup:
    """A group that was trained before, as the ledger names it."""

    source: str
    rows: tuple[int, ...]
    """Those that were trained; if it is used again, these are."""
    min_policy_version: int
    num_uses: int
    last_used_s: float
    """When the batch of its last use was formed, by the ledger's own stamps; 0 where there are none."""


@dataclass(frozen=True)
class SampleRule:
    """How batches are formed.

    ordered: batch k is the k-th run of `groups_per_batch` positions, whatever arrives first, so that a run can be
    repeated bit by bit. Otherwise: of what is there, the oldest positions first. Either way a group without a trainable
    row, or too stale, leaves its batch smaller and is not replaced: after k batches k * groups_per_batch groups are
    settled, which is what the explorer counts on when it waits for a version.

    A partial batch, made when a deadline passes, settles fewer: the positions that are missing are trained by later
    batches, and at the end by a last, smaller one. It can only bring a version sooner than the explorer counts on.
    """

    groups_per_batch: int
    tasks_per_step: int
    """Slots of an explore step."""
    ordered: bool
    max_staleness: int | None = None
    """None: no bound."""

    def rejects(self, group: Group, policy_version: int) -> bool:
        """Whether the group may not be trained by weights of this version: it has no row for it, or is too stale."""
        if not group.trainable_rows:
            return True
        age = staleness(policy_version, group.min_policy_version)
        return self.max_staleness is not None and age > self.max_staleness


@dataclass(frozen=True)
class Selection:
    use: tuple[Group, ...]
    stale: tuple[Group, ...] = ()
    empty: tuple[Group, ...] = ()
    """Groups without a trainable row."""
    reuse: tuple[UsedGroup, ...] = ()
    """Trained before, and now again."""

    @property
    def settled(self) -> tuple[Position, ...]:
        """What is no longer waiting: every fresh group."""
        return tuple(group.position for group in (*self.use, *self.stale, *self.empty))


@dataclass
class Cursor:
    """Which positions are settled: every one before explore step `low`, and those in `beyond`.

    Small and forgetful: a step leaves `beyond` when all its slots are settled and no earlier step is open.
    """

    low: int = 1
    beyond: set[Position] = field(default_factory=set)

    def __contains__(self, position: Position) -> bool:
        return position[0] < self.low or position in self.beyond

    def settle(self, positions: Iterable[Position], tasks_per_step: int) -> None:
        self.beyond.update(p for p in positions if p[0] >= self.low)
        while all((self.low, slot) in self.beyond for slot in range(tasks_per_step)):
            self.beyond.difference_update((self.low, slot) for slot in range(tasks_per_step))
            self.low += 1

    def num_settled(self, tasks_per_step: int) -> int:
        return (self.low - 1) * tasks_per_step + len(self.beyond)

    def state_dict(self) -> dict[str, object]:
        return {"low": self.low, "beyond": sorted(map(list, self.beyond))}

    @classmethod
    def from_state_dict(cls, state: dict[str, object]) -> Cursor:
        beyond = state["beyond"]
        assert isinstance(beyond, list) and isinstance(state["low"], int)
        return cls(state["low"], {(int(step), int(slot)) for step, slot in beyond})


def staleness(policy_version: int, min_policy_version: int) -> int:
    """Optimizer steps between the weights that sampled the oldest token and those about to be trained."""
    return policy_version - min_policy_version


def next_positions(cursor: Cursor, count: int, tasks_per_step: int) -> list[Position]:
    """The first `count` positions that are not settled, in order."""
    found: list[Position] = []
    step = cursor.low
    while len(found) < count:
        found.extend(p for slot in range(tasks_per_step) if (p := (step, slot)) not in cursor)
        step += 1
    return found[:count]


def select_groups(
    waiting: dict[Position, Group], cursor: Cursor, policy_version: int, rule: SampleRule, count: int | None = None
) -> Selection | None:
    """The groups of the next batch, or None while too few are there. Does not change its arguments.

    Args:
        policy_version: the trainer's version now, that is, of the weights about to be trained.
        count: groups to settle in place of `rule.groups_per_batch`, for a partial batch.
    Returns: a Selection whose `use` is empty if every group of the batch has failed or is too stale.
    """
    size = rule.groups_per_batch if count is None else count
    wanted = next_positions(cursor, size, rule.tasks_per_step) if rule.ordered else sorted(waiting)[:size]
    if len(wanted) < size or any(p not in waiting for p in wanted):
        return None
    groups = [waiting[position] for position in wanted]
    rejected = [group for group in groups if rule.rejects(group, policy_version)]
    return Selection(
        use=tuple(group for group in groups if not rule.rejects(group, policy_version)),
        stale=tuple(group for group in rejected if group.trainable_rows),
        empty=tuple(group for group in rejected if not group.trainable_rows),
    )
