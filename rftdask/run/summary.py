"""Summaries of a run from its files alone: what was learned, sample answers, counts, where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.replay_priority import max_uses
from rftdask.buffer.lineage import lineage_of
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.monitor.metrics import read_metrics
from rftdask.monitor.summary import ExperienceCounts, RunSummary, SampleAnswer, StageSummary
from rftdask.run.run_folder import package_versions
from rftdask.storage import Storage

NUM_SAMPLES = 5

Interval = tuple[float, float]

FILES = {
    "report.html": "curves, answers and settings on one page",
    "run.json": "configuration as resolved, versions, seed",
    "schedule/": "the tasks of each explore step, chosen by learned difficulty",
    "experiences/": "every rollout, as immutable shards",
    "ledger/": "which experiences each optimizer step trained",
    "global_step_N/actor/huggingface/": "the trained model, for AutoModelForCausalLM.from_pretrained",
    "eval/": "answers of the evaluations, as shards",
    "metrics/": "all numbers, as JSON lines",
    "log/": "what each role logged",
}


@dataclass(frozen=True)
class StageFolder:
    """One stage and where it is."""

    config: Config
    storage: Storage
    seconds: float = 0.0


def summarize(
    config: Config, url: str, stages: Sequence[StageFolder], *, status: str, began_s: float, error: str = ""
) -> tuple[RunSummary, list[tuple[str, pd.DataFrame]]]:
    """The summary of a run and the metrics of its stages, by name."""
    frames = [(_stage_name(stage, config), read_metrics(stage.storage)) for stage in stages]
    rows = [_stage_summary(stage, name, frame) for stage, (name, frame) in zip(stages, frames, strict=True)]
    measured = [row for row in rows if row.first_accuracy is not None]
    counts = _counts(stages)
    summary = RunSummary(
        run_name=config.name,
        run_url=url,
        status=status,
        mode=config.mode,
        started_at_s=began_s,
        seconds=time.time() - began_s,
        stages=tuple(rows),
        accuracy_before=measured[0].first_accuracy if measured else None,
        accuracy_after=measured[-1].last_accuracy if measured else None,
        samples=_samples(stages),
        counts=counts,
        time_split=_time_split(stages, frames),
        versions=package_versions(),
        config_yaml=config.to_yaml(),
        files={path: meaning for path, meaning in FILES.items()},
        next_commands=_next_commands(url, config),
        error=error,
    )
    return summary, frames


def _stage_name(stage: StageFolder, config: Config) -> str:
    return (
        stage.config.name.removeprefix(f"{config.name}/")
        if stage.config.name != config.name
        else config.algorithm.algorithm_type
    )


def _stage_summary(stage: StageFolder, name: str, frame: pd.DataFrame) -> StageSummary:
    evals = _role(frame, "eval")
    accuracies = evals["accuracy"].dropna().tolist() if "accuracy" in evals else []
    steps = _role(frame, "trainer")["step"]
    return StageSummary(
        name=name,
        mode=stage.config.mode,
        algorithm=stage.config.algorithm.algorithm_type,
        steps=int(steps.max()) if len(steps) else 0,
        seconds=stage.seconds,
        first_accuracy=accuracies[0] if accuracies else None,
        last_accuracy=accuracies[-1] if accuracies else None,
    )


def _role(frame: pd.DataFrame, role: str) -> pd.DataFrame:
    return frame[frame["role"] == role].sort_values("step") if len(frame) else frame.reindex(columns=["role", "step"])


def _counts(stages: Sequence[StageFolder]) -> ExperienceCounts | None:
    audits = [
        audit_log(
            open_log(s.storage, s.config),
            Ledger(s.storage, lineage_of(s.storage)),
            s.config.tasks_per_unit,
            max_uses(s.config),
        )
        for s in stages
        if s.config.algorithm.schema_type == "experience"
    ]
    if not audits:
        return None
    reasons = sorted({reason for audit in audits for reason in audit.dropped})
    return ExperienceCounts(
        committed=sum(a.committed for a in audits),
        trained=sum(a.trained for a in audits),
        waiting=sum(a.waiting for a in audits),
        dropped={reason: sum(a.dropped.get(reason, 0) for a in audits) for reason in reasons},
    )


def _samples(stages: Sequence[StageFolder]) -> tuple[SampleAnswer, ...]:
    """Answers to the first evaluation tasks by the first and the last version evaluated, in the last stage with any."""
    for stage in reversed(stages):
        for taskset in stage.config.buffer.explorer_input.eval_tasksets:
            log = open_log(stage.storage, stage.config, f"eval/{taskset.name}")
            shards = [name for name in log.shards(0) if name.batch == 0]
            if shards:
                before, after = (_answers(log, name) for name in (shards[0], shards[-1]))
                return tuple(_sample(before[i], after[i]) for i in list(before)[:NUM_SAMPLES] if i in after)
    return ()


def _answers(log: ExperienceLog, name: Any) -> dict[int, dict[str, Any]]:
    columns = ["task_index", "rollout", "prompt_text", "response_text", "truth", "reward"]
    rows = log.read(name).select(columns).to_pylist()
    return {row["task_index"]: row for row in rows if row["rollout"] == 0}


def _sample(before: dict[str, Any], after: dict[str, Any]) -> SampleAnswer:
    return SampleAnswer(
        before["prompt_text"],
        before["truth"],
        before["response_text"],
        after["response_text"],
        before["reward"],
        after["reward"],
    )


def _time_split(stages: Sequence[StageFolder], frames: Sequence[tuple[str, pd.DataFrame]]) -> dict[str, float]:
    """Seconds of wall time in which the trainer trained, engines generated, both, and neither (start-up, waiting)."""
    total = sum(stage.seconds for stage in stages)
    if total <= 0:
        return {}
    training: list[Interval] = []
    generating: list[Interval] = []
    for _, frame in frames:
        trainer, explorer = _role(frame, "trainer"), _role(frame, "explorer")
        if "train_s" in trainer:
            ends = trainer["time_s"] - trainer["publish_s"] - trainer["checkpoint_s"]
            training += zip(ends - trainer["train_s"], ends, strict=True)
        if "generate_s" in explorer:
            # The row is written when the last batch of the step is in, just after it was generated.
            generating += zip(explorer["time_s"] - explorer["generate_s"], explorer["time_s"], strict=True)
    either = covered_s(training + generating)
    train, generate = covered_s(training), covered_s(generating)
    both = train + generate - either
    neither = max(0.0, total - either)
    return {"training": train - both, "generating": generate - both, "both": both, "neither": neither}


def covered_s(intervals: Sequence[Interval]) -> float:
    """Seconds that at least one of the (start, end) intervals covers."""
    covered = reached = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _next_commands(url: str, config: Config) -> dict[str, str]:
    return {
        f"rftdask status {url}": "where the run stands, from its files",
        f"rftdask report {url}": "write the report again",
        f"tensorboard --logdir {url}": "all metrics as curves",
    }
