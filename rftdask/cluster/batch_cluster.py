"""Clusters on several machines: workers that join by themselves, and workers that are jobs of a batch system.

A thread keeps the requested number of jobs of each role: it replaces ended jobs and waits for requeued ones. The next
start of the driver takes over the jobs in the list on storage that it would submit itself, so that they keep their
place in the queue, and cancels the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rftdask.cluster.base import Cluster, close_in_turn, find_cluster
from rftdask.cluster.jobs import (
    MAX_FAILED_STARTS,
    MAX_FAILED_SUBMITS,
    RETURNS_FILE,
    SUBMITTED_FILE,
    JobRecord,
    ScriptPlan,
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
    imports_ahead,
    plan_jobs,
)
from rftdask.cluster.preloads import UMASK_VARIABLE, worker_options, worker_spec
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import Config
from rftdask.config.plugins import plugin_folders
from rftdask.errors import FencedError, NotInstalledError, RftError, RoleError, UserError, WaitTimeout
from rftdask.processes.dask_cluster import call_on_loss, connect, set_config, start_dask
from rftdask.processes.dask_task import workers_of
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.zygote import umask
from rftdask.storage import Storage

_POLL_INTERVAL_S = 2.0
_MAX_POLL_INTERVAL_S = 15.0
"""Interval while nothing changes, to spare the controller of the batch system."""
_HOPELESS_S = 30.0
"""Time that a job can never start, until the run fails; the batch system may be changing its configuration."""
_LIMIT_S = 60.0
"""Pause after the batch system refused a job because of a limit of submitted jobs."""
_SOON_S = 0.25
"""First interval after a worker was lost, since its job ends a moment later."""
_MISSING_S = 120.0
"""Time without its worker until a job counts as lost, if the batch system has no query."""
SUBMIT_S = 120.0
_COMMAND_S = 60.0
"""Timeout of a command. SLURM's clients retry for some seconds while its controller restarts."""
_NO_REASON = "its batch system reports no reason"
_TAKEN = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "REVOKED")
"""Prefixes of `reason` of jobs that were ended from outside, whatever they ran."""
_MAX_PAUSE_S = 60.0
CONTROLLER = "controller"
"""Role of the job with the driver, and its key in cluster.options."""
DEATH_TIMEOUT_S = 600
"""Time without a scheduler until a worker ends, and its job with it."""
_START_DEADLINE_S = 120

Job = TypeVar("Job", str, JobRecord)

log = logging.getLogger(__name__)


def join_options(config: Config, role: str) -> list[str]:
    """Options of rftdask.cluster.join for a worker of a role, the same on all batch systems."""
    stages = config.stage_configs()
    colocates = role != AUXILIARY_RESOURCE and any(stage.cluster.colocate for stage in stages)
    roles = [TRAINER_RESOURCE, EXPLORER_RESOURCE] if colocates else [role]
    imports = ",".join(imports_ahead(stages, roles))
    return [*worker_options(role, stages), *(["--imports", imports] if imports else [])]


def call(*command: str, stdin: str = "", stream: str = "stdout", timeout_s: float = _COMMAND_S) -> str:
    """Output of a command. Raises: NotInstalledError: not installed; RoleError: it failed.

    stream: "stdout" or "stderr".
    """
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "input": stdin}
    try:
        done = subprocess.run(command, timeout=timeout_s, check=False, **pipes)
    except FileNotFoundError:
        raise NotInstalledError(
            f"{command[0]} is not installed: use a login node of the cluster, or rftdask run with cluster.type=local "
            "on one machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise RoleError(
            f"{' '.join(command)} did not answer in {timeout_s:g} s: the batch system is overloaded or down; run the "
            "command by hand, and try again once it answers"
        ) from None
    if done.returncode:
        raise RoleError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()}")
    return str(getattr(done, stream))


def for_all_jobs(jobs: Iterable[Job], act: Callable[[Job], object]) -> None:
    """Call `act` for each job, although it fails for some. Raises: RftError: at the end, with all errors."""
    errors: dict[str, RftError] = {}
    for job in jobs:
        try:
            act(job)
        except RftError as error:
            errors[str(error)] = error
    if len(errors) > 1:
        raise RoleError("; ".join(errors))
    if errors:
        raise next(iter(errors.values()))


