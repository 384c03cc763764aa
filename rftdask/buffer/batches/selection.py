"""Selection: which waiting groups make the next batch. Pure rules over groups; no storage, no clock, no tensors.

A sample strategy (`algorithm.sample_strategy`) says which of the groups that have arrived come first; `select_groups`
holds for every strategy that

- a group is used whole or not at all,
- a group whose oldest token is staler than the bound is never used,
- what is set aside has a reason.

When groups are used more than once, a priority function decides in place of the strategy (replay_priority.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rftdask.config import Config, fill_from_environment
from rftdask.config.plugins import bind_arguments, find_part, read_parts
from rftdask.errors import UserError

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
    """Row numbers in the shard."""
    other_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(reason, rows) of rows that may not be trained: their status is the reason."""
    min_policy_version: int = 0
    """Oldest weights that sampled a token of the trainable rows."""


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
class Selection:
    use: tuple[Group, ...]
    stale: tuple[Group, ...] = ()
    empty: tuple[Group, ...] = ()
    """Groups without a trainable row."""
    reuse: tuple[UsedGroup, ...] = ()
    """Trained before, and now again."""

    @classmethod
    def of(cls, use: Iterable[Group], rejected: Sequence[Group], reuse: Iterable[UsedGroup] = ()) -> Selection:
        """The selection of `use`, the rejected groups by whether they have a trainable row."""
        stale = tuple(group for group in rejected if group.trainable_rows)
        return cls(tuple(use), stale, tuple(group for group in rejected if not group.trainable_rows), tuple(reuse))

    @property
    def settled(self) -> tuple[Position, ...]:
        """Positions that no longer wait: those of every fresh group."""
        return tuple(group.position for group in (*self.use, *self.stale, *self.empty))


@dataclass
class Cursor:
    """The settled positions: every one before explore step `low`, and those in `beyond`.

    Small and forgetful: a step leaves `beyond` when all its slots are settled and no earlier step is open.
    """

    low: int = 1
    beyond: set[Position] = field(default_factory=set)

    def __contains__(self, position: Position) -> bool:
        return position[0] < self.low or position in self.beyond

    def settle(self, positions: Iterable[Position], tasks_per_step: int) -> None:
        """Take these as settled; whole steps leave `beyond`."""
        # Positions before `low` are settled already; an entry that is folded twice changes nothing.
        self.beyond.update(p for p in positions if p[0] >= self.low)
        # Whole steps leave from the front alone, so what is kept is as long as the gap is wide.
        while all((self.low, slot) in self.beyond for slot in range(tasks_per_step)):
            self.beyond.difference_update((self.low, slot) for slot in range(tasks_per_step))
            self.low += 1

    def num_settled(self, tasks_per_step: int) -> int:
        """Count the settled groups since the run began."""
        return (self.low - 1) * tasks_per_step + len(self.beyond)

    def state_dict(self) -> dict[str, object]:
        """The cursor as JSON types, for a checkpoint."""
        return {"low": self.low, "beyond": sorted(map(list, self.beyond))}

    @classmethod
    def from_state_dict(cls, state: dict[str, object]) -> Cursor:
        """Inverse of `state_dict`."""
        beyond = state["beyond"]
        assert isinstance(beyond, list) and isinstance(state["low"], int)
        return cls(state["low"], {(int(step), int(slot)) for step, slot in beyond})


# ---- sample strategies


class SampleStrategy:
    """Base of the sample strategies: which of the groups that have arrived come first. This base takes the oldest.

    A strategy of your own is a class that overrides `choose`; its arguments are those of `__init__`, given as
    `algorithm.sample_strategy_args`. It must be pure: a function of what it is given, no clock, no random state.

    Example:
        class Freshest(SampleStrategy):
            def choose(self, groups, count, policy_version):
                return sorted(groups, key=lambda group: -group.min_policy_version)[:count]
    """

    sample_strategy: ClassVar[str | None] = None
    """Name in the configuration; None: it is given as package.module.Name, or by its class name in a plug-in folder."""
    follows_schedule: ClassVar[bool] = False
    """Whether batch k may be the k-th run of groups of the schedule instead, where runs must repeat bit by bit."""

    def choose(self, groups: Sequence[Group], count: int, policy_version: int) -> Sequence[Group]:
        """Return `count` of the groups, or fewer while it waits for better ones.

        Args:
            groups: all that wait, by position, at least `count`; some may have failed or be too stale. Those are
                dropped when they are chosen, and leave the batch smaller.
            policy_version: of the weights about to be trained.
        """
        return groups[:count]


