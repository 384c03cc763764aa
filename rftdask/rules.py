"""Numbers that several roles derive from the config in the same way. Pure; no role keeps a copy of such a rule."""

from __future__ import annotations

from rftdask.config import Config
from rftdask.config.mixture import demonstrations, num_experts, num_own_rollouts
from rftdask.synchronizer.styles import SyncRules, SyncStyle

__all__ = [
    "TASKS_PER_BATCH",
    "demonstrations",
    "make_sync_rules",
    "num_batches",
    "num_experts",
    "num_own_rollouts",
    "tasks_per_batch",
]

TASKS_PER_BATCH = 64
"""Largest rollout batch by default: some seconds of work, and what a lost worker costs at most."""


def make_sync_rules(config: Config) -> SyncRules:
    """The sync rules of a stage."""
    section = config.synchronizer
    return SyncRules(
        style=SyncStyle(section.sync_style),
        explorer_sync_interval=section.explorer_sync_interval,
        trainer_sync_interval=section.trainer_sync_interval,
        sync_offset=section.sync_offset,
        experiences_per_step=config.buffer.batch_size * config.algorithm.repeat_times,
        train_batch_size=num_own_rollouts(config),
        max_staleness=section.max_staleness,
    )


def tasks_per_batch(config: Config) -> int:
    """Tasks of a rollout batch: as configured, else an even share for every engine, at most TASKS_PER_BATCH."""
    if config.explorer.tasks_per_batch is not None:
        return min(config.explorer.tasks_per_batch, config.buffer.batch_size)
    return min(-(-config.buffer.batch_size // config.explorer.rollout_model.engine_num), TASKS_PER_BATCH)


def num_batches(num_tasks: int, tasks: int) -> int:
    """Rollout batches of `tasks` tasks that hold `num_tasks`."""
    return -(-num_tasks // tasks)
