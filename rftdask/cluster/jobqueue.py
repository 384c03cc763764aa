"""Batch systems other than SLURM, whose jobs are submitted through dask-jobqueue, one for each worker.

A batch system is a subclass with the job class of dask-jobqueue, the variable with a job's number, and the command that
lists its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import importlib
import re
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from rftdask.cluster.batch_cluster import (
    CONTROLLER,
    DEATH_TIMEOUT_S,
    SUBMIT_S,
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
    HostSystem,
    driver_shell,
    python_of,
    staging,
    takes_sources,
    walltime_timer,
)
from rftdask.cluster.jobs import CONFIG_FILE, JOB_PREFIX, JobRecord, Script, ScriptPlan
from rftdask.cluster.layout import ROLES, Layout, plan_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import Config, fill_from_environment
from rftdask.config.schema.cluster import WARNING_S
from rftdask.errors import NotInstalledError, RoleError, UserError
from rftdask.storage import Storage

DRIVER_FILE = "driver.sh"
_RESTARTS_FILE = "restarts"
_IMPORT_LOCK = threading.Lock()
"""Held while `signal.signal` is replaced, since two threads would restore each other's replacement."""


class JobQueueCluster(BatchCluster):
    """A batch system other than SLURM: dask-jobqueue submits its jobs, and a command lists those of a user.

    The formats of PBS (the emulation of SLURM) and Grid Engine were recorded, the others follow documentation.
    """

    takes_options: ClassVar[bool] = True
    required_package: ClassVar[str | None] = "dask_jobqueue"
    job_class: ClassVar[str]
    """Dotted path of the job class of dask-jobqueue."""
    job_number: ClassVar[str]
    """Shell variable with the number of a job in its script."""
    list_command: ClassVar[tuple[str, ...]]
    row: ClassVar[str]
    """Pattern of a job's line in its output, with the groups `id` and `state`."""
    waiting: ClassVar[tuple[str, ...]]
    running: ClassVar[tuple[str, ...]]
    stuck: ClassVar[tuple[str, ...]] = ()
    """States of jobs that only their user can release."""
    no_jobs: ClassVar[str] = "\0"
    """Error text of the command if the user has no jobs."""
    walltime_unit_s: ClassVar[float] = 1.0
    """Unit of the last part of a walltime."""
    walltime_parts: ClassVar[int] = 1
    """Number of parts of a walltime; a shorter one lacks its last parts."""

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Plan workers with the cores in the options of their roles."""
        section = config.cluster
        options = {role: {**section.options, **section.options.get(role, {})} for role in ROLES}
        cores = {role: int(own.get("cores", section.num_cpus or 1)) for role, own in options.items()}
        return plan_jobs(stages, cores, section.node_num * section.gpu_per_node or None)

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str] | None:
        """States from `list_command`. None: it is not installed. Raises: RoleError: it failed."""
        if not job_ids:
            return {}
        try:
            output = call(*(part.format(user=getpass.getuser()) for part in cls.list_command))
        except NotInstalledError:
            return None
        except RoleError as error:
            if cls.no_jobs not in str(error):
                raise
            output = ""
        states = cls.read_states(output)
        return {job_id: states[job_id] for job_id in job_ids if job_id in states}

    @classmethod
    def read_states(cls, output: str) -> dict[str, str]:
        """Parse the output of `list_command`: state by id."""
        states = {}
        for row in re.finditer(cls.row, output, re.MULTILINE):
            state = row["state"]
            if state in cls.running:
                states[row["id"]] = "RUNNING"
            elif state in (*cls.waiting, *cls.stuck):
                states[row["id"]] = f"PENDING ({state})"
        return states

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """True if only its user can release a job in this state."""
        return state in {f"PENDING ({stuck})" for stuck in cls.stuck}

    @classmethod
    def cancel(cls, *job_ids: str) -> None:
        """Cancel each job, unless it has ended."""
        command = cls.load_job_class().cancel_command.split()

        def cancel_one(job_id: str) -> None:
            try:
                call(*command, job_id)
            except RoleError:
                states = cls.states([job_id])
                if states is None or job_id in states:
                    raise

        for_all_jobs(job_ids, cancel_one)

    @classmethod
    def load_job_class(cls) -> Any:
        """Job class of dask-jobqueue, an optional package that reads its configuration when it is imported."""
        module, _, name = cls.job_class.rpartition(".")
        with _IMPORT_LOCK:
            # Its import installs a handler of SIGINT, which the driver needs, and which fails outside the main thread.
            patch = mock.patch.object(signal, "signal") if module not in sys.modules else contextlib.nullcontext()
            with patch:
                return getattr(importlib.import_module(module), name)

    @classmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """Script of a job of a role, which has `num_workers` workers in total."""
        return str(cls.load_job_class()(**cls.job_options(config, role, name, folder, logs)).job_script())

    def start_job(self, role: str, name: str) -> str:
        """Submit a job. Returns: its id. Raises: RftError, OSError, ValueError: refused."""
        job = self.load_job_class()(**self.job_options(self._config, role, name, self._folder, self._logs))
        # The job class expects the loop of the cluster.
        return str(self._cluster.sync(self._submit_job, job))

    @staticmethod
    async def _submit_job(job: Any) -> str:
        job._call = _call
        await job.start()
        return str(job.job_id)

    @classmethod
    def job_options(cls, config: Config, role: str, name: str, folder: SecretsDir, log_path: Path) -> dict[str, Any]:
        """Arguments of the job class for one worker."""
        options = fill_from_environment(config.cluster.options)
        common = {key: value for key, value in options.items() if key not in (*ROLES, CONTROLLER)}
        arguments = {
            # Quoted, because it is part of a shell command.
            "scheduler": shlex.join(folder.worker_options(config.cluster.tls, config.cluster.interface)),
            "job_name": f"{JOB_PREFIX}{role}-{config.name.replace('/', '-')}",
            "processes": 1,
            "nanny": True,
            # A killed driver cannot cancel its jobs.
            "death_timeout": DEATH_TIMEOUT_S,
            "local_directory": "${TMPDIR:-/tmp}",
            # Starts a new worker for each scheduler of the run.
            "worker_command": "rftdask.cluster.join",
            "worker_extra_args": join_options(config, role),
            # Replaces the shell of the script, so that the worker receives signals of the batch system.
            "python": f"exec {python_of(config)}",
            "log_directory": str(log_path),
            "name": f"{name}-{cls.job_number}-0",
            **common,
            **options.get(role, {}),
        }
        key = "job_script_prologue"
        if role in ROLES and (shell := staging(config)):
            arguments[key] = [*arguments.get(key, ()), *shell]
        return arguments

    @classmethod
    def plan_scripts(
        cls, config: Config, folder: SecretsDir, storage: Storage, options: SubmitOptions
    ) -> tuple[Config, ScriptPlan]:
        """Plan the controller, whose job runs `driver`, and a job for each worker."""
        if options.offline or options.single_allocation:
            raise UserError(
                f"--offline and --single-allocation need cluster.type slurm, not {config.cluster.type}; remove them"
            )
        check_not_submitted(storage)
        layout, logs = cls.plan(config, config.stage_configs()), log_folder(storage, folder)
        restarts, path = shlex.quote(str(folder.path / _RESTARTS_FILE)), str(folder.path / CONFIG_FILE)
        python = python_of(config)
        walltime_s = cls.walltime_s(config)
        # These systems have no common way to requeue a job, so the job submits its successor.
        submit_next = f"{python} -m rftdask.cluster.resubmit {shlex.quote(path)}"
        again = f'{{ echo >>{restarts} && {submit_next} && echo "queued again before the walltime" && exit 0; }}'
        # Nor a common signal before the walltime.
        first = walltime_timer(walltime_s - WARNING_S) if walltime_s > 2 * WARNING_S else ""
        host = HostSystem(restarts=f"$(cat {restarts} 2>/dev/null | wc -l)", again=again, cancel="", first=first)
        run = f"{python} {shlex.join(['-m', 'rftdask', 'run', path, *DRIVER_OPTIONS])}"
        driver = "\n".join(["#!/usr/bin/env bash", takes_sources(folder), *driver_shell(folder, run, host), ""])
        controller = Script(CONTROLLER, CONTROLLER, cls.controller(config, folder, logs).job_script())
        of_cluster, workers = SecretsDir.of(config, storage), []
        for role in ROLES:
            if count := layout.num_workers(role):
                text = cls.job_script(config, role, count, f"{role}-<number>", of_cluster, logs)
                workers.append(Script(f"{count} x {role}", role, text))
        return config, ScriptPlan((controller,), tuple(workers), driver=driver)

    @classmethod
    def submit_scripts(
        cls, config: Config, folder: SecretsDir, storage: Storage, plan: ScriptPlan, after: str | None
    ) -> list[JobRecord]:
        """Write the driver's shell and submit the controller."""
        (folder.path / _RESTARTS_FILE).unlink(missing_ok=True)
        folder.write(DRIVER_FILE, plan.driver)
        return [cls.submit_controller(config, folder, storage)]

    @classmethod
    def submit_controller(cls, config: Config, folder: SecretsDir, storage: Storage) -> JobRecord:
        """Submit the controller's job, whose driver shell exists. Raises: RoleError: refused."""
        job = cls.controller(config, folder, log_folder(storage, folder))
        try:
            job_id = asyncio.run(cls._submit_job(job))
        except (RoleError, OSError, ValueError) as error:
            raise RoleError(f"the job of the controller could not be submitted: {error}") from error
        return cls.record(config, CONTROLLER, CONTROLLER, job_id)

    @classmethod
    def render_scripts(cls, folder: SecretsDir, plan: ScriptPlan) -> str:
        """Format the scripts, and the shell that the controller's job runs."""
        texts = [f"# {script.name}\n{script.text}" for script in (*plan.scripts, *plan.worker_scripts)]
        return "\n".join([*texts, f"# {folder.path / DRIVER_FILE}\n{plan.driver}"])

    @classmethod
    def controller(cls, config: Config, folder: SecretsDir, logs: Path) -> Any:
        """Job of the driver, with `cluster.options.controller`."""
        options = cls.job_options(config, CONTROLLER, CONTROLLER, folder, logs)
        job = cls.load_job_class()(**options)
        # Replaces the command of a worker.
        job._command_template = f"exec bash {shlex.quote(str(folder.path / DRIVER_FILE))}"
        return job

    @classmethod
    def walltime_s(cls, config: Config) -> float:
        """Walltime of the controller's job in seconds. 0: none, or in an unknown format."""
        import dask  # late: dask-jobqueue, which needs it, is an optional package

        options = fill_from_environment(config.cluster.options)
        walltime = {**options, **options.get(CONTROLLER, {})}.get("walltime")
        if walltime is None:  # the script has the default of dask-jobqueue, or of the user's configuration of Dask
            walltime = dask.config.get(f"jobqueue.{cls.load_job_class().config_name}.walltime", "")
        if not re.fullmatch(r"\d+(:\d+){0,2}", str(walltime)):
            return 0.0
        parts = [int(part) for part in str(walltime).split(":")]
        parts += [0] * (cls.walltime_parts - len(parts))
        return sum(part * 60.0**power for power, part in enumerate(reversed(parts))) * cls.walltime_unit_s


