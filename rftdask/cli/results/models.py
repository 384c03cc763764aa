"""`rftdask convert` and `rftdask push`: a checkpoint as a Hugging Face model, on this machine or on the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from rftdask.cli.common import RunOrCheckpoint, Step, say
from rftdask.driver.convert import convert as convert_checkpoint
from rftdask.driver.convert import push as push_model
from rftdask.errors import UserError

MergeLora = Annotated[
    bool, typer.Option("--merge-lora/--adapter", help="LoRA: write the merged model, or the adapter in PEFT's layout")
]


def convert(
    run: RunOrCheckpoint,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Output folder")],
    step: Step = None,
    merge_lora: MergeLora = True,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Output format: hf (gguf: instructions)")] = "hf",
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    It needs no network.
    """
    if to == "gguf":
        raise UserError(
            f"--to gguf: the converter is a script of llama.cpp, and no package contains it (gguf on PyPI only writes "
            f"the file). Convert without --to, then run that script: "
            f"python llama.cpp/convert_hf_to_gguf.py {out} --outfile {out}.gguf"
        )
    if to != "hf":
        raise UserError(f"--to {to}: unknown format; use hf, a Hugging Face folder")
    done = convert_checkpoint(run, out, step=step, merge_lora=merge_lora)
    say(f"{done.folder}: step {done.step} of {done.run}")


def push(
    run: RunOrCheckpoint,
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Model on the Hub, created if necessary")],
    step: Step = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Visibility of a new model")] = True,
    merge_lora: MergeLora = True,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub.

    It adds a model card with data, algorithm, settings and results.
    """
    say(push_model(run, repo, step=step, private=private, merge_lora=merge_lora))
