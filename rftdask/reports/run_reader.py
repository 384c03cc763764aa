"""Run reader: the files of a run as values, for everything that looks at a run from outside: status, report, SQL,
traces.

It starts nothing, writes nothing and contacts no process, so it returns the same for a live, paused or dead run.
Invariant: it reads only below the given URL, even if run.json names another folder, so a copied or moved run is read
where it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rftdask.buffer.batches.audit import Audit, audit_log
from rftdask.buffer.batches.ledger import Ledger, lineage_of
from rftdask.buffer.batches.replay_priority import max_uses
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.monitor.metrics import MACHINE, MetricsRow, read_rows, rows_to_frame
from rftdask.reports.metric_table import warn_of_learning
from rftdask.run.run_folder import RUN_FILE, read_run_config
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, WEIGHTS_POINTER, read_pointer

if TYPE_CHECKING:
    import pandas as pd


class Accuracy(NamedTuple):
    """Correct answers / answers over the tasks of all eval tasksets."""

    value: float
    num_answers: int

    @property
    def error(self) -> float:
        """Standard error, assuming independent answers; nan if `value` is not a fraction."""
        return math.sqrt(self.value * (1 - self.value) / self.num_answers) if 0 <= self.value <= 1 else math.nan


@dataclass(frozen=True)
class StageReader:
    """One stage of a run and its folder. Each part is read on first access and then kept."""

    config: Config
    storage: Storage
    seconds_here: float = 0.0
    """Wall time of the stage in this process. 0: it did not run in this process."""

    @property
    def name(self) -> str:
        """Last part of the configured name: "countdown", or "warmup" of "countdown/warmup"."""
        return self.config.name.rpartition("/")[2]

    @property
    def has_begun(self) -> bool:
        """True once a process has opened the stage's folder."""
        return self.storage.exists(RUN_FILE)

    @cached_property
    def log(self) -> ExperienceLog:
        """Experience log, which may be in a database. Raises: UserError: the database URL is not complete."""
        return open_log(self.storage, self.config)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.storage, lineage_of(self.storage))

    @cached_property
    def audit(self) -> Audit | None:
        """State of every experience; None if the stage trains on a dataset. Raises: DamagedError: a ledger entry."""
        if self.config.algorithm.schema_type != "experience":
            return None
        return audit_log(self.log, self.ledger, self.config.tasks_per_unit, max_uses(self.config), self.completed_step)

    @cached_property
    def completed_step(self) -> int:
        """Last step known to be complete, with metrics or weights on storage. The ledger can be one step ahead, because
        it records a batch before training. Raises: DamagedError: a metrics file.
        """
        # Take the maximum: metrics are flushed at intervals, and so are weights published.
        pointers = (read_pointer(self.storage, name) or 0 for name in (CHECKPOINT_POINTER, WEIGHTS_POINTER))
        return max(0, *pointers, self.last_step)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of experiences: "committed", "trained", "waiting", then dropped by reason; {} without an audit."""
        if (audit := self.audit) is None:
            return {}
        return {"committed": audit.committed, "trained": audit.trained, "waiting": audit.waiting, **audit.dropped}

    @cached_property
    def metric_rows(self) -> list[MetricsRow]:
        """Rows of metrics by step. Unlike `metrics` and `rows`, reading them does not import pandas."""
        return read_rows(self.storage)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One line per row of metrics, with columns "role", "step", "time_s", tags and metrics."""
        return rows_to_frame(self.metric_rows)

    def rows(self, role: str) -> pd.DataFrame:
        """Return the metrics of one role, by step; without metrics, an empty frame with "role", "step" and "time_s"."""
        return self.metrics[self.metrics["role"] == role].sort_values("step")

    def _of_role(self, role: str) -> list[MetricsRow]:
        return [row for row in self.metric_rows if row.role == role]

    def values(self, role: str, metric: str) -> list[float]:
        """List the values of a metric by step, without gaps; [] if the role never measured it."""
        values = (row.metrics.get(metric, math.nan) for row in self._of_role(role))
        return [value for value in values if not math.isnan(value)]

    def last(self, role: str, metric: str) -> float | None:
        """Return the newest value of a metric, or None if the role never measured it."""
        return next(reversed(self.values(role, metric)), None)

    @property
    def last_step(self) -> int:
        """Newest optimizer step with metrics; 0 without any."""
        return max((row.step for row in self._of_role("trainer")), default=0)

    @property
    def seconds(self) -> float:
        """Wall time of the stage in this process, otherwise between its first and last metrics, pauses included."""
        return self.seconds_here or self.span[1] - self.span[0]

    @property
    def span(self) -> tuple[float, float]:
        """Unix seconds of the first and the last row of metrics; 0 without rows."""
        # Machine metrics are written even while the run is idle.
        times = [row.time_s for row in self.metric_rows if row.role != MACHINE]
        return min(times, default=0.0), max(times, default=0.0)

    @property
    def accuracies(self) -> list[Accuracy]:
        """Accuracy over all tasksets of each completely evaluated policy version, in order."""
        has_counts = any("num_rollouts" in row.metrics for row in self.metric_rows)
        # step -> (correct, rollouts) of each taskset
        versions: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in self._of_role("eval"):
            count = row.metrics.get("num_rollouts", math.nan) if has_counts else 1.0
            count = row.metrics.get("accuracy/count", count)
            if not math.isnan(correct := row.metrics.get("accuracy", math.nan) * count):
                versions[row.step].append((correct, count))
        # Each taskset has a row. A stopped run may have evaluated its last version on some tasksets only, and their
        # accuracy must not be compared with that of all tasksets.
        size = max(map(len, versions.values()), default=0)
        sums = [tuple(map(math.fsum, zip(*pairs, strict=True))) for pairs in versions.values() if len(pairs) == size]
        return [Accuracy(correct / count, int(count)) for correct, count in sums]

    @cached_property
    def auxiliary_use(self) -> dict[str, dict[str, float]]:
        """Calls, failures, tokens and cost of each auxiliary model, over all rollouts and evaluations."""
        use: dict[str, dict[str, float]] = {}
        names = {name for row in self.metric_rows for name in row.metrics}
        for column in sorted(name for name in names if name.startswith("auxiliary/")):
            model, _, quantity = column.removeprefix("auxiliary/").rpartition("/")  # the name may contain slashes
            values = [value for role in ("explorer", "eval") for value in self.values(role, column)]
            use.setdefault(model, {})[quantity] = sum(values, 0.0)
        return use

    @property
    def warnings(self) -> tuple[str, ...]:
        """Skipped steps and reasons why the stage does not learn, one line each; empty if it learns."""
        trainer, explorer = ([row.metrics for row in self._of_role(role)] for role in ("trainer", "explorer"))
        skipped = (f"step {step} was skipped: {reason}" for step, reason in self.ledger.skips.items())
        return (*skipped, *warn_of_learning(trainer, explorer).values())