async def _call(command: Sequence[str], *, shell: bool = False) -> str:
    """Output of a submit command. dask-jobqueue would leave a hanging one running, and drop the errors of bsub."""
    words, stdin = command, ""
    if shell:  # ["bsub< FILE 2> /dev/null"]
        program, _, file = command[0].partition("<")
        words, stdin = program.split(), Path(file.removesuffix("2> /dev/null").strip()).read_text()
    return await asyncio.to_thread(call, *words, stdin=stdin, timeout_s=SUBMIT_S)


class PbsCluster(JobQueueCluster):
    """PBS, OpenPBS and Torque."""

    cluster_type: ClassVar[str] = "pbs"
    list_command = ("qstat", "-u", "{user}")
    row = r"^(?P<id>\d+)\S*\s+\S+\s.*\s(?P<state>[A-Z])\s+\S+\s*$"
    waiting = ("Q", "H", "W", "T")
    running = ("R", "E", "S", "B")
    job_class: ClassVar[str] = "dask_jobqueue.pbs.PBSJob"
    job_number: ClassVar[str] = "${PBS_JOBID%%.*}"


class LsfCluster(JobQueueCluster):
    """IBM Spectrum LSF."""

    cluster_type: ClassVar[str] = "lsf"
    list_command = ("bjobs", "-noheader", "-o", "jobid stat")
    row = r"^(?P<id>\d+)\s+(?P<state>[A-Z]+)\s*$"
    waiting = ("PEND", "PSUSP", "WAIT", "PROV")
    running = ("RUN", "SSUSP", "USUSP", "UNKWN")
    no_jobs = "No unfinished job found"
    walltime_unit_s = 60.0
    job_class: ClassVar[str] = "dask_jobqueue.lsf.LSFJob"
    job_number: ClassVar[str] = "${LSB_JOBID}"