def forget_job() -> None:
    """Remove the variables of this process's own job, before jobs are submitted from it.

    Jobs inherit the environment: a memory limit of another kind makes each `srun` fail, and a job would take the
    restarts of the outer job for its own. Options of sbatch that the user has set (SBATCH_ACCOUNT) stay.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in kept]:
        del os.environ[name]


class JobLimitReached(RoleError):
    """Too many failed or refused jobs; the run ends."""


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `rftdask submit`."""

    single_allocation: bool = False
    offline: bool = False
    rounds: int = 1
    explore_jobs: int = 1
    dry: bool = False
    """Allow SLURM to be unavailable."""


class RemoteWorkersCluster(Cluster):
    """Scheduler and control worker; the other workers are started with `rftdask join`.

    Example: with RemoteWorkersCluster.start(config, layout, storage) as cluster: cluster.client.submit(...)
    """

    cluster_type: ClassVar[str] = "joined"

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Plan from the config. Joined workers must have the cores and GPUs that it gives their roles."""
        section = config.cluster
        cpus = {role: section.num_cpus or getattr(section.slurm, role).cpus for role in ROLES}
        return plan_jobs(stages, cpus, section.node_num * section.gpu_per_node or None)

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Start the fork server of the control worker, and a zygote for checks that need torch."""
        if sys.platform == "linux":
            start_fork_server(WORKER_IMPORTS, [])

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Start the scheduler and the control worker; other workers join later."""
        return cls(config, layout, SecretsDir.of(config, storage))

    def __init__(self, config: Config, layout: Layout, folder: SecretsDir) -> None:
        from distributed.utils import get_ip, get_ip_interface  # late: a login node plans jobs without Dask

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
        # The fork server may have the environment and the umask of an earlier run.
        env = {**os.environ, UMASK_VARIABLE: str(umask())} if forks else {}
        options = {"host": str(host), "protocol": "tls://" if cluster.tls else "tcp://"}
        # One worker on the driver's machine, for the synchronizer, which no rollout may kill.
        control = worker_spec("control-0", {CONTROL_RESOURCE: 1}, env, security=self.security, **options)
        with contextlib.ExitStack() as stack:
            stack.enter_context(set_config(forks=forks))
            self._cluster = start_dask({"control-0": control}, cluster.dashboard_address, self.security, **options)
            stack.callback(close_in_turn, self._cluster)
            self.client = connect(self._cluster)
            stack.callback(close_in_turn, self.client)
            stack.callback(self._remove_address)
            # Last, because workers connect from now on.
            folder.write_address(str(self._cluster.scheduler_address))
            try:
                self.client.wait_for_workers(1, timeout=_START_DEADLINE_S)
            except TimeoutError as error:
                raise WaitTimeout(
                    f"the control worker did not start in {_START_DEADLINE_S} s; see the log of the driver, and check "
                    "the load and the memory of its machine"
                ) from error
            self._stack = stack.pop_all()

    def scale(self, role: str, num_workers: int) -> None:
        """Raises: UserError: this cluster does not start workers."""
        raise UserError("cluster.type joined: start or stop workers with rftdask join")

    def num_asked(self, role: str) -> int:
        """Number of workers in the layout."""
        return self._layout.num_workers(role)

    def close(self) -> None:
        """Close the cluster. Workers end as well, unless the driver may restart (`may_return`)."""
        self._stack.close()

    def _remove_address(self) -> None:
        # Workers end if there is no address, and wait for the next scheduler if there is an old one.
        if not self.may_return:
            self._folder.remove_address(str(self._cluster.scheduler_address))


class BatchCluster(RemoteWorkersCluster):
    """Cluster whose workers are jobs of a batch system. A subclass knows everything of one system.

    Example: with SlurmCluster.start(config, layout, storage) as cluster: cluster.scale("explorer", 8)
    """

    cluster_type: ClassVar[str] = ""
    required_extra: ClassVar[str] = "slurm"
    remedy: ClassVar[str] = "change cluster.options"
    """What the user can do about a job that can never start, with {role} and {job_id}."""

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Take over or cancel jobs of an earlier start and submit new ones. Returns before they run."""
        return cls(config, layout, SecretsDir.of(config, storage), storage)

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str] | None:
        """States (PENDING, RUNNING, ...) of the jobs that have not ended. None: not known."""
        return None

    @classmethod
    def reason(cls, job_id: str) -> str:
        """How a job ended; empty: not known."""
        return ""

    @classmethod
    def never_runs(cls, state: str) -> bool:
        """True if a job in this state can never start."""
        return False

    @classmethod
    def is_ending(cls, state: str) -> bool:
        """True if a job in this state ends as soon as its processes have ended."""
        return False

    @classmethod
    def expected_starts(cls, job_ids: Sequence[str]) -> dict[str, str]:
        """Expected start times of waiting jobs, as far as known."""
        return {}

    @classmethod
    def is_requeued(cls, job_id: str) -> bool:
        """True if the batch system may requeue the job."""
        return True

    @classmethod
    def interrupt(cls, job_id: str) -> bool:
        """Have the driver in a job end with a checkpoint. False: the batch system cannot send signals."""
        return False

    @staticmethod
    def is_mistake(error: str) -> bool:
        """True if the batch system would always refuse the job."""
        return False

    @staticmethod
    def is_at_limit(error: str) -> bool:
        """True if the batch system refused the job because of a limit of submitted jobs."""
        return False

    @classmethod
    @abstractmethod
    def cancel(cls, *job_ids: str) -> None:
        """Cancel jobs. Idempotent. Raises: RoleError: the command failed."""

    @classmethod
    @abstractmethod
    def plan_scripts(
        cls, config: Config, folder: SecretsDir, storage: Storage, options: SubmitOptions
    ) -> tuple[Config, ScriptPlan]:
        """Plan the scripts of a run, as `rftdask submit` writes them to `folder`. Returns: also the config of the run.

        Raises: UserError: an impossible layout, or options that the batch system does not support; FencedError: the run
            is queued.
        """

    @classmethod
    @abstractmethod
    def submit_scripts(
        cls, config: Config, folder: SecretsDir, storage: Storage, plan: ScriptPlan, after: str | None
    ) -> list[JobRecord]:
        """Write and submit scripts. after: job that must end before, in any way.

        Raises: RoleError: a script is refused, and the other jobs are cancelled.
        """

    @classmethod
    def find_submitted(cls, config: Config, folder: SecretsDir) -> list[JobRecord]:
        """Submitted scripts of the folder that the batch system still has; empty if it cannot tell."""
        return []

    @classmethod
    def record_submitted(cls, config: Config, folder: SecretsDir, storage: Storage) -> None:
        """Record the jobs that a killed `rftdask submit` submitted without recording them."""
        found = cls.find_submitted(config, folder)
        if {job.job_id for job in found} - {job.job_id for job in read_jobs(storage, SUBMITTED_FILE)}:
            write_jobs(storage, found, SUBMITTED_FILE)

    @classmethod
    def check_scripts(cls, plan: ScriptPlan) -> None:
        """Test the scripts with the batch system. Raises: UserError: it would refuse a script."""
        return

    @classmethod
    @abstractmethod
    def render_scripts(cls, folder: SecretsDir, plan: ScriptPlan) -> str:
        """Format all scripts for `rftdask submit --dry-run`."""

    @classmethod
    @abstractmethod
    def job_script(cls, config: Config, role: str, num_workers: int, name: str, folder: SecretsDir, logs: Path) -> str:
        """Script of a job of a role, which has `num_workers` workers in total."""

    @abstractmethod
    def start_job(self, role: str, name: str) -> str:
        """Submit a job. Returns: its id. Raises: RftError, RuntimeError, TimeoutError, OSError, ValueError: refused."""

    @classmethod
    def workers_per_job(cls, config: Config, role: str, num_workers: int) -> int:
        """Number of workers in each job of a role, which has `num_workers` in total."""
        return 1

    @classmethod
    def record(cls, config: Config, role: str, name: str, job_id: str, script: str = "") -> JobRecord:
        """Record of a job that was submitted now."""
        # A plug-in is named by its path, as a class without cluster_type.
        own_type = cls.__dict__.get("cluster_type", "") if cls.__module__.startswith("rftdask.") else ""
        folders = tuple(map(str, plugin_folders(config.explorer.plugin_dirs)))
        system = own_type or f"{cls.__module__}.{cls.__qualname__}"
        return JobRecord(role, name, job_id, system, time.time(), script=script, plugin_dirs=folders)

    def __init__(self, config: Config, layout: Layout, folder: SecretsDir, storage: Storage) -> None:
        self._config = config
        self._storage = storage
        self._file = jobs_file(config.command_name)
        self._logs = log_folder(storage, folder)
        self._folder = folder
        self._num_workers = {role: layout.num_in_jobs(role) for role in ROLES}
        self._asked = dict(self._num_workers)
        self._per_job = {role: self.workers_per_job(config, role, asked) for role, asked in self._asked.items()}
        # Colocated engines are in the job of the ranks, which stays as long as either is needed.
        self._colocated = layout.colocated
        if self._colocated:
            self._per_job[TRAINER_RESOURCE] += layout.num_workers(EXPLORER_RESOURCE)
        self._jobs: dict[str, list[JobRecord]] = {role: [] for role in ROLES}
        self._failed_starts = dict.fromkeys(ROLES, 0)
        self._failed_submits = 0
        self._number = 0
        self._hopeless_since: dict[str, float] = {}
        """Monotonic time since which a job can never start, by job id."""
        self._cancelled: set[str] = set()
        """Ids of jobs that this process has cancelled or tried to cancel; their ends are not failed starts."""
        self._refused_until = 0.0
        """Monotonic time before which no optional job is submitted."""
        self._needed: frozenset[str] | None = None
        """Roles of the current stage. None: no stage yet, so jobs are neither submitted nor cancelled."""
        self._error: RftError | None = None
        self._pause_s = _POLL_INTERVAL_S
        self._wake = threading.Event()
        self._closed = threading.Event()
        forget_job()
        scripts = {role: self.script(role, f"{role}-0").encode() for role in ROLES}
        self._scripts = {role: hashlib.sha256(script).hexdigest()[:16] for role, script in scripts.items()}
        # Workers of an earlier start look for the newest scheduler of the run, so jobs with the scripts of this start
        # keep their place in the queue, or their nodes.
        earlier = read_jobs(storage, self._file)
        states = self.states([job.job_id for job in earlier]) or {}
        others: list[JobRecord] = []
        for job in earlier:
            # Names are unique across starts.
            self._number = max(self._number, int(job.name.rpartition("-")[2]) + 1)
            if job.job_id in states and job.script == self._scripts.get(job.role):
                log.info("taking over job %s (%s) of an earlier start, %s", job.job_id, job.name, states[job.job_id])
                self._jobs[job.role].append(dataclasses.replace(job, missing_since_s=None))
            else:
                log.info("cancelling job %s (%s) of an earlier start", job.job_id, job.name)
                others.append(job)
        for_all_jobs(others, lambda job: system_of(job).cancel(job.job_id))
        # If it fails, the jobs of an earlier start stay in the list on storage, for the next start or a cancel.
        super().__init__(config, layout, folder)
        self._thread = threading.Thread(target=self._keep, name="jobs", daemon=True)
        self._stack.callback(self._end_jobs)
        call_on_loss(self._cluster, self._on_loss)
        self._thread.start()

    def scale(self, role: str, num_workers: int) -> None:
        """Set the number of workers; the thread submits or cancels jobs."""
        if role not in ROLES:
            raise UserError(f"cluster: a batch system has workers for {', '.join(ROLES)}, not for {role!r}")
        if self._colocated and role == EXPLORER_RESOURCE:
            return  # each engine is in the job of the ranks
        # The thread reads it once per poll, so no lock is needed.
        self._asked[role] = num_workers
        self._wake.set()

    def num_asked(self, role: str) -> int:
        """Number of the last `scale`; 0 for a role without jobs."""
        return self._asked.get(role, 0)

    def use(self, roles: Collection[str]) -> None:
        """Jobs of other roles are cancelled at the next look."""
        shared = self._colocated and bool({*roles} & {TRAINER_RESOURCE, EXPLORER_RESOURCE})
        self._needed = frozenset((*roles, TRAINER_RESOURCE) if shared else roles)
        self._wake.set()

    def check(self) -> None:
        """Raises: RoleError: jobs were refused, or ended before their workers joined, too often."""
        if self._error is not None:
            raise self._error

    def comes_back(self) -> bool:
        """True if the script of the controller's job has created the marker."""
        return (self._folder.base / RETURNS_FILE).exists()

    def _end_jobs(self) -> None:
        """Cancel all jobs, or leave them to the next driver if this one is queued again (`may_return`)."""
        # First, because the thread would replace cancelled jobs.
        self._closed.set()
        self._wake.set()
        self._thread.join(SUBMIT_S)
        try:
            if not (self.may_return and self.comes_back()):
                self.cancel(*(job.job_id for jobs in self._jobs.values() for job in jobs))
                self._jobs = {role: [] for role in ROLES}
        finally:  # if a job could not be cancelled, the list has all of them
            self._note()

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                self._update()
            except JobLimitReached as error:
                self._error = error
                return
            except (RftError, OSError) as error:
                log.warning("cannot update the jobs of the run, trying again: %s", error)
            except Exception as error:  # without this thread nothing replaces lost workers
                log.exception("the thread that manages jobs failed")
                self._error = RoleError(f"the thread that manages jobs failed: {type(error).__name__}: {error}")
                return
            # The maximum, because a cause mostly affects the jobs of all roles.
            failures = max(self._failed_submits, *self._failed_starts.values())
            # The pause doubles with each failure in a row.
            pause_s, self._pause_s = self._pause_s, min(1.3 * self._pause_s, _MAX_POLL_INTERVAL_S)
            self._wake.wait(min(_POLL_INTERVAL_S * 2**failures, _MAX_PAUSE_S) if failures else pause_s)
            self._wake.clear()

    def _on_loss(self) -> None:
        self._pause_s = _SOON_S
        self._wake.set()

    def _update(self) -> None:
        if (needed := self._needed) is None:
            return
        workers = workers_of(self.client)
        names = [str(info["name"]) for info in workers.values()]
        # Records are immutable, so a shallow copy shows changes.
        now_s, before = time.time(), {role: list(jobs) for role, jobs in self._jobs.items()}
        # One query for all roles, because each is a call of the batch system's controller.
        states = self.states([job.job_id for jobs in self._jobs.values() for job in jobs])
        for role in ROLES:
            # A job needs all of its workers, since the others wait silently for a missing one.
            num_joined = {
                job.job_id: sum(n.startswith(f"{job.name}-{job.job_id}-") for n in names) for job in self._jobs[role]
            }
            jobs = [note_workers(job, num_joined[job.job_id] >= self._per_job[role], now_s) for job in self._jobs[role]]
            if states is None:
                # Without a query, a job is alive until its worker has joined and then been missing for long. A queued
                # job may wait forever.
                missing_s = {job.job_id: now_s - (job.missing_since_s or now_s) for job in jobs}
                alive = frozenset(job_id for job_id, seconds in missing_s.items() if seconds < _MISSING_S)
            else:
                alive = frozenset(job.job_id for job in jobs if job.job_id in states)
                self._check_can_start(role, jobs, states)
            reasons = {job.job_id: self.reason(job.job_id) for job in jobs if job.job_id not in alive}
            # Jobs that were ended from outside are not failed starts.
            taken = self._cancelled.union(job_id for job_id, why in reasons.items() if why.startswith(_TAKEN))
            failed, per_job = self._failed_starts[role], self._per_job[role]
            asked = self._asked[role] if role in needed else 0
            ending = frozenset(job_id for job_id, state in (states or {}).items() if self.is_ending(state))
            change = plan_role(jobs, alive, asked, failed, frozenset(taken), per_job, ending)
            for job in change.lost:
                log.warning("job %s (%s) ended: %s", job.job_id, job.name, reasons[job.job_id] or _NO_REASON)
            # Before cancelling and submitting, which may fail. A job that could not be cancelled is cancelled again.
            self._jobs[role] = [job for job in jobs if job not in change.lost]
            self._failed_starts[role] = change.num_failed_starts
            cancelled = [job.job_id for job in change.cancel]
            self._cancelled.update(cancelled)
            self.cancel(*cancelled)
            self._jobs[role] = [job for job in self._jobs[role] if job not in change.cancel]
            # The last lines of the log show the reason, mostly a missing module or a wrong partition.
            if change.num_failed_starts >= MAX_FAILED_STARTS and change.lost:
                last = change.lost[-1].job_id
                # name-7.log and name-7.err: SLURM and LSF; name.o7 and name.e7: PBS and Grid Engine.
                logs = sorted([*self._logs.glob(f"*{last}.[el]*"), *self._logs.glob(f"*.[oe]{last}")])
                tails = (path.read_text(errors="replace").splitlines()[-10:] for path in logs)
                raise JobLimitReached(
                    f"cluster: {change.num_failed_starts} {role} jobs in a row ended before their worker joined; the "
                    f"last one, {last}, ended as {reasons[last] or 'unknown'}, and its log in {self._logs} ends with:\n"
                    + "\n".join("\n".join(tail) for tail in tails)
                )
            for _ in range(change.num_new):
                # Submitting takes seconds, and `close` may be called meanwhile.
                if self._closed.is_set() or not self._submit(role):
                    break
            if self._jobs[role] != before[role]:
                self._pause_s = _POLL_INTERVAL_S
                self._note()

    def _check_can_start(self, role: str, jobs: Sequence[JobRecord], states: Mapping[str, str]) -> None:
        """Raises: JobLimitReached: a job can never start, and the role has no worker."""
        now = time.monotonic()
        for job in jobs:
            state = states.get(job.job_id, "")
            if not self.never_runs(state):
                self._hopeless_since.pop(job.job_id, None)
                continue
            self._pause_s = _POLL_INTERVAL_S
            since = self._hopeless_since.setdefault(job.job_id, now)
            if since == now:
                log.warning("job %s (%s) cannot start: %s", job.job_id, job.name, state)
            if now - since > _HOPELESS_S and not any(other.joined for other in jobs):
                raise JobLimitReached(
                    f"cluster: job {job.job_id} ({job.name}) can never start: {state}; "
                    + self.remedy.format(role=role, job_id=job.job_id)
                )

    def _submit(self, role: str) -> bool:
        """Submit and record a job. False: a limit of submitted jobs is reached, and the role can do without the job.

        Raises: RoleError: refused, try again; JobLimitReached: refused too often.
        """
        # A run needs only one explorer.
        is_optional = role == EXPLORER_RESOURCE and bool(self._jobs[role])
        if is_optional and time.monotonic() < self._refused_until:
            return False
        name = f"{role}-{self._number}"
        self._number += 1
        # A new name, because the scheduler refuses names of known workers.
        try:
            job_id = self.start_job(role, name)
        except (RftError, RuntimeError, TimeoutError, OSError, ValueError) as error:
            if is_optional and self.is_at_limit(str(error)):
                log.info("%d %s jobs are submitted, another one follows later: %s", len(self._jobs[role]), role, error)
                self._refused_until = time.monotonic() + _LIMIT_S
                return False
            self._failed_submits += 1
            if self._failed_submits >= (MAX_FAILED_STARTS if self.is_mistake(str(error)) else MAX_FAILED_SUBMITS):
                raise JobLimitReached(f"cluster: the batch system refuses the job of {name}: {error}") from error
            raise RoleError(f"the job of {name} could not be submitted: {error}") from error
        self._failed_submits = 0
        log.info("submitted job %s (%s)", job_id, name)
        self._jobs[role].append(self.record(self._config, role, name, job_id, self._scripts[role]))
        self._note()  # at once, so that the next driver knows the job if this one is killed
        return True

    def script(self, role: str, name: str) -> str:
        """Script of a job of this run."""
        return self.job_script(self._config, role, self._num_workers[role], name, self._folder, self._logs)

    def _note(self) -> None:
        write_jobs(self._storage, [job for role in ROLES for job in self._jobs[role]], self._file)


