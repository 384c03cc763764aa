"""`rftdask data`: the list of its commands."""

from __future__ import annotations

from typing import ClassVar

import typer

from rftdask.cli.app import LazyGroup


class DataGroup(LazyGroup):
    """Commands below `rftdask data`."""

    table: ClassVar = {
        "export": ("results.data_export:data_export", "Write the experiences of a run as a dataset."),
        "refine": ("results.data_refine:data_refine", "Filter, deduplicate and score a dataset."),
        "setup": ("results.data_refine:data_setup", "Create the environment of Data-Juicer, once."),
    }


app = typer.Typer(
    cls=DataGroup,
    help="Make datasets from a run or from another dataset.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _data() -> None:
    pass
