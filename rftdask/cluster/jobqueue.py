"""Workers that are jobs of a batch system, one job for each or for several, submitted through dask-jobqueue.

A thread keeps as many jobs of each role as were asked for: a job that ended is replaced, one that the system requeued
is waited for. Nothing needs to survive it: the next start takes over the jobs that this one noted and that it would
submit itself, so that no place in a queue is lost, and cancels the others. A batch system is a subclass: the class of
dask-jobqueue's job, how a script names its job, and, where there is a command for it, how one asks which jobs live.
"""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import importlib
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol
from unittest import mock

import dask
from distributed import Scheduler, SchedulerPlugin
from distributed.utils import get_ip, get_ip_interface

from rftdask.cluster import slurm_commands
from rftdask.cluster.base import Cluster, close_in_turn, find_cluster
from rftdask.cluster.jobs import (
    JOB_PREFIX,
    MAX_FAILED_STARTS,
    MAX_FAILED_SUBMITS,
    RETURNS_FILE,
    JobRecord,
    jobs_file,
    note_workers,
    plan_role,
    read_jobs,
    write_jobs,
)
from rftdask.cluster.layout import (
    AUXILIARY_RESOURCE,
    CONTROL_RESOURCE,
    EXPLORER_RESOURCE,
    ROLES,
    TRAINER_RESOURCE,
    WORKER_IMPORTS,
    Layout,
    amount_of,
    auxiliary_sizes,
    imports_ahead,
    plan_jobs,
)
from rftdask.cluster.local import worker_spec
from rftdask.cluster.preloads import LEAVING, UMASK_VARIABLE
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm_script import staging
from rftdask.config import Config, fill_from_environment
from rftdask.errors import NotInstalledError, RftError, RoleError, UserError, WaitTimeout
from rftdask.processes.dask_cluster import DASK_CONFIG, METHOD, connect, start_dask
from rftdask.processes.dask_task import workers_of
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.zygote import umask
from rftdask.storage import Storage

_LOOK_S = 2.0
_QUIET_LOOK_S = 15.0
"""Where nothing has changed for some looks: guests do not ask every two seconds."""
_HOPELESS_S = 30.0
"""That a job waits for what no wait brings, before the run fails; its batch system may be in the middle of a change."""
_LIMIT_S = 60.0
"""Until a job is submitted again that was refused because too many are submitted already."""
_SOON_S = 0.25
"""After a worker was lost: its job ends a moment later, and then there is to be another one. The pauses grow again."""
_MISSING_S = 120.0
"""Of a worker that was there, before its job counts as lost where the batch system is not asked."""
SUBMIT_S = 120.0
_NO_REASON = "its batch system does not say why"
_TAKEN = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "REVOKED")
"""How a job ends (`reason`) that somebody or something ended who knows nothing of what it ran."""
_MAX_PAUSE_S = 60.0
CONTROLLER = "controller"
"""Role of the job that drives a run, and its key in cluster.options."""
DEATH_TIMEOUT_S = 600
"""A worker that cannot reach its scheduler for so long ends, and with it its job."""

log = logging.getLogger(__name__)


def worker_options(config: Config, role: str) -> list[str]:
    """Options of rftdask.cluster.join, most of them those of `dask worker`, for a worker of a role: the same on all
    batch systems.
    """
    stages = config.stage_configs()
    turns = role != AUXILIARY_RESOURCE and any(stage.cluster.colocate for stage in stages)
    roles = [TRAINER_RESOURCE, EXPLORER_RESOURCE] if turns else [role]
    imports = ",".join(imports_ahead(stages, roles))
    # One task at a time, whose data and threads are those of a child process, which the nanny does not see.
    amount = amount_of(role, max(auxiliary_sizes(stages), default=1))
    own = f"--resources {role}={amount} --no-dashboard --nthreads 1 --memory-limit 0".split()
    return [*own, *(["--imports", imports] if imports else []), *LEAVING]


class JobLimitReached(RoleError):
    """No more jobs are submitted, and the run is to end."""


class _OnLoss(SchedulerPlugin):
    """Calls when a worker leaves the scheduler, in its loop."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Called by the scheduler for every worker that leaves, whatever the reason."""
        self._call()