def system_of(job: JobRecord) -> type[BatchCluster]:
    """Class of a job's batch system."""
    # Drivers in jobs import a copy of the plug-in folder, and one process cannot load a module from both folders.
    is_loaded = job.system.rpartition(".")[0] in sys.modules
    system = find_cluster(job.system, () if is_loaded else job.plugin_dirs)
    assert issubclass(system, BatchCluster), job
    return system


def states_of(jobs: Sequence[JobRecord]) -> dict[str, str]:
    """States by id of the jobs that have not ended, as far as known."""
    alive: dict[str, str] = {}
    for system in {system_of(job) for job in jobs}:
        alive |= system.states([job.job_id for job in jobs if system_of(job) is system]) or {}
    return alive


def submitted_jobs(storage: Storage) -> list[tuple[JobRecord, str]]:
    """Drivers of a run that are queued or run, with their states. The jobs of workers do not count, since the next
    driver takes them over.
    """
    jobs = read_jobs(storage, SUBMITTED_FILE)
    alive = states_of(jobs)
    return [(job, alive[job.job_id]) for job in jobs if job.job_id in alive]


def check_not_submitted(storage: Storage) -> None:
    """Raises: FencedError: a driver of the run is queued or runs."""
    # Queued drivers count as well, because the second driver of a run would fail.
    if alive := submitted_jobs(storage):
        drivers = ", ".join(f"{job.name} is job {job.job_id}, {state}" for job, state in alive)
        raise FencedError(f"{storage.url} is submitted already: {drivers}; rftdask cancel {storage.url} ends it")


def log_folder(storage: Storage, folder: SecretsDir) -> Path:
    """Folder of the logs of jobs: the run's logs, or the secrets directory if the run is not in a local folder."""
    return folder.base / "log" if "://" in storage.url else Path(storage.url).absolute() / "log"
