"""Summary: the results of a finished, failed or stopped run, read from its files, and their display in a terminal.

The terminal and the HTML report show the same `RunSummary`.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rftdask.buffer.log import open_log
from rftdask.config import Config
from rftdask.monitor.progress import duration
from rftdask.reports.metric_table import METRICS, WINDOW
from rftdask.reports.run_reader import Accuracy, StageReader, format_use
from rftdask.run.run_folder import package_versions
from rftdask.storage import open_storage
from rftdask.storage.safe_text import mask, safe, safe_console
from rftdask.trainer.checkpoint import HF_FOLDER, checkpoint_folder, checkpoint_steps

NUM_SAMPLES = 5
_COMPARED = ("reward", "response_length", "truncated", "flat_groups", "rollout_entropy", "kl", "loss", "staleness")
"""Metrics whose first and last steps are compared."""

Interval = tuple[float, float]

REPORT_NAME = "report.html"
_FILES = {
    "run.json": "settings, versions, seed",
    "schedule/": "tasks chosen by learned difficulty",
    "experiences/": "every rollout, as immutable shards",
    "ledger/": "experiences trained by each optimizer step",
    "eval/": "answers to evaluations",
    "metrics/": "all metrics, as JSON lines",
    "log/": "logs of each role",
}


@dataclass(frozen=True)
class StageSummary:
    """One stage. Accuracies are of its first and last evaluation, 0 to 1; None without evaluations."""

    name: str
    mode: str = ""
    algorithm: str = ""
    steps: int = 0
    seconds: float = 0.0
    first_accuracy: float | None = None
    last_accuracy: float | None = None
    eval_losses: tuple[float, ...] = ()
    """First and last loss on held-out rows, in nats; only one if it was measured once."""


@dataclass(frozen=True)
class SampleAnswer:
    """One eval task and the policy's answers before and after training."""

    prompt: str
    truth: str
    before: str
    reward_before: float | None
    after: str
    reward_after: float | None


@dataclass(frozen=True)
class Change:
    """A metric in the first and the last steps of a stage, averaged over at most WINDOW steps each."""

    stage: str
    metric: str
    first: float
    last: float
    error: float = math.nan
    """Standard error of the difference, from the spread of the steps."""


