"""`rftdask doctor`: what this machine, this installation and a storage can do, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from tempfile import gettempdir
from typing import Annotated, Literal

import typer

from rftdask.cli.app import EXIT_FAILED
from rftdask.cli.common import say
from rftdask.cluster.layout import num_cores
from rftdask.processes.gpus import visible_gpus
from rftdask.processes.leftovers import abandoned_semaphores
from rftdask.processes.zygote import socket_folder
from rftdask.storage.doctor import check_storage
from rftdask.storage.temporary import remove_abandoned

_COMMAND_TIMEOUT_S = 60.0
_TORCH = """
import torch
parts = [torch.__version__, str(torch.version.cuda or "none"), str(torch.cuda.device_count())]
print("|".join(parts + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))
"""


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="Storage to check for runs")] = None,
) -> None:
    """Check this machine, or a storage for runs.

    With a URL, it checks in about 15 s whether that storage has the properties that runs rely on, and measures its
    speed. Exit code 1 if something is broken.
    """
    if url is None:
        findings = diagnose_machine()
        say("\n".join(finding.render() for finding in findings))
        say("\nrftdask doctor FOLDER checks a storage")
        if any(finding.state == "broken" for finding in findings):
            raise typer.Exit(EXIT_FAILED)
        return
    report = check_storage(url)
    say(report.render())
    if not report.is_safe:
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True)
class Finding:
    """State of one part of the machine or installation."""

    part: str
    state: Literal["ok", "missing", "broken"]
    """missing: an optional part is not installed. broken: a part is installed and does not work."""
    text: str

    def render(self) -> str:
        """Return a line for a terminal."""
        return f"{self.state:<8} {self.part:<14} {self.text}"


def diagnose_machine() -> list[Finding]:
    """Check Python, packages, GPUs, SLURM and the sandbox. Takes a few seconds and changes nothing."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    machine = f"{num_cores()} cores, {memory_gb:.0f} GB of memory, {platform.system()} {platform.machine()}"
    bwrap = shutil.which("bwrap")
    return [
        Finding("rftdask", "ok", f"{version('rftdask')} on Python {platform.python_version()} ({sys.executable})"),
        Finding("machine", "ok" if sys.platform == "linux" else "missing", machine),
        _check_torch(),
        _check_package("transformers", "train", "the embedded engine and the trainer"),
        _check_package("vllm", "vllm", "the fast engine on GPUs"),
        _check_package("peft", "lora", "LoRA"),
        _check_package("dask-jobqueue", "slurm", "jobs of a batch system"),
        _check_slurm(),
        Finding(
            "bwrap",
            "ok" if bwrap else "missing",
            bwrap or "for explorer.sandbox.bubblewrap: install the system package bubblewrap",
        ),
        _check_leftovers(),
    ]


def _check_torch() -> Finding:
    try:
        # Reads the installed version without an import, which may fail or hang if the driver does not fit.
        installed = version("torch")
    except PackageNotFoundError:
        return Finding("torch", "missing", "for training: pip install 'rftdask[train]'")
    # In its own process, which an unsuitable driver may crash.
    done = _run(sys.executable, "-c", _TORCH)
    if done is None or done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] if done is not None else [_no_answer()]
        return Finding("torch", "broken", f"{installed} cannot be imported: {''.join(reason)}")
    # The last line, because the import may print something before it.
    _, cuda, count, *names = done.stdout.strip().splitlines()[-1].split("|")
    gpus = visible_gpus()
    if gpus and int(count) < len(gpus):
        why = "a CPU" if cuda == "none" else f"CUDA {cuda}, for which the driver may be too old"
        return Finding("torch", "broken", f"{installed} sees {count} of {len(gpus)} GPUs: it is built for {why}")
    return Finding("torch", "ok", f"{installed}, CUDA {cuda}, {count} GPUs{': ' + ', '.join(names) if names else ''}")


def _check_package(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(name, "ok", f"{version(name)}: {purpose}")
    except PackageNotFoundError:
        return Finding(name, "missing", f"{purpose}: pip install 'rftdask[{extra}]'")


def _check_slurm() -> Finding:
    if shutil.which("sinfo") is None:
        return Finding("SLURM", "missing", "no sinfo command, so runs use this machine only")
    done = _run("sinfo", "--noheader", "--format=%P %D nodes %G %l")
    if done is None or done.returncode:
        return Finding("SLURM", "broken", f"sinfo: {done.stderr.strip() if done is not None else _no_answer()}")
    return Finding("SLURM", "ok", "; ".join(" ".join(line.split()) for line in done.stdout.splitlines()))


def _check_leftovers() -> Finding:
    folders = sum(remove_abandoned(parent, only_count=True) for parent in {gettempdir(), socket_folder()})
    semaphores = len(abandoned_semaphores())
    text = f"{folders} folders and {semaphores} semaphores of killed processes"
    return Finding("leftovers", "ok", text + "; the next run removes them" * bool(folders or semaphores))


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command. None: it timed out."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None


def _no_answer() -> str:
    return f"no answer in {_COMMAND_TIMEOUT_S:.0f} s"
