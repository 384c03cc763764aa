"""SLURM clusters: workers are jobs with the options in `cluster.slurm`, or steps of an existing allocation.

If `rftdask run` starts in an allocation (salloc, or a script of the user) that `rftdask submit` has not made, each
worker job is an `srun` step on the nodes of the allocation, which waits while other steps use them. Layouts that do not
fit into the partitions are refused before anything starts.
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

from rftdask.cluster import slurm_commands
from rftdask.cluster.base import Cluster
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
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm_script import batch_script, command_of, staging, step
from rftdask.config import Config
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import WorkerJobConfig, count_gres
from rftdask.errors import RoleError, UserError
from rftdask.storage import Storage

_ALLOCATION = "RFTDASK_ALLOCATION"
"""Environment variable with the id of the allocation, once SLURM's own variables are removed."""
_END_S = 10.0

_steps: dict[str, subprocess.Popen[bytes]] = {}
"""Steps that this process has started, by id."""


class SlurmCluster(JobQueueCluster):
    """Example: with SlurmCluster.start(config, layout, storage) as cluster: cluster.scale("explorer", 8)"""

    cluster_type: ClassVar[str] = "slurm"
    spans_nodes: ClassVar[bool] = True
    takes_options: ClassVar[bool] = False  # `cluster.slurm` has the options of jobs
    # For the keys of TLS. Jobs of dask-jobqueue have only one task on one node.
    required_package: ClassVar[str | None] = "cryptography"
    is_mistake = staticmethod(slurm_commands.is_mistake)
    is_at_limit = staticmethod(slurm_commands.is_at_limit)

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Plan for the partitions of SLURM. Raises: UserError: the jobs do not fit."""
        section = config.cluster
        jobs = {role: getattr(section.slurm, role) for role in ROLES}
        limited = capacities(config)
        known = limited[TRAINER_RESOURCE].num_nodes * limited[TRAINER_RESOURCE].gpus
        # Without node_num the run does not take the whole partition.
        num_gpus = known if section.node_num and jobs[TRAINER_RESOURCE].num_gpus else None
        layout = plan_jobs(stages, {role: job.cpus for role, job in jobs.items()}, num_gpus)
        slurm_commands.check_fit(
            {role: cls.shape(config, role, layout.num_in_jobs(role)) for role in ROLES}, jobs, limited
        )
        return layout

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Start a cluster of jobs, or of steps if this process is in an allocation."""
        kind = SlurmStepsCluster if cls is SlurmCluster and allocation() is not None else cls
        return kind(config, layout, SecretsDir.of(config, storage), storage)

    @classmethod
    def shape(cls, config: Config, role: str, num_workers: int) -> slurm_commands.JobShape:
        """Jobs for `num_workers` workers of a role. Raises: UserError: jobs would have unused GPUs or tasks."""
        exploring = [stage for stage in config.stage_configs() if stage.has_explorer]
        job: WorkerJobConfig = getattr(config.cluster.slurm, role)
        of_engines = {TRAINER_RESOURCE: 1, AUXILIARY_RESOURCE: max(auxiliary_sizes(config.stage_configs()), default=1)}
        gpus_each = of_engines.get(role) or _gpus_of_engines(config)
        if role == AUXILIARY_RESOURCE and num_workers and 1 <= job.num_gpus < gpus_each:
            raise UserError(
                f"cluster.slurm.auxiliary: a node has {job.num_gpus} GPUs, and an engine of an auxiliary model uses "
                f"{gpus_each}; set gres to gpu:{gpus_each}, since only engines of the policy may use several nodes"
            )
        shape = slurm_commands.shape_of(role, job, num_workers, gpus_each)
        if shape.span > 1:
            for stage in exploring:
                check_spans(stage, job)
        return shape

    @classmethod
    def workers_per_job(cls, config: Config, role: str, num_workers: int) -> int:
        """All ranks of a trainer, or the engines that the GPUs of a job allow."""
        return cls.shape(config, role, num_workers).num_workers

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """States from squeue, never None."""
        return slurm_commands.states(job_ids)

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """Decided by SLURM's reason."""
        return slurm_commands.never_runs(state)

    @classmethod
    def is_ending(cls, state: str) -> bool:
        """True for COMPLETING jobs, which epilogs and hanging processes may keep for minutes."""
        return state == slurm_commands.ENDING

    @classmethod
    def expected_starts(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """Start times from squeue."""
        return slurm_commands.expected_starts(job_ids)

    @classmethod
    def is_requeued(cls, job_id: str) -> bool:
        """Answer of scontrol; a site may forbid requeueing."""
        return slurm_commands.is_requeued(job_id)

    @classmethod
    def interrupt(cls, job_id: str) -> bool:
        """Send SIGINT to the script."""
        slurm_commands.interrupt(job_id)
        return True

    @classmethod
    def reason(cls, job_id: str) -> str:
        """State from scontrol, which keeps ended jobs for some minutes."""
        return slurm_commands.reason(job_id)

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """Cancel with scancel."""
        slurm_commands.cancel([job_id])

    @classmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """Script from `cluster.slurm.<role>`. A preempted job is requeued under its id."""
        job, shape = getattr(config.cluster.slurm, role), cls.shape(config, role, num_workers)
        worker = _worker(config, role, folder, shape.span)
        # Completed by the shell. Names have the numbers of the job and its start, since known names are refused.
        number = "${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}"
        name_options = f'--name "{name}-{number}" --local-directory "${{TMPDIR:-/tmp}}"'
        # A failing task ends the job, because the others wait for it, and the next job may get a better node.
        srun = step(job, shape, "--kill-on-bad-exit=1") if shape.num_tasks > 1 else ""
        submitted = os.environ.get(SUBMITTED, "")
        shell = [
            *staging(config),
            # For sites that do not pass the environment on to jobs.
            *([f"export {SUBMITTED}={shlex.quote(submitted)}"] * bool(submitted)),
            # Replaces the shell of the script, so that the worker receives signals of the batch system.
            "exec " + command_of(config, role, f"{worker} {name_options}", srun),
        ]
        return batch_script(config, name, role, job, logs, shell, shape=shape)

    def start_job(self, role: str, name: str) -> str:
        """Submit with sbatch, which has read the script when it returns, so one file per role is enough."""
        return slurm_commands.submit(str(self._folder.write(f"{role}.sh", self.script(role, name))))


class SlurmStepsCluster(SlurmCluster):
    """A cluster in an existing allocation, whose jobs are steps with ids `allocation.process`."""

    cluster_type: ClassVar[str] = ""

    @classmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """Shell of a step."""
        shape = cls.shape(config, role, num_workers)
        return step_script(config, role, shape, name, _worker(config, role, folder, shape.span), logs)

    def start_job(self, role: str, name: str) -> str:
        """Start an srun."""
        return start_step(self._folder.write(f"{name}.sh", self.script(role, name)))

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """States of steps, also of an ended driver on this machine, from the process of srun."""
        return {job_id: "RUNNING" for job_id in job_ids if _process_of(job_id) is not None}

    @classmethod
    def reason(cls, job_id: str) -> str:
        """Exit code of srun, if this process has started it."""
        process = _steps.get(job_id)
        code = None if process is None else process.poll()
        return "" if code is None else "CANCELLED" if code < 0 else f"FAILED (exit {code})"

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """Terminate srun, which ends its tasks. Idempotent."""
        if (process := _process_of(job_id)) is not None:
            process.terminate()
            # A second signal would end srun without its tasks.
            if job_id in _steps:
                try:
                    _steps[job_id].wait(_END_S)
                except subprocess.TimeoutExpired:
                    raise RoleError(f"step {job_id} did not end in {_END_S:.0f} s") from None


def check_spans(stage: Config, job: WorkerJobConfig) -> None:
    """Raises: UserError: an engine of the stage would need several nodes, and does not support them."""
    for path, engine in stage.explorer.engines():
        if engine.num_gpus <= job.num_gpus or (path != "explorer.rollout_model" and engine.is_apart):
            continue
        problem = f"{path} uses {engine.num_gpus} GPUs, and a node of cluster.slurm.explorer has {job.num_gpus}"
        if path != "explorer.rollout_model" or not engine.traits.spans_nodes:
            raise UserError(f"{problem}; only engines of the policy with engine_type vllm may use several nodes")
        if engine.data_parallel_size > 1:
            raise UserError(f"{problem}; data_parallel_size is limited to one node, use engine_num for more engines")
        if "://" in stage.checkpoint_job_dir:
            raise UserError(
                f"{problem}; all of its nodes read the weights, so checkpoint_root_dir must be a shared folder"
            )
        # In /dev/shm or TMPDIR of the worker's node.
        first = "are only on the first of its nodes"
        if stage.sync_method != "checkpoint":
            raise UserError(
                f"{problem}; weights of synchronizer.sync_method {stage.sync_method} {first}, set checkpoint"
            )
        if stage.synchronizer.full_publish_interval > 1:
            raise UserError(f"{problem}; weights made of deltas {first}, set synchronizer.full_publish_interval to 1")


def _gpus_of_engines(config: Config) -> int:
    return max((s.explorer.gpus_per_worker for s in config.stage_configs() if s.has_explorer), default=1)


def _worker(config: Config, role: str, folder: SecretsDir, span: int) -> str:
    """Return the arguments of Python that start a worker. The job's shell adds its name and folder."""
    colocates = any(stage.cluster.colocate for stage in config.stage_configs())
    return shlex.join(
        [
            *("-m", "rftdask.cluster.join"),
            *(("--span", str(span)) if span > 1 else ()),
            *(("--engine-every", str(_gpus_of_engines(config))) if role == TRAINER_RESOURCE and colocates else ()),
            *folder.worker_options(config.cluster.tls, config.cluster.interface),
            *(*worker_options(config, role), "--death-timeout", str(DEATH_TIMEOUT_S)),
        ]
    )


def capacities(config: Config) -> dict[str, slurm_commands.Capacity]:
    """Nodes that each role may use of its partition, or of the allocation of this process.

    Raises: UserError: the config requests more, or SLURM is not installed.
    """
    section = config.cluster
    if (job_id := allocation()) is not None:
        return dict.fromkeys(
            ROLES, slurm_commands.limit(read_allocation(job_id), section.node_num, section.gpu_per_node)
        )
    sizes = {role: slurm_commands.read_capacity(getattr(section.slurm, role).partition) for role in ROLES}
    return {role: slurm_commands.limit(size, section.node_num, section.gpu_per_node) for role, size in sizes.items()}


def check_chain(config: Config) -> None:
    """Check that the jobs of an offline chain fit: one explore job, which others may help, or one train job.

    Raises: UserError: a job does not fit.
    """
    if any(stage.models_apart for stage in config.stage_configs()):
        raise UserError(
            "explorer.auxiliary_models: --offline has no jobs for auxiliary models; set engine_num to 0, which loads "
            "them in the workers of the policy"
        )
    jobs, partitions = {role: getattr(config.cluster.slurm, role) for role in ROLES}, capacities(config)
    for role in (TRAINER_RESOURCE, EXPLORER_RESOURCE):
        slurm_commands.check_fit({role: chain_shape(config, role)}, jobs, partitions)


def chain_shape(config: Config, role: str) -> slurm_commands.JobShape:
    """Job of an offline chain: the engines of one job, or a trainer whose ranks are processes of one task.

    Raises: UserError: the job would have unused GPUs, or train on several nodes.
    """
    job: WorkerJobConfig = getattr(config.cluster.slurm, role)
    if role == TRAINER_RESOURCE:
        if (job.nodes or 1) > 1:
            raise UserError("cluster.slurm.trainer.nodes: the train job of --offline has one node; remove this key")
        return slurm_commands.JobShape(1, min(1, job.num_gpus), 1)
    each = max(stage.explorer.gpus_per_worker for stage in config.stage_configs())
    if 1 <= job.num_gpus < each:
        raise UserError(
            f"cluster.slurm.explorer: an engine of {each} GPUs needs several nodes with {job.num_gpus} each; use "
            "rftdask submit without --offline"
        )
    return slurm_commands.shape_of(role, job, max(1, job.workers_per_node(each)) * (job.nodes or 1), each)


def allocation() -> str | None:
    """Id of the allocation that this process may use. None: not in an allocation, or in a job of `rftdask submit`."""
    if SUBMITTED in os.environ:
        return None
    job_id = os.environ.get(_ALLOCATION) or os.environ.get("SLURM_JOB_ID")
    if job_id is not None:
        os.environ[_ALLOCATION] = job_id
    return job_id


def read_allocation(job_id: str) -> slurm_commands.Capacity:
    """Nodes of an allocation. Raises: RoleError: unknown to SLURM."""
    told: dict[str, str] = dict(
        re.findall(r"(\w+)=(\S+)", slurm_commands.call("scontrol", "--oneliner", "show", "job", job_id))
    )
    nodes = int(told.get("NumNodes", "1").partition("-")[0])
    # For jobs with whole nodes only AllocTRES has the number of GPUs.
    in_all = re.search(r"(?<![\w/])gres/gpu=(\d+)", told.get("AllocTRES") or told.get("TRES", ""))
    gpus = max(count_gres(told.get("TresPerNode")), int(in_all[1]) // nodes if in_all else 0)
    return slurm_commands.Capacity(f"of allocation {job_id}", nodes, int(told.get("NumCPUs", "1")) // nodes, gpus)


def step_script(config: Config, role: str, shape: slurm_commands.JobShape, name: str, worker: str, logs: Path) -> str:
    """Shell of a step whose tasks are workers. worker: arguments of Python, without a name."""
    job_id, job = os.environ[_ALLOCATION], getattr(config.cluster.slurm, role)
    gpus = [option for option in slurm_commands.directives(job) if option.startswith(("--gres=", "--gpus-per-node="))]
    # --exact leaves the rest to steps of other roles and runs; memory is shared.
    options = (f"--jobid={job_id}", "--exact", "--mem=0", "--kill-on-bad-exit=1", *gpus)
    # `exec` keeps the process id of the shell, which is part of the id of the step.
    name_options = f'--name "{name}-{job_id}.$$-0" --local-directory "${{TMPDIR:-/tmp}}"'
    command = command_of(config, role, f"{worker} {name_options}", step(job, shape, *options))
    log = f'exec >>{shlex.quote(str(logs))}/"{name}-{job_id}.$$.log" 2>&1'
    return "\n".join([log, *job.prologue, *staging(config), f"exec {command}\n"])


def start_step(script: Path) -> str:
    """Start a step. Returns: its id."""
    process = subprocess.Popen(["bash", str(script)], stdin=subprocess.DEVNULL, start_new_session=True)
    job_id = f"{os.environ[_ALLOCATION]}.{process.pid}"
    _steps[job_id] = process
    return job_id


def _process_of(job_id: str) -> psutil.Process | None:
    allocation_id, _, pid = job_id.partition(".")
    if job_id in _steps and _steps[job_id].poll() is not None:
        return None
    try:
        process = psutil.Process(int(pid))
        # Another process may have the number by now; a shell of this process becomes srun.
        is_step = f"--jobid={allocation_id}" in process.cmdline() or job_id in _steps
    except (psutil.Error, ValueError):
        return None
    return process if is_step else None
