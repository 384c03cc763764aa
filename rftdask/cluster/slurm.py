"""SLURM: plans, scripts and jobs of a run, with the options in `cluster.slurm`; or steps of an existing allocation.

Site templates may extend the scripts. Layouts that do not fit into the partitions are refused before anything starts.
If `rftdask run` starts in an allocation (salloc, or a script of the user) that `rftdask submit` has not made, each
worker job is an `srun` step on the nodes of the allocation, which waits while other steps use them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import psutil

from rftdask.cluster.base import Cluster
from rftdask.cluster.batch_cluster import (
    CONTROLLER,
    DEATH_TIMEOUT_S,
    BatchCluster,
    SubmitOptions,
    call,
    check_not_submitted,
    for_all_jobs,
    join_options,
    log_folder,
)
from rftdask.cluster.driver_script import (
    DRIVER_OPTIONS,
    PATIENCE_S,
    HostSystem,
    driver_shell,
    python_of,
    staging,
    takes_sources,
)
from rftdask.cluster.job_shapes import Capacity, JobShape, check_fit, limit, megabytes, shape_of
from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, JOB_PREFIX, JobRecord, Script, ScriptPlan
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
from rftdask.config import Config, make_plan, replace
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import WARNING_S, JobConfig, WorkerJobConfig, count_gres
from rftdask.errors import NotInstalledError, RoleError, UserError
from rftdask.storage import Storage

ONE_TASK = JobShape(1, 0, 1)
TEMPLATE = """\
{#- Every script of a run on SLURM is made by this template, and each command in it by its block `command`. To change
them, extend it as cluster.slurm.template; for a container, say:

    {% extends "job.sh" %}
    {% block command %}{{ srun }} {{ "apptainer exec --nv IMAGE " if role != "controller" }}{{ command }}{% endblock %}

role      of the job or command: controller (which drives the run), trainer, explorer
srun      what starts a command as tasks of a job, where it has several; else empty
command   python, an interpreter, and arguments, what it runs
run       the name of the run
-#}
{% if command -%}
{% block command %}{{ srun }} {{ command }}{% endblock %}

{%- else -%}
#!/usr/bin/env bash
{% block directives %}
{% for directive in directives %}
#SBATCH {{ directive }}
{% endfor %}
{% endblock %}

{% block prologue %}
{% for line in prologue %}
{{ line }}
{% endfor %}
{% endblock %}
{% block shell %}
{{ shell }}
{% endblock %}
{% endif %}
"""
"""Jinja template, named job.sh for templates that extend it."""
NO_REQUEUE = (
    "SLURM does not requeue this job: before its walltime the run writes a checkpoint and ends, and rftdask submit "
    "continues it"
)
ON_SLURM = HostSystem(
    restarts="${SLURM_RESTART_COUNT:-0}",
    again='scontrol requeue "$SLURM_JOB_ID"',
    cancel='scancel --quiet "$SLURM_JOB_ID" && sleep 60',
    # A warning at the start, not at the walltime.
    first='case "$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null)" in\n'
    f'  *" Requeue=0 "*) echo "warning: {NO_REQUEUE}" >&2 ;;\nesac',
    # SLURM counts a requeue before it signals.
    queued='scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null'
    ' | grep -q " Restarts=$((${SLURM_RESTART_COUNT:-0} + 1)) "',
)
_WARNING = f"--signal=B:USR1@{WARNING_S}"
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
_ALLOCATION = "RFTDASK_ALLOCATION"
"""Environment variable with the id of the allocation, once SLURM's own variables are removed."""
_END_S = 10.0

_steps: dict[str, subprocess.Popen[bytes]] = {}
"""Steps that this process has started, by id."""


class SlurmCluster(BatchCluster):
    """A run on SLURM: its plan, its scripts, and SLURM's commands for its jobs.

    Example: with SlurmCluster.start(config, layout, storage) as cluster: cluster.scale("explorer", 8)
    """

    cluster_type: ClassVar[str] = "slurm"
    spans_nodes: ClassVar[bool] = True
    # For the keys of TLS. Jobs of dask-jobqueue have only one task on one node.
    required_package: ClassVar[str | None] = "cryptography"
    remedy = "change cluster.slurm.{role} (partition, walltime, cpus, memory, gres, account, directives)"

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
        check_fit({role: cls.shape(config, role, layout.num_in_jobs(role)) for role in ROLES}, jobs, limited)
        return layout

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Start a cluster of jobs, or of steps if this process is in an allocation."""
        kind = SlurmStepsCluster if cls is SlurmCluster and allocation() is not None else cls
        return kind(config, layout, SecretsDir.of(config, storage), storage)

    @classmethod
    def shape(cls, config: Config, role: str, num_workers: int) -> JobShape:
        """Jobs for `num_workers` workers of a role. Raises: UserError: jobs would have unused GPUs or tasks."""
        job: WorkerJobConfig = getattr(config.cluster.slurm, role)
        of_engines = {TRAINER_RESOURCE: 1, AUXILIARY_RESOURCE: max(auxiliary_sizes(config.stage_configs()), default=1)}
        gpus_each = of_engines.get(role) or _gpus_of_engines(config)
        if role == AUXILIARY_RESOURCE and num_workers and 1 <= job.num_gpus < gpus_each:
            raise UserError(
                f"cluster.slurm.auxiliary: a node has {job.num_gpus} GPUs, and an engine of an auxiliary model uses "
                f"{gpus_each}; set gres to gpu:{gpus_each}, since only engines of the policy may use several nodes"
            )
        shape = shape_of(role, job, num_workers, gpus_each)
        if shape.span > 1:
            for stage in config.stage_configs():
                if stage.has_explorer:
                    check_spans(stage, job)
        return shape

    @classmethod
    def workers_per_job(cls, config: Config, role: str, num_workers: int) -> int:
        """All ranks of a trainer, or the engines that the GPUs of a job allow."""
        return cls.shape(config, role, num_workers).num_workers

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """States from squeue. ENDING: the processes of a job are ending; REQUEUED: it starts again afterwards."""
        if not job_ids:
            return {}
        # All jobs of the user, because a query by id fails once SLURM has forgotten one of them.
        lines = call("squeue", "--noheader", "--array", "--me", "--format=%A %F %T %M %r").splitlines()
        # %F is the id of the array, which runs if one of its tasks does, so running tasks come last.
        rows = sorted((line.split(maxsplit=4) for line in lines), key=lambda row: row[2] == "RUNNING")
        states: dict[str, str] = {}
        for number, array, state, used, *why in rows:
            # SLURM reports COMPLETING for both; a requeued job has used no time of its next start.
            if state == ENDING and used == "0:00":
                state = "REQUEUED"
            has_reason = state == "PENDING" and why and why[0].strip() != "None"
            states[number] = states[array] = f"{state} ({why[0].strip()})" if has_reason else state
        return {job_id: states[job_id] for job_id in job_ids if job_id in states}

    @classmethod
    def expected_starts(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """Expected start times of pending jobs, as far as known: "2026-11-24T08:00:00"."""
        if not job_ids:
            return {}
        output = call("squeue", "--noheader", "--me", "--states=PENDING", "--format=%A %S")
        rows = (line.split() for line in output.splitlines())
        return {job_id: at for job_id, at in rows if job_id in job_ids and at != "N/A"}

    @classmethod
    def is_requeued(cls, job_id: str) -> bool:
        """True if SLURM may requeue a job, which a site can forbid (JobRequeue, --no-requeue)."""
        return _show_job(job_id).get("Requeue") != "0"

    @classmethod
    def interrupt(cls, job_id: str) -> bool:
        """Send SIGINT to the script of a job. Cancels pending tasks of an array."""
        # First, or one of them would start after the running one.
        call("scancel", "--quiet", "--state=PENDING", job_id)
        call("scancel", "--batch", "--signal=INT", job_id)
        return True

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """True if a job in this state can never start because of its options."""
        reason = state.removeprefix("PENDING (").removesuffix(")")
        return reason in _NEVER or bool(_NEVER_PER_JOB.fullmatch(reason))

    @classmethod
    def is_ending(cls, state: str) -> bool:
        """True for COMPLETING jobs, which epilogs and hanging processes may keep for minutes."""
        return state == ENDING

    @classmethod
    def reason(cls, job_id: str) -> str:
        """State and exit code from scontrol, which keeps ended jobs for some minutes: "TIMEOUT (exit 0:15)"."""
        try:
            fields = _show_job(job_id)
        except RoleError:
            return ""
        return f"{fields.get('JobState', '')} (exit {fields.get('ExitCode', '?')})"

    @classmethod
    def cancel(cls, *job_ids: str) -> None:
        """Cancel jobs with scancel. Idempotent."""
        if job_ids:
            call("scancel", "--quiet", *job_ids)

    @staticmethod
    def is_mistake(error: str) -> bool:
        """True if sbatch would always refuse the job."""
        return bool(
            re.search(r"(?i)\binvalid |configuration is not available|specification can not be satisfied", error)
        )

    @staticmethod
    def is_at_limit(error: str) -> bool:
        """True if sbatch refused the job because of a limit of submitted jobs."""
        return bool(re.search(r"SubmitJob|MaxJobCount|job submit limit|temporarily unable to accept job", error))

    @classmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """Script from `cluster.slurm.<role>`. A preempted job is requeued under its id."""
        job, shape = getattr(config.cluster.slurm, role), cls.shape(config, role, num_workers)
        # Names have the numbers of the job and its start, since known names are refused.
        worker = _worker(config, role, folder, shape.span, name + "-${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}")
        # A failing task ends the job, because the others wait for it, and the next job may get a better node.
        srun = step(job, shape, "--kill-on-bad-exit=1") if shape.num_tasks > 1 else ""
        submitted = os.environ.get(SUBMITTED, "")
        shell = [
            *staging(config),
            # For sites that do not pass the environment on to jobs.
            *([f"export {SUBMITTED}={shlex.quote(submitted)}"] * bool(submitted)),
            # Replaces the shell of the script, so that the worker receives signals of the batch system.
            "exec " + command_of(config, role, worker, srun),
        ]
        return batch_script(config, name, role, job, logs, shell, shape=shape)

    def start_job(self, role: str, name: str) -> str:
        """Submit with sbatch, which has read the script when it returns, so one file per role is enough."""
        return sbatch(str(self._folder.write(f"{role}.sh", self.script(role, name))))

    @classmethod
    def plan_scripts(
        cls, config: Config, folder: SecretsDir, storage: Storage, options: SubmitOptions
    ) -> tuple[Config, ScriptPlan]:
        """Plan the controller, or the jobs of --offline or --single-allocation, for what SLURM has."""
        stages = config.stage_configs()
        if (options.offline or options.single_allocation) and any(stage.cluster.colocate for stage in stages):
            raise UserError(
                "cluster.colocate: --offline and --single-allocation give each role its own nodes; remove these options"
            )
        layout, unchecked = None, ""
        try:
            check_not_submitted(storage)
            if options.offline:
                check_chain(config)
            else:
                layout = cls.plan(config, stages)
        except (NotInstalledError, RoleError) as error:
            if not options.dry:
                raise
            unchecked = str(error)
        if options.offline:
            scripts = offline_scripts(config, folder, storage, options.rounds, options.explore_jobs)
            return config, ScriptPlan(scripts, unchecked=unchecked)
        layout = layout or plan_jobs(stages, {role: getattr(config.cluster.slurm, role).cpus for role in ROLES})
        if options.single_allocation:
            # The number of ranks must match the parts of the job.
            ranks = layout.num_workers(TRAINER_RESOURCE)
            pinned = {"trainer.num_ranks": ranks} if ranks and config.trainer.trainer_strategy != "single" else {}
            config = replace(config, {"cluster.type": "joined", **pinned})
            script = allocation_script(config, layout, folder, storage)
            return config, ScriptPlan((script,), unchecked=unchecked, layout=layout)
        controller = Script(CONTROLLER, CONTROLLER, controller_text(config, folder, storage))
        of_cluster, logs = SecretsDir.of(config, storage), log_folder(storage, folder)
        workers = []
        for role, count, shape in _jobs_of(config, layout):
            text = cls.job_script(config, role, count, f"{role}-<number>", of_cluster, logs)
            workers.append(Script(f"{shape.num_jobs} x {role}", role, text))
        return config, ScriptPlan((controller,), tuple(workers), unchecked, layout)

    @classmethod
    def submit_scripts(
        cls, config: Config, folder: SecretsDir, storage: Storage, plan: ScriptPlan, after: str | None
    ) -> list[JobRecord]:
        """Submit with sbatch, each script after the one that it depends on; if one is refused, cancel the others."""
        jobs: dict[str, JobRecord] = {}
        try:
            for script in plan.scripts:
                path = folder.write(f"{script.name}.sh", script.text)
                options = _dependency(script, jobs[script.after].job_id) if script.after else []
                if not options:
                    waits = [config.cluster.slurm.dependency, f"afterany:{after}" if after is not None else None]
                    options = [f"--dependency={','.join(filter(None, waits))}"] if any(waits) else []
                job_id = sbatch(str(path), *options)
                jobs[script.name] = cls.record(config, script.role, script.name, job_id)
        # The rest of a chain would wait for jobs that never come.
        except BaseException:
            cls.cancel(*(job.job_id for job in jobs.values()))
            raise
        return list(jobs.values())

    @classmethod
    def find_submitted(cls, config: Config, folder: SecretsDir) -> list[JobRecord]:
        """Jobs of the user whose script is in the folder, without the jobs of workers."""
        # The command of an interactive job may be empty.
        rows = (line.partition(" ") for line in call("squeue", "--noheader", "--me", "--format=%F %o").splitlines())
        ours = folder.path.resolve()  # another path may lead to it
        names = {job_id: Path(path).stem for job_id, _, path in rows if Path(path).parent.resolve() == ours}
        return [
            cls.record(config, name.partition("-")[0], name, job_id)
            for job_id, name in names.items()
            if name not in ROLES
        ]

    @classmethod
    def check_scripts(cls, plan: ScriptPlan) -> None:
        """Test each script with SLURM. Raises: UserError: SLURM would refuse a script."""
        for script in (*plan.scripts, *plan.worker_scripts):
            if cls.is_mistake(answer := _foresee(script)):
                raise UserError(f"SLURM refuses the job of {script.role} (cluster.slurm.{script.role}): {answer}")

    @classmethod
    def render_scripts(cls, folder: SecretsDir, plan: ScriptPlan) -> str:
        """Format all scripts, with SLURM's prediction and the submit command of each."""
        parts = [f"# not checked against what SLURM has: {plan.unchecked}\n"] * bool(plan.unchecked)
        for script in (*plan.scripts, *plan.worker_scripts):
            options = "".join(f" {shlex.quote(option)}" for option in _dependency(script, f"<job of {script.after}>"))
            path = folder.path / f"{script.name}.sh"
            by = f"{options} {path}" if script in plan.scripts else f", by the controller ({script.name})"
            foreseen = "" if plan.unchecked else f"# SLURM: {_foresee(script)}\n"
            parts.append(f"{foreseen}# sbatch{by}\n{script.text}")
        return "\n".join(parts)


class SlurmStepsCluster(SlurmCluster):
    """A cluster in an existing allocation, whose jobs are steps with ids `allocation.process`."""

    cluster_type: ClassVar[str] = ""

    @classmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """Shell of a step whose tasks are workers."""
        job_id, job = os.environ[_ALLOCATION], getattr(config.cluster.slurm, role)
        shape = cls.shape(config, role, num_workers)
        gpus = [option for option in directives(job) if option.startswith(("--gres=", "--gpus-per-node="))]
        # --exact leaves the rest to steps of other roles and runs; memory is shared.
        options = (f"--jobid={job_id}", "--exact", "--mem=0", "--kill-on-bad-exit=1", *gpus)
        # `exec` keeps the process id of the shell, which is part of the id of the step.
        worker = _worker(config, role, folder, shape.span, f"{name}-{job_id}.$$-0")
        command = command_of(config, role, worker, step(job, shape, *options))
        log = f'exec >>{shlex.quote(str(logs))}/"{name}-{job_id}.$$.log" 2>&1'
        return "\n".join([log, *job.prologue, *staging(config), f"exec {command}\n"])

    def start_job(self, role: str, name: str) -> str:
        """Start an srun."""
        script = self._folder.write(f"{name}.sh", self.script(role, name))
        process = subprocess.Popen(["bash", str(script)], stdin=subprocess.DEVNULL, start_new_session=True)
        job_id = f"{os.environ[_ALLOCATION]}.{process.pid}"
        _steps[job_id] = process
        return job_id

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
    def cancel(cls, *job_ids: str) -> None:
        """Terminate each srun, which ends its tasks. Idempotent."""
        for_all_jobs(job_ids, cls._cancel_step)

    @classmethod
    def _cancel_step(cls, job_id: str) -> None:
        if (process := _process_of(job_id)) is not None:
            process.terminate()
            # A second signal would end srun without its tasks.
            if job_id in _steps:
                try:
                    _steps[job_id].wait(_END_S)
                except subprocess.TimeoutExpired:
                    raise RoleError(f"step {job_id} did not end in {_END_S:.0f} s; end its srun by hand") from None


def controller_text(config: Config, folder: SecretsDir, storage: Storage) -> str:
    """Script of the controller."""
    run = _rftdask(config, CONTROLLER, "run", str(folder.path / CONFIG_FILE), *DRIVER_OPTIONS)
    shell = [takes_sources(folder), *driver_shell(folder, run, ON_SLURM)]
    logs, job = log_folder(storage, folder), config.cluster.slurm.controller
    return batch_script(config, CONTROLLER, CONTROLLER, job, logs, shell, _driver_asks(config))


def allocation_script(config: Config, layout: Layout, folder: SecretsDir, storage: Storage) -> Script:
    """Script of one job with all roles: a heterogeneous job, or one with equal nodes for sites without heterogeneous
    jobs. Raises: UserError: the roles need different nodes.
    """
    logs, section = log_folder(storage, folder), config.cluster.slurm
    asks, steps, parts, at = list[str](), list[str](), dict[str, JobShape](), 0
    for role, _, jobs in _jobs_of(config, layout):
        job: JobConfig = getattr(section, role)
        if jobs.span > 1:
            raise UserError(
                f"cluster.slurm.{role}: an engine would use {jobs.span} nodes; use rftdask submit without "
                "--single-allocation, or rftdask run in an allocation of salloc"
            )
        shape = parts[role] = JobShape(1, jobs.num_jobs * jobs.nodes, jobs.tasks_per_node)
        if not jobs.nodes:
            shape = parts[role] = JobShape(1, 0 if section.heterogeneous else 1, jobs.num_jobs * jobs.tasks_per_node)
        # Each role has its own nodes; the driver is part 0, or on the first node.
        place = f"--het-group={len(parts)}" if section.heterogeneous else f"--relative={at}"
        at += shape.nodes
        asks += ["hetjob", *asks_for(job, shape)] * section.heterogeneous
        output = f"--output={logs}/{role}-%J-%t.log"
        srun = step(job, shape, place, "--kill-on-bad-exit=0", output, "--open-mode=append")
        work = ("join", str(folder.path / CONFIG_FILE), "--role", role, "--patience", str(PATIENCE_S))
        # In a subshell, because the prologue of a role must not affect the others.
        steps += ["(", *job.prologue, f"exec {_rftdask(config, role, *work, srun=srun)}", ") &"]
    run = _rftdask(config, CONTROLLER, "run", str(folder.path / CONFIG_FILE), *DRIVER_OPTIONS)
    shell = [takes_sources(folder), *driver_shell(folder, run, ON_SLURM, steps)]
    if section.heterogeneous:
        job, shape = section.controller, ONE_TASK
    else:
        job, shape = alike({role: getattr(section, role) for role in parts}, section.controller, parts)
    text = batch_script(config, CONTROLLER, CONTROLLER, job, logs, shell, _driver_asks(config), asks, shape=shape)
    return Script(CONTROLLER, CONTROLLER, text)


def offline_scripts(
    config: Config, folder: SecretsDir, storage: Storage, rounds: int, explore_jobs: int
) -> tuple[Script, ...]:
    """Scripts of alternating jobs: an array of explore jobs, whose first task is the driver and whose others join, then
    a train job. Raises: UserError: the number of explore steps is not known.
    """
    if config.stages:
        raise UserError("rftdask submit --offline creates its own stages; submit a config without `stages`")
    total = make_plan(config).stages[0].explore_steps
    if total is None or total < rounds:
        raise UserError(
            f"rftdask submit --offline divides the explore steps into {rounds} rounds, and "
            f"{'their number is not known' if total is None else f'there are {total}'}; set buffer.total_steps"
        )
    logs, path, scripts = log_folder(storage, folder), str(folder.path / CONFIG_FILE), []
    explore, train = config.cluster.slurm.explorer, config.cluster.slurm.trainer
    of_explorers, of_trainer = (chain_shape(config, role) for role in (EXPLORER_RESOURCE, TRAINER_RESOURCE))
    srun = step(explore, of_explorers) if of_explorers.num_tasks > 1 else ""
    help_with = ("join", path, "mode=explore", "--role", EXPLORER_RESOURCE, "--patience", str(PATIENCE_S))
    work = _rftdask(config, EXPLORER_RESOURCE, *help_with, srun=srun)
    cancelled = shlex.quote(str(folder.path / CANCELLED_FILE))
    help_out = [
        "# All tasks but the first are helpers, which SLURM may start and preempt at any time.",
        f'if [ "$SLURM_ARRAY_TASK_ID" != 0 ]; then [ -e {cancelled} ] || exec {work}; exit; fi',
    ]
    end = 'scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID"  # helpers that have not started'
    engines = f"explorer.rollout_model.engine_num={explore_jobs * of_explorers.num_workers}"
    # The batch system limits the cores of the train job.
    cores = [f"cluster.num_cpus={train.cpus}"] if train.cpus > 1 and config.cluster.num_cpus is None else []
    for number in range(1, rounds + 1):
        # Each round continues the run to a later step.
        run = ("run", path, f"buffer.total_steps={total * number // rounds}", *DRIVER_OPTIONS)
        drive = _rftdask(config, CONTROLLER, *run, "mode=explore", "cluster.type=joined", engines)
        shell = [takes_sources(folder), *help_out, *driver_shell(folder, drive, ON_SLURM, [f"{work} &"], [end])]
        asks, name = (f"--array=0-{explore_jobs - 1}", *_driver_asks(config)), f"explore-{number}"
        text = batch_script(
            config, name, EXPLORER_RESOURCE, explore, logs, shell, asks, number="%A_%a", shape=of_explorers
        )
        scripts.append(Script(name, "explore", text, f"train-{number - 1}" if number > 1 else None))
        learn = _rftdask(
            config, TRAINER_RESOURCE, *run, "mode=train", "cluster.type=local", "cluster.node_num=0", *cores
        )
        shell = [takes_sources(folder), *staging(config), *driver_shell(folder, learn, ON_SLURM)]
        after, name, asks = name, f"train-{number}", _driver_asks(config)
        text = batch_script(config, name, TRAINER_RESOURCE, train, logs, shell, asks, shape=of_trainer)
        scripts.append(Script(name, "train", text, after, "_0"))
    return tuple(scripts)


def _jobs_of(config: Config, layout: Layout) -> list[tuple[str, int, JobShape]]:
    """(role, number of workers, jobs) of each role with workers."""
    counts = {role: layout.num_in_jobs(role) for role in ROLES}
    return [(role, count, SlurmCluster.shape(config, role, count)) for role, count in counts.items() if count]


def _dependency(script: Script, job_id: str) -> list[str]:
    if script.after is None:
        return []
    return [f"--dependency=afterok:{job_id}{script.after_task}", "--kill-on-invalid-dep=yes"]


def _driver_asks(config: Config) -> tuple[str, ...]:
    """Options of a driver's job: a signal before the walltime, and mail to the user."""
    mail = config.cluster.slurm.mail
    return (_WARNING, *((f"--mail-user={mail}", "--mail-type=END,FAIL") if mail is not None else ()))


def _rftdask(config: Config, role: str, *arguments: str, srun: str = "") -> str:
    return command_of(config, role, shlex.join(["-m", "rftdask", *arguments]), srun)


def batch_script(
    config: Config,
    name: str,
    role: str,
    job: JobConfig,
    logs: Path,
    shell: Sequence[str],
    options: Sequence[str] = (),
    parts: Sequence[str] = (),
    number: str = "%j",
    shape: JobShape = ONE_TASK,
) -> str:
    """Return the text of a batch script.

    Args:
        name: name of the job and its log.
        role: role of its command.
        options: options of sbatch for this job, over which `directives` of its section win.
        parts: options of the other parts of a heterogeneous job.
        number: pattern of the job id in the name of the log.
    Raises: UserError: the site's template fails.
    """
    # --requeue allows a restart after the loss of a node, and append keeps the log of earlier starts.
    directives = [
        f"--job-name={JOB_PREFIX}{name}-{config.name.replace('/', '-')}",
        f"--output={logs}/{name}-{number}.log",
        "--open-mode=append",
        "--requeue",
        *options,
        *asks_for(job, shape),
        *parts,
    ]
    return _render(config, role, directives=directives, prologue=job.prologue, shell="\n".join(shell))


def command_of(config: Config, role: str, arguments: str, srun: str = "") -> str:
    """Return the shell command of a process of the run: Python with `arguments`.

    Args: srun: prefix for several tasks. Raises: UserError: the site's template fails.
    """
    python = python_of(config)
    values = {"python": python, "arguments": arguments, "command": f"{python} {arguments}", "srun": srun}
    return " ".join(_render(config, role, **values).split("\n")).strip()


def _render(config: Config, role: str, **values: Any) -> str:
    import jinja2  # late: most commands render no script

    template = config.cluster.slurm.template
    site = {} if template is None else {"site": template}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({"job.sh": TEMPLATE, **site}),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        script = environment.get_template("site" if site else "job.sh")
        return script.render({"command": "", "srun": "", "run": config.name, "role": role, **values})
    except jinja2.TemplateError as error:
        raise UserError(f"cluster.slurm.template: {type(error).__name__}: {error}") from error


def asks_for(job: JobConfig, shape: JobShape) -> list[str]:
    """Return the directives with the resources of a job, each of whose tasks is a worker."""
    memory = []
    # By core and task, because each task is a worker. A whole node has more cores, so it gets all of its memory (0).
    if job.memory is not None:
        memory = ["--mem=0" if job.exclusive else f"--mem-per-cpu={-(-megabytes(job.memory) // job.cpus)}M"]
    return [*_places(shape), f"--cpus-per-task={job.cpus}", *memory, *directives(job)]


def directives(job: JobConfig) -> list[str]:
    """Options of a job, for both `#SBATCH` and srun."""
    keys = ("partition", "account", "qos", "reservation", "gres", "gpus_per_node", "constraint")
    options = {key: key.replace("_", "-") for key in keys} | {"walltime": "time"}
    named = [f"--{option}={value}" for key, option in options.items() if (value := getattr(job, key)) is not None]
    return [*named, *["--exclusive"] * job.exclusive, *job.directives]


def alike(
    jobs: Mapping[str, JobConfig], controller: JobConfig, parts: Mapping[str, JobShape]
) -> tuple[JobConfig, JobShape]:
    """Return one job with the nodes of all parts, each as large as the largest.

    Args: all by role; `controller` has the partition and walltime. Raises: UserError: GPUs differ.
    """
    if len({(job.gres, job.gpus_per_node) for job in jobs.values()}) > 1:
        requests = ", ".join(f"cluster.slurm.{role}: {job.gres or job.gpus_per_node}" for role, job in jobs.items())
        raise UserError(
            f"all nodes of a job that is not heterogeneous are equal (cluster.slurm.heterogeneous), and GPUs differ: "
            f"{requests}; request the same"
        )
    one = next(iter(jobs.values()))
    tasks = {role: shape.tasks_per_node for role, shape in parts.items()}
    cpus = max(job.cpus * tasks[role] for role, job in jobs.items())
    sizes = [megabytes(job.memory) * tasks[role] for role, job in jobs.items() if job.memory is not None]
    memory = f"{max(sizes)}MiB" if len(sizes) == len(jobs) else None
    job = controller.model_copy(
        update={
            **{"cpus": cpus, "memory": memory, "gres": one.gres, "gpus_per_node": one.gpus_per_node},
            **{"exclusive": any(job.exclusive for job in jobs.values())},
            **{"constraint": controller.constraint or one.constraint},
        }
    )
    return job, JobShape(1, sum(shape.nodes for shape in parts.values()), 1)


def step(job: JobConfig, shape: JobShape, *options: str) -> str:
    """Return the srun prefix of a command that all tasks of a job run.

    Each task sees all GPUs of its node and claims its own (processes/gpus.py), so NCCL can connect them.
    """
    # All options are explicit, because versions of srun read the job's environment differently. No GPU options:
    # --gpus-per-task hides the GPUs of other tasks, and with --gpu-bind=none SLURM 22.05 hides all GPUs if a node has
    # several tasks.
    return shlex.join(["srun", *options, *_places(shape), f"--cpus-per-task={job.cpus}", "--mpi=none"])


def _places(shape: JobShape) -> list[str]:
    if not shape.nodes:
        return [f"--ntasks={shape.num_tasks}"]
    return [f"--nodes={shape.nodes}", f"--ntasks={shape.num_tasks}", f"--ntasks-per-node={shape.tasks_per_node}"]


def _worker(config: Config, role: str, folder: SecretsDir, span: int, name: str) -> str:
    """Return the arguments of Python that start a worker, whose name and folder the shell of its job completes."""
    colocates = any(stage.cluster.colocate for stage in config.stage_configs())
    arguments = shlex.join(
        [
            *("-m", "rftdask.cluster.join"),
            *(("--span", str(span)) if span > 1 else ()),
            *(("--engine-every", str(_gpus_of_engines(config))) if role == TRAINER_RESOURCE and colocates else ()),
            *folder.worker_options(config.cluster.tls, config.cluster.interface),
            *(*join_options(config, role), "--death-timeout", str(DEATH_TIMEOUT_S)),
        ]
    )
    return f'{arguments} --name "{name}" --local-directory "${{TMPDIR:-/tmp}}"'


def _gpus_of_engines(config: Config) -> int:
    return max((s.explorer.gpus_per_worker for s in config.stage_configs() if s.has_explorer), default=1)


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


def capacities(config: Config) -> dict[str, Capacity]:
    """Nodes that each role may use of its partition, or of the allocation of this process.

    Raises: UserError: the config requests more, or SLURM is not installed.
    """
    section = config.cluster
    if (job_id := allocation()) is not None:
        return dict.fromkeys(ROLES, limit(read_allocation(job_id), section.node_num, section.gpu_per_node))
    sizes = {role: read_capacity(getattr(section.slurm, role).partition) for role in ROLES}
    return {role: limit(size, section.node_num, section.gpu_per_node) for role, size in sizes.items()}


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
        check_fit({role: chain_shape(config, role)}, jobs, partitions)


def chain_shape(config: Config, role: str) -> JobShape:
    """Job of an offline chain: the engines of one job, or a trainer whose ranks are processes of one task.

    Raises: UserError: the job would have unused GPUs, or train on several nodes.
    """
    job: WorkerJobConfig = getattr(config.cluster.slurm, role)
    if role == TRAINER_RESOURCE:
        if (job.nodes or 1) > 1:
            raise UserError("cluster.slurm.trainer.nodes: the train job of --offline has one node; remove this key")
        return JobShape(1, min(1, job.num_gpus), 1)
    gpus_each = max(stage.explorer.gpus_per_worker for stage in config.stage_configs())
    if 1 <= job.num_gpus < gpus_each:
        raise UserError(
            f"cluster.slurm.explorer: an engine of {gpus_each} GPUs needs several nodes with {job.num_gpus} each; use "
            "rftdask submit without --offline"
        )
    return shape_of(role, job, max(1, job.workers_per_node(gpus_each)) * (job.nodes or 1), gpus_each)


def allocation() -> str | None:
    """Id of the allocation that this process may use. None: not in an allocation, or in a job of `rftdask submit`."""
    if SUBMITTED in os.environ:
        return None
    job_id = os.environ.get(_ALLOCATION) or os.environ.get("SLURM_JOB_ID")
    if job_id is not None:
        os.environ[_ALLOCATION] = job_id
    return job_id


def read_allocation(job_id: str) -> Capacity:
    """Nodes of an allocation. Raises: RoleError: unknown to SLURM."""
    fields = _show_job(job_id)
    nodes = int(fields.get("NumNodes", "1").partition("-")[0])
    # For jobs with whole nodes only AllocTRES has the number of GPUs.
    in_all = re.search(r"(?<![\w/])gres/gpu=(\d+)", fields.get("AllocTRES") or fields.get("TRES", ""))
    gpus = max(count_gres(fields.get("TresPerNode")), int(in_all[1]) // nodes if in_all else 0)
    return Capacity(f"of allocation {job_id}", nodes, int(fields.get("NumCPUs", "1")) // nodes, gpus)


def _show_job(job_id: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", call("scontrol", "--oneliner", "show", "job", job_id)))


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


def sbatch(script: str, *options: str) -> str:
    """Submit a script file. Returns: the job id. Raises: RoleError: SLURM refused it."""
    output = call("sbatch", "--parsable", *options, script)
    # Only the last line, because a wrapper of the site may print others before.
    match = re.fullmatch(r"(\d+)(;.*)?", output.strip().rpartition("\n")[2])
    if not match:
        raise RoleError(f"sbatch {script} printed no job id but {output.strip() or 'nothing'!r}")
    return match[1]


def _foresee(script: Script) -> str:
    """Return SLURM's prediction of when and where a script would start, or its refusal, without submitting it."""
    try:
        output = call("sbatch", "--test-only", stdin=script.text, stream="stderr")
    except (NotInstalledError, RoleError) as error:  # may be a temporary limit
        return " ".join(str(error).split())
    lines = (line.strip().removeprefix("sbatch: ") for line in output.splitlines())
    return "; ".join(" ".join(line.split()) for line in lines if line)


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
