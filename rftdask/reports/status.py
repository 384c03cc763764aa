"""Status: where a run stands, from its files alone, so also when it is dead or runs elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from rftdask.errors import DamagedError
from rftdask.reports.run_reader import Stage, open_stages, tell_use
from rftdask.run.lease import lease_holders
from rftdask.synchronizer.published import CHECKPOINT_POINTER, WEIGHTS_POINTER, read_pointer


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
    warnings: tuple[str, ...] = ()
    """Why it learns nothing, a line each; see `monitor.explain`."""
    reward: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None
    """Newest loss on held-out rows."""
    auxiliary: dict[str, dict[str, float]] = field(default_factory=dict)
    """Auxiliary model -> its calls, failures, tokens and cost."""
    roles: dict[str, str] = field(default_factory=dict)
    """Role -> process that works on it now."""
    last_sign_s: float | None = None
    """Seconds since a role last wrote metrics."""

    def render(self) -> str:
        """One line of what it is, and one for each thing that is known of it."""
        lines = [f"{self.name}  {self.mode}  {self.algorithm}  {self.state}  {self.folder}"]
        if self.state == "not started":
            return lines[0]
        checkpoint, published = self.checkpoint or "none", self.published or "none"
        counts = ", ".join(f"{number:,} {name}" for name, number in self.experiences.items())
        complete = ", complete" if self.sealed else ""
        facts = {
            "step": f"{self.step or 0} in the ledger, checkpoint {checkpoint}, published {published}",
            "explored": f"{self.explore_step or 0} steps{complete}; {counts}" if counts else "",
            "reward": "" if self.reward is None else f"{self.reward:.3f}",
            "accuracy": "" if self.accuracy is None else f"{self.accuracy:.1%}",
            "eval loss": "" if self.eval_loss is None else f"{self.eval_loss:.4g}",
            "auxiliary": "; ".join(f"{name}: {tell_use(use)}" for name, use in self.auxiliary.items()),
            "roles": ", ".join(f"{role}: {who}" for role, who in self.roles.items()),
            "last sign": "" if self.last_sign_s is None else f"{self.last_sign_s:.0f} s ago",
            "PROBLEMS": "; ".join(self.problems),
        }
        # What is not known, or not of this mode, has no line.
        lines += [f"  {label:<12}{text}" for label, text in facts.items() if text]
        return "\n".join([*lines, *(f"  {'WARNING':<12}{warning}" for warning in self.warnings)])


def read_status(url: str) -> list[StageStatus]:
    """The stages of the run in the folder `url`. Raises: DataError: it is no run folder."""
    return [stage_status(stage) for stage in open_stages(url)]


def stage_status(stage: Stage) -> StageStatus:
    """Where one stage stands, by its files alone."""
    storage, config = stage.storage, stage.config
    status = partial(
        StageStatus, stage.name, folder=storage.url, mode=config.mode, algorithm=config.algorithm.algorithm_type
    )
    if not stage.has_begun:
        return status(state="not started")
    held = lease_holders(storage)
    roles = {role: f"process {holder['pid']} on {holder['host']}" for role, holder in held.items()}
    try:
        warnings, experiences, problems = stage.warnings, stage.counts, stage.audit.problems if stage.audit else ()
    except DamagedError as error:  # of the ledger: the rest can be told all the same
        warnings, experiences, problems = (), {}, (f"the experiences cannot be counted: {error}",)
    return status(
        # By the leases alone: a run that was killed says nothing, and its lease is found to be nobody's.
        state="running" if roles else "not running",
        step=stage.ledger.last_step() or None,
        checkpoint=read_pointer(storage, CHECKPOINT_POINTER),
        published=read_pointer(storage, WEIGHTS_POINTER),
        explore_step=max((shard.explore_step for shard in stage.log.shards()), default=None),
        sealed=stage.log.sealed_at() is not None,
        experiences=experiences,
        problems=problems,
        warnings=warnings,
        reward=next(reversed(stage.values("trainer", "reward")), None),
        accuracy=next((accuracy.value for accuracy in reversed(stage.accuracies)), None),
        eval_loss=next(reversed(stage.values("eval", "eval_loss")), None),
        auxiliary=stage.auxiliary_use,
        roles=roles,
        # Not below 0: clocks of two machines differ.
        last_sign_s=max(0.0, time.time() - last_s) if (last_s := stage.span[1]) else None,
    )
