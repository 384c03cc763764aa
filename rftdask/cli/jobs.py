"""`rftdask logs`, `cancel` and `attach`: the processes of a run, seen from another one."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from rftdask.cli.common import Run, say
from rftdask.driver.jobs import cancel as end_run
from rftdask.driver.jobs import connect, follow_logs, read_logs
from rftdask.processes.dask_task import workers_of


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
