"""Jobs: which of a role's jobs to submit and which to cancel, and the lists of them on storage.

The rule is pure. `control/submitted.json` has the jobs of `rftdask submit`, `control/jobs-<mode>.json` those that the
driver of that mode asked for: each is written by one process, read by `rftdask status`, and a cache of what the batch
system knows. The next start cancels what is left of the latter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from rftdask.errors import NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_json

SUBMITTED_FILE = "control/submitted.json"
CONFIG_FILE = "submitted.yaml"
"""In the run's private folder: the config as submitted."""
CANCELLED_FILE = "cancelled"
"""There, too: a submitted job that is about to start ends at once."""
RETURNS_FILE = "returns"
"""There, too: the controller is queued again, so its jobs stay for it."""
RETURNED = "RFTDASK_RETURNED"
"""Environment variable of a driver that is not the first of its job."""
JOB_PREFIX = "rftdask-"
"""Of the names of all jobs, before their role and the run's name."""
MAX_FAILED_STARTS = 2
"""Jobs of a role in a row that ended by themselves without their worker having joined, before the run fails."""
MAX_FAILED_SUBMITS = 8
"""Times in a row that the batch system refuses a job, before the run fails; with the pauses between, some minutes."""


@dataclass(frozen=True)
class JobRecord:
    """One job of a run.

    Example: JobRecord("explorer", "explorer-0", "1234", "slurm", submitted_s=1763772000.0)
    """

    role: str
    """controller, trainer or explorer; explore and train in a chain."""
    name: str
    job_id: str
    system: str
    """Batch system, as cluster.type."""
    submitted_s: float
    """Unix time."""
    joined: bool = False
    """Its worker has joined."""
    missing_since_s: float | None = None
    """Since when the worker that had joined is gone."""
    script: str = ""
    """Hash of what it asks for and runs, by which a later driver knows it for one of its own."""


@dataclass(frozen=True)
class Change:
    """What to do so that a role has the jobs it should have."""

    lost: tuple[JobRecord, ...]
    """Ended by themselves, or not worth waiting for."""
    cancel: tuple[JobRecord, ...]
    num_new: int
    num_failed_starts: int
    """In a row, now."""


def plan_change(
    jobs: Sequence[JobRecord],
    alive: frozenset[str],
    num_asked: int,
    num_failed_starts: int,
    taken: frozenset[str] = frozenset(),
    per_job: int = 1,
    ending: frozenset[str] = frozenset(),
) -> Change:
    """For one role.

    Args: jobs: oldest first; alive: ids of those that wait or run; num_asked: workers; taken: ids of those that the
    batch system ended on its own, which says nothing of whether workers can start; per_job: workers of each job;
    ending: ids of those alive that are being ended for good. Their places are filled at once, since that may take
    minutes; how they ended is known when they have.
    """
    # No more workers than were asked for, but for those of a job that has the first.
    num_jobs = max(min(1, num_asked), num_asked // per_job)
    lost = tuple(job for job in jobs if job.job_id not in alive)
    kept = [job for job in jobs if job.job_id in alive]
    failed = num_failed_starts
    for job in lost:
        failed = 0 if job.joined else failed + (job.job_id not in taken)
    # One that has joined proves that workers can start here, whatever became of others.
    if any(job.joined for job in kept):
        failed = 0
    # One that never joined may have failed by itself, which is to be known before there is another.
    stay = [job for job in kept if not (job.joined and job.job_id in ending)]
    # Too many: the newest go, which have the least to lose.
    return Change(lost, tuple(stay[num_jobs:]), max(0, num_jobs - len(stay)), failed)


def note_workers(job: JobRecord, is_there: bool, now_s: float) -> JobRecord:
    """The record after a look at the scheduler's workers."""
    if is_there:
        return replace(job, joined=True, missing_since_s=None)
    # The first look at which it is missing; one that never joined may still wait in the queue.
    if job.joined and job.missing_since_s is None:
        return replace(job, missing_since_s=now_s)
    return job


def jobs_file(command: str) -> str:
    """Of the jobs that a driver asked for; `Config.command_name`."""
    return f"control/jobs-{command}.json"


def write_jobs(storage: Storage, jobs: Sequence[JobRecord], file: str) -> None:
    """Replace the note of the jobs of a run, in one put."""
    storage.put(file, json.dumps([asdict(job) for job in jobs], indent=1).encode())


def slurm_numbers(storage: Storage, jobs: Sequence[JobRecord]) -> list[str]:
    """Numbers of all jobs that a run has had on SLURM, also of those that ended long ago; empty: it had none."""
    if not any("slurm" in job.system for job in jobs):
        return []
    # The lists have the jobs of now; each job that began has left a log with its number.
    logs = (re.fullmatch(r"[a-z]+(?:-\d+)?-(\d+)(?:[_.]\d+)?\.log", name) for name in storage.list("log"))
    return sorted({job.job_id.partition(".")[0] for job in jobs} | {found[1] for found in logs if found})


def read_jobs(storage: Storage, file: str = "") -> list[JobRecord]:
    """The jobs as last noted, of all lists or of one; empty where there are none."""
    drivers = [f"control/{name}" for name in storage.list("control") if name.startswith("jobs-")]
    files = [file] if file else [SUBMITTED_FILE, *sorted(drivers)]
    jobs: list[JobRecord] = []
    for each in files:
        # A cache of what the batch system knows: a torn one costs an answer, not a run.
        with suppress(NotFoundError, ValueError, TypeError):
            jobs += [JobRecord(**row) for row in parse_json(storage.get(each))]
    return jobs