class BatchJob(Protocol):
    """The part of a job of dask-jobqueue that is used here."""

    cancel_command: ClassVar[str]
    job_id: str
    _command_template: str
    """What its script runs."""

    def __init__(self, **options: Any) -> None: ...

    async def start(self) -> object:
        """Write its script and submit it."""

    def job_script(self) -> str:
        """The script as it would be submitted."""


_START_DEADLINE_S = 120


class RemoteWorkersCluster(Cluster):
    """Scheduler and control worker; `rftdask join` brings the other workers. `scale` is for subclasses that start them.

    Example: with RemoteWorkersCluster.start(config, layout, storage) as cluster: cluster.client.submit(...)
    """

    cluster_type: ClassVar[str] = "joined"

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """By what the config says a worker of each role has; whoever starts them must give that much."""
        section = config.cluster
        cpus = {role: section.num_cpus or getattr(section.slurm, role).cpus for role in ROLES}
        return plan_jobs(stages, cpus, section.node_num * section.gpu_per_node or None)

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Starts the fork server of the control worker, and a zygote for checks that need torch."""
        if sys.platform == "linux":
            start_fork_server(WORKER_IMPORTS, [])

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Scheduler and control worker run when it returns; the others join when they are started."""
        return cls(config, layout, SecretsDir.of(config, storage))

    def __init__(self, config: Config, layout: Layout, folder: SecretsDir) -> None:
        cluster = config.cluster
        self.worker_deadline_s = cluster.max_queue_s
        self._layout = layout
        self._folder = folder
        self.security = folder.make_keys() if cluster.tls else None
        folder.make()
        try:
            host = get_ip() if cluster.interface is None else get_ip_interface(cluster.interface)
        except ValueError as error:
            raise UserError(f"cluster.interface: {error}") from error
        self.prepare(config, [])
        forks = sys.platform == "linux"
        self._restore = dask.config.set(DASK_CONFIG | ({METHOD: "forkserver"} if forks else {}))
        # The fork server has the environment and the mask of its start, which may be those of an earlier run.
        env = {**os.environ, UMASK_VARIABLE: str(umask())} if forks else {}
        options = {"host": str(host), "protocol": "tls://" if cluster.tls else "tcp://"}
        # One worker beside the driver, for what no rollout may kill: the synchronizer.
        control = worker_spec("control-0", {CONTROL_RESOURCE: 1}, env, security=self.security, **options)
        self._cluster = start_dask({"control-0": control}, cluster.dashboard_address, self.security, **options)
        self.client = connect(self._cluster)
        self.address = str(self._cluster.scheduler_address)
        # From here on workers find this scheduler, so it is written when everything else is there.
        folder.write_address(self.address)
        try:
            self.client.wait_for_workers(1, timeout=_START_DEADLINE_S)
        except TimeoutError as error:
            self.close()
            raise WaitTimeout(f"the control worker did not start in {_START_DEADLINE_S} s") from error

    def scale(self, role: str, num_workers: int) -> None:
        """Raises: UserError, always: it does not start workers."""
        raise UserError("cluster.type joined: the workers of this run are started by rftdask join; start more or fewer")

    def num_asked(self, role: str) -> int:
        """As the layout has it."""
        return self._layout.num_workers(role)

    def close(self) -> None:
        """Workers end too, unless the driver is to come back (`may_return`)."""
        # A worker that finds no address ends for good; one that finds an old address waits for the next scheduler.
        if not self.may_return:
            self._folder.remove_address(self.address)
        close_in_turn(self.client, self._cluster)
        self._restore.__exit__(None, None, None)


