"""View: a run as its files tell it, for all that looks at one from outside: status, report, SQL, traces, pages.

It starts nothing, writes nothing and asks no process, so it tells the same of a run that lives, rests or is dead.
Invariant: what is read lies below the URL that was given, also where run.json names another place; a run that was
copied or moved is read where it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rftdask.buffer.batches.audit import Audit, audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.lineage import lineage_of
from rftdask.buffer.batches.replay_priority import max_uses
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.monitor.metrics import MACHINE, read_metrics
from rftdask.reports.metric_table import warn_of_learning
from rftdask.run.run_folder import RUN_FILE, read_run_config
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, WEIGHTS_POINTER, read_pointer

if TYPE_CHECKING:
    import pandas as pd


class Accuracy(NamedTuple):
    """Correct answers / answers to the tasks of all eval tasksets."""

    value: float
    num_answers: int

    @property
    def error(self) -> float:
        """Standard error, as of answers that know nothing of each other; nan where `value` is no share."""
        return math.sqrt(self.value * (1 - self.value) / self.num_answers) if 0 <= self.value <= 1 else math.nan


@dataclass(frozen=True)
class Stage:
    """One stage of a run and its folder. Each part is read when it is first asked for, and kept.

    Example: open_stages("runs/demo/countdown")[-1].values("trainer", "reward")
    """

    config: Config
    storage: Storage
    seconds_here: float = 0.0
    """Wall time of the stage in this process; 0 where it did not run here."""

    @property
    def name(self) -> str:
        """Last part of its name: "countdown", or "warmup" of "countdown/warmup"."""
        return self.config.name.rpartition("/")[2]

    @property
    def has_begun(self) -> bool:
        """Whether its folder was opened at least once."""
        return self.storage.exists(RUN_FILE)

    @cached_property
    def log(self) -> ExperienceLog:
        """Its experiences, which may lie in a database. Raises: UserError: the URL of that is not complete."""
        return open_log(self.storage, self.config)

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the lineage that the stage is in now."""
        return Ledger(self.storage, lineage_of(self.storage))

    @cached_property
    def audit(self) -> Audit | None:
        """Where each experience is; None of a stage that trains on a dataset. Raises: DamagedError: a ledger entry."""
        if self.config.algorithm.schema_type != "experience":
            return None
        return audit_log(self.log, self.ledger, self.config.tasks_per_unit, max_uses(self.config), self.made_step)

    @cached_property
    def made_step(self) -> int:
        """The last step that is known to be made: the ledger has a batch before it is trained. Such a step has metrics,
        or its weights are on storage. Raises: DamagedError: a file of metrics.
        """
        # Each may be behind: metrics are flushed now and then, and weights are published at intervals.
        pointers = (read_pointer(self.storage, name) or 0 for name in (CHECKPOINT_POINTER, WEIGHTS_POINTER))
        return max(0, *pointers, *map(int, self.rows("trainer")["step"]))

    @property
    def counts(self) -> dict[str, int]:
        """Experiences: "committed", "trained", "waiting", then the dropped ones by reason; empty without an audit."""
        audit = self.audit
        if audit is None:
            return {}
        return {"committed": audit.committed, "trained": audit.trained, "waiting": audit.waiting, **audit.dropped}

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row for each row of metrics; columns "role", "step", "time_s", tags and metrics."""
        return read_metrics(self.storage)

    def rows(self, role: str) -> pd.DataFrame:
        """The metrics of one role, by step."""
        if not len(self.metrics):
            # Columns without rows, so that who asks needs no case for a run that has just begun.
            return self.metrics.reindex(columns=["role", "step", "time_s"])
        return self.metrics[self.metrics["role"] == role].sort_values("step")

    def values(self, role: str, metric: str) -> list[float]:
        """List what one role measured, by step, without gaps; empty if it never did."""
        rows = self.rows(role)
        return [float(value) for value in rows[metric].dropna()] if metric in rows else []

    @property
    def seconds(self) -> float:
        """Wall time of the stage: in this process, else from its first number to its last, pauses included."""
        first, last = self.span
        return self.seconds_here or last - first

    @property
    def span(self) -> tuple[float, float]:
        """Unix seconds of the first and the last row of metrics; 0 where there is none."""
        # Of roles: what machines have in use is written also while nothing happens.
        times = self.metrics["time_s"][self.metrics["role"] != MACHINE] if len(self.metrics) else []
        return float(min(times, default=0.0)), float(max(times, default=0.0))

    @property
    def accuracies(self) -> list[Accuracy]:
        """Of each version that was evaluated on the most tasksets, in order: the accuracy over all of them together."""
        rows = self.rows("eval")
        if "accuracy" not in rows:
            return []
        # A row for each taskset. A run that stopped may have evaluated its last version on some of them alone, whose
        # accuracy would be compared with another taskset's.
        counts = rows.get("num_rollouts", 1.0)
        rows = rows.assign(num_rollouts=counts, num_correct=rows["accuracy"] * counts).dropna(subset=["num_correct"])
        versions = rows.groupby("step")[["num_correct", "num_rollouts"]]
        sizes = versions.size()
        sums = versions.sum()[sizes == sizes.max()]
        return [Accuracy(correct / count, int(count)) for correct, count in sums.itertuples(index=False)]

    @cached_property
    def auxiliary_use(self) -> dict[str, dict[str, float]]:
        """What each auxiliary model was asked for in all rollouts and evaluations: calls, failures, tokens and cost."""
        found: dict[str, dict[str, float]] = {}
        for column in [str(name) for name in self.metrics.columns if str(name).startswith("auxiliary/")]:
            # A name may have slashes of its own.
            model, _, what = column.removeprefix("auxiliary/").rpartition("/")
            found.setdefault(model, {})[what] = sum(
                (sum(self.values(role, column)) for role in ("explorer", "eval")), 0.0
            )
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines that say which steps were skipped, and why it learns nothing; empty where it learns."""
        trainer, explorer = (self.rows(role).to_dict("records") for role in ("trainer", "explorer"))
        skipped = (f"step {step} was skipped: {because}" for step, because in self.ledger.skips.items())
        return (*skipped, *warn_of_learning(trainer, explorer).values())


def tell_use(use: Mapping[str, float]) -> str:
    """What a model was asked for, for a person. Example: "64 calls (2 failed), 1,024 + 256 tokens, cost 0.12"."""
    failed = f" ({use['failures']:,.0f} failed)" if use.get("failures") else ""
    tokens = f"{use.get('prompt_tokens', 0):,.0f} + {use.get('response_tokens', 0):,.0f} tokens"
    cost = f", cost {use['cost']:.4g}" if "cost" in use else ""
    return f"{use.get('calls', 0):,.0f} calls{failed}, {tokens}{cost}"


def open_stages(url: str | Path) -> list[Stage]:
    """The stages of the run at `url`, one for a run without stages. Raises: DataError: `url` is no run folder."""
    storage = open_storage(url)
    return stages_of(read_run_config(storage), storage)


def stages_of(config: Config, storage: Storage) -> list[Stage]:
    """The stages of a run with this config, whose folder is `storage`; also of one that has not begun."""
    # A run of one stage is its own stage, in the same folder.
    if not config.stages:
        return [Stage(config, storage)]
    stages = []
    for stage in config.stage_configs():
        folder = open_storage(f"{storage.url.rstrip('/')}/{stage.name.rpartition('/')[2]}")
        # Once it has begun, with the config it ran with: its model is what the stage before it made.
        stages.append(Stage(read_run_config(folder) if folder.exists(RUN_FILE) else stage, folder))
    return stages
