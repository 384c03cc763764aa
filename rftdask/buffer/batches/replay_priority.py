"""Priority replay: which groups form the next batch if a group may be trained more than once. Pure rules.

Invariants: use counts are a fold over ledger entries and stored nowhere else. A group is reused whole, with exactly the
rows that were trained before, and never once its oldest token is staler than the bound. After k batches at most
k * groups_per_batch fresh groups are settled, as without replay; the explorer relies on this.
Source of the priorities: the replay buffer of Trinity-RFT, with the same config keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rftdask.buffer.batches.ledger import LedgerEntry, Rows
from rftdask.buffer.batches.selection import Cursor, Group, Position, SampleRule, Selection, UsedGroup, next_positions
from rftdask.config import Config, fill_from_environment
from rftdask.config.plugins import bind_arguments, find_part, read_parts

if TYPE_CHECKING:
    import numpy as np

TIME_NOTE = "time_s"
"""Note of a ledger entry: time when it was formed, in Unix seconds. Cooldowns are measured between these times."""


# ---- priority functions


class PriorityFunction(ABC):
    """Base of the priority functions (`replay_buffer.priority_fn`), which decide which groups come first.

    Subclass it and implement `priorities`; `replay_buffer.priority_fn_args` are the arguments of `__init__`.

    Example:
        class Newest(PriorityFunction):
            def priorities(self, versions_N, uses_N, random):
                return versions_N
    """

    priority_fn: ClassVar[str | None] = None
    """Name in the configuration. None: package.module.Name, or the class name if it is in a plug-in folder."""

    @property
    def max_uses(self) -> int | None:
        """Total number of times that a group may be trained; None: no limit."""
        return None

    @abstractmethod
    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Compute the priority of every candidate of a batch; the largest come first, ties in the given order.

        Args:
            versions_N: [N] float64, oldest policy version of each group.
            uses_N: [N] float64, number of times each was trained.
            random: seeded by the run's seed and the step, so a resumed run draws the same numbers.
        Returns: [N] float64.
        """


@dataclass(frozen=True)
class LinearDecay(PriorityFunction):
    """linear_decay: version - decay * uses."""

    priority_fn = "linear_decay"

    decay: float = 2.0
    """Policy versions that each use costs."""

    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return versions_N - self.decay * uses_N


@dataclass(frozen=True)
class DecayLimitRandomization(LinearDecay):
    """decay_limit_randomization: version - decay * uses + sigma * noise, with a limit of uses."""

    priority_fn = "decay_limit_randomization"

    use_count_limit: int | None = 3
    """Total number of times that a group may be trained; None: no limit."""
    sigma: float = 0.0
    """Standard deviation of the noise, in policy versions."""

    @property
    def max_uses(self) -> int | None:
        return self.use_count_limit

    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        values_N = super().priorities(versions_N, uses_N, random)
        return values_N + self.sigma * random.standard_normal(len(values_N)) if self.sigma > 0 else values_N


PRIORITY_FUNCTIONS = read_parts("rftdask.buffer.batches.replay_priority", "priority_fn")


