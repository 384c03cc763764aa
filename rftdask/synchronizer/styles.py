"""Sync styles: which weights an explore step runs with, and when the trainer publishes. Pure rules of counters.

Explore steps and optimizer steps count from 1; policy version v is what optimizer step v leaves behind, version 0 the
start. Explore step s can at best have behind it the optimizer steps that the experiences of steps 1..s-1 fill; no rule
asks for more, so no style can wait for itself.

- fixed: both sides count, whatever the speed of either. A step runs with exactly the weights that the explore steps up
  to its last boundary, less `sync_offset` of them, can have trained. Boundaries come every `explorer_sync_interval`
  steps.
- explorer_driven: at each of its boundaries the explorer asks for newer weights and waits for them; the trainer
  publishes when asked.
- trainer_driven: the trainer publishes at its intervals; the explorer takes the newest at its boundaries and waits only
  for staleness.
- fully_async: as trainer_driven, and every work unit takes the newest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rftdask.config import Config

DEFAULT_MAX_STALENESS = 4
"""Bound where the style implies none: up to 4 costs no quality in the field's ablations (arXiv:2505.24298, table 3)."""

_LONGEST_WALK = 10_000
"""Explore steps after which the search for the largest staleness of the fixed style gives up on a longer period."""


class SyncStyle(StrEnum):
    """Values of `synchronizer.sync_style`; see the module's text."""

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
    """True: run with exactly that version; False: with it or any newer."""


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
    """Number of rollouts of one explore step: batch_size * repeat_times."""
    train_batch_size: int
    max_staleness: int | None = None

    def weights_for(self, explore_step: int) -> WeightRequirement:
        """The weights that the step needs before it may start."""
        # Boundaries passed: the first is at step 1 + sync_offset, and until the second one the steps run on version 0.
        syncs = max(0, explore_step - 1 - self.sync_offset) // self.explorer_sync_interval
        if self.style is SyncStyle.FIXED:
            return WeightRequirement(self._trainable(syncs * self.explorer_sync_interval), exact=True)
        fresh_enough = self._fresh_enough(explore_step)
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            # One more version at each boundary; never one that the steps before cannot have filled.
            requested = min(syncs, self.num_steps_from(explore_step - 1))
            return WeightRequirement(max(requested, fresh_enough), exact=False)
        return WeightRequirement(fresh_enough, exact=False)

    def takes_newest_at(self, explore_step: int) -> bool:
        """True if the step may move on to the newest weights; else it stays with those of the step before."""
        if self.style is SyncStyle.FULLY_ASYNC:
            return True
        # Negative before the first boundary: there are no newer weights that the rule would count.
        past = explore_step - 1 - self.sync_offset
        return past >= 0 and past % self.explorer_sync_interval == 0

    def publish_due(self, step: int, published: int, requested: int) -> bool:
        """True if the trainer publishes after `step`, given the last published version and the requested one."""
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            # Not before the step that was asked for, and once for each request.
            return published < requested <= step
        return step % self.trainer_sync_interval == 0

    def num_steps_from(self, explore_steps: int) -> int:
        """Number of optimizer steps that the experiences of so many explore steps fill."""
        return explore_steps * self.experiences_per_step // self.train_batch_size

    def explore_steps_for(self, version: int) -> int:
        """Number of explore steps that must be complete before optimizer step `version` has its batch."""
        # Rounded up: an optimizer step needs its whole batch.
        return -(-version * self.train_batch_size // self.experiences_per_step)

    @property
    def staleness_bound(self) -> int:
        """Largest staleness of a token that is trained."""
        if self.max_staleness is not None:
            return self.max_staleness
        if self.style is SyncStyle.FIXED:
            return self._fixed_staleness()
        # At least what the intervals make unavoidable: a bound below it would set aside groups of every step.
        return max(DEFAULT_MAX_STALENESS, self.explorer_sync_interval, self._unavoidable_staleness())

    @property
    def smallest_staleness_bound(self) -> int:
        """Tightest bound that sets no group aside whatever the roles do."""
        return self._fixed_staleness() if self.style is SyncStyle.FIXED else self._unavoidable_staleness()

    def _unavoidable_staleness(self) -> int:
        """Staleness of a step's last group when it begins with all that the steps before it can have published."""
        count, batch = self.experiences_per_step, self.train_batch_size
        # What is left over is always a multiple of gcd(count, batch) and less than a batch.
        left_over = batch - math.gcd(count, batch)  # most experiences that the steps before leave without a batch
        return -(-(left_over + count) // batch) - 1 + self.trainer_sync_interval - 1

    def _fixed_staleness(self) -> int:
        """The largest staleness of the fixed style, by walking one period of its pattern."""
        interval, count = self.explorer_sync_interval, self.experiences_per_step
        batch = self.train_batch_size * self.trainer_sync_interval
        # After so many explore steps both counters are at a boundary together, and the pattern repeats.
        period = interval * (batch // math.gcd(interval * count, batch))
        last = self.sync_offset + 2 * min(period, _LONGEST_WALK)  # the first period begins after the offset
        # Last of a step's groups: it is trained latest, with the weights the whole step began with.
        return max(self._trained_at(step) - 1 - self.weights_for(step).version for step in range(1, last + 1))

    def _trained_at(self, explore_step: int) -> int:
        """Optimizer step that trains the last group of the explore step, in order."""
        # Rounded up: the last group is trained by the step that its experiences fill only in part.
        return -(-explore_step * self.experiences_per_step // self.train_batch_size)

    def _trainable(self, explore_steps: int) -> int:
        """Newest version published by the trainer's own intervals once it has trained all of so many explore steps."""
        return self.num_steps_from(explore_steps) // self.trainer_sync_interval * self.trainer_sync_interval

    def _fresh_enough(self, explore_step: int) -> int:
        """The oldest version whose tokens are still within the bound when the last group of the step is trained."""
        # Optimizer step t trains with weights t - 1, so a token of version v has staleness t - 1 - v.
        needed = max(0, self._trained_at(explore_step) - 1 - self.staleness_bound)
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            return min(needed, self.num_steps_from(explore_step - 1))
        # Only multiples of the trainer's interval are published; the next one above is the oldest that will do.
        rounded_up = -(-needed // self.trainer_sync_interval) * self.trainer_sync_interval
        return min(rounded_up, self._trainable(explore_step - 1))


def make_sync_rules(config: Config) -> SyncRules:
    """The sync rules of a stage."""
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
