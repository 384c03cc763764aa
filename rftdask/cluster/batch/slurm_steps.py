"""SLURM, inside an allocation that is there already (salloc, or a script of the user's own): workers are steps of it.

Where `rftdask run` finds itself in a job that `rftdask submit` has not made, it asks for no other: each job that it
would have submitted is an `srun` on the nodes that are there, which waits while others, such as of another run, have
them. What ends is replaced, as a job is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from rftdask.cluster import slurm
from rftdask.cluster.batch.slurm_script import command_of, staging, step
from rftdask.cluster.slurm import Capacity
from rftdask.config import Config
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import WorkerJobConfig, count_gres
from rftdask.errors import RoleError

_ALLOCATION = "RFTDASK_ALLOCATION"
"""Environment: its number, once SLURM's own variables are forgotten."""
_END_S = 10.0

_steps: dict[str, subprocess.Popen[bytes]] = {}
"""Of this process, by id."""


def allocation() -> str | None:
    """The number of the allocation that this process is in and may use; None: there is none, or it is a job of
    `rftdask submit`, which has submitted others.
    """
    if SUBMITTED in os.environ:
        return None
    found = os.environ.get(_ALLOCATION) or os.environ.get("SLURM_JOB_ID")
    if found is not None:
        os.environ[_ALLOCATION] = found
    return found


def read_allocation(job_id: str) -> Capacity:
    """What its nodes have. Raises: RoleError: SLURM does not know it."""
    told: dict[str, str] = dict(re.findall(r"(\w+)=(\S+)", slurm.call("scontrol", "--oneliner", "show", "job", job_id)))
    nodes = int(told.get("NumNodes", "1").partition("-")[0])
    # Of a job that asked for whole nodes only what it got says how many GPUs there are.
    in_all = re.search(r"(?<![\w/])gres/gpu=(\d+)", told.get("AllocTRES") or told.get("TRES", ""))
    gpus = max(count_gres(told.get("TresPerNode")), int(in_all[1]) // nodes if in_all else 0)
    return Capacity(f"of allocation {job_id}", nodes, int(told.get("NumCPUs", "1")) // nodes, gpus)


def step_script(config: Config, role: str, shape: slurm.JobShape, name: str, worker: str, logs: Path) -> str:
    """Shell that becomes a step whose tasks are workers. worker: arguments of Python, without a name."""
    job_id, job = os.environ[_ALLOCATION], _job(config, role)
    gpus = [option for option in slurm.directives(job) if option.startswith(("--gres=", "--gpus-per-node="))]
    # Exactly what it asks for, so that steps of other roles and runs have the rest; memory is the allocation's.
    options = (f"--jobid={job_id}", "--exact", "--mem=0", "--kill-on-bad-exit=1", *gpus)
    # The shell becomes srun and keeps its number, which is that of the step to this package.
    own = f'--name "{name}-{job_id}.$$-0" --local-directory "${{TMPDIR:-/tmp}}"'
    command = command_of(config, role, f"{worker} {own}", step(job, shape, *options))
    log = f'exec >>{shlex.quote(str(logs))}/"{name}-{job_id}.$$.log" 2>&1'
    return "\n".join([log, *job.prologue, *staging(config), f"exec {command}\n"])


def start_step(script: Path) -> str:
    """Start it; its id."""
    process = subprocess.Popen(["bash", str(script)], stdin=subprocess.DEVNULL, start_new_session=True)
    job_id = f"{os.environ[_ALLOCATION]}.{process.pid}"
    _steps[job_id] = process
    return job_id


class Steps:
    """What `JobQueueCluster` asks of a batch system, of steps; their ids are allocation.process."""

    cluster_type: ClassVar[str] = ""

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """A step of a driver that is gone is known by its srun, on the same machine."""
        return {job_id: "RUNNING" for job_id in job_ids if _process_of(job_id) is not None}

    @classmethod
    def reason(cls, job_id: str) -> str:
        """By the exit code of srun, where this process has started it."""
        process = _steps.get(job_id)
        code = None if process is None else process.poll()
        return "" if code is None else "CANCELLED" if code < 0 else f"FAILED (exit {code})"

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """Idempotent; srun ends its tasks."""
        if (process := _process_of(job_id)) is not None:
            process.terminate()
            # A second signal would be the end of srun without that of its tasks.
            if job_id in _steps:
                try:
                    _steps[job_id].wait(_END_S)
                except subprocess.TimeoutExpired:
                    raise RoleError(f"step {job_id} did not end in {_END_S:.0f} s") from None


def _process_of(job_id: str) -> psutil.Process | None:
    allocation_id, _, pid = job_id.partition(".")
    if job_id in _steps and _steps[job_id].poll() is not None:
        return None
    try:
        process = psutil.Process(int(pid))
        # Its number may be another's by now; before srun it is the shell of this module.
        ours = f"--jobid={allocation_id}" in process.cmdline() or job_id in _steps
    except (psutil.Error, ValueError):
        return None
    return process if ours else None


def _job(config: Config, role: str) -> WorkerJobConfig:
    job: WorkerJobConfig = getattr(config.cluster.slurm, role)
    return job