@dataclass(frozen=True)
class Replay:
    """The rule for using groups more than once. Example: Replay(LinearDecay(decay=2.0), reuse_cooldown_s=30.0)"""

    priority_fn: PriorityFunction = LinearDecay()
    reuse_cooldown_s: float | None = None
    """Seconds between the batches of two uses of a group; None: groups are used once, by priority."""
    seed: int = 0
    after_the_end: bool = False
    """True if a batch may consist only of used groups once no fresh ones can come."""

    @property
    def max_uses(self) -> int | None:
        """Most entries that may train one row; None: any number."""
        return 1 if self.reuse_cooldown_s is None else self.priority_fn.max_uses

    def priorities(self, versions: Sequence[int], uses: Sequence[int], step: int) -> np.ndarray:
        """Return the priorities of the candidates of batch `step`, [N] float64.

        The noise is a function of (seed, step) and of the order of the candidates.
        """
        import numpy as np  # late: heavy, and a reader of `max_uses` does not need it

        # Keyed, not advanced: the noise of a step does not depend on how many steps this process has seen.
        key = np.array([self.seed % 2**64, step], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        return self.priority_fn.priorities(np.asarray(versions, np.float64), np.asarray(uses, np.float64), random)


def make_replay(config: Config) -> Replay | None:
    """Make the replay rule of the config; None if it is disabled.

    Raises: UserError: an unknown priority function, or arguments that it does not take.
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
    """Return the most ledger entries that may train one experience; None: any number."""
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
        """Return the oldest entry that matters for the batch of `step`; groups trained before it are too stale.

        A group sampled by version v is trained after step v at the earliest, so the bound limits the fold.
        """
        return self.step + 1 if self._max_staleness is None else max(self.step + 1, step - self._max_staleness)

    def fold(self, entry: LedgerEntry, version_of: Callable[[Rows], int]) -> None:
        """Count the uses in an entry; call in order. version_of: returns the oldest version of some rows of the log."""
        self.step = entry.step
        if self._replay.reuse_cooldown_s is None:
            return
        # Entries of earlier releases have no time, and count as long ago.
        at_s = entry.notes.get(TIME_NOTE, 0.0)
        for rows in (rows for rows in entry.use if not rows.of_dataset):
            # A group is identified by its trained rows: other rows of the same task are another group.
            key = (rows.source, rows.rows)
            group = self._groups.get(key) or UsedGroup(rows.source, rows.rows, version_of(rows), 0, at_s)
            self._groups[key] = replace(group, num_uses=group.num_uses + 1, last_used_s=at_s)
        # Groups that are too old or used up stay so, and are dropped.
        self._groups = {(group.source, group.rows): group for group in self._usable(entry.step)}

    def ready(self, policy_version: int, now_s: float) -> list[UsedGroup]:
        """Return the groups that have cooled down and are within the bounds."""
        return [group for group in self._usable(policy_version) if self._is_cool(group, now_s)]

    def is_cooling(self, policy_version: int, now_s: float) -> bool:
        """Return True if more groups become ready by waiting."""
        return any(not self._is_cool(group, now_s) for group in self._usable(policy_version))

    def _usable(self, policy_version: int) -> list[UsedGroup]:
        """Return the groups within the bounds of staleness and uses, cool or not; their order depends on the ledger."""
        oldest = None if self._max_staleness is None else policy_version - self._max_staleness
        limit = self._replay.priority_fn.max_uses
        groups = (self._groups[key] for key in sorted(self._groups))
        return [
            group
            for group in groups
            if (oldest is None or group.min_policy_version >= oldest) and (limit is None or group.num_uses < limit)
        ]

    def _is_cool(self, group: UsedGroup, now_s: float) -> bool:
        # A negative difference counts as cool: a clock that was set back must not block a group.
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
    """Select the groups of the next batch by priority among fresh and used ones; None while there are too few.

    A fresh group that failed or is too stale is settled first and takes the place of a fresh one; only used groups may
    fill the gap. With an ordered rule, the fresh candidates are the next positions.
    Args: as `select_groups`; used: in a fixed order.
    """
    import numpy as np  # late: as above

    wanted = rule.groups_per_batch if count is None else count
    positions = next_positions(cursor, wanted, rule.tasks_per_step) if rule.ordered else sorted(waiting)
    if any(position not in waiting for position in positions):
        return None
    fresh = [waiting[position] for position in positions]
    # A group that is rejected now would be rejected by every later batch, so it is settled at once.
    unusable = [group for group in fresh if rule.rejects(group, policy_version)][:wanted]
    good = [group for group in fresh if not rule.rejects(group, policy_version)]
    versions = [group.min_policy_version for group in good] + [group.min_policy_version for group in used]
    uses = [0] * len(good) + [group.num_uses for group in used]
    # Fresh groups first, then used ones, both in a fixed order: the noise is drawn by index.
    values = replay.priorities(versions, uses, step=policy_version + 1)
    taken: list[int] = []
    places_of_fresh = wanted - len(unusable)
    for number in np.argsort(-values, kind="stable").tolist():
        is_fresh = number < len(good)
        # Without this bound a batch could settle more fresh groups than the explorer expects.
        if len(taken) < wanted and (places_of_fresh or not is_fresh):
            places_of_fresh -= is_fresh
            taken.append(number)
    if len(taken) + len(unusable) < wanted:
        return None
    taken.sort()  # fresh groups by position, then used ones
    reuse = [used[number - len(good)] for number in taken if number >= len(good)]
    return Selection.of([good[number] for number in taken if number < len(good)], unusable, reuse)
