"""Environment: what this machine and this installation can do, line by line, with what to do about what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from rftdask.cluster.layout import num_cores
from rftdask.processes.gpus import visible_gpus

_COMMAND_S = 60.0
_TORCH = """
import torch
told = [torch.__version__, str(torch.version.cuda or "none"), str(torch.cuda.device_count())]
print("|".join(told + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))
"""


@dataclass(frozen=True)
class Finding:
    """One line."""

    part: str
    state: Literal["ok", "missing", "broken"]
    """missing: an option that is not there. broken: it is there and does not work."""
    text: str

    def render(self) -> str:
        """For a terminal."""
        return f"{self.state:<8} {self.part:<14} {self.text}"


def check_environment() -> list[Finding]:
    """Look at Python, packages, GPUs, SLURM and the sandbox. Takes some seconds; changes nothing."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    machine = f"{num_cores()} cores, {memory_gb:.0f} GB of memory, {platform.system()} {platform.machine()}"
    return [
        Finding("rftdask", "ok", f"{version('rftdask')} on Python {platform.python_version()} ({sys.executable})"),
        Finding("machine", "ok" if sys.platform == "linux" else "missing", machine),
        _torch(),
        _package("transformers", "train", "the embedded engine and the trainer"),
        _package("vllm", "vllm", "the fast engine on GPUs"),
        _package("peft", "lora", "LoRA"),
        _package("dask-jobqueue", "slurm", "jobs of a batch system"),
        _slurm(),
        _command("bwrap", "explorer.sandbox.bubblewrap: the system's package is bubblewrap"),
    ]


def _torch() -> Finding:
    try:
        # By what is installed, without an import, which may fail or hang where the driver does not fit.
        there = version("torch")
    except PackageNotFoundError:
        return Finding("torch", "missing", "for training: pip install 'rftdask[train]'")
    # In a process of its own: a driver that does not fit may take it along.
    done = _run(sys.executable, "-c", _TORCH)
    if done is None or done.returncode:
        said = done.stderr.strip().splitlines()[-1:] if done is not None else [f"no answer in {_COMMAND_S:.0f} s"]
        return Finding("torch", "broken", f"{there} cannot be imported: {''.join(said)}")
    # The last line: what is imported may have printed something before it.
    _, cuda, count, *names = done.stdout.strip().splitlines()[-1].split("|")
    gpus = visible_gpus()
    if gpus and int(count) < len(gpus):
        why = "a CPU" if cuda == "none" else f"CUDA {cuda}, for which the driver may be too old"
        return Finding("torch", "broken", f"{there} sees {count} of {len(gpus)} GPUs: it is built for {why}")
    return Finding("torch", "ok", f"{there}, CUDA {cuda}, {count} GPUs{': ' + ', '.join(names) if names else ''}")


def _package(name: str, extra: str, what: str) -> Finding:
    try:
        return Finding(name, "ok", f"{version(name)}: {what}")
    except PackageNotFoundError:
        return Finding(name, "missing", f"{what}: pip install 'rftdask[{extra}]'")


def _slurm() -> Finding:
    if shutil.which("sinfo") is None:
        return Finding("SLURM", "missing", "sinfo is no command here, so runs are for this machine")
    done = _run("sinfo", "--noheader", "--format=%P %D nodes %G %l")
    if done is None or done.returncode:
        said = done.stderr.strip() if done is not None else f"no answer in {_COMMAND_S:.0f} s"
        return Finding("SLURM", "broken", f"sinfo: {said}")
    return Finding("SLURM", "ok", "; ".join(" ".join(line.split()) for line in done.stdout.splitlines()))


def _command(name: str, what: str) -> Finding:
    found = shutil.which(name)
    return Finding(name, "ok" if found else "missing", found or what)


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        return None
