"""Priority replay: which groups make the next batch when a group may be trained more than once. Pure rules.

Invariants: use counts are a fold over ledger entries and kept nowhere else; a group is used again whole, the very rows
that were trained before; none is used once its oldest token is staler than the bound. After k batches at most
k * groups_per_batch fresh groups are settled, so what the explorer may count on holds as without replay.
Source of the priorities: the replay buffer of Trinity-RFT, whose config keys they have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rftdask.buffer.batches.ledger import LedgerEntry, Rows
from rftdask.buffer.batches.selection import Cursor, Group, Position, SampleRule, Selection, UsedGroup, next_positions
from rftdask.config import Config, fill_from_environment
from rftdask.config.plugins import bind_arguments, find_part, read_parts

TIME_NOTE = "time_s"
"""Note of a ledger entry: when it was formed, in Unix seconds. Cooldowns are measured between such stamps."""


# ---- priority functions


class PriorityFunction(ABC):
    """Base of the priority functions (`replay_buffer.priority_fn`): which groups come first.

    A function of your own is a class with `priorities`; its arguments are those of `__init__`, given as
    `replay_buffer.priority_fn_args`.

    Example:
        class Newest(PriorityFunction):
            def priorities(self, versions_N, uses_N, random):
                return versions_N
    """

    priority_fn: ClassVar[str | None] = None
    """Name in the configuration; None: it is given as package.module.Name, or by its class name in a plug-in folder."""

    @property
    def max_uses(self) -> int | None:
        """Times that a group may be trained in all; None: no limit."""
        return None

    @abstractmethod
    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Compute the priority of every candidate of a batch; the largest come first, equal ones in their order.

        Args:
            versions_N: [N] float64, oldest policy version of each group.
            uses_N: [N] float64, how often each was trained.
            random: of this batch: a function of the run's seed and the step, so a resumed run draws the same.
        Returns: [N] float64.
        """


@dataclass(frozen=True)
class LinearDecay(PriorityFunction):
    """linear_decay: version - decay * uses."""

    priority_fn = "linear_decay"

    decay: float = 2.0
    """Policy versions that a use costs."""

    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """See PriorityFunction; [N] version - decay * uses."""
        return versions_N - self.decay * uses_N


@dataclass(frozen=True)
class DecayLimitRandomization(LinearDecay):
    """decay_limit_randomization: version - decay * uses + sigma * noise, and a limit of uses."""

    priority_fn = "decay_limit_randomization"

    use_count_limit: int | None = 3
    """Times that a group is trained in all; None: no limit."""
    sigma: float = 0.0
    """Standard deviation of the noise, in policy versions."""

    @property
    def max_uses(self) -> int | None:
        """See PriorityFunction."""
        return self.use_count_limit

    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """See PriorityFunction; [N] version - decay * uses, with noise of `sigma` versions."""
        values_N = super().priorities(versions_N, uses_N, random)
        return values_N + self.sigma * random.standard_normal(len(values_N)) if self.sigma > 0 else values_N


PRIORITY_FUNCTIONS = read_parts("rftdask.buffer.batches.replay_priority", "priority_fn")