def format_use(use: Mapping[str, float]) -> str:
    """Format the use of an auxiliary model. Example: "64 calls (2 failed), 1,024 + 256 tokens, cost 0.12"."""
    failed = f" ({use['failures']:,.0f} failed)" if use.get("failures") else ""
    tokens = f"{use.get('prompt_tokens', 0):,.0f} + {use.get('response_tokens', 0):,.0f} tokens"
    cost = f", cost {use['cost']:.4g}" if "cost" in use else ""
    return f"{use.get('calls', 0):,.0f} calls{failed}, {tokens}{cost}"


def open_stages(url: str | Path) -> list[StageReader]:
    """Open the stages of the run at `url`; a run without stages counts as one. Raises: DataError: not a run folder."""
    storage = open_storage(url)
    return stages_of(read_run_config(storage), storage)


def stages_of(config: Config, storage: Storage) -> list[StageReader]:
    """Open the stages of a run with this config in the folder `storage`, even before it begins."""
    if not config.stages:
        return [StageReader(config, storage)]  # a run without stages uses its own folder as the stage's
    stages = []
    for stage in config.stage_configs():
        folder = open_storage(f"{storage.url.rstrip('/')}/{stage.name.rpartition('/')[2]}")
        # Once begun, the stage's own config counts: its model is the result of the previous stage.
        stages.append(StageReader(read_run_config(folder) if folder.exists(RUN_FILE) else stage, folder))
    return stages
