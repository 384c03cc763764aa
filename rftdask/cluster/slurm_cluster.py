"""SLURM: a cluster whose workers are SLURM's jobs, each asking for what `cluster.slurm` says of its role.

It knows partitions, so a layout that they cannot hold is refused before anything starts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rftdask.cluster import slurm
from rftdask.cluster.base import Cluster
from rftdask.cluster.batch.slurm_script import batch_script, command_of, staging, step
from rftdask.cluster.batch.slurm_steps import Steps, allocation, read_allocation, start_step, step_script
from rftdask.cluster.jobqueue import DEATH_TIMEOUT_S, JobQueueCluster, worker_options
from rftdask.cluster.layout import (
    AUXILIARY_RESOURCE,
    EXPLORER_RESOURCE,
    ROLES,
    TRAINER_RESOURCE,
    Layout,
    auxiliary_sizes,
    plan_jobs,
)
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.config import Config
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import WorkerJobConfig
from rftdask.errors import UserError
from rftdask.storage import Storage


class SlurmCluster(JobQueueCluster):
    """Example: with SlurmCluster.start(config, layout, storage) as cluster: cluster.scale("explorer", 8)"""

    cluster_type: ClassVar[str] = "slurm"
    spans_nodes: ClassVar[bool] = True
    takes_options: ClassVar[bool] = False  # what jobs ask for is in `cluster.slurm`
    # Not dask-jobqueue, whose jobs are one task on one node; the keys of TLS are made by this one.
    required_package: ClassVar[str | None] = "cryptography"
    # By the words of squeue and sbatch.
    is_mistake = staticmethod(slurm.is_mistake)
    is_at_limit = staticmethod(slurm.is_at_limit)

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Asks SLURM for its partitions. Raises: UserError: they cannot hold the jobs, with the arithmetic."""
        section = config.cluster
        jobs = {role: getattr(section.slurm, role) for role in ROLES}
        limited = capacities(config)
        known = limited[TRAINER_RESOURCE].num_nodes * limited[TRAINER_RESOURCE].gpus
        # What a whole partition has is nobody's to take; a number of nodes is.
        num_gpus = known if section.node_num and jobs[TRAINER_RESOURCE].num_gpus else None
        layout = plan_jobs(stages, {role: job.cpus for role, job in jobs.items()}, num_gpus)
        slurm.check_fit({role: cls.shape(config, role, layout.num_in_jobs(role)) for role in ROLES}, jobs, limited)
        return layout

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """In an allocation that is there already its workers are steps of it."""
        kind = SlurmStepsCluster if cls is SlurmCluster and allocation() is not None else cls
        return kind(config, layout, PrivateFolder.of(config, storage), storage)

    @classmethod
    def shape(cls, config: Config, role: str, num_workers: int) -> slurm.JobShape:
        """The jobs of so many workers of a role. Raises: UserError: they leave GPUs or places of a job unused."""
        exploring = [stage for stage in config.stage_configs() if stage.has_explorer]
        job: WorkerJobConfig = getattr(config.cluster.slurm, role)
        of_engines = {TRAINER_RESOURCE: 1, AUXILIARY_RESOURCE: max(auxiliary_sizes(config.stage_configs()), default=1)}
        gpus_each = of_engines.get(role) or _gpus_of_engines(config)
        if role == AUXILIARY_RESOURCE and num_workers and 1 <= job.num_gpus < gpus_each:
            raise UserError(
                f"cluster.slurm.auxiliary: a node has {job.num_gpus} GPUs, and an engine of an auxiliary model works "
                f"on {gpus_each}; set gres to gpu:{gpus_each}, since only engines of the policy may have several nodes"
            )
        shape = slurm.shape_of(role, job, num_workers, gpus_each)
        if shape.span > 1:
            for stage in exploring:
                check_spans(stage, job)
        return shape

    @classmethod
    def workers_per_job(cls, config: Config, role: str, num_workers: int) -> int:
        """All ranks of a trainer; as many engines as the GPUs of a job are for."""
        return cls.shape(config, role, num_workers).num_workers

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """By squeue; never None, so a job that has left the queue is lost at the next look."""
        return slurm.states(job_ids)

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """By SLURM's reason."""
        return slurm.never_runs(state)

    @classmethod
    def is_ending(cls, state: str) -> bool:
        """By squeue; epilogs and processes that do not end may keep it there for minutes."""
        return state == slurm.ENDING

    @classmethod
    def expected_starts(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """By squeue."""
        return slurm.expected_starts(job_ids)

    @classmethod
    def is_requeued(cls, job_id: str) -> bool:
        """By scontrol; a site may forbid it."""
        return slurm.is_requeued(job_id)

    @classmethod
    def interrupt(cls, job_id: str) -> bool:
        """By SIGINT to its script."""
        slurm.interrupt(job_id)
        return True

    @classmethod
    def reason(cls, job_id: str) -> str:
        """By scontrol, which remembers a job for some minutes."""
        return slurm.reason(job_id)

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """By scancel."""
        slurm.cancel([job_id])

    @classmethod
    def job_script(
        cls, config: Config, role: str, num_workers: int, name: str, folder: PrivateFolder, logs: Path
    ) -> str:
        """From `cluster.slurm.<role>`; a job that is preempted is requeued under its number."""
        job, shape = getattr(config.cluster.slurm, role), cls.shape(config, role, num_workers)
        worker = _worker(config, role, folder, shape.span)
        # The shell completes these two. The job's number is in the name, because a name that is still known is refused;
        # so is that of its start.
        own = f'--name "{name}-${{SLURM_JOB_ID}}-${{SLURM_RESTART_COUNT:-0}}" --local-directory "${{TMPDIR:-/tmp}}"'
        # A task that ends with an error ends the job: the others wait for it, and the next job may have a better node.
        srun = step(job, shape, "--kill-on-bad-exit=1") if shape.num_tasks > 1 else ""
        submitted = os.environ.get(SUBMITTED, "")
        shell = [
            *staging(config),
            # Said again, for sites that pass no environment on to jobs.
            *([f"export {SUBMITTED}={shlex.quote(submitted)}"] * bool(submitted)),
            # In the place of its script's shell, so that it is the worker whom the batch system tells to end.
            "exec " + command_of(config, role, f"{worker} {own}", srun),
        ]
        return batch_script(config, name, role, job, logs, shell, shape=shape)

    def start_job(self, role: str, name: str) -> str:
        """By sbatch, which has read the file when it returns: one for each role is enough."""
        return slurm.submit(str(self._folder.write(f"{role}.sh", self.script(role, name))))


class SlurmStepsCluster(Steps, SlurmCluster):
    """SLURM, in an allocation that is there already; see batch/slurm_steps.py."""

    @classmethod
    def job_script(
        cls, config: Config, role: str, num_workers: int, name: str, folder: PrivateFolder, logs: Path
    ) -> str:
        """The shell of a step."""
        shape = cls.shape(config, role, num_workers)
        return step_script(config, role, shape, name, _worker(config, role, folder, shape.span), logs)

    def start_job(self, role: str, name: str) -> str:
        """By srun."""
        return start_step(self._folder.write(f"{name}.sh", self.script(role, name)))


def check_spans(stage: Config, job: WorkerJobConfig) -> None:
    """Raises: UserError: an engine of the stage would be on several nodes, and cannot be."""
    for path, engine in stage.explorer.engines():
        if engine.num_gpus <= job.num_gpus or (path != "explorer.rollout_model" and engine.is_apart):
            continue
        told = f"{path} works on {engine.num_gpus} GPUs, and a node of cluster.slurm.explorer has {job.num_gpus}"
        if path != "explorer.rollout_model" or not engine.traits.spans_nodes:
            raise UserError(f"{told}; of several nodes are only engines of the policy, of engine_type vllm")
        if engine.data_parallel_size > 1:
            raise UserError(f"{told}; data_parallel_size is for one node, use engine_num for more engines")
        if "://" in stage.checkpoint_job_dir:
            raise UserError(
                f"{told}; all of its nodes read the weights, so checkpoint_root_dir must be a folder that they see"
            )
        # Both lie below /dev/shm or TMPDIR of the node of the worker, which is the first one.
        first = "lie on the first of its nodes alone"
        if stage.sync_method != "checkpoint":
            raise UserError(f"{told}; weights of synchronizer.sync_method {stage.sync_method} {first}, set checkpoint")
        if stage.synchronizer.full_publish_interval > 1:
            raise UserError(f"{told}; weights made of deltas {first}, set synchronizer.full_publish_interval to 1")


def _gpus_of_engines(config: Config) -> int:
    return max((s.explorer.gpus_per_worker for s in config.stage_configs() if s.has_explorer), default=1)


def _worker(config: Config, role: str, folder: PrivateFolder, span: int) -> str:
    """Arguments of Python for a worker, but for its name and its folder, which the shell of its job knows."""
    turns = any(stage.cluster.colocate for stage in config.stage_configs())
    return shlex.join(
        [
            *("-m", "rftdask.cluster.join"),
            *(("--span", str(span)) if span > 1 else ()),
            *(("--engine-every", str(_gpus_of_engines(config))) if role == TRAINER_RESOURCE and turns else ()),
            *folder.worker_options(config.cluster.tls, config.cluster.interface),
            *(*worker_options(config, role), "--death-timeout", str(DEATH_TIMEOUT_S)),
        ]
    )


def capacities(config: Config) -> dict[str, slurm.Capacity]:
    """What each role may use of its partition, or of the allocation that this process is in. Raises: UserError: the
    config wants more than there is, or no SLURM.
    """
    section = config.cluster
    if (job_id := allocation()) is not None:
        return dict.fromkeys(ROLES, slurm.limit(read_allocation(job_id), section.node_num, section.gpu_per_node))
    there = {role: slurm.read_capacity(getattr(section.slurm, role).partition) for role in ROLES}
    return {role: slurm.limit(found, section.node_num, section.gpu_per_node) for role, found in there.items()}


def check_chain(config: Config) -> None:
    """Whether the jobs of an offline chain fit: one that explores, which others help if they can, or one that trains.

    Raises: UserError: one of them cannot run, with the arithmetic.
    """
    if any(stage.models_apart for stage in config.stage_configs()):
        raise UserError(
            "explorer.auxiliary_models: a chain of --offline has no jobs for engine_num of auxiliary models; set it to "
            "0, which loads them beside the policy"
        )
    jobs, there = {role: getattr(config.cluster.slurm, role) for role in ROLES}, capacities(config)
    for role in (TRAINER_RESOURCE, EXPLORER_RESOURCE):
        slurm.check_fit({role: chain_shape(config, role)}, jobs, there)


def chain_shape(config: Config, role: str) -> slurm.JobShape:
    """A job of an offline chain: the engines of one job, or a trainer whose ranks are processes of one task.

    Raises: UserError: it leaves GPUs of a job unused, or trains on several nodes.
    """
    job: WorkerJobConfig = getattr(config.cluster.slurm, role)
    if role == TRAINER_RESOURCE:
        if (job.nodes or 1) > 1:
            raise UserError("cluster.slurm.trainer.nodes: the train job of --offline is one node; leave it out")
        return slurm.JobShape(1, min(1, job.num_gpus), 1)
    each = max(stage.explorer.gpus_per_worker for stage in config.stage_configs())
    if 1 <= job.num_gpus < each:
        raise UserError(
            f"cluster.slurm.explorer: an engine of {each} GPUs has several nodes of {job.num_gpus}, which is for "
            "rftdask submit without --offline"
        )
    return slurm.shape_of(role, job, max(1, job.workers_per_node(each)) * (job.nodes or 1), each)
