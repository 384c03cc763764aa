"""Shapes of SLURM's jobs: how workers are distributed over jobs and nodes, and whether they fit, as pure rules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rftdask.cluster.layout import AUXILIARY_RESOURCE, TRAINER_RESOURCE
from rftdask.config.schema.cluster import JobConfig, WorkerJobConfig
from rftdask.errors import UserError


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
    per_node = job.workers_per_node(gpus_each)
    # Sites without GRES give whole nodes, whose GPUs are not known here.
    if gpus_each > 1 and not job.num_gpus and not job.exclusive:
        raise UserError(
            f"{gpus}, and an engine works on {gpus_each} GPUs (tensor, pipeline and data_parallel_size of "
            f"explorer.rollout_model); set gpu:{gpus_each}"
        )
    if job.num_gpus and per_node * gpus_each != job.num_gpus:
        raise UserError(
            f"{gpus}, and {_counted(per_node, what)} with {_counted(gpus_each, 'GPU')} each ({ask}.tasks_per_node) use "
            f"{per_node * gpus_each} of a node; ask for {per_node * gpus_each}"
        )
    if is_trainer:
        nodes = job.nodes or (-(-num_workers // per_node) if per_node else 0)
        per_node = per_node or -(-num_workers // (nodes or 1))
    else:
        nodes, per_node = job.nodes or min(1, per_node), per_node or 1
    one = JobShape(1, nodes, per_node)
    if num_workers % one.num_tasks:
        raise UserError(
            f"cluster: {_counted(num_workers, what)} ({key}), and a job of {_counted(nodes or 1, 'node')} x {per_node} "
            f"has {one.num_tasks} ({gpus}; {ask}.nodes, tasks_per_node); set {key} to "
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
        capacity = capacities[role]
        if shape.nodes > capacity.num_nodes:
            raise UserError(
                f"cluster.slurm.{role}: a job of {shape.nodes} nodes with {shape.tasks_per_node} workers each, and "
                f"partition {capacity.partition} has {capacity.num_nodes} nodes with {capacity.gpus} GPUs; ask for "
                "more of each node (gres, tasks_per_node)"
            )
        if shape.num_jobs:
            shared.setdefault(capacity.partition, []).append(role)
    for partition, roles in shared.items():
        capacity = capacities[roles[0]]
        # Requests are per node, or per worker if SLURM places workers.
        counts = {role: shapes[role].num_jobs * (shapes[role].nodes or shapes[role].num_tasks) for role in roles}
        gpus = {role: jobs[role].num_gpus for role in roles}
        cores = {role: jobs[role].cpus * (shapes[role].tasks_per_node if shapes[role].nodes else 1) for role in roles}
        for what, asked, available in (("GPUs", gpus, capacity.gpus), ("cores", cores, capacity.cpus)):
            for role in roles:
                if asked[role] > available:
                    raise UserError(
                        f"cluster.slurm.{role}: a job asks for {asked[role]} {what} of a node, and no node of "
                        f"partition {partition} has more than {available}"
                    )
                if jobs[role].exclusive:
                    asked[role] = available
            places = capacity.num_nodes * available
            # Jobs that do not fit on empty nodes can never start.
            needed = sum(counts[role] * asked[role] for role in roles)
            if needed > places:
                sums = " + ".join(f"{counts[role]} {role} x {asked[role]}" for role in roles)
                raise UserError(
                    f"cluster: {sums} = {needed} {what}, and partition {partition} has {capacity.num_nodes} nodes x "
                    f"{available} = {places} (trainer.num_ranks, explorer.rollout_model.engine_num, cluster.node_num, "
                    "cluster.gpu_per_node)"
                )


def limit(capacity: Capacity, num_nodes: int, gpus: int) -> Capacity:
    """Limit a partition to `num_nodes` nodes with `gpus` GPUs each; 0: all. Raises: UserError: too few."""
    if num_nodes > capacity.num_nodes:
        raise UserError(
            f"cluster.node_num is {num_nodes}, and partition {capacity.partition} has {capacity.num_nodes} nodes; 0 "
            "takes all of them"
        )
    if gpus > capacity.gpus:
        raise UserError(
            f"cluster.gpu_per_node is {gpus}, and the nodes of partition {capacity.partition} have {capacity.gpus} "
            "GPUs; 0 takes all of them"
        )
    return replace(capacity, num_nodes=num_nodes or capacity.num_nodes, gpus=gpus or capacity.gpus)


def hours(time_limit: str) -> float:
    """Hours of a time limit: "1-12:00:00" -> 36.0, "30:00" -> 0.5; infinite if it is not a time."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+)*", time_limit):
        return math.inf
    days, _, clock = time_limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # Without days the last part is seconds; with days the first part is hours.
    parts = parts + [0] * (3 - len(parts)) if days else [0] * (3 - len(parts)) + parts
    return 24 * int(days or 0) + parts[0] + parts[1] / 60 + parts[2] / 3600


def megabytes(memory: str) -> int:
    """ "4GB" -> 3815, in units of 2**20 bytes, rounded up. Raises: UserError: invalid memory size."""
    from dask.utils import parse_bytes  # late: planning a run imports nothing heavy

    try:
        return -(-int(parse_bytes(memory)) // 2**20)
    except ValueError as error:
        raise UserError(f"cluster.slurm: memory: {error}") from error
