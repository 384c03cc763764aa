"""`rftdask init` and `rftdask schema`: a first configuration, and what editors complete YAML with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rftdask.cli.common import say
from rftdask.cluster.slurm import read_capacity
from rftdask.config import make_plan
from rftdask.driver.init_config import GSM8K, FirstConfig, json_schema
from rftdask.errors import RoleError, UserError
from rftdask.processes.gpus import visible_gpus


def init(
    out: Annotated[str, typer.Argument(metavar="[FILE]", help="Output file")] = "run.yaml",
    tasks: Annotated[str, typer.Option(help="Task file (jsonl, json, csv, parquet) or a dataset on the Hub")] = "",
    model: Annotated[str, typer.Option(help="Model folder, or a model on the Hub")] = "",
    slurm: Annotated[str, typer.Option(metavar="PARTITION", help="SLURM partition to submit jobs to")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Use defaults instead of asking")] = False,
) -> None:
    """Write a first configuration from a few answers.

    It asks for the tasks, the model, and where the run is executed.
    """

    def ask(question: str, answer: str, default: str) -> str:
        try:
            return answer or (default if yes else typer.prompt(question, default=default))
        except typer.Abort:
            raise UserError(f"no answer to {question!r}; give it as an option, or use --yes for the defaults") from None

    num_gpus, node = len(visible_gpus()), None
    if slurm and shutil.which("sinfo") is not None:
        try:
            node = read_capacity(slurm)
        except RoleError as error:
            say(f"the nodes of partition {slurm} are not known here; check what the jobs ask for: {error}", err=True)
    first = FirstConfig(
        tasks=ask("Tasks, with a question and an answer each", tasks, GSM8K),
        model=ask("Model", model, "Qwen/Qwen2.5-0.5B-Instruct"),
        where="slurm" if slurm else "gpus" if num_gpus else "laptop",
        partition=slurm,
        node=node,
        name=os.path.splitext(os.path.basename(out))[0],
    )
    path = Path(out)
    checked = first.write(path)
    place = f"partition {slurm}" if slurm else f"this machine and its {num_gpus} GPUs" if num_gpus else "this machine"
    say(f"wrote {path}, for {place}; its plan is\n")
    say(make_plan(checked).render())
    if Path(first.tasks).is_file():
        from rftdask.driver.preflight import rewards_of_truths  # late: heavy

        for line in rewards_of_truths(checked.stage_configs()):
            say(line)
    say("\nNext commands")
    for purpose, command in first.next_commands(path):
        say(f"  # {purpose}\n  {command}")


def schema() -> None:
    """Print the JSON Schema of a configuration, for editors.

    The schema explains every key. Editors complete YAML with it.
    """
    say(json.dumps(json_schema(), indent=1))
