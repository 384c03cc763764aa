"""`rftdask status`, `logs`, `cancel` and `attach`: watch and end a run from any machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Annotated

import typer

from rftdask.cli.app import EXIT_FAILED
from rftdask.cli.common import Run, say
from rftdask.driver.jobs import cancel as end_run
from rftdask.driver.jobs import connect, follow_logs, read_logs
from rftdask.processes.dask_task import workers_of
from rftdask.reports.jobs import read_run_jobs
from rftdask.reports.status import read_status


def status(run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """Print the progress of a run from its files.

    It works from any machine, also for a dead run. Exit code 1 if the experiences of the run do not add up.
    """
    run_jobs = read_run_jobs(run)
    stages = read_status(run) if run_jobs.has_begun else []
    if as_json:
        say(json.dumps({**run_jobs.to_json(), "stages": [dataclasses.asdict(stage) for stage in stages]}, indent=1))
    else:
        for job in run_jobs.jobs:
            say(f"job {job.job_id:<8} {job.name:<14} {job.state}")
        if run_jobs.usage is not None:
            say(f"took {run_jobs.usage.render()}")
        elif run_jobs.usage_unknown:
            say(run_jobs.usage_unknown)
        if run_jobs.why:
            say(f"not running: {run_jobs.why}")
        for stage in stages:
            say(stage.render())
    if any(stage.problems for stage in stages):
        raise typer.Exit(EXIT_FAILED)


def logs(
    run: Run,
    role: Annotated[
        str, typer.Argument(help="Role: controller, driver, trainer, explorer, engine (default: all)")
    ] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Number of lines per log")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines as they come, until Ctrl-C")] = False,
) -> None:
    """Print the last lines of the logs of a run.

    It includes the logs of its jobs, and also works for a dead run.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for name, tail in follow_logs(run, role, lines) if follow else read_logs(run, role, lines):
            say(f"==> {name} <==")
            say("\n".join(tail))


def cancel(
    run: Run, timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait before killing its jobs")] = 600
) -> None:
    """End a run with a checkpoint, wherever it runs.

    `rftdask submit` continues it.
    """
    end_run(run, timeout, say)


def attach(run: Run) -> None:
    """List the workers of a run's cluster and their tasks.

    In a notebook: Experiment.attach(RUN).
    """
    with connect(run) as client:
        workers = workers_of(client)
        say(f"scheduler {client.scheduler.address}")
        for address, info in sorted(workers.items(), key=lambda item: str(item[1]["name"])):
            busy = ", ".join(client.processing().get(address, ())) or "idle"
            say(f"  {info['name']:<28} {', '.join(info['resources']):<10} {address:<28} {busy}")
        say(f"dashboard {client.dashboard_link}" if client.dashboard_link else "no dashboard")
