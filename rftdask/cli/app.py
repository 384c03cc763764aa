"""The list of commands, and the entry point that turns errors into exit codes.

Exit codes: 0 everything was done; 1 a role failed; 2 the user can fix the error; 130, 143 and 129 the command was asked
to end (Ctrl-C, SIGTERM, SIGHUP) and work is left.

Invariant: `--version`, `--help` and completion of a command's name read only the tables of this module. The module of a
command, and with it the configuration, is imported when the command is called.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import traceback
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from rftdask import __version__
from rftdask.errors import FencedError, RftError, UserError, lacks_training
from rftdask.storage.safe_text import safe

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_STOPPED = 130

# fmt: off
COMMANDS = {
    # Start
    "init": ("first_steps.init", "Write a first configuration from a few answers."),
    "quickstart": ("first_steps.examples", "Train a small model on this machine in half a minute."),
    "import": ("first_steps.import_file:import_file", "Translate a TRL, verl or Trinity-RFT configuration."),
    "examples": ("first_steps.examples:app", "List and copy bundled configurations and examples."),
    "schema": ("first_steps.init", "Print the JSON Schema of a configuration, for editors."),
    "doctor": ("checks.doctor", "Check this machine, or a storage for runs."),
    # Run
    "validate": ("validate", "Check a configuration, and print its plan."),
    "debug": ("debug", "Roll out one task repeatedly while you edit its code."),
    "run": ("run", "Run a configuration to its end, or continue it."),
    "sweep": ("sweep", "Run a configuration with every combination of values."),
    "cancel": ("jobs", "End a run with a checkpoint, wherever it runs."),
    "serve": ("serve", "Serve the policy through OpenAI's API."),
    # Look
    "status": ("jobs", "Print the progress of a run from its files."),
    "studio": ("serve", "Watch, compare, configure, start and stop runs."),
    "report": ("results.reports", "Write the report of a run as one HTML page."),
    "view": ("serve", "Browse the experiences of a run with their tokens."),
    "experiences": ("results.reports", "Query the experiences of a run with SQL."),
    "trace": ("results.reports", "Print the history of one experience."),
    "log": ("jobs:logs", "Print the last lines of the logs of a run."),
    "logs": ("jobs", "Print the last lines of the logs of a run."),
    "perf": ("results.reports", "Write a timeline of a run for Perfetto."),
    "track": ("results.reports", "Send the metrics of a run to a tracker."),
    # Cluster
    "submit": ("submit", "Submit a run to a batch system."),
    "join": ("run", "Work for a run as one more worker of its cluster."),
    "attach": ("jobs", "List the workers of a run's cluster and their tasks."),
    "estimate": ("validate", "Print the GPU memory that a configuration needs."),
    # Models and data
    "convert": ("results.models", "Write a checkpoint as a Hugging Face folder."),
    "push": ("results.models", "Upload a checkpoint to the Hugging Face Hub."),
    "data": ("results.data:app", "Make datasets from a run or from another dataset."),
    # Repair and check
    "replay": ("replay", "Train the recorded batches of a run again."),
    "skip": ("replay", "Skip a recorded batch that cannot be trained."),
    "compact": ("results.compact", "Merge the small shards of a run into large files."),
    "conformance": ("checks.conformance", "Compare losses and advantages with other frameworks."),
    "crashtest": ("checks.crashtest", "Kill, unplug and damage short runs, and check them."),
}
# fmt: on
"""Name -> (module below rftdask.cli, with ":function" if that differs from the name; first paragraph of the help)."""
_HEADINGS = {
    "init": "Start",
    "validate": "Run",
    "status": "Look",
    "submit": "Cluster",
    "convert": "Models and data",
    "replay": "Repair and check",
}
"""First command of each group of the help -> its heading."""
_HIDDEN = {"log"}
"""Names that Trinity-RFT users type; help does not list them."""


class LazyGroup(TyperGroup):
    """Group that imports its commands when they are called, and lists them from `table`, in the form of COMMANDS."""

    table: ClassVar[Mapping[str, tuple[str, str]]] = COMMANDS

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        # Only for lists: help, completion, and suggestions for a mistyped name.
        self.commands = {
            name: TyperCommand(name, help=text, hidden=name in _HIDDEN) for name, (_, text) in self.table.items()
        }

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands below their headings."""
        groups: dict[str, list[tuple[str, str]]] = {}
        heading = "Commands"
        for name, (_, text) in self.table.items():
            heading = _HEADINGS.get(name, heading) if self.table is COMMANDS else heading
            if name not in _HIDDEN:
                groups.setdefault(heading, []).append((name, text))
        width = max(map(len, self.table))  # the texts of all groups begin in one column
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def load(self, name: str) -> Any:
        """Import the command or group `name`. Raises: KeyError: no such command."""
        module, _, function = self.table[name][0].partition(":")
        callback = getattr(importlib.import_module(f"rftdask.cli.{module}"), function or name)
        if isinstance(callback, typer.Typer):
            command = typer.main.get_command(callback)
        else:
            one = typer.Typer(add_completion=False, rich_markup_mode=None)
            one.command(name)(callback)
            command = typer.main.get_command(one)
        command.name, command.short_help = name, self.table[name][1]
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command. Completion skips them, because typer imports pydantic to read them."""
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        rest = list(itertools.dropwhile(lambda word: word.startswith("-"), args))
        ctx._protected_args, ctx.args = rest[:1], rest[1:]
        return rest[1:]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the imported command and its arguments. Raises: UsageError: no such command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load(str(command.name)) if command else None, rest


def make_group(table: Mapping[str, tuple[str, str]], text: str, **options: Any) -> typer.Typer:
    """Return a command with the subcommands of `table`, each imported when it is called. text: help of the command."""
    group = type("Group", (LazyGroup,), {"table": table})
    return typer.Typer(cls=group, help=text, add_completion=False, rich_markup_mode=None, **options)


app = typer.Typer(
    name="rftdask",
    cls=LazyGroup,
    help="Reinforcement fine-tuning of language models as an elastic batch system on Dask.\n\n"
    "A run lives on storage: the same command continues it after any interruption.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else that --help needs
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rftdask {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command `rftdask` with the arguments of the process, and exit with its code."""

    def fail(text: str, code: int) -> None:
        typer.echo(safe(text), err=True)
        sys.exit(code)

    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:  # raised while typer builds the commands; afterwards typer handles it
        sys.exit(EXIT_STOPPED)
    except (UserError, FencedError) as error:
        fail(f"error: {error}", EXIT_USER)
    except RftError as error:
        fail(f"error: {error}", EXIT_FAILED)
    except Exception as error:
        if isinstance(error, ImportError) and (remedy := lacks_training(error)):
            fail(f"error: {remedy}", EXIT_USER)
        if hasattr(error, "message") and hasattr(error, "exit_code"):  # usage errors, whose class is private to typer
            from typer import rich_utils  # late: imports rich, which most commands do not need

            error.message = safe(str(error.message))
            rich_utils.rich_format_error(error)  # type: ignore[arg-type]
            sys.exit(error.exit_code)
        # A bug. Its traceback may quote text from elsewhere, so it also passes through `safe`.
        fail(traceback.format_exc().rstrip(), EXIT_FAILED)
