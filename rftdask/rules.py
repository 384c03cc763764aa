"""Numbers that several roles derive from the config in the same way. Pure; no role keeps a copy of such a rule."""

from __future__ import annotations

from rftdask.buffer.batches.backpressure import UnreadLimit
from rftdask.buffer.batches.replay_priority import ReplayRule
from rftdask.config import Config
from rftdask.config.mixture import demonstrations, num_experts, num_own_rollouts
from rftdask.synchronizer.styles import SyncRules, SyncStyle

__all__ = [
    "TASKS_PER_BATCH",
    "demonstrations",
    "explorer_workers",
    "make_sync_rules",
    "max_uses",
    "num_batches",
    "num_experts",
    "num_own_rollouts",
    "replay_rule",
    "tasks_per_batch",
    "train_step_limit",
    "unread_limit",
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
    """Tasks of a rollout batch: as configured, else an even share for every engine that there may be, at most
    TASKS_PER_BATCH.
    """
    if config.explorer.tasks_per_batch is not None:
        return min(config.explorer.tasks_per_batch, config.buffer.batch_size)
    return min(-(-config.buffer.batch_size // explorer_workers(config)[1]), TASKS_PER_BATCH)


def explorer_workers(config: Config) -> tuple[int, int]:
    """Fewest and most explorer workers of a stage."""
    explorer, usual = config.explorer, config.explorer.rollout_model.engine_num
    fewest = explorer.min_workers or min(usual, explorer.max_workers or usual)
    return fewest, explorer.max_workers or max(usual, fewest)


def num_batches(num_tasks: int, tasks: int) -> int:
    """Rollout batches of `tasks` tasks that hold `num_tasks`."""
    return -(-num_tasks // tasks)


_DEFAULT_USES = 3
"""Of decay_limit_randomization, as in the reference."""


def replay_rule(config: Config) -> ReplayRule | None:
    """How groups are used more than once; None without a replay buffer."""
    section = config.buffer.trainer_input.experience_buffer.replay_buffer
    if not section.enable:
        return None
    args = section.priority_fn_args
    limited = section.priority_fn == "decay_limit_randomization"
    return ReplayRule(
        decay=float(args.get("decay", 2.0)),
        use_count_limit=int(args.get("use_count_limit", _DEFAULT_USES)) if limited else None,
        sigma=float(args.get("sigma", 0.0)) if limited else 0.0,
        reuse_cooldown_s=section.reuse_cooldown_time,
        seed=config.seed,
        after_the_end=config.trainer.total_steps is not None,
    )


def max_uses(config: Config) -> int | None:
    """Most ledger entries that may train one experience; None: any number."""
    rule = replay_rule(config)
    return 1 if rule is None else rule.max_uses


def unread_limit(config: Config) -> UnreadLimit | None:
    """How much may lie unread before explorers are held back; None: nothing holds them but the sync style."""
    section = config.buffer.trainer_input.experience_buffer
    if config.mode != "both" or (section.capacity is None and section.max_unread_bytes is None):
        return None
    return UnreadLimit(section.capacity, section.max_unread_bytes, always=num_own_rollouts(config))


def train_step_limit(config: Config, planned: int | None) -> int | None:
    """After how many steps the trainer ends; None: when the experiences do.

    planned: steps of whole batches that the experiences fill. Partial batches need more of them, and so may replay.
    """
    if config.algorithm.schema_type != "experience":
        return planned
    if replay_rule(config) is not None or config.synchronizer.sync_style != SyncStyle.FIXED:
        return config.trainer.total_steps
    return planned