@dataclass(frozen=True)
class Replay:
    """The rule by which groups are used more than once.

    Example: Replay(LinearDecay(decay=2.0), reuse_cooldown_s=30.0)
    """

    priority_fn: PriorityFunction = LinearDecay()
    reuse_cooldown_s: float | None = None
    """Seconds between the batches of two uses of a group; None: groups are used once, by priority."""
    seed: int = 0
    after_the_end: bool = False
    """Whether used groups alone may make a batch when no fresh one can come any more."""

    @property
    def max_uses(self) -> int | None:
        """Most entries that may train one row; None: any number."""
        return 1 if self.reuse_cooldown_s is None else self.priority_fn.max_uses

    def priorities(self, versions: Sequence[int], uses: Sequence[int], step: int) -> np.ndarray:
        """[N] float64 of the candidates of batch `step`; the noise is a function of (seed, step) and of their order."""
        # Philox is keyed, not advanced: the noise of a step does not depend on how many steps this process has seen.
        key = np.array([self.seed % 2**64, step], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        return self.priority_fn.priorities(np.asarray(versions, np.float64), np.asarray(uses, np.float64), random)


def make_replay(config: Config) -> Replay | None:
    """Make the replay buffer of the config; None without one.

    Raises: UserError: there is no such priority function, or it does not take the arguments.
    """
    section = config.buffer.trainer_input.experience_buffer.replay_buffer
    if not section.enable:
        return None
    part = find_part("priority function", section.priority_fn, PRIORITY_FUNCTIONS, config.explorer.plugin_dirs)
    where = "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args"
    arguments = fill_from_environment(section.priority_fn_args)
    bind_arguments(where, part, arguments)
    return Replay(
        part(**arguments),
        reuse_cooldown_s=section.reuse_cooldown_time,
        seed=config.seed,
        after_the_end=config.trainer.total_steps is not None,
    )


def max_uses(config: Config) -> int | None:
    """Most ledger entries that may train one experience; None: any number."""
    replay = make_replay(config)
    return 1 if replay is None else replay.max_uses


# ---- use counts


class UseCounts:
    """The groups that may be used again, folded from the ledger.

    Example:
        for step in range(uses.first_step(9), 9): uses.fold(ledger.read(step), version_of)
        uses.ready(policy_version=8, now_s=clock())
    """

    def __init__(self, replay: Replay, max_staleness: int | None) -> None:
        self._replay = replay
        self._max_staleness = max_staleness
        self._groups: dict[tuple[str, tuple[int, ...]], UsedGroup] = {}
        self.step = 0
        """The last entry folded in."""

    def first_step(self, step: int) -> int:
        """The oldest entry that matters for the batch of `step`: what was trained before it is too stale by now.

        A group sampled by version v is trained after step v at the earliest, therefore the bound limits the fold.
        """
        return self.step + 1 if self._max_staleness is None else max(self.step + 1, step - self._max_staleness)

    def fold(self, entry: LedgerEntry, version_of: Callable[[Rows], int]) -> None:
        """Count the uses in an entry; entries come in order. version_of: oldest version of some rows of the log."""
        self.step = entry.step
        if self._replay.reuse_cooldown_s is None:
            return
        # An entry of an earlier version has no stamp, and counts as long ago.
        at_s = entry.notes.get(TIME_NOTE, 0.0)
        for rows in (rows for rows in entry.use if not rows.of_dataset):
            # A group is the very rows that were trained: if a filter took others another time, that is another group.
            key = (rows.source, rows.rows)
            # The version is read from the shard once, at the first use.
            group = self._groups.get(key) or UsedGroup(rows.source, rows.rows, version_of(rows), 0, at_s)
            self._groups[key] = replace(group, num_uses=group.num_uses + 1, last_used_s=at_s)
        # What is too old or used up by now stays so: the fold holds no more than may still be trained.
        self._groups = {(group.source, group.rows): group for group in self._usable(entry.step)}

    def ready(self, policy_version: int, now_s: float) -> list[UsedGroup]:
        """Return those that have cooled down and are within the bounds."""
        return [group for group in self._usable(policy_version) if self._is_cool(group, now_s)]

    def is_cooling(self, policy_version: int, now_s: float) -> bool:
        """True if waiting would make more of them ready."""
        return any(not self._is_cool(group, now_s) for group in self._usable(policy_version))

    def _usable(self, policy_version: int) -> list[UsedGroup]:
        """Those within the bounds of staleness and of uses, cool or not, in an order that the ledger alone decides."""
        oldest = None if self._max_staleness is None else policy_version - self._max_staleness
        limit = self._replay.priority_fn.max_uses
        groups = (self._groups[key] for key in sorted(self._groups))
        return [
            group
            for group in groups
            if (oldest is None or group.min_policy_version >= oldest) and (limit is None or group.num_uses < limit)
        ]

    def _is_cool(self, group: UsedGroup, now_s: float) -> bool:
        # Written so that a clock that was set back cannot keep a group for longer than its cooldown from then on.
        return not 0.0 <= now_s - group.last_used_s < (self._replay.reuse_cooldown_s or 0.0)


def select_with_reuse(
    waiting: Mapping[Position, Group],
    used: Sequence[UsedGroup],
    cursor: Cursor,
    policy_version: int,
    rule: SampleRule,
    replay: Replay,
    count: int | None = None,
) -> Selection | None:
    """Select the groups of the next batch by priority, fresh ones and used ones; None while too few are there.

    A fresh group that failed or is too stale is settled first and takes the place of a fresh one; only used groups may
    fill that place. In order, the fresh candidates are those positions that are next, whatever else is there.
    Args: as of `select_groups`; used: in a fixed order.
    """
    wanted = rule.groups_per_batch if count is None else count
    positions = next_positions(cursor, wanted, rule.tasks_per_step) if rule.ordered else sorted(waiting)
    if any(position not in waiting for position in positions):
        return None
    fresh = [waiting[position] for position in positions]
    # What is rejected now would be rejected by every later batch too, so it is settled at once.
    unusable = [group for group in fresh if rule.rejects(group, policy_version)][:wanted]
    good = [group for group in fresh if not rule.rejects(group, policy_version)]
    versions = [group.min_policy_version for group in good] + [group.min_policy_version for group in used]
    uses = [0] * len(good) + [group.num_uses for group in used]
    # Fresh groups first, then used ones, both in a fixed order: the noise is drawn by place.
    values = replay.priorities(versions, uses, step=policy_version + 1)
    # Down the list by priority, until the batch is full.
    taken: list[int] = []
    places_of_fresh = wanted - len(unusable)
    for number in np.argsort(-values, kind="stable").tolist():
        is_fresh = number < len(good)
        # Without this bound a batch could settle more fresh groups than the explorer counts on.
        if len(taken) < wanted and (places_of_fresh or not is_fresh):
            places_of_fresh -= is_fresh
            taken.append(number)
    if len(taken) + len(unusable) < wanted:
        return None
    taken.sort()  # fresh groups by position, then used ones
    reuse = [used[number - len(good)] for number in taken if number >= len(good)]
    return Selection.of([good[number] for number in taken if number < len(good)], unusable, reuse)
