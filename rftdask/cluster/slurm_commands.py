"""SLURM's commands: states of jobs, capacity of partitions, usage, and the shapes of jobs that fit."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from rftdask.cluster.layout import AUXILIARY_RESOURCE, TRAINER_RESOURCE
from rftdask.config.schema.cluster import JobConfig, WorkerJobConfig, count_gres
from rftdask.errors import NotInstalledError, RoleError, UserError

_NEVER = {
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "DependencyNeverSatisfied"),
    *("InvalidAccount", "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed"),
}
_NEVER_PER_JOB = re.compile(r"(QOS|Assoc)Max\w+Per(JobLimit|Job|Node)|QOSMin\w+")
"""Reasons of pending jobs (%r of squeue, job_reason_string in SLURM's source) that the job itself causes."""
_WELL = {"COMPLETED", "CANCELLED", "RUNNING", "PENDING", "REQUEUED", "COMPLETING", "CONFIGURING", "RESIZING"}
"""States in SLURM's accounting that are not failures; a run cancels the jobs of its workers when it ends."""
_MAX_FAILED_SHOWN = 5
NO_BOOKS = "SLURM has no accounting here (sacct), so GPU hours, queue time and exit reasons are not known"
ENDING = "COMPLETING"
_COMMAND_S = 60.0
"""Timeout of a command. SLURM's clients retry for some seconds while its controller restarts."""


def call(*command: str, deadline_s: float = _COMMAND_S) -> str:
    """Output of a command. Raises: NotInstalledError: not installed; RoleError: it failed."""
    return _call(command, "", deadline_s).stdout


def _call(command: Sequence[str], stdin: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, input=stdin, check=False)
    except FileNotFoundError:
        raise NotInstalledError(
            f"{command[0]} is not installed: use a login node of the cluster, or rftdask run with cluster.type=local "
            "on one machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise RoleError(f"{' '.join(command)} did not answer in {deadline_s:.0f} s") from None
    if done.returncode:
        raise RoleError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()}")
    return done


def foresee(script: str) -> str:
    """SLURM's prediction of when and where a script would start, without submitting it.

    Raises: RoleError: SLURM would refuse it, or does not answer; NotInstalledError.
    """
    output = _call(("sbatch", "--test-only"), script, _COMMAND_S).stderr
    lines = (line.strip().removeprefix("sbatch: ") for line in output.splitlines())
    return "; ".join(" ".join(line.split()) for line in lines if line)


def is_requeued(job_id: str) -> bool:
    """True if SLURM may requeue a job, which a site can forbid (JobRequeue, --no-requeue)."""
    return not re.search(r"\bRequeue=0\b", call("scontrol", "--oneliner", "show", "job", job_id))


def expected_starts(ids: Sequence[str]) -> dict[str, str]:
    """Expected start times of pending jobs, as far as known: "2026-11-24T08:00:00"."""
    if not ids:
        return {}
    output = call("squeue", "--noheader", "--me", "--states=PENDING", "--format=%A %S")
    rows = (line.split() for line in output.splitlines())
    return {job_id: at for job_id, at in rows if job_id in ids and at != "N/A"}


def directives(job: JobConfig) -> list[str]:
    """Options of a job, for both `#SBATCH` and srun."""
    options = [
        ("--partition", job.partition),
        ("--account", job.account),
        ("--qos", job.qos),
        ("--reservation", job.reservation),
        ("--gres", job.gres),
        ("--gpus-per-node", job.gpus_per_node),
        ("--constraint", job.constraint),
        ("--time", job.walltime),
    ]
    named = [f"{name}={value}" for name, value in options if value is not None]
    return [*named, *["--exclusive"] * job.exclusive, *job.directives]


def megabytes(memory: str) -> int:
    """ "4GB" -> 3815, in units of 2**20 bytes, rounded up. Raises: UserError: invalid memory size."""
    from dask.utils import parse_bytes  # late: planning a run imports nothing heavy

    try:
        return -(-int(parse_bytes(memory)) // 2**20)
    except ValueError as error:
        raise UserError(f"cluster.slurm: memory: {error}") from error


def submit(script: str, *options: str) -> str:
    """Submit a script file. Returns: the job id. Raises: RoleError: SLURM refused it."""
    output = call("sbatch", "--parsable", *options, script)
    # Only the last line, because a wrapper of the site may print others before.
    match = re.fullmatch(r"(\d+)(;.*)?", output.strip().rpartition("\n")[2])
    if not match:
        raise RoleError(f"sbatch {script} printed no job id but {output.strip() or 'nothing'!r}")
    return match[1]


def cancel(ids: Iterable[str]) -> None:
    """Cancel jobs. Idempotent."""
    if ids := list(ids):
        call("scancel", "--quiet", *ids)


def forget_job() -> None:
    """Remove the variables of this process's own job, before jobs are submitted from it.

    Jobs inherit the environment: a memory limit of another kind makes each `srun` fail, and a job would take the
    restarts of the outer job for its own. Options of sbatch that the user has set (SBATCH_ACCOUNT) stay.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in kept]:
        del os.environ[name]


def interrupt(job_id: str) -> None:
    """Send SIGINT to the script of a job, which ends its run with a checkpoint. Cancels pending tasks of an array."""
    # First, or one of them would start after the running one.
    call("scancel", "--quiet", "--state=PENDING", job_id)
    call("scancel", "--batch", "--signal=INT", job_id)


def states(ids: Sequence[str]) -> dict[str, str]:
    """States of queued and running jobs, such as "RUNNING" or "PENDING (Resources)"; the others have ended. ENDING: its
    processes are ending; REQUEUED: it starts again afterwards.
    """
    if not ids:
        return {}
    # All jobs of the user, because a query by id fails once SLURM has forgotten one of them.
    lines = call("squeue", "--noheader", "--array", "--me", "--format=%A %F %T %M %r").splitlines()
    # %F is the id of the array, which runs if one of its tasks does, so running tasks come last.
    rows = sorted((line.split(maxsplit=4) for line in lines), key=lambda row: row[2] == "RUNNING")
    found: dict[str, str] = {}
    for number, array, state, used, *why in rows:
        # SLURM reports COMPLETING for both; a requeued job has used no time of its next start.
        if state == ENDING and used == "0:00":
            state = "REQUEUED"
        has_reason = state == "PENDING" and why and why[0].strip() != "None"
        found[number] = found[array] = f"{state} ({why[0].strip()})" if has_reason else state
    return {job_id: found[job_id] for job_id in ids if job_id in found}


def never_runs(state: str) -> bool:
    """True if a job in this state can never start because of its options."""
    reason = state.removeprefix("PENDING (").removesuffix(")")
    return reason in _NEVER or bool(_NEVER_PER_JOB.fullmatch(reason))


def is_mistake(error: str) -> bool:
    """True if sbatch would always refuse the job."""
    return bool(re.search(r"(?i)\binvalid |configuration is not available|specification can not be satisfied", error))


def is_at_limit(error: str) -> bool:
    """True if sbatch refused the job because of a limit of submitted jobs."""
    return bool(re.search(r"SubmitJob|MaxJobCount|job submit limit|temporarily unable to accept job", error))


def reason(job_id: str) -> str:
    """How a job ended: "TIMEOUT (exit 0:15)"; empty: not known."""
    try:
        output = call("scontrol", "--oneliner", "show", "job", job_id)
    except RoleError:
        return ""
    fields = dict(re.findall(r"(\w+)=(\S+)", output))
    return f"{fields.get('JobState', '')} (exit {fields.get('ExitCode', '?')})"


@dataclass(frozen=True)
class Usage:
    """Usage of the jobs of a run in SLURM's accounting. A requeued job counts each time.

    Example: Usage(num_jobs=3, gpu_hours=16.5, queue_s=1800.0, ends={"COMPLETED": 2, "PREEMPTED": 1})
    """

    num_jobs: int
    gpu_hours: float
    queue_s: float
    """Longest wait of a job."""
    ends: dict[str, int]
    """Number of jobs by state."""
    failed: tuple[str, ...] = ()
    """For each failed job: its id, state and reason."""

    def render(self) -> str:
        """Format as a line, with further lines for the newest failed jobs."""
        ends = ", ".join(f"{count} {state}" for state, count in sorted(self.ends.items()))
        line = (
            f"{self.num_jobs} jobs ({ends}), {self.gpu_hours:.2f} GPU hours, up to {self.queue_s / 60:.0f} min in queue"
        )
        return "\n".join([line, *(f"  job {job}" for job in self.failed[-_MAX_FAILED_SHOWN:])])


def usage(ids: Sequence[str]) -> Usage | None:
    """Usage of these jobs. None: SLURM has no accounting, or does not answer."""
    fields = "State,ElapsedRaw,AllocTRES,Submit,Start,JobID,ExitCode,Reason"
    options = ("--allocations", "--duplicates", "--noheader", "--parsable2", f"--format={fields}")
    try:
        rows = call("sacct", *options, f"--jobs={','.join(ids)}").splitlines() if ids else []
    except (RoleError, UserError):
        return None
    if not rows:
        return None
    ends: Counter[str] = Counter()
    gpu_s = queue_s = 0.0
    failed = []
    for state, elapsed, tres, *times, job_id, code, why in (row.split("|") for row in rows):
        if state.split()[0] not in _WELL:
            failed.append(f"{job_id} {state} (exit {code}{f', {why}' if why not in ('', 'None') else ''})")
        ends[state.split()[0]] += 1  # "CANCELLED by 1000"
        gpus = re.search(r"(?<![\w/])gres/gpu=(\d+)", tres)  # GPUs of all types
        gpu_s += int(elapsed or 0) * int(gpus[1] if gpus else 0)
        with suppress(ValueError):  # "Unknown": not started
            submit, start = map(datetime.fromisoformat, times)
            queue_s = max(queue_s, (start - submit).total_seconds())
    return Usage(len(rows), gpu_s / 3600, queue_s, dict(ends), tuple(failed))


@dataclass(frozen=True)
class Capacity:
    """Size of a partition, used or free."""

    partition: str
    num_nodes: int
    cpus: int
    """Per node."""
    gpus: int
    """Per node."""
    memory_mb: int = 0
    """Per node, in units of 2**20 bytes; 0: not known."""
    time_limit: str = "infinite"
    """Time limit of jobs, in SLURM's format."""


def read_capacity(partition: str | None) -> Capacity:
    """Read the size of a partition. None: the default one. Raises: UserError: no such partition, or no SLURM."""
    options = ["--partition", partition] if partition else []
    output = call("sinfo", "--noheader", "--format=%P|%D|%c|%G|%m|%l", *options)
    rows = [line.strip().split("|") for line in output.splitlines() if line.strip()]
    if not partition:  # an asterisk marks the default partition; without a default, take all
        rows = [row for row in rows if row[0].endswith("*")] or rows
    if not rows:
        raise UserError(f"cluster.slurm: there is no partition {partition!r}; sinfo lists the available ones")
    return Capacity(
        partition=rows[0][0].rstrip("*"),
        num_nodes=sum(int(row[1]) for row in rows),
        cpus=max(int(row[2].rstrip("+")) for row in rows),
        gpus=max(count_gres(row[3]) for row in rows),
        memory_mb=max(int(row[4].rstrip("+")) for row in rows),
        time_limit=rows[0][5],
    )


def hours(time_limit: str) -> float:
    """Hours of a time limit: "1-12:00:00" -> 36.0, "30:00" -> 0.5; infinite if it is not a time."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+)*", time_limit):
        return math.inf
    days, _, clock = time_limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # Without days the last part is seconds; with days the first part is hours.
    parts = parts + [0] * (3 - len(parts)) if days else [0] * (3 - len(parts)) + parts
    return 24 * int(days or 0) + parts[0] + parts[1] / 60 + parts[2] / 3600


@dataclass(frozen=True)
class JobShape:
    """Equal jobs for the workers of a role.

    Example: 16 ranks on two nodes of 8 GPUs are JobShape(num_jobs=1, nodes=2, tasks_per_node=8).
    """

    num_jobs: int
    nodes: int
    """Nodes of each job; 0: SLURM decides."""
    tasks_per_node: int
    """Workers on each node, or of the job if `nodes` is 0."""
    span: int = 1
    """Nodes of each worker, with one task each; the first is the worker, the others follow its engine."""

    @property
    def num_tasks(self) -> int:
        """Tasks of each job."""
        return self.tasks_per_node * (self.nodes or 1)

    @property
    def num_workers(self) -> int:
        """Workers of each job."""
        return self.num_tasks // self.span


def shape_of(role: str, job: WorkerJobConfig, num_workers: int, gpus_each: int) -> JobShape:
    """Distribute workers of a role over jobs; ranks share one job.

    Args: gpus_each: GPUs of each worker, if it has any.
    Raises: UserError: jobs would have unused GPUs or tasks, or too few GPUs.
    """
    if not num_workers:
        return JobShape(0, 0, 1)
    ask, is_trainer = f"cluster.slurm.{role}", role == TRAINER_RESOURCE
    what, key = ("rank", "trainer.num_ranks") if is_trainer else ("engine", "explorer.rollout_model.engine_num")
    if role == AUXILIARY_RESOURCE:
        key = "engine_num of explorer.auxiliary_models"
    gpus = f"{ask}.gpus_per_node is {job.gpus_per_node}" if job.gpus_per_node else f"{ask}.gres is {job.gres}"
    if not is_trainer and 1 <= job.num_gpus < gpus_each:
        return _over_nodes(job, num_workers, gpus_each, ask, gpus)
    each = job.workers_per_node(gpus_each)
    # Sites without GRES give whole nodes, whose GPUs are not known here.
    if gpus_each > 1 and not job.num_gpus and not job.exclusive:
        raise UserError(
            f"{gpus}, and an engine works on {gpus_each} GPUs (tensor, pipeline and data_parallel_size of "
            f"explorer.rollout_model); set gpu:{gpus_each}"
        )
    if job.num_gpus and each * gpus_each != job.num_gpus:
        raise UserError(
            f"{gpus}, and {_counted(each, what)} with {_counted(gpus_each, 'GPU')} each ({ask}.tasks_per_node) use "
            f"{each * gpus_each} of a node; ask for {each * gpus_each}"
        )
    if is_trainer:
        nodes = job.nodes or (-(-num_workers // each) if each else 0)
        each = each or -(-num_workers // (nodes or 1))
    else:
        nodes, each = job.nodes or min(1, each), each or 1
    one = JobShape(1, nodes, each)
    if num_workers % one.num_tasks:
        raise UserError(
            f"cluster: {_counted(num_workers, what)} ({key}), and a job of {_counted(nodes or 1, 'node')} x {each} has "
            f"{one.num_tasks} ({gpus}; {ask}.nodes, tasks_per_node); set {key} to "
            f"{-(-num_workers // one.num_tasks) * one.num_tasks}, or ask for less"
        )
    return replace(one, num_jobs=num_workers // one.num_tasks)


def _over_nodes(job: WorkerJobConfig, num_workers: int, gpus_each: int, ask: str, gpus: str) -> JobShape:
    """Return the jobs for engines that each use all GPUs of several nodes."""
    span, rest = divmod(gpus_each, job.num_gpus)
    problem = (
        f"{gpus}, and an engine works on {gpus_each} GPUs (tensor, pipeline and data_parallel_size of "
        "explorer.rollout_model)"
    )
    if rest or (job.tasks_per_node or 1) > 1:
        raise UserError(f"{problem}, which is not a number of whole nodes; set gpu:{gpus_each}, or a divisor of it")
    # Nodes must be explicit, because too few GPUs may be a mistake.
    if (job.nodes or 0) % span or not job.nodes:
        raise UserError(
            f"{problem}; set gpu:{gpus_each}, or for engines over {span} nodes {ask}.nodes: {span}, or a multiple of it"
        )
    one = JobShape(1, job.nodes, 1, span)
    if num_workers % one.num_workers:
        raise UserError(
            f"{problem}, so {span} nodes, and a job of {job.nodes} nodes has {one.num_workers} of {num_workers} "
            f"engines; set explorer.rollout_model.engine_num to {-(-num_workers // one.num_workers) * one.num_workers}"
        )
    return replace(one, num_jobs=num_workers // one.num_workers)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def check_fit(
    shapes: Mapping[str, JobShape], jobs: Mapping[str, JobConfig], capacities: Mapping[str, Capacity]
) -> None:
    """Check that the jobs of all roles fit on empty partitions at the same time.

    Args: all by role. Raises: UserError: they do not fit, with the numbers.
    """
    # Roles on the same partition share its nodes.
    shared: dict[str, list[str]] = {}
    for role, shape in shapes.items():
        there = capacities[role]
        if shape.nodes > there.num_nodes:
            raise UserError(
                f"cluster.slurm.{role}: a job of {shape.nodes} nodes with {shape.tasks_per_node} workers each, and "
                f"partition {there.partition} has {there.num_nodes} nodes with {there.gpus} GPUs; ask for more of each "
                "node (gres, tasks_per_node)"
            )
        if shape.num_jobs:
            shared.setdefault(there.partition, []).append(role)
    for partition, roles in shared.items():
        there = capacities[roles[0]]
        # Requests are per node, or per worker if SLURM places workers.
        counts = {role: shapes[role].num_jobs * (shapes[role].nodes or shapes[role].num_tasks) for role in roles}
        gpus = {role: jobs[role].num_gpus for role in roles}
        cores = {role: jobs[role].cpus * (shapes[role].tasks_per_node if shapes[role].nodes else 1) for role in roles}
        for what, asked, each in (("GPUs", gpus, there.gpus), ("cores", cores, there.cpus)):
            for role in roles:
                if asked[role] > each:
                    raise UserError(
                        f"cluster.slurm.{role}: a job asks for {asked[role]} {what} of a node, and no node of "
                        f"partition {partition} has more than {each}"
                    )
                if jobs[role].exclusive:
                    asked[role] = each
            places = there.num_nodes * each
            # Jobs that do not fit on empty nodes can never start.
            needed = sum(counts[role] * asked[role] for role in roles)
            if needed > places:
                sums = " + ".join(f"{counts[role]} {role} x {asked[role]}" for role in roles)
                raise UserError(
                    f"cluster: {sums} = {needed} {what}, and partition {partition} has {there.num_nodes} nodes x "
                    f"{each} = {places} (trainer.num_ranks, explorer.rollout_model.engine_num, cluster.node_num, "
                    "cluster.gpu_per_node)"
                )


def limit(there: Capacity, num_nodes: int, gpus: int) -> Capacity:
    """Limit a partition to `num_nodes` nodes with `gpus` GPUs each; 0: all. Raises: UserError: too few."""
    if num_nodes > there.num_nodes:
        raise UserError(
            f"cluster.node_num is {num_nodes}, and partition {there.partition} has {there.num_nodes} nodes; 0 takes "
            "all of them"
        )
    if gpus > there.gpus:
        raise UserError(
            f"cluster.gpu_per_node is {gpus}, and the nodes of partition {there.partition} have {there.gpus} GPUs; 0 "
            "takes all of them"
        )
    return replace(there, num_nodes=num_nodes or there.num_nodes, gpus=gpus or there.gpus)
