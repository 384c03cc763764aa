"""Start: the layout and the cluster that `cluster.type` asks for. What it starts is imported when it is asked for."""

from __future__ import annotations

import os

from rftdask.cluster import slurm
from rftdask.cluster.base import (
    EXPLORER_RESOURCE,
    TRAINER_RESOURCE,
    Cluster,
    Layout,
    count_gpus,
    plan_jobs,
    plan_layout,
)
from rftdask.config import Config
from rftdask.errors import UserError
from rftdask.storage import Storage

ROLES = (TRAINER_RESOURCE, EXPLORER_RESOURCE)


def plan_cluster(config: Config, stages: list[Config]) -> Layout:
    """The workers of a run. Raises: UserError: they cannot be had, with the arithmetic; nothing is started."""
    cluster = config.cluster
    if cluster.type in ("local", "local-cuda"):
        if cluster.node_num > 1:
            raise UserError(f"cluster.node_num is {cluster.node_num}, and cluster.type {cluster.type} is one machine")
        return plan_layout(stages, cluster.num_cpus or num_cores(), count_gpus(config))
    if cluster.type == "slurm":
        return _plan_slurm(config, stages)
    threads = cluster.num_cpus or 1
    num_gpus = cluster.node_num * cluster.gpu_per_node or None
    if cluster.type == "existing":
        return plan_jobs(stages, dict.fromkeys(ROLES, threads), num_gpus)
    if cluster.type == "joined":
        cpus = {role: cluster.num_cpus or getattr(cluster.slurm, role).cpus for role in ROLES}
        return plan_jobs(stages, cpus, num_gpus)
    cores = {role: int({**cluster.options, **cluster.options.get(role, {})}.get("cores", threads)) for role in ROLES}
    return plan_jobs(stages, cores, num_gpus)


def _plan_slurm(config: Config, stages: list[Config]) -> Layout:
    cluster = config.cluster
    jobs = {role: getattr(cluster.slurm, role) for role in ROLES}
    limited = slurm_capacities(config)
    known = limited[TRAINER_RESOURCE].num_nodes * limited[TRAINER_RESOURCE].gpus
    # What a whole partition has is nobody's to take; a number of nodes is.
    num_gpus = known if cluster.node_num and slurm.count_gres(jobs[TRAINER_RESOURCE].gres) else None
    layout = plan_jobs(stages, {role: job.cpus for role, job in jobs.items()}, num_gpus)
    counts = {role: sum(role in worker.resources for worker in layout.workers) for role in ROLES}
    slurm.check_fit(counts, jobs, limited)
    _check_engines(config, stages)
    return layout


def slurm_capacities(config: Config) -> dict[str, slurm.Capacity]:
    """What each role may use of its partition. Raises: UserError: the config wants more than there is, or no SLURM."""
    cluster = config.cluster
    there = {role: slurm.read_capacity(getattr(cluster.slurm, role).partition) for role in ROLES}
    return {role: slurm.limit(found, cluster.node_num, cluster.gpu_per_node) for role, found in there.items()}


def check_chain(config: Config) -> None:
    """Whether the jobs of an offline chain fit: one that explores, which others help if they can, or one that trains.

    Raises: UserError: one of them cannot run, with the arithmetic.
    """
    jobs, there = {role: getattr(config.cluster.slurm, role) for role in ROLES}, slurm_capacities(config)
    for role in ROLES:
        slurm.check_fit({role: 1}, jobs, there)
    _check_engines(config, config.stage_configs())


def _check_engines(config: Config, stages: list[Config]) -> None:
    gres = config.cluster.slurm.explorer.gres
    each = max((stage.explorer.rollout_model.num_gpus for stage in stages if stage.mode != "train"), default=1)
    if each > max(1, slurm.count_gres(gres)):
        raise UserError(
            f"cluster.slurm.explorer.gres is {gres}, and an engine works on {each} GPUs "
            f"(tensor, pipeline and data_parallel_size of explorer.rollout_model); set gpu:{each}"
        )


def start_cluster(config: Config, layout: Layout, storage: Storage) -> Cluster:
    """The running cluster of a run; workers of a batch system join later. Raises: UserError, WaitTimeout."""
    # All late: Dask takes most of a second to import, and looking at a run does not need it; the rest are extras.
    kind = config.cluster.type
    if kind == "local":
        from rftdask.cluster.local import LocalCluster

        return LocalCluster(layout, config.cluster.dashboard_address)
    if kind == "local-cuda":
        from rftdask.cluster.cuda import LocalCudaCluster

        return LocalCudaCluster(layout, config.cluster.dashboard_address)
    if kind == "existing":
        from rftdask.cluster.existing import ExistingCluster

        return ExistingCluster(config, layout)
    from rftdask.cluster.secrets_folder import PrivateFolder

    folder = PrivateFolder.of(config, storage)
    if kind == "joined":
        from rftdask.cluster.remote_scheduler import HeadCluster

        return HeadCluster(config, layout, folder)
    from rftdask.cluster.jobqueue import BatchCluster

    return BatchCluster(config, layout, folder, storage)


def num_cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