class JobQueueCluster(RemoteWorkersCluster):
    """Example: with PbsCluster.start(config, layout, storage) as cluster: cluster.scale("explorer", 8)"""

    cluster_type: ClassVar[str] = ""
    takes_options: ClassVar[bool] = True
    required_package: ClassVar[str | None] = "dask_jobqueue"
    required_extra: ClassVar[str] = "slurm"
    job_class: ClassVar[str]
    """Dotted path of dask-jobqueue's class of a job, where jobs are its."""
    job_number: ClassVar[str]
    """How a script of the batch system names its job."""

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """A worker of each role has the cores that its options ask for."""
        section = config.cluster
        options = {role: {**section.options, **section.options.get(role, {})} for role in ROLES}
        cores = {role: int(given.get("cores", section.num_cpus or 1)) for role, given in options.items()}
        return plan_jobs(stages, cores, section.node_num * section.gpu_per_node or None)

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Cancels the jobs of an earlier start, then submits its own; returns before they run."""
        return cls(config, layout, SecretsDir.of(config, storage), storage)

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str] | None:
        """State (PENDING, RUNNING, ...) of those jobs that have not ended; None: the batch system is not asked."""
        return None

    @classmethod
    def reason(cls, job_id: str) -> str:
        """How a job ended, as far as its batch system remembers; empty: not known."""
        return ""

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """Whether a job in this state (`states`) can never start, as its batch system says."""
        return False

    @classmethod
    def is_ending(cls, state: str) -> bool:
        """Whether a job in this state (`states`) is in its queue only until its processes have ended, for good."""
        return False

    @classmethod
    def expected_starts(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """When its batch system expects those of the jobs to start that wait, where it says so."""
        return {}

    @classmethod
    def is_requeued(cls, job_id: str) -> bool:
        """Whether the job can come back by itself."""
        return True

    @classmethod
    def interrupt(cls, job_id: str) -> bool:
        """Have a job that drives a run end it with a checkpoint; False: its batch system passes no signal on."""
        return False

    @staticmethod
    def is_mistake(error: str) -> bool:
        """Whether a job was refused for what it asks for, as it would be every time."""
        return False

    @staticmethod
    def is_at_limit(error: str) -> bool:
        """Whether a job was refused only because of how many are submitted already."""
        return False

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """Idempotent. Raises: RoleError: the batch system fails."""
        slurm_commands.call(*cls.load_job_class().cancel_command.split(), job_id)

    @classmethod
    def load_job_class(cls) -> type[BatchJob]:
        """dask-jobqueue's class of a job. Imported late: an extra, and it reads its configuration when imported."""
        module, _, name = cls.job_class.rpartition(".")
        # When it is imported it takes SIGINT, which is the driver's to hear; and in the thread of a notebook, where
        # nobody may take a signal, it fails.
        with mock.patch.object(signal, "signal"):
            job_class: type[BatchJob] = getattr(importlib.import_module(module), name)
        return job_class

    @classmethod
    def workers_per_job(cls, config: Config, role: str, num_workers: int) -> int:
        """Workers of a role in each of its jobs, of `num_workers` in all."""
        return 1

    @classmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """The script of a job with workers of a role, of which the run has `num_workers`."""
        return cls.load_job_class()(**cls.job_options(config, role, name, folder, logs)).job_script()

    def start_job(self, role: str, name: str) -> str:
        """Submit a job; its number. Raises: RftError, RuntimeError, TimeoutError, OSError, ValueError: refused."""
        job = self.load_job_class()(**self.job_options(self._config, role, name, self._folder, self._logs))
        # Its script is written and submitted in the loop of the cluster, as its class wants it.
        self._cluster.sync(job.start, callback_timeout=SUBMIT_S)
        return str(job.job_id)

    @classmethod
    def job_options(cls, config: Config, role: str, name: str, folder: SecretsDir, log_path: Path) -> dict[str, Any]:
        """Arguments of dask-jobqueue's job class for one worker."""
        options = fill_from_environment(config.cluster.options)
        given = {key: value for key, value in options.items() if key not in (*ROLES, CONTROLLER)}
        made = {
            **cls.common_options(config, role, folder),
            "log_directory": str(log_path),
            "name": f"{name}-{cls.job_number}-0",
            **given,
            **options.get(role, {}),
        }
        key = "job_script_prologue"
        return made | {key: [*made.get(key, ()), *staging(config)]} if role in ROLES and staging(config) else made

    @classmethod
    def common_options(cls, config: Config, role: str, folder: SecretsDir) -> dict[str, Any]:
        """Those arguments that are the same on all batch systems."""
        return {
            # Its command is what a shell reads.
            "scheduler": shlex.join(folder.worker_options(config.cluster.tls, config.cluster.interface)),
            "job_name": f"{JOB_PREFIX}{role}-{config.name.replace('/', '-')}",
            "processes": 1,
            "nanny": True,
            # A worker whose driver is gone ends by itself: a killed driver cancels nothing.
            "death_timeout": DEATH_TIMEOUT_S,
            "local_directory": "${TMPDIR:-/tmp}",
            # It outlives its scheduler, and takes the next one of the run.
            "worker_command": "rftdask.cluster.join",
            "worker_extra_args": worker_options(config, role),
            # In the place of its script's shell, so that it is the worker whom the batch system tells to end.
            "python": f"exec {shlex.quote(config.cluster.python or sys.executable)}",
        }

    def __init__(self, config: Config, layout: Layout, folder: SecretsDir, storage: Storage) -> None:
        self._config = config
        self._storage = storage
        self._file = jobs_file(config.command_name)
        self._logs = log_folder(storage, folder)
        self._folder = folder
        self._num_workers = {role: layout.num_in_jobs(role) for role in ROLES}
        self._asked = dict(self._num_workers)
        self._per_job = {role: self.workers_per_job(config, role, asked) for role, asked in self._asked.items()}
        # Engines that take turns with ranks are in the ranks' job, which stays as long as one of both is needed.
        self._colocated = layout.colocated
        if self._colocated:
            self._per_job[TRAINER_RESOURCE] += layout.num_workers(EXPLORER_RESOURCE)
        self._jobs: dict[str, list[JobRecord]] = {role: [] for role in ROLES}
        self._failed_starts = dict.fromkeys(ROLES, 0)
        self._failed_submits = 0
        self._number = 0
        self._hopeless_since: dict[str, float] = {}
        """By job id: when it was first seen to wait for what no wait brings. Monotonic clock."""
        self._refused_until = 0.0
        """Monotonic clock: no optional job is submitted before."""
        self._needed: frozenset[str] | None = None
        """Roles of the stage that runs; None: none does yet, and nothing is submitted or cancelled."""
        self._error: RftError | None = None
        self._pause_s = _LOOK_S
        self._wake = threading.Event()
        self._closed = threading.Event()
        slurm_commands.forget_job()
        self._scripts = {role: self._script_hash(role) for role in ROLES}
        # Jobs of an earlier start, whose scheduler is no more: it was killed, or has left them for this one. Their
        # workers look for the scheduler of the run, whichever that is, so those that are as this start would submit
        # them keep their places in the queue, or their nodes.
        earlier = read_jobs(storage, self._file)
        states = self.states([job.job_id for job in earlier]) or {}
        for job in earlier:
            # Numbers go on from those of the earlier start, so that no two jobs of a run have one name.
            self._number = max(self._number, int(job.name.rpartition("-")[2]) + 1)
            if job.job_id in states and job.script == self._scripts.get(job.role):
                log.info("taking over job %s (%s) of an earlier start, %s", job.job_id, job.name, states[job.job_id])
                self._jobs[job.role].append(dataclasses.replace(job, missing_since_s=None))
            else:
                log.info("cancelling job %s (%s) of an earlier start", job.job_id, job.name)
                system_of(job).cancel(job.job_id)
        super().__init__(config, layout, folder)
        scheduler, loop = self._cluster.scheduler, self._cluster.loop
        assert isinstance(scheduler, Scheduler) and loop is not None
        # In the loop of the scheduler, which is not safe to change from another thread.
        loop.add_callback(scheduler.add_plugin, _OnLoss(self._on_loss))
        self._thread = threading.Thread(target=self._keep, name="jobs", daemon=True)
        self._thread.start()

    def scale(self, role: str, num_workers: int) -> None:
        """The thread submits or cancels jobs at its next look."""
        if role not in ROLES:
            raise UserError(f"cluster: the workers of a batch system are for {', '.join(ROLES)}, not for {role!r}")
        if self._colocated and role == EXPLORER_RESOURCE:
            return  # each has its place beside a rank
        # One assignment, which the thread reads once a look: no lock is needed.
        self._asked[role] = num_workers
        self._wake.set()

    def num_asked(self, role: str) -> int:
        """As `scale` last had it, 0 for a role without jobs."""
        return self._asked.get(role, 0)

    def use(self, roles: Collection[str]) -> None:
        """Jobs of other roles are cancelled at the next look."""
        shared = self._colocated and bool({*roles} & {TRAINER_RESOURCE, EXPLORER_RESOURCE})
        self._needed = frozenset((*roles, TRAINER_RESOURCE) if shared else roles)
        self._wake.set()

    def check(self) -> None:
        """Raises: RoleError: the jobs end before their workers join, or are refused, again and again."""
        if self._error is not None:
            raise self._error

    def comes_back(self) -> bool:
        """The script of the controller's job says so, by a file."""
        return (self._folder.base / RETURNS_FILE).exists()

    def close(self) -> None:
        """Cancels every job it has submitted, and notes that there are none; leaves them to the next driver where this
        one is queued again (`may_return`).
        """
        if not self._closed.is_set():
            # The thread first: it would replace the jobs that are cancelled below.
            self._closed.set()
            self._wake.set()
            self._thread.join(SUBMIT_S)
            if not (self.may_return and self.comes_back()):
                for job in (job for jobs in self._jobs.values() for job in jobs):
                    self.cancel(job.job_id)
                self._jobs = {role: [] for role in ROLES}
            self._note()
            super().close()

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except JobLimitReached as error:
                self._error = error
                return
            except (RftError, OSError) as error:
                log.warning("the jobs of the run could not be looked at, which is tried again: %s", error)
            except Exception as error:  # the run must not go on without anybody who keeps its workers
                log.exception("the jobs of the run are no longer kept")
                self._error = RoleError(f"the jobs of the run are no longer kept: {type(error).__name__}: {error}")
                return
            # The worst of them: what refuses one role's jobs mostly refuses all.
            failures = max(self._failed_submits, *self._failed_starts.values())
            # Twice as long after each failure in a row: the batch system, or whoever set it up, needs time.
            pause_s, self._pause_s = self._pause_s, min(1.3 * self._pause_s, _QUIET_LOOK_S)
            self._wake.wait(min(_LOOK_S * 2**failures, _MAX_PAUSE_S) if failures else pause_s)
            self._wake.clear()

    def _on_loss(self) -> None:
        self._pause_s = _SOON_S
        self._wake.set()

    def _look(self) -> None:
        if (needed := self._needed) is None:
            return
        workers = workers_of(self.client)
        names = [str(info["name"]) for info in workers.values()]
        # The record of a job is replaced, not changed, so a shallow copy tells whether there is something to note.
        now_s, before = time.time(), {role: list(jobs) for role, jobs in self._jobs.items()}
        # Asked once for all roles: each question is a call of the batch system's controller.
        states = self.states([job.job_id for jobs in self._jobs.values() for job in jobs])
        for role in ROLES:
            # A job is as good as its last worker: with one missing its ranks wait, and say nothing of themselves.
            there = {
                job.job_id: sum(n.startswith(f"{job.name}-{job.job_id}-") for n in names) for job in self._jobs[role]
            }
            jobs = [note_workers(job, there[job.job_id] >= self._per_job[role], now_s) for job in self._jobs[role]]
            # Which of our jobs live; then which to give up, to cancel and to submit, and whether that can go on.
            if states is None:
                # No command to ask by: a job lives until its worker was there and has been gone for long. One that
                # waits in the queue has never been there, and may wait as long as it likes.
                missing_s = {job.job_id: now_s - (job.missing_since_s or now_s) for job in jobs}
                alive = frozenset(job_id for job_id, seconds in missing_s.items() if seconds < _MISSING_S)
            else:
                alive = frozenset(job.job_id for job in jobs if job.job_id in states)
                self._check_hopes(role, jobs, states)
            reasons = {job.job_id: self.reason(job.job_id) for job in jobs if job.job_id not in alive}
            # Jobs that were taken away say nothing against what they ran, so they are no failed starts.
            taken = frozenset(job_id for job_id, reason in reasons.items() if reason.startswith(_TAKEN))
            failed, each = self._failed_starts[role], self._per_job[role]
            asked = self._asked[role] if role in needed else 0
            ending = frozenset(job_id for job_id, state in (states or {}).items() if self.is_ending(state))
            change = plan_role(jobs, alive, asked, failed, taken, each, ending)
            for job in change.lost:
                log.warning("job %s (%s) ended: %s", job.job_id, job.name, reasons[job.job_id] or _NO_REASON)
            gone = {job.job_id for job in (*change.lost, *change.cancel)}
            # Before anything is cancelled or submitted: what fails below is looked at again with this list.
            self._jobs[role] = [job for job in jobs if job.job_id not in gone]
            self._failed_starts[role] = change.num_failed_starts
            for job in change.cancel:
                self.cancel(job.job_id)
            # What their last lines say is the reason, mostly a missing module or a wrong partition; so they go into the
            # error.
            if change.num_failed_starts >= MAX_FAILED_STARTS and change.lost:
                last = change.lost[-1].job_id
                # name-7.log and name-7.err are of SLURM and LSF, name.o7 and name.e7 of PBS and Grid Engine.
                found = sorted([*self._logs.glob(f"*{last}.[el]*"), *self._logs.glob(f"*.[oe]{last}")])
                tails = (path.read_text(errors="replace").splitlines()[-10:] for path in found)
                raise JobLimitReached(
                    f"cluster: {change.num_failed_starts} {role} jobs in a row ended before their worker had joined; "
                    f"the last one, {last}, ended as {reasons[last] or 'nobody knows'} and wrote to {self._logs}:\n"
                    + "\n".join("\n".join(tail) for tail in tails)
                )
            for _ in range(change.num_new):
                # Submitting takes seconds, and `close` cancels what it finds here.
                if self._closed.is_set() or not self._submit(role):
                    break
            if self._jobs[role] != before[role]:
                self._pause_s = _LOOK_S
                self._note()

    def _check_hopes(self, role: str, jobs: Sequence[JobRecord], states: Mapping[str, str]) -> None:
        """Raises: JobLimitReached: a job of a role that has no worker waits for what no wait brings."""
        now = time.monotonic()
        for job in jobs:
            state = states.get(job.job_id, "")
            if not self.never_runs(state):
                # The batch system has changed its mind, so the time begins again.
                self._hopeless_since.pop(job.job_id, None)
                continue
            self._pause_s = _LOOK_S
            since = self._hopeless_since.setdefault(job.job_id, now)
            if since == now:
                log.warning("job %s (%s) cannot start: %s", job.job_id, job.name, state)
            if now - since > _HOPELESS_S and not any(other.joined for other in jobs):
                raise JobLimitReached(
                    f"cluster: job {job.job_id} ({job.name}) can never start: {state}; change what "
                    f"cluster.slurm.{role} asks for (partition, walltime, cpus, memory, gres, account, directives)"
                )

    def _submit(self, role: str) -> bool:
        """Submit one more job of a role, and note it. False: the user may not have more of them at the moment, and the
        role can do without.

        Raises: RoleError: it was refused, which is tried again; JobLimitReached: too often.
        """
        # Explorers beyond the first are welcome, not needed.
        is_optional = role == EXPLORER_RESOURCE and bool(self._jobs[role])
        if is_optional and time.monotonic() < self._refused_until:
            return False
        name = f"{role}-{self._number}"
        self._number += 1
        # A new name for each job: the scheduler refuses a worker whose name it still knows.
        try:
            job_id = self.start_job(role, name)
        except (RftError, RuntimeError, TimeoutError, OSError, ValueError) as error:
            if is_optional and self.is_at_limit(str(error)):
                log.info("%d %s jobs are there, and one more is tried later: %s", len(self._jobs[role]), role, error)
                self._refused_until = time.monotonic() + _LIMIT_S
                return False
            self._failed_submits += 1
            if self._failed_submits >= (MAX_FAILED_STARTS if self.is_mistake(str(error)) else MAX_FAILED_SUBMITS):
                raise JobLimitReached(f"cluster: the batch system refuses the job of {name}: {error}") from error
            raise RoleError(f"the job of {name} could not be submitted: {error}") from error
        self._failed_submits = 0
        log.info("submitted job %s (%s)", job_id, name)
        now_s = time.time()
        # A kind without a name of its own is named as its class.
        system = self.cluster_type or f"{type(self).__module__}.{type(self).__qualname__}"
        self._jobs[role].append(JobRecord(role, name, job_id, system, now_s, script=self._scripts[role]))
        self._note()  # at once: a driver that is killed now leaves a job that the next one knows
        return True

    def script(self, role: str, name: str) -> str:
        """The script of a job of this run."""
        return self.job_script(self._config, role, self._num_workers[role], name, self._folder, self._logs)

    def _script_hash(self, role: str) -> str:
        """Of what a job of the role asks for and runs, whichever its number."""
        return hashlib.sha256(self.script(role, f"{role}-0").encode()).hexdigest()[:16]

    def _note(self) -> None:
        write_jobs(self._storage, [job for role in ROLES for job in self._jobs[role]], self._file)


