"""SLURM: a cluster whose workers are SLURM's jobs, each asking for what `cluster.slurm` says of its role.

It knows partitions, so a layout that they cannot hold is refused before anything starts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rftdask.cluster import slurm
from rftdask.cluster.base import ROLES, TRAINER_RESOURCE, Layout, plan_jobs
from rftdask.cluster.jobqueue import JobQueueCluster
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.config import Config
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import JobConfig
from rftdask.errors import UserError


class SlurmCluster(JobQueueCluster):
    """Example: with SlurmCluster.start(config, layout, storage) as cluster: cluster.scale("explorer", 8)"""

    cluster_type: ClassVar[str] = "slurm"
    takes_options: ClassVar[bool] = False  # what jobs ask for is in `cluster.slurm`
    job_class: ClassVar[str] = "dask_jobqueue.slurm.SLURMJob"

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Asks SLURM for its partitions. Raises: UserError: they cannot hold the jobs, with the arithmetic."""
        section = config.cluster
        jobs = {role: getattr(section.slurm, role) for role in ROLES}
        limited = capacities(config)
        known = limited[TRAINER_RESOURCE].num_nodes * limited[TRAINER_RESOURCE].gpus
        # What a whole partition has is nobody's to take; a number of nodes is.
        num_gpus = known if section.node_num and slurm.count_gres(jobs[TRAINER_RESOURCE].gres) else None
        layout = plan_jobs(stages, {role: job.cpus for role, job in jobs.items()}, num_gpus)
        counts = {role: layout.num_workers(role) for role in ROLES}
        slurm.check_fit(counts, jobs, limited)
        _check_engines(config, stages)
        return layout

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """By squeue; never None, so a job that has left the queue is lost at the next look."""
        return slurm.states(job_ids)

    @classmethod
    def reason(cls, job_id: str) -> str:
        """By scontrol, which remembers a job for some minutes."""
        return slurm.reason(job_id)

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """By scancel."""
        slurm.cancel([job_id])

    @classmethod
    def job_options(cls, config: Config, role: str, name: str, folder: PrivateFolder, log_path: Path) -> dict[str, Any]:
        """From `cluster.slurm.<role>`; a job that is preempted is requeued under its number."""
        job: JobConfig = getattr(config.cluster.slurm, role)
        submitted = os.environ.get(SUBMITTED, "")
        return {
            **cls.common_options(config, role, folder),
            # The job's number is in the name, because a name that is still known is refused; so is that of its start.
            "name": f"{name}-${{SLURM_JOB_ID}}-${{SLURM_RESTART_COUNT:-0}}",
            "cores": job.cpus,
            "memory": job.memory,
            "queue": job.partition,
            "account": job.account,
            "walltime": job.walltime or "",
            "job_directives_skip": () if job.walltime else ("-t ",),
            "job_extra_directives": [
                *(f"--{key}={value}" for key, value in (("gres", job.gres), ("constraint", job.constraint)) if value),
                "--requeue",
                "--open-mode=append",
                f"--output={log_path}/{name}-%j.log",
                *job.directives,
            ],
            # Said again, for sites that pass no environment on to jobs.
            "job_script_prologue": [
                *job.prologue,
                *([f"export {SUBMITTED}={shlex.quote(submitted)}"] * bool(submitted)),
            ],
        }


def capacities(config: Config) -> dict[str, slurm.Capacity]:
    """What each role may use of its partition. Raises: UserError: the config wants more than there is, or no SLURM."""
    section = config.cluster
    there = {role: slurm.read_capacity(getattr(section.slurm, role).partition) for role in ROLES}
    return {role: slurm.limit(found, section.node_num, section.gpu_per_node) for role, found in there.items()}


def check_chain(config: Config) -> None:
    """Whether the jobs of an offline chain fit: one that explores, which others help if they can, or one that trains.

    Raises: UserError: one of them cannot run, with the arithmetic.
    """
    jobs, there = {role: getattr(config.cluster.slurm, role) for role in ROLES}, capacities(config)
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
