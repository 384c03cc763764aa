"""Status: where a run stands according to its files, so the status of a dead or remote run is available as well."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from rftdask.config.plan import make_plan
from rftdask.errors import DamagedError, RftError
from rftdask.reports.run_reader import StageReader, format_use, open_stages
from rftdask.run.lease import lease_holders
from rftdask.run.run_folder import read_driver, read_end
from rftdask.storage import open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, WEIGHTS_POINTER, read_pointer


@dataclass(frozen=True)
class StageStatus:
    name: str
    folder: str
    mode: str
    algorithm: str
    state: str
    """not started, running, or not running (finished, stopped or killed; `step` shows how far it got)."""
    step: int | None = None
    """Newest optimizer step in the ledger."""
    checkpoint: int | None = None
    """Step from which the run resumes."""
    published: int | None = None
    """Newest policy version that explorers can load."""
    explore_step: int | None = None
    """Newest explore step with a committed shard."""
    sealed: bool = False
    """True if no more experiences will be added."""
    experiences: dict[str, int] = field(default_factory=dict)
    """Numbers of committed, trained, waiting, and dropped (by reason) experiences."""
    problems: tuple[str, ...] = ()
    """Broken invariants found by the audit, or the error that prevented it; empty for a sound run."""
    warnings: tuple[str, ...] = ()
    """Reasons why the stage does not learn, one line each; see `reports.metric_table`."""
    reward: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None
    auxiliary: dict[str, dict[str, float]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    last_sign_s: float | None = None
    """Seconds since a role last wrote metrics."""

    def render(self) -> str:
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
            "auxiliary": "; ".join(f"{name}: {format_use(use)}" for name, use in self.auxiliary.items()),
            "roles": ", ".join(f"{role}: {process}" for role, process in self.roles.items()),
            "last sign": "" if self.last_sign_s is None else f"{self.last_sign_s:.0f} s ago",
            "PROBLEMS": "; ".join(self.problems),
        }
        lines += [f"  {label:<12}{text}" for label, text in facts.items() if text]
        return "\n".join([*lines, *(f"  {'WARNING':<12}{warning}" for warning in self.warnings)])


def read_status(url: str) -> list[StageStatus]:
    """Read the status of each stage of the run at `url`. Raises: DataError: not a run folder."""
    return [stage_status(stage) for stage in open_stages(url)]


def stage_status(stage: StageReader) -> StageStatus:
    storage, config = stage.storage, stage.config
    status = partial(
        StageStatus, stage.name, folder=storage.url, mode=config.mode, algorithm=config.algorithm.algorithm_type
    )
    if not stage.has_begun:
        return status(state="not started")
    roles = {role: f"process {holder['pid']} on {holder['host']}" for role, holder in lease_holders(storage).items()}
    try:
        warnings, experiences, problems = stage.warnings, stage.counts, stage.audit.problems if stage.audit else ()
    except DamagedError as error:  # everything but the counts is still readable
        warnings, experiences, problems = (), {}, (f"the experiences cannot be counted: {error}",)
    return status(
        # Only leases show that a role is alive; a killed process leaves no other trace.
        state="running" if roles else "not running",
        step=stage.ledger.last_step() or None,
        checkpoint=read_pointer(storage, CHECKPOINT_POINTER),
        published=read_pointer(storage, WEIGHTS_POINTER),
        explore_step=max((shard.explore_step for shard in stage.log.shards()), default=None),
        sealed=stage.log.sealed_at() is not None,
        experiences=experiences,
        problems=problems,
        warnings=warnings,
        reward=stage.last("trainer", "reward"),
        accuracy=next((accuracy.value for accuracy in reversed(stage.accuracies)), None),
        eval_loss=stage.last("eval", "eval_loss"),
        auxiliary=stage.auxiliary_use,
        roles=roles,
        # Clamped at 0, because the clocks of two machines differ.
        last_sign_s=max(0.0, time.time() - last_s) if (last_s := stage.span[1]) else None,
    )


@dataclass(frozen=True)
class RunLine:
    name: str
    """Path below the folder of runs."""
    state: str
    """running, finished, failed, stopped, not begun, or killed (it recorded no end)."""
    why: str = ""
    algorithms: tuple[str, ...] = ()
    stage: str = ""
    """Current or last stage; empty for a run without stages."""
    step: int = 0
    total: int | None = None
    """Planned optimizer steps of that stage. None: unknown."""
    progress: float | None = None
    """Fraction of the run that is done, 0 to 1, counting all stages as equally long."""
    reward: float | None = None
    first_accuracy: float | None = None
    accuracy: float | None = None
    accuracy_error: float = math.nan
    """Standard error; nan if unknown."""
    eval_loss: float | None = None
    seconds: float = 0.0
    """Time between the first and the last metrics of each stage, pauses included."""
    began_s: float = 0.0
    """Unix seconds of the first metrics; 0 without any."""
    last_number_s: float = 0.0
    """Unix seconds of the last metrics; 0 without any."""
    warnings: tuple[str, ...] = ()

    @property
    def is_alive(self) -> bool:
        return self.state == "running"


def read_line(name: str, url: str, stages: Sequence[StageReader]) -> RunLine:
    """Read the status of the run at `url` with these stages. Raises: DamagedError: a file of the run."""
    storage = open_storage(url)
    begun = [stage for stage in stages if stage.has_begun]
    alive = read_driver(storage) is not None or any(map(lease_holders, [storage, *(s.storage for s in begun)]))
    end, _, why = (read_end(storage) or "").partition(": ")
    state = "running" if alive else end or ("killed" if begun else "not begun")
    current = begun[-1] if begun else stages[0]
    step = current.last_step if begun else 0
    total: int | None = step if begun else None
    progress: float | None = 1.0
    if state != "finished":
        total = _planned_steps(current) if begun else None
        # Earlier stages have ended, whatever their plan was.
        progress = (len(begun) - 1 + min(1.0, step / total)) / len(stages) if total else None
    rewards = [reward for stage in begun for reward in stage.values("trainer", "reward")]
    losses = [loss for stage in begun for loss in stage.values("eval", "eval_loss")]
    accuracies = [accuracy for stage in begun for accuracy in stage.accuracies]
    spans = [stage.span for stage in begun if stage.metric_rows]
    return RunLine(
        name,
        state,
        why=why,
        algorithms=tuple(stage.config.algorithm.algorithm_type for stage in stages),
        stage=current.name if len(stages) > 1 else "",
        step=step,
        total=total,
        progress=progress,
        reward=next(reversed(rewards), None),
        first_accuracy=accuracies[0].value if accuracies else None,
        accuracy=accuracies[-1].value if accuracies else None,
        accuracy_error=accuracies[-1].error if accuracies else math.nan,
        eval_loss=next(reversed(losses), None),
        seconds=sum(end - start for start, end in spans),
        began_s=min((start for start, _ in spans), default=0.0),
        last_number_s=max((end for _, end in spans), default=0.0),
        warnings=tuple(
            f"{stage.name}: {warning}" if len(stages) > 1 else warning for stage in begun for warning in stage.warnings
        ),
    )


def _planned_steps(stage: StageReader) -> int | None:
    with suppress(RftError, OSError, ValueError):  # the dataset may have been moved or deleted
        if (steps := make_plan(stage.config).stages[0].train_steps) is not None:
            return steps
    return stage.config.trainer.total_steps
