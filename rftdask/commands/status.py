"""Status: where a run stands, from its files alone, so also when it is dead or runs elsewhere."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.replay_priority import max_uses
from rftdask.buffer.lineage import lineage_of
from rftdask.buffer.log import open_log
from rftdask.config import Config, load_config
from rftdask.errors import DamagedError
from rftdask.monitor.metrics import read_metrics
from rftdask.run.run_folder import lease_holder, read_run
from rftdask.storage import open_storage
from rftdask.weights.published import CHECKPOINT_POINTER, WEIGHTS_POINTER, read_pointer


@dataclass(frozen=True)
class StageStatus:
    """One stage of a run, as its files tell."""

    name: str
    folder: str
    mode: str
    algorithm: str
    state: str
    """not started, running, or not running (finished, stopped or killed: `step` tells how far it came)."""
    step: int | None = None
    """Newest optimizer step in the ledger."""
    checkpoint: int | None = None
    """Step the run resumes from."""
    published: int | None = None
    """Newest policy version explorers can load."""
    explore_step: int | None = None
    """Newest explore step with a committed shard."""
    sealed: bool = False
    """No more experiences will come."""
    experiences: dict[str, int] = field(default_factory=dict)
    """committed, trained, waiting, and dropped by reason."""
    problems: tuple[str, ...] = ()
    """Broken promises the audit found, or what kept it from counting; empty in a sound run."""
    reward: float | None = None
    accuracy: float | None = None
    roles: dict[str, str] = field(default_factory=dict)
    """Role -> process that works on it now."""
    last_sign_s: float | None = None
    """Seconds since a role last wrote metrics."""


def read_status(url: str) -> list[StageStatus]:
    """The stages of the run in the folder `url`. Raises: DataError: it is no run folder."""
    storage = open_storage(url)
    config = load_config(read_run(storage)["config"])
    return [_stage_status(stage) for stage in config.stage_configs()]


def to_json(stages: list[StageStatus]) -> list[dict[str, Any]]:
    return [asdict(stage) for stage in stages]


def _stage_status(config: Config) -> StageStatus:
    storage = open_storage(config.checkpoint_job_dir)
    name = config.name.rpartition("/")[2]
    base = {"name": name, "folder": storage.url, "mode": config.mode, "algorithm": config.algorithm.algorithm_type}
    if not storage.exists("run.json"):
        return StageStatus(**base, state="not started")
    roles = {
        role: f"process {holder['pid']} on {holder['host']}"
        for role in ("trainer", "explorer")
        if (holder := lease_holder(storage, role)) is not None
    }
    experiences = open_log(storage, config)
    ledger = Ledger(storage, lineage_of(storage))
    shards = experiences.shards()
    audit, damage = None, ""
    if config.algorithm.schema_type == "experience":
        try:
            audit = audit_log(experiences, ledger, config.tasks_per_unit, max_uses(config))
        except DamagedError as error:  # of the books: the rest can be told all the same
            damage = f"the experiences cannot be counted: {error}"
    metrics = read_metrics(storage)
    newest = float(metrics["time_s"].max()) if len(metrics) else None
    return StageStatus(
        **base,
        state="running" if roles else "not running",
        step=ledger.last_step() or None,
        checkpoint=read_pointer(storage, CHECKPOINT_POINTER),
        published=read_pointer(storage, WEIGHTS_POINTER),
        explore_step=max((shard.explore_step for shard in shards), default=None),
        sealed=experiences.sealed_at() is not None,
        experiences={}
        if audit is None
        else {"committed": audit.committed, "trained": audit.trained, "waiting": audit.waiting, **audit.dropped},
        problems=audit.problems if audit is not None else (damage,) * bool(damage),
        reward=_last(metrics, "trainer", "reward"),
        accuracy=_last(metrics, "eval", "accuracy"),
        roles=roles,
        last_sign_s=None if newest is None else max(0.0, time.time() - newest),
    )


def _last(metrics: Any, role: str, name: str) -> float | None:
    if not len(metrics) or name not in metrics:
        return None
    values = metrics[metrics["role"] == role].sort_values("step")[name].dropna()
    return float(values.iloc[-1]) if len(values) else None