@dataclass(frozen=True)
class OldestFirst(SampleStrategy):
    """default: the oldest positions first, whatever their age."""

    sample_strategy = "default"
    follows_schedule = True


@dataclass(frozen=True)
class StalenessControl(OldestFirst):
    """staleness_control: the oldest first, and none that is staler than the bound."""

    sample_strategy = "staleness_control"

    max_staleness: int | None = None
    """The same bound as `synchronizer.max_staleness`, which takes its value from here."""


@dataclass(frozen=True)
class Mix(OldestFirst):
    """mix: the oldest first, beside demonstrations of a dataset (source.py)."""

    sample_strategy = "mix"
    takes_demonstrations: ClassVar[bool] = True

    max_staleness: int | None = None
    expert_data_ratio: float = 0.5
    """Share of demonstrations in a batch, from 0 to below 1."""
    sft_dataset_name: str | None = None
    """The auxiliary buffer they are in."""


SAMPLE_STRATEGIES = read_parts("rftdask.buffer.batches.selection", "sample_strategy")


def make_sample_strategy(config: Config) -> SampleStrategy:
    """Make the sample strategy of the config. Raises: UserError: no such name, or arguments it does not take."""
    name = config.algorithm.sample_strategy
    arguments = fill_from_environment(config.algorithm.sample_strategy_args or {})
    part = find_part("sample strategy", name, SAMPLE_STRATEGIES, config.explorer.plugin_dirs)
    bind_arguments("algorithm.sample_strategy_args", part, arguments)
    strategy: SampleStrategy = part(**arguments)
    # What has arrived depends on the speed of workers, so a choice among it cannot be repeated bit by bit.
    if config.synchronizer.sync_style == "fixed" and not strategy.follows_schedule:
        raise UserError(
            f"algorithm.sample_strategy {name} chooses among the groups that have arrived, and sync_style fixed takes "
            "them in the order of the schedule; use another sync_style, or set follows_schedule = True"
        )
    return strategy


# ---- the rule


@dataclass(frozen=True)
class SampleRule:
    """The rule by which batches are formed.

    ordered: batch k is the k-th run of `groups_per_batch` positions, whatever arrives first, so that a run can be
    repeated bit by bit. Otherwise: of what is there, what the strategy chooses. Either way a group without a trainable
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
    strategy: SampleStrategy = OldestFirst()

    def rejects(self, group: Group, policy_version: int) -> bool:
        """True if weights of this version may not train the group: no row of it may be trained, or it is too stale."""
        if not group.trainable_rows:
            return True
        # By the oldest token of the group: the bound holds for every token that is trained.
        age = staleness(policy_version, group.min_policy_version)
        return self.max_staleness is not None and age > self.max_staleness


def staleness(policy_version: int, min_policy_version: int) -> int:
    """Optimizer steps between the weights that sampled the oldest token and those about to be trained."""
    return policy_version - min_policy_version


def next_positions(cursor: Cursor, count: int, tasks_per_step: int) -> list[Position]:
    """The first `count` positions that are not settled, in order."""
    positions: list[Position] = []
    step = cursor.low
    while len(positions) < count:
        # Ends: only finitely many positions are settled beyond `low`.
        positions.extend(p for slot in range(tasks_per_step) if (p := (step, slot)) not in cursor)
        step += 1
    return positions[:count]


def select_groups(
    waiting: Mapping[Position, Group], cursor: Cursor, policy_version: int, rule: SampleRule, count: int | None = None
) -> Selection | None:
    """Select the groups of the next batch; None while too few are there. Does not change its arguments.

    Args:
        policy_version: the trainer's version now, that is, of the weights about to be trained.
        count: groups to settle in place of `rule.groups_per_batch`, for a partial batch.
    Returns: a Selection whose `use` is empty if every group of the batch has failed or is too stale.
    """
    size = rule.groups_per_batch if count is None else count
    # Before anything is sorted: a waiting trainer asks this often.
    if len(waiting) < size:
        return None
    # Sorted where nothing is prescribed: a strategy is given the oldest first.
    positions = next_positions(cursor, size, rule.tasks_per_step) if rule.ordered else sorted(waiting)
    if any(position not in waiting for position in positions):
        return None
    groups: Sequence[Group] = [waiting[position] for position in positions]
    if not rule.ordered:
        groups = rule.strategy.choose(groups, size, policy_version)
        # The strategy waits for better ones; it is asked again when more have arrived.
        if len(groups) < size:
            return None
    rejected = [group for group in groups if rule.rejects(group, policy_version)]
    return Selection.of((group for group in groups if not rule.rejects(group, policy_version)), rejected)