@dataclass(frozen=True)
class Query:
    """How a batch system is asked, and how it answers."""

    command: tuple[str, ...]
    row: str
    """Pattern of the line of a job, with groups `id` and `state`."""
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    stuck: tuple[str, ...] = ()
    """Of a job that nobody but its user gets going again."""
    nothing: str = "\0"
    """In what it says, and fails, where the user has no job."""

    def states(self, job_ids: Sequence[str]) -> dict[str, str] | None:
        """PENDING or RUNNING, of those that have not ended; None: there is no such command here.

        Raises: RoleError: it fails, which says nothing of the jobs.
        """
        if not job_ids:
            return {}
        try:
            told = slurm_commands.call(*(part.format(user=getpass.getuser()) for part in self.command))
        except NotInstalledError:
            return None
        except RoleError as error:
            if self.nothing not in str(error):
                raise
            told = ""
        found = self.read(told)
        return {job_id: found[job_id] for job_id in job_ids if job_id in found}

    def read(self, told: str) -> dict[str, str]:
        """State by number of job, from what the command printed."""
        found = {}
        for row in re.finditer(self.row, told, re.MULTILINE):
            state = row["state"]
            if state in self.running:
                found[row["id"]] = "RUNNING"
            elif state in (*self.waiting, *self.stuck):
                found[row["id"]] = f"PENDING ({state})"
        return found

    def never_runs(self, state: str) -> bool:
        """Whether a job in this state (`states`) waits until its user does something."""
        return state in {f"PENDING ({stuck})" for stuck in self.stuck}


