"""Sync styles: which weights an explore step runs with, and when the trainer publishes. Pure rules of counters.

Explore steps and optimizer steps count from 1. Policy version v is the result of optimizer step v; version 0 is the
initial model. When explore step s begins, the experiences of steps 1..s-1 bound the number of optimizer steps that can
have run. No rule requires more than that, so no style deadlocks.

- fixed: both sides count steps, independent of speed. A step runs with exactly the weights that the explore steps up to
  its last boundary, minus `sync_offset`, can have trained. A boundary comes every `explorer_sync_interval` steps.
- explorer_driven: at each boundary the explorer requests newer weights and waits for them; the trainer publishes on
  request.
- trainer_driven: the trainer publishes at its intervals. The explorer takes the newest weights at its boundaries and
  waits only to keep the staleness bound.
- fully_async: like trainer_driven, but every work unit takes the newest weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rftdask.config import Config

DEFAULT_MAX_STALENESS = 4
"""Staleness bound of styles that imply none. Values up to 4 cost no quality (arXiv:2505.24298, table 3)."""

_LONGEST_WALK = 10_000
"""Maximum explore steps to search for the largest staleness of the fixed style."""


class SyncStyle(StrEnum):
    """Values of `synchronizer.sync_style`; see the module docstring."""

    FIXED = "fixed"
    EXPLORER_DRIVEN = "explorer_driven"
    TRAINER_DRIVEN = "trainer_driven"
    FULLY_ASYNC = "fully_async"


@dataclass(frozen=True)
class WeightRequirement:
    """The weights that an explore step needs before it may start."""

    version: int
    """Policy version that must be published."""
    exact: bool
    """True: exactly that version. False: that version or a newer one."""


@dataclass(frozen=True)
class SyncRules:
    """The rules of one run.

    Example: one step off policy
        SyncRules(SyncStyle.FIXED, 1, 1, 1, 32, 32).weights_for(3) == WeightRequirement(1, exact=True)
    """

    style: SyncStyle
    explorer_sync_interval: int
    trainer_sync_interval: int
    sync_offset: int
    experiences_per_step: int
    """Rollouts per explore step: batch_size * repeat_times."""
    train_batch_size: int
    max_staleness: int | None = None

    def weights_for(self, explore_step: int) -> WeightRequirement:
        # The first boundary is at step 1 + sync_offset; steps before the second boundary run on version 0.
        syncs = max(0, explore_step - 1 - self.sync_offset) // self.explorer_sync_interval
        if self.style is SyncStyle.FIXED:
            return WeightRequirement(self._trainable(syncs * self.explorer_sync_interval), exact=True)
        fresh_enough = self._fresh_enough(explore_step)
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            # One more version at each boundary, but never more than the earlier steps can have filled.
            requested = min(syncs, self.num_steps_from(explore_step - 1))
            return WeightRequirement(max(requested, fresh_enough), exact=False)
        return WeightRequirement(fresh_enough, exact=False)

    def takes_newest_at(self, explore_step: int) -> bool:
        """True if the step may switch to the newest weights; otherwise it keeps those of the previous step."""
        if self.style is SyncStyle.FULLY_ASYNC:
            return True
        # Negative before the first boundary, when no newer weights count.
        past = explore_step - 1 - self.sync_offset
        return past >= 0 and past % self.explorer_sync_interval == 0

    def publish_due(self, step: int, published: int, requested: int) -> bool:
        """True if the trainer publishes after `step`, given the last published and the requested version."""
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            # Not before the requested step, and once per request.
            return published < requested <= step
        return step % self.trainer_sync_interval == 0

    def num_steps_from(self, explore_steps: int) -> int:
        """Number of optimizer steps that the experiences of `explore_steps` explore steps fill."""
        return explore_steps * self.experiences_per_step // self.train_batch_size

    def explore_steps_for(self, version: int) -> int:
        """Number of explore steps that must be complete before the batch of optimizer step `version` is full."""
        # Rounded up: an optimizer step needs its whole batch.
        return -(-version * self.train_batch_size // self.experiences_per_step)

    @property
    def staleness_bound(self) -> int:
        """Largest staleness of a trained token."""
        if self.max_staleness is not None:
            return self.max_staleness
        if self.style is SyncStyle.FIXED:
            return self._fixed_staleness()
        # A bound below what the intervals make unavoidable would drop groups of every step.
        return max(DEFAULT_MAX_STALENESS, self.explorer_sync_interval, self._unavoidable_staleness())

    @property
    def smallest_staleness_bound(self) -> int:
        """Tightest bound that never drops a group, whatever the speed of the roles."""
        return self._fixed_staleness() if self.style is SyncStyle.FIXED else self._unavoidable_staleness()

    def _unavoidable_staleness(self) -> int:
        """Staleness of a step's last group if the step starts with the newest version that can exist by then."""
        count, batch = self.experiences_per_step, self.train_batch_size
        # The remainder is a multiple of gcd(count, batch) below one batch; this is its largest value.
        left_over = batch - math.gcd(count, batch)
        return -(-(left_over + count) // batch) - 1 + self.trainer_sync_interval - 1

    def _fixed_staleness(self) -> int:
        """Largest staleness of the fixed style, found by walking one period of its pattern."""
        interval, count = self.explorer_sync_interval, self.experiences_per_step
        batch = self.train_batch_size * self.trainer_sync_interval
        # After `period` explore steps both counters are at a boundary, and the pattern repeats.
        period = interval * (batch // math.gcd(interval * count, batch))
        last = self.sync_offset + 2 * min(period, _LONGEST_WALK)  # the first period begins after the offset
        # The last group of a step is trained latest, but sampled with the weights the step began with.
        return max(self._trained_at(step) - 1 - self.weights_for(step).version for step in range(1, last + 1))

    def _trained_at(self, explore_step: int) -> int:
        """Optimizer step that trains the last group of the explore step, in log order."""
        # Rounded up: the last group may fill its optimizer step only in part.
        return -(-explore_step * self.experiences_per_step // self.train_batch_size)

    def _trainable(self, explore_steps: int) -> int:
        """Newest version at the trainer's intervals once all of `explore_steps` explore steps are trained."""
        return self.num_steps_from(explore_steps) // self.trainer_sync_interval * self.trainer_sync_interval

    def _fresh_enough(self, explore_step: int) -> int:
        """Oldest version whose tokens are within the bound when the last group of the step is trained."""
        # Optimizer step t trains with weights t - 1, so a token of version v has staleness t - 1 - v.
        needed = max(0, self._trained_at(explore_step) - 1 - self.staleness_bound)
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            return min(needed, self.num_steps_from(explore_step - 1))
        # Only multiples of the trainer's interval are published, so round up to the next one.
        rounded_up = -(-needed // self.trainer_sync_interval) * self.trainer_sync_interval
        return min(rounded_up, self._trainable(explore_step - 1))


def make_sync_rules(config: Config) -> SyncRules:
    section = config.synchronizer
    return SyncRules(
        style=SyncStyle(section.sync_style),
        explorer_sync_interval=section.explorer_sync_interval,
        trainer_sync_interval=section.trainer_sync_interval,
        sync_offset=section.sync_offset,
        experiences_per_step=config.buffer.batch_size * config.algorithm.repeat_times,
        train_batch_size=config.num_own_rollouts,
        max_staleness=section.max_staleness,
    )
