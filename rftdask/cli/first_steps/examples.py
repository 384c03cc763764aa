"""`rftdask quickstart` and `rftdask examples`: what the package brings along."""

from __future__ import annotations

import runpy
import textwrap
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


GROUPS = {
    "On a laptop (slurm.yaml needs SLURM, s3.yaml a bucket)": (
        "config/quickstart",
        "examples/quickstart",
        "examples/recipes",
    ),
    "Notebooks": ("notebooks",),
    "Agents": ("examples/agents",),
    "Environments, each of a package": ("examples/environments",),
    "Configurations to change": ("config/sft", "config/preferences", "config/offline"),
    "Machines with GPUs": ("config/gsm8k", "config/gpus"),
    "SLURM sites": ("config/slurm",),
}
"""Headings of the list of bundled files -> how their names begin."""


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
        for heading, prefixes in GROUPS.items():
            say(f"{heading}:")
            for name, path in bundled().items():
                if name.startswith(prefixes):
                    indent = "      "
                    text = textwrap.fill(describe(path), 80, initial_indent=indent, subsequent_indent=indent)
                    say(f"  {name}\n{text}")
            say("")
        say("rftdask examples copy NAME copies one of them")


def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name or part of it (ppo_critic), or folder (agents)")],
    to: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Output folder")] = ".",
) -> None:
    """Copy a bundled file or folder, to change and run it.

    An example with its own code is a configuration and a module.
    """
    for path in copy_bundled(name, Path(to)):
        say(f"wrote {path}")
