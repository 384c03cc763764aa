"""`rftdask sweep`: one configuration with every combination of some values, each a separate run in a common group.

Each run is started by `rftdask run` or `rftdask submit`, so the same command continues a sweep: it keeps finished runs
and continues stopped ones. On SLURM each run depends on the run N before it, so at most N exist at a time and the user
can log out. Table and chart are read from the runs' files, also of failed runs.
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
from typing import TYPE_CHECKING, Annotated

import typer

from rftdask.cli.app import EXIT_FAILED
from rftdask.cli.common import ConfigFile, say
from rftdask.cli.submit import plan_submission
from rftdask.cluster.batch_cluster import submitted_jobs
from rftdask.cluster.driver_script import PATIENCE_S
from rftdask.cluster.slurm import SlurmCluster
from rftdask.config import Config, load_config
from rftdask.driver.preflight import check_inputs
from rftdask.errors import DataError, FencedError, UserError
from rftdask.reports.run_reader import StageReader, open_stages
from rftdask.run.input_fingerprints import check_inputs_unchanged
from rftdask.run.run_folder import read_end
from rftdask.storage import open_storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEED = "seed"
TABLE, CHART = "sweep.csv", "sweep.svg"
MAX_RUNS = 1000
_OPTIONS = ("--progress", "none", "--exit-with-parent", "--patience", str(PATIENCE_S))
"""Options of each run: it ends with a sweep that is killed, and the next sweep waits for that."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def sweep(
    config: ConfigFile,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE,VALUE...", help="Axes, such as seed=0..4 or a.b=1,2; a single value applies to all runs"
        ),
    ],
    at_most: Annotated[int, typer.Option(min=1, help="Number of concurrent runs")] = 1,
    table: Annotated[bool, typer.Option("--table", help="Print the state of the runs; start nothing")] = False,
) -> None:
    """Run a configuration with every combination of values.

    The same command continues a sweep. It ends with a table and a chart. With cluster.type slurm, it submits the runs.
    Exit code 1 if a run failed.
    """
    points = plan_sweep(config, settings)
    num_failed = 0 if table else run_sweep(config, points, at_most, lambda line: say(line, err=True))
    text, folder = write_results(points)
    say(text)
    if folder is not None:
        say(f"\n{folder}/ has the table as sweep.csv and the curves as sweep.svg")
    if num_failed:
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    values: tuple[tuple[str, str], ...]
    """(key, value as typed) of each axis."""
    overrides: tuple[str, ...]
    """All settings in addition to the file, as arguments of `rftdask run`."""
    config: Config

    @property
    def arm(self) -> str:
        """Label of the configuration without its seed. Runs that differ only in their seed share it."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values if key != SEED) or "all"


@dataclass(frozen=True)
class Outcome:
    """Result of one run so far."""

    point: Point
    state: str
    """"not started", "running or stopped", "finished", or how the run failed."""
    step: int | None = None
    reward: float | None = None
    """Mean reward of the last trained step."""
    first_accuracy: float | None = None
    last_accuracy: float | None = None
    eval_loss: float | None = None


def plan_sweep(path: str, settings: Sequence[str]) -> list[Point]:
    """Return the runs of a sweep. settings: KEY=VALUE for all runs; axes as KEY=V1,V2,... or KEY=FIRST..LAST.

    Raises: UserError: no axis, or too many runs; ConfigError: a combination is not a valid configuration.
    """
    fixed, axes = list[str](), dict[str, list[str]]()
    for setting in settings:
        key, sign, text = setting.partition("=")
        values = values_of(text)
        if sign and len(values) > 1:
            axes[key] = values
        else:
            fixed.append(setting)
    if not axes:
        raise UserError("no key has several values; add an axis: seed=0..4 or algorithm.optimizer.lr=1e-6,2e-6")
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) > MAX_RUNS:
        raise UserError(f"{len(combinations)} runs exceed the limit of {MAX_RUNS} for a sweep; give fewer values")
    # Loaded without the axes, only for the group, which all runs share.
    group = load_config(path, fixed)
    if not group.continue_from_checkpoint:
        raise UserError("continue_from_checkpoint: false: a sweep continues its runs by name; leave the setting out")
    points = []
    for combination in combinations:
        chosen = tuple(zip(axes, combination, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', value)}" for key, value in chosen)
        folder = (f"group={group.group or group.name}", f"name={name}")
        # The folder comes last and wins, so that no setting of the user puts two runs into one folder.
        overrides = (*fixed, *(f"{key}={value}" for key, value in chosen), *folder)
        points.append(Point(chosen, overrides, load_config(path, list(overrides))))
    names = [point.config.name for point in points]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"several runs of the sweep would share the folder {', '.join(twice)}; give values that differ")
    return points


def values_of(text: str) -> list[str]:
    """Return the values of an axis. Commas within brackets or quotes do not separate values.

    >>> values_of("1e-6,2e-6"), values_of("0..2"), values_of("[1,2],[3]"), values_of("a")
    (['1e-6', '2e-6'], ['0', '1', '2'], ['[1,2]', '[3]'], ['a'])
    """
    if match := _RANGE.fullmatch(text):
        return [str(number) for number in range(int(match[1]), int(match[2]) + 1)]
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
    """Run unfinished runs in order, `at_most` at a time. Ctrl-C ends active runs with a checkpoint.

    Returns: number of failed runs; 0 on SLURM, where the runs are only submitted.
    """
    if points[0].config.cluster.type == SlurmCluster.cluster_type:
        submit_sweep(points, at_most, say)
        return 0

    def run_one(point: Point) -> int:
        if read_end(open_storage(point.config.checkpoint_job_dir)) == "finished":
            return 0
        say(f"{point.config.name} begins")
        # Separate processes, so that Ctrl-C in a terminal reaches all of them.
        command = [sys.executable, "-m", "rftdask", "run", path, *point.overrides, *_OPTIONS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last_lines = "\n".join(done.stderr.strip().splitlines()[-5:])
            say(f"{point.config.name} ended with code {done.returncode}: {last_lines}")
        return done.returncode

    with ThreadPoolExecutor(at_most, "sweep") as threads:
        runs = [threads.submit(run_one, point) for point in points]
        try:
            return sum(run.result() != 0 for run in runs)
        except BaseException:
            threads.shutdown(cancel_futures=True)  # otherwise the queued runs would begin now
            raise


def submit_sweep(points: Sequence[Point], at_most: int, say: Callable[[str], None]) -> None:
    """Submit unfinished runs to SLURM. Each run waits until the run `at_most` before it has ended or failed.

    Raises: as `rftdask submit`, except that runs that are already submitted are kept.
    """
    jobs: list[str] = []
    for point in points:
        storage = open_storage(point.config.checkpoint_job_dir)
        if read_end(storage) == "finished":
            continue
        try:
            submission = plan_submission(point.config)
            stages = point.config.stage_configs()
            # Checked for each run, since an axis may vary the model or the taskset.
            fingerprints = check_inputs_unchanged(stages, check_inputs(stages, elsewhere=True))
            [job] = submission.submit(fingerprints, after=jobs[-at_most] if len(jobs) >= at_most else None)
            say(f"submitted {point.config.name} as job {job.job_id}")
            jobs.append(job.job_id)
        except FencedError:
            if not (submitted := [job.job_id for job, _ in submitted_jobs(storage)]):
                raise
            say(f"{point.config.name} is already submitted as job {', '.join(submitted)}")
            jobs += submitted


def _stages(point: Point) -> list[StageReader]:
    try:
        return [stage for stage in open_stages(point.config.checkpoint_job_dir) if stage.has_begun]
    except DataError:
        return []


def _outcome(point: Point) -> Outcome:
    if not (stages := _stages(point)):
        return Outcome(point, "not started")
    accuracies = [accuracy.value for stage in stages for accuracy in stage.accuracies]
    last = stages[-1]
    return Outcome(
        point,
        read_end(open_storage(point.config.checkpoint_job_dir)) or "running or stopped",
        last.ledger.last_step() or None,
        next(reversed(last.values("trainer", "reward")), None),
        accuracies[0] if accuracies else None,
        accuracies[-1] if accuracies else None,
        next(reversed(last.values("eval", "eval_loss")), None),
    )


def render_table(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each run, then for each arm the mean and standard deviation over its seeds."""
    rows = [["run", "state", "step", "reward", "accuracy", "eval loss"]]
    for outcome in outcomes:
        both = [_number(value) for value in (outcome.first_accuracy, outcome.last_accuracy)]
        accuracy = f"{both[0]} -> {both[1]}" if any(both) else ""
        state = outcome.state if len(outcome.state) < 40 else f"{outcome.state[:37]}..."
        reward, loss = _number(outcome.reward), _number(outcome.eval_loss)
        rows.append([outcome.point.config.name, state, str(outcome.step or ""), reward, accuracy, loss])
    arms = list(dict.fromkeys(outcome.point.arm for outcome in outcomes))
    # Without repetitions, the arms would only repeat the lines above.
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
    """Return the table as CSV, with a column for each axis."""
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
    """Plot rewards and accuracies by step: for each arm the mean over its seeds, in a band from minimum to maximum."""
    from matplotlib.figure import Figure  # late: takes half a second to import

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for place, (role, metric) in enumerate((("trainer", "reward"), ("eval", "accuracy")), start=1):
        axes = figure.add_subplot(1, 2, place)
        axes.set_title(metric, loc="left")
        axes.set_xlabel("step of the last stage")
        for arm in dict.fromkeys(point.arm for point in points):
            by_step: dict[int, list[float]] = {}
            for point in (point for point in points if point.arm == arm):
                for step, value in _curve(point, role, metric):
                    # A step that only some runs have reached is averaged over those runs.
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
    frame = stages[-1].metrics if (stages := _stages(point)) else None
    if frame is None or metric not in frame:
        return []
    rows = frame[frame["role"] == role].dropna(subset=[metric])
    return list(zip(rows["step"].tolist(), rows[metric].tolist(), strict=True))


def write_results(points: Sequence[Point]) -> tuple[str, Path | None]:
    """Write table and chart next to the runs, if those are on this machine.

    Returns: the table as text, and the folder of the files. None: nothing was written.
    """
    outcomes = [_outcome(point) for point in points]
    table, folder = render_table(outcomes), points[0].config.checkpoint_job_dir
    if "://" in folder or not Path(folder).parent.exists():
        return table, None
    group_folder = Path(folder).parent
    (group_folder / TABLE).write_text(render_csv(outcomes))
    plot_sweep(points).savefig(group_folder / CHART)
    return table, group_folder
