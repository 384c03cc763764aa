"""Options that several commands share, and how commands print, load and begin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftdask.config import Config, load_config
from rftdask.driver.init_config import bundled
from rftdask.errors import UserError
from rftdask.run.run_folder import allocate_run_name
from rftdask.storage.safe_text import safe


def _existing(config: str) -> str:
    """Return `config`. Raises: UserError: it does not exist, and the package has a file of that name."""
    if config.startswith("config/") and not Path(config).exists() and config in bundled():
        copy = f"rftdask examples copy {config} {Path(config).parent}"
        raise UserError(f"{config} does not exist here; `{copy}` copies the bundled file there")
    return config


ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="YAML file, for example config/quickstart.yaml", callback=_existing)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file, such as trainer.total_steps=20"),
]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs per machine to plan for (may differ from this machine)")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of machines, each with --gpus GPUs")]
Gpu = Annotated[str, typer.Option(help='GPU model or memory size, for example "H100 80GB", "RTX 4090" or 48GB')]
Origin = Annotated[str, typer.Option("--from", metavar="SYSTEM", help="System of the file: trinity (Trinity-RFT)")]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="Accept a changed reward, workflow, taskset or model")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run")]
RunOrCheckpoint = Annotated[
    str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder or URL of a run or checkpoint")
]
Step = Annotated[int | None, typer.Option(help="Checkpoint step (default: latest)")]
Progress = Annotated[str, typer.Option(help="Progress display: auto, terminal, plain or none")]


def say(text: object, err: bool = False) -> None:
    """Print a line with control characters escaped. Commands print through this function only."""
    typer.echo(safe(str(text)), err=err)


def warn(warnings: tuple[str, ...]) -> None:
    """Print warnings to stderr."""
    for warning in warnings:
        say(f"warning: {warning}", err=True)


def load(config: str, overrides: list[str] | None, origin: str = "") -> Config:
    """Load and check a configuration, and print its warnings."""
    checked = load_config(config, overrides or [], origin=origin)
    if checked.origin:
        say(f"read as a file of {checked.origin}; rftdask validate shows what that changes", err=True)
    warn(checked.warnings)
    return checked


def with_run_name(checked: Config) -> Config:
    """Return the configuration of this start, which has a new name if it must not continue the run in its folder."""
    begun = allocate_run_name(checked)
    if begun.name != checked.name:
        say(f"continue_from_checkpoint: false: a new run, {begun.checkpoint_job_dir}", err=True)
    return begun


def machine_settings(gpus: int | None, nodes: int | None) -> list[str]:
    """Return --gpus and --nodes as overrides."""
    settings = (("cluster.gpu_per_node", gpus), ("cluster.node_num", nodes))
    return [f"{key}={number}" for key, number in settings if number is not None]


def write_text(path: str, text: str, option: str = "") -> None:
    """Write a file. option: its name in messages. Raises: UserError: the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{option}{path}: {error.strerror}") from error