class OtherCluster(JobQueueCluster):
    """A batch system other than SLURM, which is asked as `query` says and submitted to through dask-jobqueue."""

    query: ClassVar[Query]
    walltime_unit_s: ClassVar[float] = 1.0
    """Of the last part of a walltime."""

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str] | None:
        """By one command for all; None: it is not a command here."""
        return cls.query.states(job_ids)

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """Of a job that is held for an error of its own."""
        return cls.query.never_runs(state)

    @classmethod
    def cancel(cls, job_id: str) -> None:
        """A job that has ended is left alone."""
        try:
            super().cancel(job_id)
        except RoleError:
            if job_id in (cls.states([job_id]) or {}):
                raise

    @classmethod
    def controller(cls, config: Config, folder: SecretsDir, logs: Path, command: str) -> BatchJob:
        """The job that drives a run, by a command of a shell; it asks for what `cluster.options.controller` says."""
        options = cls.job_options(config, CONTROLLER, CONTROLLER, folder, logs)
        job = cls.load_job_class()(**options)
        # In the place of a worker; a script says nothing else of what it runs.
        job._command_template = command
        return job

    @classmethod
    def walltime_s(cls, config: Config) -> float:
        """Of the controller's job; 0: it has none, or one that cannot be read here."""
        options = config.cluster.options
        told = str({**options, **options.get(CONTROLLER, {})}.get("walltime", ""))
        if not re.fullmatch(r"\d+(:\d+)*", told):
            return 0.0
        seconds = 0.0
        for part in told.split(":"):
            seconds = 60 * seconds + int(part)
        return seconds * cls.walltime_unit_s