@dataclass(frozen=True)
class RunSummary:
    """Results of a run, except curves."""

    run_name: str
    run_url: str
    status: str
    """"finished", "stopped" or "failed"."""
    mode: str = ""
    started_at_s: float = 0.0
    """Unix seconds."""
    seconds: float = 0.0
    stages: tuple[StageSummary, ...] = ()
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    accuracy_error: float = math.nan
    """Standard error of the difference, from the numbers of answers; nan if unknown."""
    num_answers: tuple[int, int] = (0, 0)
    """Numbers of answers to the first and the last evaluation; 0 if unknown."""
    seed: int | None = None
    samples: tuple[SampleAnswer, ...] = ()
    changes: tuple[Change, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of experiences in all stages, see `StageReader.counts`."""
    auxiliary: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Calls, failures, tokens and cost in all stages, by auxiliary model."""
    versions: Mapping[str, str] = field(default_factory=dict)
    config_yaml: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the run -> description."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """Command -> description."""
    error: str = ""
    """Reason of a failure or stop."""
    warnings: tuple[str, ...] = ()
    """Reasons why the run does not learn, one line each."""

    @property
    def dropped(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if name not in ("committed", "trained", "waiting")}

    @property
    def adds_up(self) -> bool:
        return 2 * self.counts.get("committed", 0) == sum(self.counts.values())


def percent(value: float | None) -> str:
    """Example: "61.5%"; "-" for None and NaN."""
    return "-" if value is None or value != value else f"{value:.1%}"


def learned(summary: RunSummary) -> str:
    """Return the result of the run in one sentence.

    Example: "accuracy 12.0% -> 61.5% (+49.5 points, standard error 8.3, 100 answers each, seed 42 only)".
    """
    before, after = summary.accuracy_before, summary.accuracy_after
    losses = [(stage.name, *stage.eval_losses) for stage in summary.stages if len(stage.eval_losses) == 2]
    if before is None and losses:
        return "; ".join(f"held-out loss of {name} {first:.4g} -> {last:.4g}" for name, first, last in losses)
    # A single evaluation shows no change.
    if before is None or after is None:
        return "accuracy was not measured before and after training; set eval_interval and an eval taskset"
    facts = [f"{100 * (after - before):+.1f} points"]
    if not math.isnan(summary.accuracy_error):
        facts.append(f"standard error {100 * summary.accuracy_error:.1f}")
    first, last = summary.num_answers
    if first and last:
        facts.append(f"{first:,} answers each" if first == last else f"{first:,} and {last:,} answers")
    if summary.seed is not None:  # a single run cannot show the variance between seeds
        facts.append(f"seed {summary.seed} only")
    return f"accuracy {percent(before)} -> {percent(after)} ({', '.join(facts)})"


def shorten(text: str, max_chars: int = 160) -> str:
    """Shorten a text to one line of at most `max_chars`, cutting the middle, since answers end with their result."""
    text = " ".join(text.split())
    half = (max_chars - 5) // 2
    return text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}"


def summarize(
    config: Config,
    url: str,
    stages: Sequence[StageReader],
    *,
    status: str,
    began_s: float | None = None,
    error: str = "",
) -> RunSummary:
    """Read the summary of a run from the files of its stages.

    Args: began_s: Unix seconds at which this process started the run. None: use the times of its metrics.
    Raises: DamagedError: the experiences cannot be counted.
    """
    rows, counts = [], Counter[str]()
    evaluations: list[Accuracy] = []  # the first and the last of each stage, in order
    for stage in stages:
        accuracies, losses = stage.accuracies, stage.values("eval", "eval_loss")
        evaluations += accuracies[:1] + accuracies[-1:]
        rows.append(
            StageSummary(
                name=stage.name if config.stages else config.algorithm.algorithm_type,
                mode=stage.config.mode,
                algorithm=stage.config.algorithm.algorithm_type,
                steps=stage.last_step,
                seconds=stage.seconds,
                first_accuracy=accuracies[0].value if accuracies else None,
                last_accuracy=accuracies[-1].value if accuracies else None,
                eval_losses=(*losses[:1], *losses[1:][-1:]),
            )
        )
        counts.update(stage.counts)
    auxiliary: dict[str, Counter[str]] = {}
    for stage in stages:
        for name, use in stage.auxiliary_use.items():
            auxiliary.setdefault(name, Counter()).update(use)
    return RunSummary(
        run_name=config.name,
        run_url=url,
        status=status,
        mode=config.mode,
        started_at_s=min((stage.span[0] for stage in stages), default=0.0) if began_s is None else began_s,
        seconds=sum(stage.seconds for stage in stages) if began_s is None else time.time() - began_s,
        stages=tuple(rows),
        accuracy_before=evaluations[0].value if evaluations else None,
        accuracy_after=evaluations[-1].value if evaluations else None,
        accuracy_error=math.hypot(evaluations[0].error, evaluations[-1].error) if evaluations else math.nan,
        num_answers=(evaluations[0].num_answers, evaluations[-1].num_answers) if evaluations else (0, 0),
        seed=config.seed,
        samples=_samples(stages),
        changes=tuple(c for row, stage in zip(rows, stages, strict=True) for c in _changes(row.name, stage)),
        counts=dict(counts),
        auxiliary=auxiliary,
        versions=package_versions(),
        config_yaml=config.to_yaml(),
        files=_files_of(url, stages),
        next_commands=next_commands(config.monitor.monitor_type, url),
        # An error can quote a setting or a URL with a secret, and users share the report.
        error=mask(error),
        warnings=tuple(
            f"{row.name}: {warning}" for row, stage in zip(rows, stages, strict=True) for warning in stage.warnings
        ),
    )


def _changes(name: str, stage: StageReader) -> list[Change]:
    changes = []
    for metric in _COMPARED:
        values = stage.values("trainer", metric) or stage.values("explorer", metric)
        size = min(WINDOW, len(values) // 2)
        if size:
            first, last = values[:size], values[-size:]
            error = math.sqrt((variance(first) + variance(last)) / size) if size > 1 else math.nan
            changes.append(Change(name, metric, fmean(first), fmean(last), error))
    return changes


def _files_of(url: str, stages: Sequence[StageReader]) -> dict[str, str]:
    root = open_storage(url)
    names = root.list()
    files = {REPORT_NAME: "curves, answers and settings"}  # written after this summary
    files |= {name: meaning for name, meaning in _FILES.items() if name in names}
    for stage in stages:
        folder = stage.storage.url.removeprefix(root.url).strip("/")
        prefix = f"{folder}/" if folder else ""
        names = stage.storage.list()
        files |= {f"{prefix}{name}": meaning for name, meaning in _FILES.items() if name in names}
        models = [f"{checkpoint_folder(step)}/{HF_FOLDER}" for step in checkpoint_steps(stage.storage)]
        # Not every checkpoint contains a model in this format.
        for model in [model for model in models if stage.storage.exists(f"{model}/config.json")][-1:]:
            files[f"{prefix}{model}/"] = "the trained model, for transformers"
    return files


def next_commands(monitor_type: str, url: str) -> dict[str, str]:
    """Return commands that work in any shell on this machine, with descriptions."""
    folder = shlex.quote(url)
    commands = {
        f"{_command('rftdask')} status {folder}": "show the status of the run",
        f"{_command('rftdask')} report {folder}": "write the report again",
    }
    if monitor_type == "tensorboard":
        commands[f"{_command('tensorboard')} --logdir {folder}"] = "show all metrics as curves"
    return commands


def _command(name: str) -> str:
    """Return a shell command for this program of the current Python, which may not be on the PATH."""
    program = Path(sys.executable).parent / name
    if not program.exists():  # installed without scripts
        return f"{shlex.quote(sys.executable)} -m {name}{'.main' * (name == 'tensorboard')}"
    on_path = shutil.which(name)
    return name if on_path is not None and os.path.samefile(on_path, program) else shlex.quote(str(program))


def _samples(stages: Sequence[StageReader]) -> tuple[SampleAnswer, ...]:
    """Read answers to the first eval tasks of the first and the last evaluated version, in the last stage with any."""
    columns = ["task_index", "rollout", "prompt_text", "response_text", "truth", "reward"]
    for stage in reversed(stages):
        for taskset in stage.config.buffer.explorer_input.eval_tasksets:
            log = open_log(stage.storage, stage.config, f"eval/{taskset.name}")
            # The first work unit of each evaluation has the same tasks.
            shards = [name for name in log.shards(0) if name.unit == 0]
            if not shards:
                continue
            # Names sort by version, so the first shard is of the oldest version and the last of the newest.
            before, after = (
                {row["task_index"]: row for row in log.read(name).select(columns).to_pylist() if row["rollout"] == 0}
                for name in (shards[0], shards[-1])
            )
            pairs = [(before[task], after[task]) for task in list(before)[:NUM_SAMPLES] if task in after]
            return tuple(
                SampleAnswer(
                    *(old["prompt_text"], old["truth"], old["response_text"], old["reward"]),
                    *(new["response_text"], new["reward"]),
                )
                for old, new in pairs
            )
    return ()


def time_split(stages: Sequence[StageReader]) -> dict[str, float]:
    """Return seconds of wall time by activity: training, generating, both, and neither (start-up, waiting)."""
    total = sum(stage.seconds for stage in stages)
    training: list[Interval] = []
    generating: list[Interval] = []
    for stage in stages:
        trainer, explorer = stage.rows("trainer"), stage.rows("explorer")
        if "train_s" in trainer:
            # The row is written at the end of the step, after training, publishing and saving.
            ends = trainer["time_s"] - trainer["publish_s"] - trainer["checkpoint_s"]
            training += zip(ends - trainer["train_s"], ends, strict=True)
        if "generate_s" in explorer:
            # The row is written right after the last work unit of the step was generated. Parallel engines can
            # generate for more seconds in sum than the step took.
            passed = explorer[["generate_s", "step_s"]].min(axis=1)
            generating += zip(explorer["time_s"] - passed, explorer["time_s"], strict=True)
    train, generate, either = covered_s(training), covered_s(generating), covered_s(training + generating)
    both = train + generate - either
    split = {"training": train - both, "generating": generate - both, "both": both, "neither": max(0.0, total - either)}
    return split if total > 0 else {}


def covered_s(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of (start, end) intervals."""
    covered = reached = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def render_summary(summary: RunSummary) -> RenderableType:
    """Draw the end of a run for a terminal: results, sample answers, files and next commands."""

    def shown(text: str, style: str = "") -> Text:
        return Text(safe(text), style)

    def line(text: str, style: str) -> RenderableType:
        # Not wrapped, so that it can be copied.
        return Text(safe(text), style, no_wrap=True, overflow="ignore")

    color = {"finished": "green", "failed": "red"}.get(summary.status, "yellow")
    head = (summary.run_name, "bold"), " ", (summary.status, f"bold {color}"), f" after {duration(summary.seconds)}"
    parts: list[RenderableType] = [Text.assemble(*head)]
    if summary.error:
        parts.append(shown(summary.error, "red"))
    parts += [Text(learned(summary)), *(shown(f"warning: {warning}", "yellow") for warning in summary.warnings)]
    if summary.stages:
        table = Table("stage", "mode", "algorithm", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("steps", "time", "accuracy before", "after"):
            table.add_column(name, justify="right")
        for stage in summary.stages:
            accuracies = percent(stage.first_accuracy), percent(stage.last_accuracy)
            steps, took = str(stage.steps), duration(stage.seconds)
            table.add_row(shown(stage.name), stage.mode, shown(stage.algorithm), steps, took, *accuracies)
        parts.append(table)
    # Only the last stage, which is the purpose of the run.
    if changes := [change for change in summary.changes if change.stage == summary.changes[-1].stage]:
        table = Table("changes", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("first steps", "last steps", "\u00b1"):
            table.add_column(name, justify="right")
        for change in changes:
            numbers = f"{change.first:.4g}", f"{change.last:.4g}", f"{change.error:.2g}".replace("nan", "")
            table.add_row(METRICS[change.metric].label, *numbers)
        parts.append(table)
    if summary.samples:
        parts.append(_sample_table(summary.samples[:NUM_SAMPLES]))
    if summary.counts:
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in summary.dropped.items())
        used = f"{summary.counts['trained']:,} trained{dropped}, {summary.counts['waiting']:,} waiting"
        doubt = "" if summary.adds_up else " (these do NOT add up)"
        parts += [Text(f"experiences: {summary.counts['committed']:,} committed = {used}{doubt}"), Text("")]
    if summary.auxiliary:
        parts += [shown(f"auxiliary model {name}: {format_use(use)}") for name, use in summary.auxiliary.items()]
        parts.append(Text(""))
    parts.append(line(f"Files are in {summary.run_url}", "bold"))
    width = max(map(len, summary.files), default=0)
    parts += [
        Text.assemble((f"  {name:<{width}}  ", "cyan"), (what, "dim"), no_wrap=True, overflow="ignore")
        for name, what in summary.files.items()
    ]
    if summary.next_commands:
        parts += [Text(""), Text("Next commands", style="bold")]
    for command, meaning in summary.next_commands.items():
        parts += [line(f"  # {meaning}", "dim"), line(f"  {command}", "cyan")]
    return Group(*parts)


def _sample_table(samples: Sequence[SampleAnswer]) -> RenderableType:
    def answer(text: str, reward: float | None) -> RenderableType:
        return Text.assemble(safe(shorten(text)), "" if reward is None else (f"\nreward {reward:.3g}", "dim"))

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True, expand=True)
    for name in ("task", "truth", "before", "after"):
        # rich can make a column with a ratio narrower than its minimum width.
        table.add_column(name, ratio=None if name == "truth" else 1, overflow="fold")
    for sample in samples:
        texts = Text(safe(shorten(sample.prompt))), Text(safe(shorten(sample.truth, 40)))
        table.add_row(*texts, answer(sample.before, sample.reward_before), answer(sample.after, sample.reward_after))
    return table


def print_summary(summary: RunSummary) -> None:
    """Print `render_summary`; paths and commands stay on one line even in a narrower terminal."""
    safe_console().print(render_summary(summary), crop=False)