class SgeCluster(JobQueueCluster):
    """Grid Engine."""

    cluster_type: ClassVar[str] = "sge"
    list_command = ("qstat", "-u", "{user}")
    row = r"^\s*(?P<id>\d+)\s+[\d.]+\s+\S+\s+\S+\s+(?P<state>[A-Za-z]+)\s"
    waiting = ("qw", "hqw", "hRwq", "Rq")
    running = ("r", "t", "Rr", "Rt", "s", "S", "T", "dr", "dt")
    stuck = ("Eqw", "Ehqw")
    remedy = (
        "qstat -j {job_id} prints the reason; clear the error with qmod -cj {job_id}, or change cluster.options "
        "(queue, resource_spec, walltime)"
    )
    job_class: ClassVar[str] = "dask_jobqueue.sge.SGEJob"
    job_number: ClassVar[str] = "${JOB_ID}"


class HTCondorCluster(JobQueueCluster):
    """HTCondor."""

    cluster_type: ClassVar[str] = "htcondor"
    list_command = ("condor_q", "-autoformat:j", "JobStatus")
    row = r"^(?P<id>\d+\.\d+)\s+(?P<state>\d)\s*$"
    waiting = ("1",)
    running = ("2", "6", "7")
    stuck = ("5",)  # held: it has failed to start, or its user holds it
    remedy = (
        "HTCondor holds it: condor_q -hold {job_id} prints the reason; release it with condor_release {job_id}, or "
        "change cluster.options (memory, disk, job_extra_directives)"
    )
    job_class: ClassVar[str] = "dask_jobqueue.htcondor.HTCondorJob"
    job_number: ClassVar[str] = "$(ClusterId).$(ProcId)"  # in the submit file, because jobs have no variable

    @classmethod
    def controller(cls, config: Config, folder: SecretsDir, logs: Path) -> Any:
        """Run in the universe `local`, on the submitting machine, since other machines may not submit jobs."""
        options = config.cluster.options
        controller = options.get(CONTROLLER, {})
        extra = {
            "universe": "local",
            **(options.get("job_extra_directives") or {}),
            **(controller.get("job_extra_directives") or {}),
        }
        tree = {**options, CONTROLLER: {**controller, "job_extra_directives": extra}}
        cluster = config.cluster.model_copy(update={"options": tree})
        return super().controller(config.model_copy(update={"cluster": cluster}), folder, logs)


class OarCluster(JobQueueCluster):
    """OAR, whose walltimes begin with hours."""

    cluster_type: ClassVar[str] = "oar"
    list_command = ("oarstat", "-u", "{user}")
    row = r"^(?P<id>\d+)\s.*?\s(?P<state>[A-Zt])\s"
    waiting = ("W", "H", "t")
    running = ("L", "R", "S", "F")
    walltime_parts = 3  # 4 and 4:00 are four hours
    job_class: ClassVar[str] = "dask_jobqueue.oar.OARJob"
    job_number: ClassVar[str] = "${OAR_JOB_ID}"

    @classmethod
    def job_options(cls, config: Config, role: str, name: str, folder: SecretsDir, log_path: Path) -> dict[str, Any]:
        """Arguments of the job class. Raises: UserError: the walltime is a number, which may be seconds or hours."""
        options = super().job_options(config, role, name, folder, log_path)
        if isinstance(walltime := options.get("walltime"), int):
            raise UserError(
                f"cluster.options.walltime is the number {walltime}, because YAML reads 10:00:00 without quotes as "
                "36000; put it in quotes: '10:00:00'"
            )
        return options