class PbsCluster(OtherCluster):
    """PBS, OpenPBS and Torque."""

    cluster_type: ClassVar[str] = "pbs"
    query = Query(
        ("qstat", "-u", "{user}"),
        r"^(?P<id>\d+)\S*\s+\S+\s.*\s(?P<state>[A-Z])\s+\S+\s*$",
        waiting=("Q", "H", "W", "T"),
        running=("R", "E", "S", "B"),
    )
    job_class: ClassVar[str] = "dask_jobqueue.pbs.PBSJob"
    job_number: ClassVar[str] = "${PBS_JOBID%%.*}"


class LsfCluster(OtherCluster):
    """IBM Spectrum LSF."""

    cluster_type: ClassVar[str] = "lsf"
    query = Query(
        ("bjobs", "-noheader", "-o", "jobid stat"),
        r"^(?P<id>\d+)\s+(?P<state>[A-Z]+)\s*$",
        waiting=("PEND", "PSUSP", "WAIT", "PROV"),
        running=("RUN", "SSUSP", "USUSP", "UNKWN"),
        nothing="No unfinished job found",
    )
    walltime_unit_s = 60.0
    job_class: ClassVar[str] = "dask_jobqueue.lsf.LSFJob"
    job_number: ClassVar[str] = "${LSB_JOBID}"


