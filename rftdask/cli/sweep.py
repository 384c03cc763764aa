"""Sweep: the same configuration with every combination of some values, each a run of its own in one group of folders.

A run is `rftdask run` or `rftdask submit`, so the same command continues a sweep: what has finished is left alone, what
was stopped goes on. On SLURM each run waits for the one that is N before it, so at most N are there at a time and
nobody needs to stay logged in. The table and the chart come from the runs' files, whatever became of them.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from rftdask.config import Config, load_config
from rftdask.errors import DataError, UserError
from rftdask.reports.run_reader import open_stages
from rftdask.run.run_folder import read_end
from rftdask.storage import open_storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEED = "seed"
TABLE, CHART = "sweep.csv", "sweep.svg"
MAX_RUNS = 1000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: the values of its axes, as they were typed."""

    values: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...]
    """All that is set beside the file, as `rftdask run` takes it."""
    config: Config

    @property
    def arm(self) -> str:
        """What it has in common with its repetitions: all values but the seed's."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values if key != SEED) or "all"


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    point: Point
    state: str
    """not started, running or stopped, finished, or how it failed."""
    step: int | None = None
    reward: float | None = None
    """Of the last trained step."""
    first_accuracy: float | None = None
    last_accuracy: float | None = None
    eval_loss: float | None = None


def plan_sweep(path: str, settings: Sequence[str]) -> list[Point]:
    """The runs of a sweep. settings: KEY=VALUE for all of them, and axes: KEY=V1,V2,... or KEY=FIRST..LAST.

    Raises: UserError: there is no axis, or there are too many runs; ConfigError: one of them is no configuration.
    """
    fixed, axes = list[str](), dict[str, list[str]]()
    for setting in settings:
        key, found, text = setting.partition("=")
        values = values_of(text)
        if found and len(values) > 1:
            axes[key] = values
        else:
            fixed.append(setting)
    if not axes:
        raise UserError("nothing is to be swept; give a key several values: seed=0..4 algorithm.optimizer.lr=1e-6,2e-6")
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) > MAX_RUNS:
        raise UserError(f"that would be {len(combinations)} runs, and a sweep has at most {MAX_RUNS}")
    # Read once without the axes, for the group alone, which all runs of the sweep have in common.
    group = load_config(path, fixed)
    if not group.continue_from_checkpoint:
        raise UserError("continue_from_checkpoint: a sweep goes on with its runs by their names; leave it out")
    points = []
    for combination in combinations:
        chosen = tuple(zip(axes, combination, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', value)}" for key, value in chosen)
        own = (f"group={group.group or group.name}", f"name={name}")
        # The folder's parts come last and win: no setting of the user's can bring two runs into one folder.
        overrides = (*fixed, *(f"{key}={value}" for key, value in chosen), *own)
        points.append(Point(chosen, overrides, load_config(path, list(overrides))))
    names = [point.config.name for point in points]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"two runs of the sweep would have the same folder: {', '.join(twice)}; give values that differ"
        )
    return points


def values_of(text: str) -> list[str]:
    """The values of an axis; commas within brackets or quotes are parts of a value.

    >>> values_of("1e-6,2e-6"), values_of("0..2"), values_of("[1,2],[3]"), values_of("a")
    (['1e-6', '2e-6'], ['0', '1', '2'], ['[1,2]', '[3]'], ['a'])
    """
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        return [str(number) for number in range(first, last + 1)]
    return [part.strip() for part in _split(text) if part.strip()]


def _split(text: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def run_sweep(path: str, points: Sequence[Point], at_most: int, say: Callable[[str], None]) -> int:
    """Run what has not finished, `at_most` at a time, in order; how many runs failed. Ctrl-C ends those that run with a
    checkpoint. On SLURM they are submitted, and none has failed yet.
    """
    from rftdask.cluster.slurm import SlurmCluster  # late: it loads Dask

    if points[0].config.cluster.type == SlurmCluster.cluster_type:
        submit_sweep(points, at_most, say)
        return 0

    def run_one(point: Point) -> int:
        if read_end(open_storage(point.config.checkpoint_job_dir)) == "finished":
            return 0
        say(f"{point.config.name} begins")
        # A process each, as if it were typed: Ctrl-C in a terminal reaches all of them.
        command = [sys.executable, "-m", "rftdask", "run", path, *point.overrides, "--progress", "none"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-5:])
            say(f"{point.config.name} ended with code {done.returncode}: {said}")
        return done.returncode

    with ThreadPoolExecutor(at_most, "sweep") as threads:
        runs = [threads.submit(run_one, point) for point in points]
        try:
            return sum(run.result() != 0 for run in runs)
        except BaseException:
            threads.shutdown(cancel_futures=True)  # else the others would begin now
            raise


def submit_sweep(points: Sequence[Point], at_most: int, say: Callable[[str], None]) -> None:
    """Submit what has not finished to SLURM: each run waits until the one that is `at_most` before it has ended,
    however it did. Raises: as `rftdask submit`; those that were submitted before stay.
    """
    from rftdask.cli.submit import plan_submission  # late: it loads Dask
    from rftdask.driver.preflight import check_inputs
    from rftdask.run.input_fingerprints import check_inputs_unchanged

    jobs: list[str] = []
    for point in points:
        if read_end(open_storage(point.config.checkpoint_job_dir)) == "finished":
            continue
        submission = plan_submission(point.config)
        stages = point.config.stage_configs()
        # Each run by itself, since a value of an axis may be another model or taskset.
        made_of = check_inputs_unchanged(stages, check_inputs(stages, elsewhere=True))
        [job] = submission.submit(made_of, after=jobs[-at_most] if len(jobs) >= at_most else None)
        say(f"submitted {point.config.name} as job {job.job_id}")
        jobs.append(job.job_id)


def read_outcomes(points: Sequence[Point]) -> list[Outcome]:
    """What became of the runs, by their files."""
    return [_outcome(point) for point in points]


def _outcome(point: Point) -> Outcome:
    storage = open_storage(point.config.checkpoint_job_dir)
    try:
        stages = [stage for stage in open_stages(storage.url) if stage.has_begun]
    except DataError:
        return Outcome(point, "not started")
    if not stages:
        return Outcome(point, "not started")
    accuracies = [accuracy.value for stage in stages for accuracy in stage.accuracies]
    last = stages[-1]
    return Outcome(
        point,
        read_end(storage) or "running or stopped",
        last.ledger.last_step() or None,
        next(reversed(last.values("trainer", "reward")), None),
        accuracies[0] if accuracies else None,
        accuracies[-1] if accuracies else None,
        next(reversed(last.values("eval", "eval_loss")), None),
    )


def render_table(outcomes: Sequence[Outcome]) -> str:
    """A line for each run, then one for each arm with the mean and the standard deviation over its seeds."""
    rows = [["run", "state", "step", "reward", "accuracy", "eval loss"]]
    for outcome in outcomes:
        both = [_number(value) for value in (outcome.first_accuracy, outcome.last_accuracy)]
        accuracy = f"{both[0]} -> {both[1]}" if any(both) else ""
        state = outcome.state if len(outcome.state) < 40 else f"{outcome.state[:37]}..."
        reward, loss = _number(outcome.reward), _number(outcome.eval_loss)
        rows.append([outcome.point.config.name, state, str(outcome.step or ""), reward, accuracy, loss])
    arms = list(dict.fromkeys(outcome.point.arm for outcome in outcomes))
    # Where each run is an arm of its own, the lines above have said it all.
    if len(arms) < len(outcomes):
        rows.append([""] * 6)
        for arm in arms:
            of_arm = [outcome for outcome in outcomes if outcome.point.arm == arm]
            numbers = [[o.reward for o in of_arm], [o.last_accuracy for o in of_arm], [o.eval_loss for o in of_arm]]
            spreads = [_spread([value for value in part if value is not None]) for part in numbers]
            rows.append([arm, f"{len(of_arm)} runs", "", *spreads])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _spread(values: Sequence[float]) -> str:
    return "" if not values else f"{mean(values):.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def render_csv(outcomes: Sequence[Outcome]) -> str:
    """The table for programs: a column for each axis."""
    text = io.StringIO()
    axes = [key for key, _ in outcomes[0].point.values]
    fields = ("state", "step", "reward", "first_accuracy", "last_accuracy", "eval_loss")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*axes, "folder", *fields])
    for outcome in outcomes:
        folder = outcome.point.config.checkpoint_job_dir
        rows.writerow([*(value for _, value in outcome.point.values), folder, *(getattr(outcome, f) for f in fields)])
    return text.getvalue()


def plot_sweep(points: Sequence[Point]) -> Figure:
    """Rewards and accuracies by step: a line for each arm, the mean of its seeds, in a band from the least to the
    largest of them.
    """
    from matplotlib.figure import Figure  # late: half a second that only who draws pays

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for place, (role, metric) in enumerate((("trainer", "reward"), ("eval", "accuracy")), start=1):
        axes = figure.add_subplot(1, 2, place)
        axes.set_title(metric, loc="left")
        axes.set_xlabel("step of the last stage")
        for arm in dict.fromkeys(point.arm for point in points):
            by_step: dict[int, list[float]] = {}
            for point in (point for point in points if point.arm == arm):
                for step, value in _curve(point, role, metric):
                    # A step that only some of the runs have reached is told by those alone.
                    by_step.setdefault(step, []).append(value)
            steps = sorted(by_step)
            if steps:
                [line] = axes.plot(steps, [mean(by_step[step]) for step in steps], label=arm)
                low, high = [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps]
                axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return figure


def _curve(point: Point, role: str, metric: str) -> list[tuple[int, float]]:
    try:
        stages = [stage for stage in open_stages(point.config.checkpoint_job_dir) if stage.has_begun]
    except DataError:
        return []
    if not stages or metric not in stages[-1].metrics:
        return []
    frame = stages[-1].metrics
    rows = frame[frame["role"] == role].dropna(subset=[metric])
    return list(zip(rows["step"].tolist(), rows[metric].tolist(), strict=True))


def write_results(points: Sequence[Point]) -> tuple[str, Path | None]:
    """The table; beside the runs, where they are on this machine, it and the chart as files: their folder."""
    outcomes = read_outcomes(points)
    table, folder = render_table(outcomes), points[0].config.checkpoint_job_dir
    if "://" in folder or not Path(folder).parent.exists():
        return table, None
    beside = Path(folder).parent
    (beside / TABLE).write_text(render_csv(outcomes))
    plot_sweep(points).savefig(beside / CHART)
    return table, beside
