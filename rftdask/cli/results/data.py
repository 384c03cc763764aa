"""`rftdask data`: the list of its commands."""

from __future__ import annotations

from rftdask.cli.app import make_group

app = make_group(
    {
        "export": ("results.data_export:data_export", "Write the experiences of a run as a dataset."),
        "refine": ("results.data_refine:data_refine", "Filter, deduplicate and score a dataset."),
        "setup": ("results.data_refine:data_setup", "Create the environment of Data-Juicer, once."),
    },
    "Make datasets from a run or from another dataset.",
    no_args_is_help=True,
)


@app.callback()
def _data() -> None:
    pass
