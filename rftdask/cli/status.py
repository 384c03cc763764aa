"""`rftdask status`: the progress of a run from its files."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from rftdask.cli.app import EXIT_FAILED
from rftdask.cli.common import Run, say
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
