"""`rftdask conformance`: losses and advantages against those of other frameworks."""

from __future__ import annotations

import warnings

import typer

from rftdask.cli.app import EXIT_FAILED
from rftdask.cli.common import say
from rftdask.testing.conformance.run import failures, format_table, run_conformance


def conformance() -> None:
    """Compare losses and advantages with other frameworks.

    Exit code 1 if one differs from the documentation.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the frameworks warn about themselves when they are imported
        rows = run_conformance()
    say(format_table(rows))
    if failures(rows):
        raise typer.Exit(EXIT_FAILED)
