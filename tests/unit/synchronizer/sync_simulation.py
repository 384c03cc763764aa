"""Explorer and trainer as two counters that wait for each other by the real rules, in an order drawn at random.

It stands for the roles: a rollout batch is one group here, an explore step begins when its admission is published, and
up to `window` steps are under way at once and commit in any order. There is no clock: a simulation ends when all is
done or when neither side can move, which is a deadlock.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rftdask.buffer.sampling import Cursor, Group, Position, SampleRule, select_groups, staleness
from rftdask.synchronizer.styles import SyncRules, SyncStyle


@dataclass
class Outcome:
    train_steps: int = 0
    max_staleness: int = 0
    num_stale_groups: int = 0
    num_empty_batches: int = 0
    versions: list[int] = field(default_factory=list)
    """Version that each explore step ran with, in order."""
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
    ) -> None:
        """empty_share: of groups whose rollouts all fail; sampling_ahead False: the explorer moves when it must."""
        self.rules = rules
        self.random = random.Random(seed)
        self.explore_steps = explore_steps
        self.window = window
        self.empty_share = empty_share
        self.sampling_ahead = sampling_ahead
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
        self.outcome = Outcome()

    def run(self) -> Outcome:
        while self.outcome.train_steps < self.train_steps:
            moves = [self.begin_step, self.commit, self.train]
            self.random.shuffle(moves)
            if not self.sampling_ahead:
                moves.sort(key=lambda move: move == self.begin_step)
            if not any(move() for move in moves):
                if self.next_step == self.explore_steps:
                    break  # the log is sealed and what waits is less than a batch
                self.outcome.stuck = (
                    f"explorer before step {self.next_step + 1}, trainer after {self.outcome.train_steps}, "
                    f"published {self.published}, waiting {len(self.waiting)}"
                )
                break
        self.outcome.versions = [self.version_of[step] for step in sorted(self.version_of)]
        return self.outcome

    def begin_step(self) -> bool:
        step = self.next_step + 1
        if step > self.explore_steps or len({s for s, _ in self.open}) >= self.window:
            return False
        admission = self.rules.admit(step)
        if self.rules.style is SyncStyle.EXPLORER_DRIVEN and admission.version > self.published:
            self.requested = max(self.requested, admission.version)
            self.publish_if_due()
        if admission.version > self.published:
            return False
        if self.rules.takes_newest_at(step):
            self.pinned = self.published
        self.pinned = max(self.pinned, admission.version)
        self.version_of[step] = admission.version if admission.exact else self.pinned
        self.next_step = step
        self.open += [(step, slot) for slot in range(self.rule.tasks_per_step)]
        return True

    def commit(self) -> bool:
        if not self.open:
            return False
        position = self.open.pop(self.random.randrange(len(self.open)))
        rows = () if self.random.random() < self.empty_share else (0,)
        self.waiting[position] = Group(position, "shard", rows, min_policy_version=self.version_of[position[0]])
        return True

    def train(self) -> bool:
        version = self.outcome.train_steps
        selection = select_groups(self.waiting, self.cursor, version, self.rule)
        if selection is None:
            return False
        assert len(set(selection.settled)) == len(selection.settled)
        self.outcome.num_empty_batches += not selection.use
        self.outcome.num_stale_groups += len(selection.stale)
        ages = [staleness(version, group.min_policy_version) for group in selection.use]
        self.outcome.max_staleness = max([self.outcome.max_staleness, *ages])
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
