"""`rftdask crashtest`: short runs that are killed, unplugged and damaged."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rftdask.cli.app import EXIT_FAILED
from rftdask.cli.common import say
from rftdask.testing.crashtest.suite import PARTS, run_crash_test


def crashtest(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="Folder on the file system to test (default: temporary)")
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of processes to kill at random moments")] = 100,
    seed: Annotated[int, typer.Option(help="Random seed")] = 1,
    only: Annotated[
        str, typer.Option(metavar="PART,...", help="Parts: stops kills power rivals damage protections")
    ] = "",
    every: Annotated[int, typer.Option(min=1, help="Test only every n-th place")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Kill, unplug and damage short runs, and check them.

    Exit code 1 if a run broke a promise of docs/reliability.md.
    """
    parts = tuple(name.strip() for name in only.split(",") if name.strip()) or PARTS
    result = run_crash_test(folder, parts, kills, seed, every, say=lambda line: say(line, err=True))
    say(json.dumps(result.to_json(), indent=1) if as_json else result.render())
    if result.failures:
        raise typer.Exit(EXIT_FAILED)
