"""Selection: which waiting groups form the next batch. Pure rules over groups; no storage, no clock, no tensors.

A sample strategy (`algorithm.sample_strategy`) decides which of the groups that have arrived come first. For every
strategy, `select_groups` ensures that

- a group is used whole or not at all,
- a group whose oldest token is staler than the bound is never used,
- every dropped group has a reason.

If groups are used more than once, a priority function replaces the strategy (replay_priority.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rftdask.config import Config, fill_from_environment
from rftdask.config.plugins import bind_arguments, find_part, read_parts
from rftdask.errors import UserError

Position = tuple[int, int]
"""(explore step, slot) of the group's task. Steps count from 1, slots from 0."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one task, as rows of one shard.

    Example: Group(position=(12, 3), source="00000012-...parquet", trainable_rows=(24, 25), other_rows={"failed":
    (26,)}, min_policy_version=11)
    """

    position: Position
    source: str
    trainable_rows: tuple[int, ...]
    """Row numbers in the shard."""
    other_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(reason, rows) of the rows that may not be trained; the reason is their status."""
    min_policy_version: int = 0
    """Version of the oldest weights that sampled a token of the trainable rows."""


@dataclass(frozen=True)
class UsedGroup:
    """A group that was trained before, as the ledger names it."""

    source: str
    rows: tuple[int, ...]
    """The trained rows, which are the ones that are reused."""
    min_policy_version: int
    num_uses: int
    last_used_s: float
    """Time when the batch of its last use was formed, from the ledger, in Unix seconds; 0 if not recorded."""


@dataclass(frozen=True)
class Selection:
    use: tuple[Group, ...]
    stale: tuple[Group, ...] = ()
    empty: tuple[Group, ...] = ()
    """Groups without a trainable row."""
    reuse: tuple[UsedGroup, ...] = ()
    """Groups that were trained before and are trained again."""

    @classmethod
    def of(cls, use: Iterable[Group], rejected: Sequence[Group], reuse: Iterable[UsedGroup] = ()) -> Selection:
        """Make a selection; rejected groups with a trainable row are stale, the others empty."""
        stale = tuple(group for group in rejected if group.trainable_rows)
        return cls(tuple(use), stale, tuple(group for group in rejected if not group.trainable_rows), tuple(reuse))

    @property
    def settled(self) -> tuple[Position, ...]:
        """Positions that this selection settles: those of every fresh group."""
        return tuple(group.position for group in (*self.use, *self.stale, *self.empty))


@dataclass
class Cursor:
    """The settled positions: all before explore step `low`, and those in `beyond`.

    A step leaves `beyond` when all its slots are settled and no earlier step is open, so the cursor stays small.
    """

    low: int = 1
    beyond: set[Position] = field(default_factory=set)

    def __contains__(self, position: Position) -> bool:
        return position[0] < self.low or position in self.beyond

    def settle(self, positions: Iterable[Position], tasks_per_step: int) -> None:
        """Mark these positions as settled. Idempotent."""
        self.beyond.update(p for p in positions if p[0] >= self.low)
        while all((self.low, slot) in self.beyond for slot in range(tasks_per_step)):
            self.beyond.difference_update((self.low, slot) for slot in range(tasks_per_step))
            self.low += 1

    def num_settled(self, tasks_per_step: int) -> int:
        """Return the number of groups settled since the run began."""
        return (self.low - 1) * tasks_per_step + len(self.beyond)

    def state_dict(self) -> dict[str, object]:
        """Return the cursor as JSON types, for a checkpoint."""
        return {"low": self.low, "beyond": sorted(map(list, self.beyond))}

    @classmethod
    def from_state_dict(cls, state: dict[str, object]) -> Cursor:
        beyond = state["beyond"]
        assert isinstance(beyond, list) and isinstance(state["low"], int)
        return cls(state["low"], {(int(step), int(slot)) for step, slot in beyond})


# ---- sample strategies


class SampleStrategy:
    """Base of the sample strategies, which decide which arrived groups come first. This base takes the oldest.

    Subclass it and override `choose`; `algorithm.sample_strategy_args` are the arguments of `__init__`. `choose` must
    be pure: no clock, no random state.

    Example:
        class Freshest(SampleStrategy):
            def choose(self, groups, count, policy_version):
                return sorted(groups, key=lambda group: -group.min_policy_version)[:count]
    """

    sample_strategy: ClassVar[str | None] = None
    """Name in the configuration. None: package.module.Name, or the class name if it is in a plug-in folder."""
    follows_schedule: ClassVar[bool] = False
    """True if batch k may instead be the k-th run of groups of the schedule, for runs that must repeat bit by bit."""

    def choose(self, groups: Sequence[Group], count: int, policy_version: int) -> Sequence[Group]:
        """Return `count` of the groups, or fewer to wait for better ones.

        Args:
            groups: all waiting groups, by position, at least `count`. Groups that failed or are too stale are dropped
                when chosen, which makes the batch smaller.
            policy_version: version of the weights about to be trained.
        """
        return groups[:count]