class SgeCluster(OtherCluster):
    """Grid Engine."""

    cluster_type: ClassVar[str] = "sge"
    query = Query(
        ("qstat", "-u", "{user}"),
        r"^\s*(?P<id>\d+)\s+[\d.]+\s+\S+\s+\S+\s+(?P<state>[A-Za-z]+)\s",
        waiting=("qw", "hqw", "hRwq", "Rq"),
        running=("r", "t", "Rr", "Rt", "s", "S", "T", "dr", "dt"),
        stuck=("Eqw", "Ehqw"),
    )
    job_class: ClassVar[str] = "dask_jobqueue.sge.SGEJob"
    job_number: ClassVar[str] = "${JOB_ID}"


class HTCondorCluster(OtherCluster):
    """HTCondor."""

    cluster_type: ClassVar[str] = "htcondor"
    query = Query(
        ("condor_q", "-autoformat:j", "JobStatus"),
        r"^(?P<id>\d+\.\d+)\s+(?P<state>\d)\s*$",
        waiting=("1",),
        running=("2", "6", "7"),
        stuck=("5",),  # held: it has failed to start, or its user holds it
    )
    job_class: ClassVar[str] = "dask_jobqueue.htcondor.HTCondorJob"
    job_number: ClassVar[str] = "$(ClusterId).$(ProcId)"  # of the submit file: a job finds no number in its environment

    @classmethod
    def controller(cls, config: Config, folder: SecretsDir, logs: Path, command: str) -> BatchJob:
        """In the universe `local`, on the machine that submits, since jobs elsewhere may not submit jobs."""
        options = config.cluster.options
        own = options.get(CONTROLLER, {})
        extra = {
            "universe": "local",
            **(options.get("job_extra_directives") or {}),
            **(own.get("job_extra_directives") or {}),
        }
        tree = {**options, CONTROLLER: {**own, "job_extra_directives": extra}}
        cluster = config.cluster.model_copy(update={"options": tree})
        return super().controller(config.model_copy(update={"cluster": cluster}), folder, logs, command)


