"""SLURM's own commands: what jobs ask for, which jobs live, and what a partition could give. It knows no cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask.utils import parse_bytes

from rftdask.config.schema.cluster import JobConfig
from rftdask.errors import RoleError, UserError

_COMMAND_S = 60.0
"""For one command; while its controller restarts SLURM's clients try for some seconds by themselves."""


def call(*command: str, deadline_s: float = _COMMAND_S) -> str:
    """Output of one of SLURM's commands. Raises: UserError: there is no SLURM here; RoleError: it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not a command here: cluster.type slurm needs SLURM's commands") from None
    except subprocess.TimeoutExpired:
        raise RoleError(f"{' '.join(command)} did not answer in {deadline_s:.0f} s") from None
    if done.returncode:
        raise RoleError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def directives(job: JobConfig) -> list[str]:
    """The options of a job, in the form that both `#SBATCH` and srun read."""
    options = [
        ("--partition", job.partition),
        ("--account", job.account),
        ("--gres", job.gres),
        ("--constraint", job.constraint),
        ("--time", job.walltime),
    ]
    return [f"{name}={value}" for name, value in options if value is not None] + list(job.directives)


def megabytes(memory: str) -> int:
    """ "4GB" -> 3815, in units of 2**20 bytes, rounded up. Raises: UserError: it is no amount of memory."""
    try:
        return -(-int(parse_bytes(memory)) // 2**20)
    except ValueError as error:
        raise UserError(f"cluster.slurm: memory: {error}") from error


def submit(script: str, *options: str) -> str:
    """Submit a script file; the job id. Raises: RoleError: SLURM refuses it, with its words."""
    return call("sbatch", "--parsable", *options, script).strip().partition(";")[0]


def cancel(ids: Iterable[str]) -> None:
    """Idempotent: jobs that ended are left alone."""
    if ids := list(ids):
        call("scancel", "--quiet", *ids)


def forget_restarts() -> None:
    """To be called before jobs are submitted from inside one: they inherit its environment, and SLURM tells a job of
    its restarts only once it has had one, so until then it would take those of the job around it for its own.
    """
    os.environ.pop("SLURM_RESTART_COUNT", None)


def interrupt(job_id: str) -> None:
    """SIGINT to the script of a job, which ends its run with a checkpoint; tasks of an array that wait are dropped."""
    # First those that wait, else one of them would start when the one that runs has ended.
    call("scancel", "--quiet", "--state=PENDING", job_id)
    call("scancel", "--batch", "--signal=INT", job_id)


def states(ids: Sequence[str]) -> dict[str, str]:
    """State (PENDING, RUNNING, ...) of those of the jobs that are still in the queue; the others have ended."""
    if not ids:
        return {}
    # All of the user's: asking by number fails once SLURM has forgotten one of them.
    lines = call("squeue", "--noheader", "--array", "--me", "--format=%A %F %T").splitlines()
    # %F is the number of the array: it runs if one of its tasks does.
    rows = sorted((line.split() for line in lines), key=lambda row: row[2] == "RUNNING")
    found = {name: state for number, array, state in rows for name in (number, array)}
    return {job_id: found[job_id] for job_id in ids if job_id in found}


def reason(job_id: str) -> str:
    """How a job that has left the queue ended, as far as SLURM remembers: "TIMEOUT (exit 0:15)"; empty: not known."""
    try:
        told = call("scontrol", "--oneliner", "show", "job", job_id)
    except RoleError:
        return ""
    found = dict(re.findall(r"(\w+)=(\S+)", told))
    return f"{found.get('JobState', '')} (exit {found.get('ExitCode', '?')})"


@dataclass(frozen=True)
class Capacity:
    """What a partition has, used or not."""

    partition: str
    num_nodes: int
    cpus: int
    """Of each node."""
    gpus: int
    """Of each node."""


def read_capacity(partition: str | None) -> Capacity:
    """Raises: UserError: there is no such partition, or no SLURM."""
    told = call("sinfo", "--noheader", "--format=%P|%D|%c|%G", *(["--partition", partition] if partition else []))
    rows = [line.strip().split("|") for line in told.splitlines() if line.strip()]
    if not partition:  # the default partition is marked so; without one, whatever there is
        rows = [row for row in rows if row[0].endswith("*")] or rows
    if not rows:
        raise UserError(f"cluster.slurm: there is no partition {partition!r}; sinfo lists those that you may use")
    return Capacity(
        partition=rows[0][0].rstrip("*"),
        num_nodes=sum(int(nodes) for _, nodes, _, _ in rows),
        cpus=max(int(cpus.rstrip("+")) for _, _, cpus, _ in rows),
        gpus=max(count_gres(gres) for *_, gres in rows),
    )


def count_gres(gres: str | None) -> int:
    """GPUs in "gpu:2", "gpu:a100:4(S:0-1)" or "gres/gpu:1"; 0 without."""
    found = re.findall(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?", gres or "")
    return sum(int(count or 1) for count in found)


def check_fit(counts: Mapping[str, int], jobs: Mapping[str, JobConfig], capacities: Mapping[str, Capacity]) -> None:
    """Whether the jobs of all roles could run at once on empty partitions.

    Args: all by role. Raises: UserError: they could not, with the arithmetic.
    """
    # Roles that share a partition share its nodes: their jobs are added up.
    shared: dict[str, list[str]] = {}
    for role, count in counts.items():
        if count:
            shared.setdefault(capacities[role].partition, []).append(role)
    for partition, roles in shared.items():
        there = capacities[roles[0]]
        for what, each in (("GPUs", there.gpus), ("cores", there.cpus)):
            asked = {role: count_gres(jobs[role].gres) if what == "GPUs" else jobs[role].cpus for role in roles}
            for role in roles:
                if asked[role] > each:
                    raise UserError(
                        f"cluster.slurm.{role}: a job asks for {asked[role]} {what}, and no node of partition "
                        f"{partition} has more than {each}"
                    )
            places = there.num_nodes * each
            needed = sum(counts[role] * asked[role] for role in roles)
            if needed > places:
                sums = " + ".join(f"{counts[role]} {role} x {asked[role]}" for role in roles)
                raise UserError(
                    f"cluster: {sums} = {needed} {what}, and partition {partition} has {there.num_nodes} nodes x "
                    f"{each} = {places} (trainer.num_ranks, explorer.rollout_model.engine_num, cluster.node_num, "
                    "cluster.gpu_per_node)"
                )


def limit(there: Capacity, num_nodes: int, gpus: int) -> Capacity:
    """What may be used of it: `num_nodes` nodes with `gpus` GPUs each; 0: all there are. Raises: UserError: too few."""
    if num_nodes > there.num_nodes:
        raise UserError(
            f"cluster.node_num is {num_nodes}, and partition {there.partition} has {there.num_nodes} nodes; 0 takes "
            "what there is"
        )
    if gpus > there.gpus:
        raise UserError(
            f"cluster.gpu_per_node is {gpus}, and the nodes of partition {there.partition} have {there.gpus} GPUs; 0 "
            "takes what there is"
        )
    return Capacity(there.partition, num_nodes or there.num_nodes, there.cpus, gpus or there.gpus)