@dataclass(frozen=True)
class OldestFirst(SampleStrategy):
    """default: the oldest positions first, regardless of staleness."""

    sample_strategy = "default"
    follows_schedule = True


@dataclass(frozen=True)
class StalenessControl(OldestFirst):
    """staleness_control: the oldest positions first, and none staler than the bound."""

    sample_strategy = "staleness_control"

    max_staleness: int | None = None
    """Sets `synchronizer.max_staleness`."""


@dataclass(frozen=True)
class Mix(OldestFirst):
    """mix: the oldest positions first, together with demonstrations from a dataset (source.py)."""

    sample_strategy = "mix"
    takes_demonstrations: ClassVar[bool] = True

    max_staleness: int | None = None
    expert_data_ratio: float = 0.5
    """Fraction of demonstrations in a batch, 0 <= ratio < 1."""
    sft_dataset_name: str | None = None
    """Name of the auxiliary buffer with the demonstrations."""


SAMPLE_STRATEGIES = read_parts("rftdask.buffer.batches.selection", "sample_strategy")


def make_sample_strategy(config: Config) -> SampleStrategy:
    """Make the sample strategy of the config. Raises: UserError: an unknown name, or arguments it does not take."""
    name = config.algorithm.sample_strategy
    arguments = fill_from_environment(config.algorithm.sample_strategy_args or {})
    part = find_part("sample strategy", name, SAMPLE_STRATEGIES, config.explorer.plugin_dirs)
    bind_arguments("algorithm.sample_strategy_args", part, arguments)
    strategy: SampleStrategy = part(**arguments)
    # Arrival depends on the speed of workers, so a choice among arrived groups cannot be repeated bit by bit.
    if config.synchronizer.sync_style == "fixed" and not strategy.follows_schedule:
        raise UserError(
            f"algorithm.sample_strategy {name} does not work with sync_style fixed, because it selects from the groups "
            "that have arrived; use another sync_style, or set `follows_schedule = True` in the class of the strategy"
        )
    return strategy


# ---- the rule


@dataclass(frozen=True)
class SampleRule:
    """The rule for forming batches.

    ordered: batch k is the k-th run of `groups_per_batch` positions, in whatever order groups arrive, so that a run can
    be repeated bit by bit. Otherwise the strategy chooses among the groups that have arrived. In both cases a group
    without a trainable row, or too stale, makes its batch smaller and is not replaced: after k batches
    k * groups_per_batch groups are settled. The explorer relies on this when it waits for a version.

    A partial batch, formed when a deadline passes, settles fewer groups. Later batches train the missing positions, and
    at the end a last, smaller batch does. So a version can only come sooner than the explorer expects.
    """

    groups_per_batch: int
    tasks_per_step: int
    """Slots of an explore step."""
    ordered: bool
    max_staleness: int | None = None
    """None: no bound."""
    strategy: SampleStrategy = OldestFirst()

    def rejects(self, group: Group, policy_version: int) -> bool:
        """Return True if weights of this version may not train the group: no row is trainable, or it is too stale."""
        if not group.trainable_rows:
            return True
        # By the oldest token, so that the bound holds for every trained token.
        age = staleness(policy_version, group.min_policy_version)
        return self.max_staleness is not None and age > self.max_staleness


def staleness(policy_version: int, min_policy_version: int) -> int:
    """Return the optimizer steps between the weights that sampled the oldest token and those about to be trained."""
    return policy_version - min_policy_version


def next_positions(cursor: Cursor, count: int, tasks_per_step: int) -> list[Position]:
    """Return the first `count` positions that are not settled, in order."""
    positions: list[Position] = []
    step = cursor.low
    while len(positions) < count:
        positions.extend(p for slot in range(tasks_per_step) if (p := (step, slot)) not in cursor)
        step += 1
    return positions[:count]


def select_groups(
    waiting: Mapping[Position, Group], cursor: Cursor, policy_version: int, rule: SampleRule, count: int | None = None
) -> Selection | None:
    """Select the groups of the next batch; None while there are too few. Does not change its arguments.

    Args:
        policy_version: version of the weights about to be trained.
        count: number of groups to settle instead of `rule.groups_per_batch`, for a partial batch.
    Returns: a Selection whose `use` is empty if every group of the batch has failed or is too stale.
    """
    size = rule.groups_per_batch if count is None else count
    # Before sorting: a waiting trainer calls this often.
    if len(waiting) < size:
        return None
    positions = next_positions(cursor, size, rule.tasks_per_step) if rule.ordered else sorted(waiting)
    if any(position not in waiting for position in positions):
        return None
    groups: Sequence[Group] = [waiting[position] for position in positions]
    if not rule.ordered:
        groups = rule.strategy.choose(groups, size, policy_version)
        # The strategy waits for better groups; it is called again when more have arrived.
        if len(groups) < size:
            return None
    rejected = [group for group in groups if rule.rejects(group, policy_version)]
    return Selection.of((group for group in groups if not rule.rejects(group, policy_version)), rejected)