class OarCluster(OtherCluster):
    """OAR."""

    cluster_type: ClassVar[str] = "oar"
    query = Query(
        ("oarstat", "-u", "{user}"),
        r"^(?P<id>\d+)\s.*?\s(?P<state>[A-Zt])\s",
        waiting=("W", "H", "t"),
        running=("L", "R", "S", "F"),
    )
    job_class: ClassVar[str] = "dask_jobqueue.oar.OARJob"
    job_number: ClassVar[str] = "${OAR_JOB_ID}"


def system_of(job: JobRecord) -> type[JobQueueCluster]:
    """The batch system of a job."""
    found = find_cluster(job.system)
    assert issubclass(found, JobQueueCluster), job
    return found


def states_of(jobs: Sequence[JobRecord]) -> dict[str, str]:
    """State by number of those that have not ended, as far as their batch systems are asked."""
    alive: dict[str, str] = {}
    for system in {system_of(job) for job in jobs}:
        alive |= system.states([job.job_id for job in jobs if system_of(job) is system]) or {}
    return alive


def log_folder(storage: Storage, folder: SecretsDir) -> Path:
    """Where jobs log: beside the other logs of the run, or in the private folder where that is no local path."""
    return folder.base / "log" if "://" in storage.url else Path(storage.url).absolute() / "log"
