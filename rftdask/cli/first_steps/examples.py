"""`rftdask quickstart` and `rftdask examples`: what the package brings along."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Annotated

import typer

from rftdask.cli.app import make_group
from rftdask.cli.common import Overrides, say
from rftdask.driver.init_config import bundled, copy_bundled, describe

app = make_group(
    {
        "copy": ("first_steps.examples", "Copy a bundled file or folder, to change and run it."),
        "toy": ("first_steps.toy", "Create a small model that learns sums on a CPU."),
    },
    "List and copy bundled configurations and examples.",
)


def quickstart(overrides: Overrides = None) -> None:
    """Train a small model on this machine in half a minute.

    It shows that the installation works, and what a run leaves on storage.
    """
    # Runs the same file that `rftdask examples copy quickstart` copies.
    runpy.run_path(str(bundled()["examples/quickstart.py"]))["main"](overrides or [])


@app.callback(invoke_without_command=True)
def examples(context: typer.Context) -> None:
    """List and copy bundled configurations and examples.

    Without a command, it lists configurations, examples and notebooks.
    """
    if context.invoked_subcommand is None:
        for name, path in bundled().items():
            say(f"{name}\n    {describe(path)}")


def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name or part of it (ppo_critic), or folder (agents)")],
    to: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Output folder")] = ".",
) -> None:
    """Copy a bundled file or folder, to change and run it.

    An example with its own code is a configuration and a module.
    """
    for path in copy_bundled(name, Path(to)):
        say(f"wrote {path}")
