"""Summary: what a finished (or failed, or stopped) run has to tell a person, and how a terminal shows it.

Plain values that the driver fills in; the same `RunSummary` makes the terminal's last words and the HTML report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rftdask.monitor.progress import duration

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class StageSummary:
    """One stage. Accuracies are those of its first and last evaluation, 0 to 1; None when there was none."""

    name: str
    mode: str = ""
    algorithm: str = ""
    steps: int = 0
    seconds: float = 0.0
    first_accuracy: float | None = None
    last_accuracy: float | None = None


@dataclass(frozen=True)
class SampleAnswer:
    """One eval task and what the policy answered before and after training."""

    prompt: str
    truth: str = ""
    before: str = ""
    after: str = ""
    reward_before: float | None = None
    reward_after: float | None = None


@dataclass(frozen=True)
class ExperienceCounts:
    """Where the experiences of the log are: committed = trained + dropped + waiting."""

    committed: int = 0
    trained: int = 0
    waiting: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> count."""

    @property
    def add_up(self) -> bool:
        return self.committed == self.trained + self.waiting + sum(self.dropped.values())


@dataclass(frozen=True)
class RunSummary:
    """All of a run that is not a curve.

    Example: RunSummary(run_name="countdown", run_url="/scratch/runs/demo/countdown", status="finished", seconds=812.0)
    """

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
    samples: tuple[SampleAnswer, ...] = ()
    counts: ExperienceCounts | None = None
    time_split: Mapping[str, float] = field(default_factory=dict)
    """What the time went to -> seconds, such as generating, training, both, neither."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """More to show in large print: label -> text, such as "tokens per second" -> "5,120"."""
    versions: Mapping[str, str] = field(default_factory=dict)
    config_yaml: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the run -> what it is."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """Command -> what it does."""
    error: str = ""
    """Why it failed or stopped."""


def percent(value: float | None) -> str:
    """Example: "61.5%"; "-" for None and NaN."""
    return "-" if value is None or value != value else f"{value:.1%}"


def learned(summary: RunSummary) -> str:
    """One sentence: what the run has learned. Example: "accuracy 12.0% -> 61.5% (+49.5 points)"."""
    before, after = summary.accuracy_before, summary.accuracy_after
    if before is None or after is None:
        return "accuracy was not measured before and after; set eval_interval and an eval taskset to see it"
    return f"accuracy {percent(before)} -> {percent(after)} ({100 * (after - before):+.1f} points)"


def shorten(text: str, max_chars: int = 160) -> str:
    """In one line, at most `max_chars`; the middle goes, because an answer's end holds its result."""
    text = " ".join(text.split())
    half = (max_chars - 5) // 2
    return text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}"


def render_summary(summary: RunSummary, max_samples: int = 5) -> RenderableType:
    """What a terminal shows at the end: what was learned, sample answers, where the files are, what to type next."""
    from rich.console import Group
    from rich.text import Text

    color = {"finished": "green", "failed": "red"}.get(summary.status, "yellow")
    head = Text.assemble(
        (summary.run_name, "bold"), " ", (summary.status, f"bold {color}"), f" after {duration(summary.seconds)}"
    )
    parts: list[RenderableType] = [head]
    if summary.error:
        parts.append(Text(summary.error, style="red"))
    parts.append(Text(learned(summary)))
    if summary.stages:
        parts.append(_stage_table(summary))
    if summary.samples:
        parts.append(_sample_table(summary.samples[:max_samples]))
    if summary.counts:
        parts += [Text(_counts_line(summary.counts)), Text("")]
    parts.append(Text(f"Files are in {summary.run_url}", style="bold"))
    parts += _pairs(summary.files)
    if summary.next_commands:
        parts += [Text(""), Text("Next you can type", style="bold"), *_pairs(summary.next_commands)]
    return Group(*parts)


def _stage_table(summary: RunSummary) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "mode", "algorithm"):
        table.add_column(name)
    for name in ("steps", "time", "accuracy before", "after"):
        table.add_column(name, justify="right")
    for stage in summary.stages:
        accuracies = percent(stage.first_accuracy), percent(stage.last_accuracy)
        table.add_row(stage.name, stage.mode, stage.algorithm, str(stage.steps), duration(stage.seconds), *accuracies)
    return table


def _sample_table(samples: tuple[SampleAnswer, ...]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True, expand=True)
    for name, ratio in (("task", 4), ("truth", 1), ("before", 4), ("after", 4)):
        table.add_column(name, ratio=ratio, overflow="fold", min_width=len(name))
    for sample in samples:
        before, after = _answer(sample.before, sample.reward_before), _answer(sample.after, sample.reward_after)
        table.add_row(Text(shorten(sample.prompt)), Text(shorten(sample.truth, 40)), before, after)
    return table


def _answer(text: str, reward: float | None) -> RenderableType:
    from rich.text import Text

    return Text.assemble(shorten(text), "" if reward is None else (f"\nreward {reward:.3g}", "dim"))


def _counts_line(counts: ExperienceCounts) -> str:
    dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in counts.dropped.items())
    used = f"{counts.trained:,} trained{dropped}, {counts.waiting:,} waiting"
    return f"experiences: {counts.committed:,} committed = {used}" + ("" if counts.add_up else " (these do NOT add up)")


def _pairs(pairs: Mapping[str, str]) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for left, right in pairs.items():
        table.add_row(Text(left, style="cyan"), Text(right, style="dim"))
    return [Padding(table, (0, 0, 0, 2))] if pairs else []
