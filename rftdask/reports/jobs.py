"""Jobs: the batch jobs of a run and the reason why it is not running, from storage and the batch system."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rftdask.cluster.batch_cluster import system_of
from rftdask.cluster.jobs import read_jobs, slurm_numbers
from rftdask.cluster.slurm import NO_BOOKS, Usage, usage
from rftdask.errors import RftError
from rftdask.run.lease import lease_holders
from rftdask.run.run_folder import RUN_FILE, folders_of, read_driver, read_end, read_run
from rftdask.storage import Storage, open_storage

DRIVER_ROLES = ("controller", "explore", "train")
"""Roles of the jobs that run a driver; all other jobs are workers."""


@dataclass(frozen=True)
class JobStatus:
    role: str
    name: str
    job_id: str
    state: str
    """PENDING, RUNNING, ...; for a job that left the queue its outcome, or "ended"."""
    is_alive: bool


@dataclass(frozen=True)
class RunJobs:
    jobs: tuple[JobStatus, ...]
    why: str
    """Why the run is not running; empty while it is."""
    has_begun: bool
    """True if the run has a folder that other commands can read."""
    usage: Usage | None = None
    """Resources used by all jobs, including ended ones. None: the batch system keeps no accounting."""
    usage_unknown: str = ""
    """Why the usage of SLURM jobs is unknown."""

    def to_json(self) -> dict[str, Any]:
        usage = None if self.usage is None else asdict(self.usage)
        return {"jobs": [asdict(job) for job in self.jobs], "why": self.why, "usage": usage}


def read_run_jobs(url: str) -> RunJobs:
    """Read the jobs of the run at `url`. Raises: DataError: no run was ever submitted or started at `url`."""
    storage = open_storage(url)
    records = read_jobs(storage)
    has_begun = storage.exists(RUN_FILE)
    if not records and not has_begun:
        read_run(storage)  # raises DataError
    alive: dict[str, str | None] = {}  # job id -> state of queued jobs; None if the batch system is not queried
    starts: dict[str, str] = {}
    try:
        for system in {job.system for job in records}:
            jobs_there = [job for job in records if job.system == system]
            states = system_of(jobs_there[0]).states([job.job_id for job in jobs_there])
            alive.update(dict.fromkeys(job.job_id for job in jobs_there) if states is None else states)
            waiting = [job_id for job_id, state in (states or {}).items() if state.startswith("PENDING")]
            starts |= system_of(jobs_there[0]).expected_starts(waiting)
    except RftError as error:
        unknown = f"not known: {error}"
        return RunJobs(tuple(JobStatus(j.role, j.name, j.job_id, unknown, False) for j in records), "", has_begun)
    jobs = []
    for job in records:
        is_alive = alive.get(job.job_id) is not None
        if job.job_id in alive:
            text = alive[job.job_id] or "not asked"
            text += f", expected to start at {starts[job.job_id]}" if job.job_id in starts else ""
        else:
            text = system_of(job).reason(job.job_id) or "ended"
        jobs.append(JobStatus(job.role, job.name, job.job_id, text, is_alive))
    numbers = slurm_numbers(storage, records)
    used = usage(numbers) if numbers else None
    usage_unknown = NO_BOOKS if numbers and used is None else ""
    return RunJobs(tuple(jobs), why_not_running(storage, tuple(jobs)), has_begun, used, usage_unknown)


def why_not_running(storage: Storage, jobs: tuple[JobStatus, ...]) -> str:
    """Return why the run is not running: its recorded end, or the state of its driver's job; "" while it is running."""
    if processes_of(storage):
        return ""
    drivers = [job for job in jobs if job.role in DRIVER_ROLES]
    waiting = [job for job in drivers if job.is_alive]
    if waiting:
        job, state = waiting[0], waiting[0].state
        if state.startswith("RUNNING"):
            return f"its driver has not started yet, or has just ended, in job {job.job_id} ({job.name})"
        does = {"REQUEUED": "is queued again", "COMPLETING": "is ending"}.get(state, f"is {state}")
        return f"job {job.job_id} ({job.name}) {does}"
    # The recorded end takes precedence: the batch system only knows that the job ended.
    end = read_end(storage)
    if end is not None:
        return end
    states = "; ".join(f"job {job.job_id} ({job.name}): {job.state}" for job in drivers)
    if not storage.exists(RUN_FILE):
        return f"it never began: {states}"
    return f"it was killed and recorded no end{': ' + states if states else ''}"


def processes_of(storage: Storage) -> set[tuple[str, int]]:
    """Return (host, pid) of each process that currently drives the run or holds a role of one of its stages."""
    folders = folders_of(storage).values()
    holders = [read_driver(storage), *(holder for folder in folders for holder in lease_holders(folder).values())]
    return {(holder["host"], holder["pid"]) for holder in holders if holder is not None}
