"""Simulation of explorer and trainer as two counters that wait for each other by the real rules, in random order.

A work unit is one group; an explore step begins when its required weights are published; up to `window` steps run at
once and commit in any order. There is no clock: a simulation ends when all work is done or when neither side can move,
which is a deadlock. Deadlines for partial batches expire at random, but never so that they hide a deadlock.
"""

import random
from dataclasses import dataclass, field

from rftdask.buffer.batches.backpressure import UnreadLimit
from rftdask.buffer.batches.ledger import LedgerEntry, Rows
from rftdask.buffer.batches.replay_priority import Replay, UseCounts, select_with_reuse
from rftdask.buffer.batches.selection import Cursor, Group, Position, SampleRule, Selection, select_groups, staleness
from rftdask.synchronizer.styles import SyncRules, SyncStyle
from tests.numerics import shifted_seed


@dataclass
class Outcome:
    train_steps: int = 0
    max_staleness: int = 0
    num_stale_groups: int = 0
    num_empty_batches: int = 0
    num_partial_batches: int = 0
    num_reused_groups: int = 0
    max_unread_groups: int = 0
    """Most groups that waited unread before a step began."""
    settled: list[Position] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Versions of the explore steps, in order."""
    stuck: str = ""


class Simulation:
    def __init__(
        self,
        rules: SyncRules,
        *,
        repeat_times: int,
        explore_steps: int,
        seed: int,
        window: int = 2,
        empty_share: float = 0.0,
        sampling_ahead: bool = True,
        partial_share: float = 0.0,
        replay: Replay | None = None,
        unread_limit: UnreadLimit | None = None,
    ) -> None:
        """
        Args:
            empty_share: share of groups whose rollouts all fail.
            sampling_ahead: False: the explorer moves only when it must.
            partial_share: share of moves before which the trainer's deadline passes.
            unread_limit: backpressure limit, in groups.
        """
        self.rules = rules
        self.random = random.Random(shifted_seed(seed))
        self.explore_steps = explore_steps
        self.window = window
        self.empty_share = empty_share
        self.sampling_ahead = sampling_ahead
        self.partial_share = partial_share
        self.replay = replay
        self.unread_limit = unread_limit
        self.rule = SampleRule(
            groups_per_batch=rules.train_batch_size // repeat_times,
            tasks_per_step=rules.experiences_per_step // repeat_times,
            ordered=rules.style is SyncStyle.FIXED,
            max_staleness=rules.staleness_bound,
        )
        self.train_steps = rules.num_steps_from(explore_steps)
        self.open: list[Position] = []
        self.version_of: dict[int, int] = {}
        self.waiting: dict[Position, Group] = {}
        self.cursor = Cursor()
        self.published = self.requested = self.pinned = self.next_step = 0
        self.uses = UseCounts(replay or Replay(), rules.staleness_bound)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        until_the_data_ends = bool(self.partial_share) or self.replay is not None
        while until_the_data_ends or self.outcome.train_steps < self.train_steps:
            if self.random.random() < self.partial_share:
                self.train_full_batches()
            moves = [self.begin_step, self.commit, self.train]
            self.random.shuffle(moves)
            if not self.sampling_ahead:
                moves.sort(key=lambda move: move == self.begin_step)
            if not any(move() for move in moves):
                if self.next_step == self.explore_steps and not self.open:
                    self.train_remainder()
                    break  # the log is sealed, and the waiting groups do not fill a batch
                self.outcome.stuck = (
                    f"explorer before step {self.next_step + 1}, trainer after {self.outcome.train_steps}, "
                    f"published {self.published}, waiting {len(self.waiting)}"
                )
                break
        self.outcome.versions = [self.version_of[step] for step in sorted(self.version_of)]
        return self.outcome

    def begin_step(self) -> bool:
        step = self.next_step + 1
        if step > self.explore_steps or len({s for s, _ in self.open}) >= self.window or not self.has_room(step):
            return False
        required = self.rules.weights_for(step)
        if self.rules.style is SyncStyle.EXPLORER_DRIVEN and required.version > self.published:
            self.requested = max(self.requested, required.version)
            self.publish_if_due()
        if required.version > self.published:
            return False
        if self.rules.takes_newest_at(step):
            self.pinned = self.published
        self.pinned = max(self.pinned, required.version)
        self.version_of[step] = required.version if required.exact else self.pinned
        self.next_step = step
        self.open += [(step, slot) for slot in range(self.rule.tasks_per_step)]
        return True

    def has_room(self, step: int) -> bool:
        if self.unread_limit is None:
            return True
        unread = (step - 1) * self.rule.tasks_per_step - self.cursor.num_settled(self.rule.tasks_per_step)
        if not self.unread_limit.admits(unread, mean_bytes=100.0):
            return False
        self.outcome.max_unread_groups = max(self.outcome.max_unread_groups, unread)
        return True

    def commit(self) -> bool:
        if not self.open:
            return False
        position = self.open.pop(self.random.randrange(len(self.open)))
        rows = () if self.random.random() < self.empty_share else (0,)
        self.waiting[position] = Group(position, "shard", rows, min_policy_version=self.version_of[position[0]])
        return True

    def train(self) -> bool:
        if self.replay is not None and not (self.waiting or self.open or self.next_step < self.explore_steps):
            return False  # used groups do not form a batch then
        return self.settle(self.select())

    def train_full_batches(self) -> None:
        count = min(len(self.waiting), self.rule.groups_per_batch)
        selection = self.select(count) if count and not self.rule.ordered else None
        if selection is not None and (selection.use or selection.reuse):
            self.outcome.num_partial_batches += 1
            self.settle(selection)

    def train_remainder(self) -> None:
        num_groups, size = self.explore_steps * self.rule.tasks_per_step, self.rule.groups_per_batch
        left = num_groups - num_groups % size - self.cursor.num_settled(self.rule.tasks_per_step)
        if left > 0:
            self.settle(self.select(left))

    def select(self, count: int | None = None) -> Selection | None:
        version = self.outcome.train_steps
        if self.replay is None:
            return select_groups(self.waiting, self.cursor, version, self.rule, count)
        used = self.uses.ready(version, now_s=0.0)
        return select_with_reuse(self.waiting, used, self.cursor, version, self.rule, self.replay, count)

    def settle(self, selection: Selection | None) -> bool:
        if selection is None:
            return False
        version = self.outcome.train_steps
        assert len(set(selection.settled)) == len(selection.settled) <= self.rule.groups_per_batch
        self.outcome.settled += selection.settled
        self.outcome.num_empty_batches += not (selection.use or selection.reuse)
        self.outcome.num_stale_groups += len(selection.stale)
        self.outcome.num_reused_groups += len(selection.reuse)
        ages = [staleness(version, group.min_policy_version) for group in selection.use]
        ages += [staleness(version, group.min_policy_version) for group in selection.reuse]
        self.outcome.max_staleness = max([self.outcome.max_staleness, *ages])
        use = [Rows(str(group.position), (group.min_policy_version,)) for group in selection.use]
        use += [Rows(group.source, group.rows) for group in selection.reuse]
        self.uses.fold(LedgerEntry(version + 1, "main", tuple(use)), lambda rows: rows.rows[0])
        for position in selection.settled:
            del self.waiting[position]
        self.cursor.settle(selection.settled, self.rule.tasks_per_step)
        self.outcome.train_steps += 1
        self.publish_if_due()
        return True

    def publish_if_due(self) -> None:
        step = self.outcome.train_steps
        if self.published < step and self.rules.publish_due(step, self.published, self.requested):
            self.published = step
