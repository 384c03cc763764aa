"""Jobs of batch systems: which jobs of a role to submit and cancel, as a pure rule, and their lists on storage.

`control/submitted.json` has the jobs of `rftdask submit`, `control/jobs-<mode>.json` those of the driver of that mode.
One process writes each list, and `rftdask status` reads them. The next start takes over or cancels the remaining jobs
of the driver.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from rftdask.cluster.layout import Layout
from rftdask.errors import NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_json

SUBMITTED_FILE = "control/submitted.json"
CONFIG_FILE = "submitted.yaml"
"""Submitted config, in the run's secrets directory."""
CANCELLED_FILE = "cancelled"
"""Marker in that directory: submitted jobs end as soon as they start."""
RETURNS_FILE = "returns"
"""Marker in that directory: the controller is queued again, so its jobs stay."""
RETURNED = "RFTDASK_RETURNED"
"""Environment variable of a driver that was started again in its job."""
JOB_PREFIX = "rftdask-"
"""Prefix of the names of all jobs, followed by the role and the name of the run."""
MAX_FAILED_STARTS = 2
"""Consecutive jobs of a role that end before their worker joins, until the run fails."""
MAX_FAILED_SUBMITS = 8
"""Consecutive refusals of a job until the run fails; with the pauses between them some minutes."""


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
    """Batch system, as cluster.type, or the path of its class."""
    submitted_s: float
    """Unix time."""
    joined: bool = False
    """True once its worker has joined."""
    missing_since_s: float | None = None
    """Unix time at which its worker, which had joined, was lost."""
    script: str = ""
    """Hash of its script. A later driver takes over jobs with the script that it would submit."""
    plugin_dirs: tuple[str, ...] = ()
    """Plug-in folders of its run, one of which may have the class of the batch system."""


@dataclass(frozen=True)
class Script:
    """A batch script of a submission."""

    name: str
    role: str
    text: str
    after: str | None = None
    """Name of the script whose job must succeed before."""
    after_task: str = ""
    """Suffix of the array task that must succeed before: "_0". "": all tasks."""


@dataclass(frozen=True)
class ScriptPlan:
    """Scripts that `rftdask submit` writes and submits."""

    scripts: tuple[Script, ...]
    worker_scripts: tuple[Script, ...] = ()
    """Scripts that the controller will submit, for display."""
    unchecked: str = ""
    """Reason why the scripts were not checked against SLURM's partitions; empty: checked."""
    layout: Layout | None = None
    """Layout whose workers must fit the memory of their jobs. None: not checked."""
    driver: str = ""
    """Shell that the controller's job runs on batch systems other than SLURM."""


@dataclass(frozen=True)
class JobPlan:
    """Changes to the jobs of a role."""

    lost: tuple[JobRecord, ...]
    """Jobs that have ended."""
    cancel: tuple[JobRecord, ...]
    num_new: int
    num_failed_starts: int
    """Consecutive failed starts, including this change."""


def plan_role(
    jobs: Sequence[JobRecord],
    alive: frozenset[str],
    num_asked: int,
    num_failed_starts: int,
    taken: frozenset[str] = frozenset(),
    per_job: int = 1,
    ending: frozenset[str] = frozenset(),
) -> JobPlan:
    """Compute the changes for one role.

    Args:
        jobs: oldest first.
        alive: ids of queued and running jobs.
        num_asked: requested workers.
        taken: ids of jobs that the batch system ended on its own; they do not count as failed starts.
        per_job: workers of each job.
        ending: ids of jobs in `alive` that are ending, which may take minutes; they are replaced at once.
    """
    # No more workers than requested, except for the first job.
    num_jobs = max(min(1, num_asked), num_asked // per_job)
    lost = tuple(job for job in jobs if job.job_id not in alive)
    kept = [job for job in jobs if job.job_id in alive]
    failed = num_failed_starts
    for job in lost:
        failed = 0 if job.joined else failed + (job.job_id not in taken)
    # A worker that joined shows that workers can start.
    if any(job.joined for job in kept):
        failed = 0
    # A job without a joined worker may have failed, which must be known before it is replaced.
    stay = [job for job in kept if not (job.joined and job.job_id in ending)]
    # The newest jobs have the least work to lose.
    return JobPlan(lost, tuple(stay[num_jobs:]), max(0, num_jobs - len(stay)), failed)


def note_workers(job: JobRecord, is_there: bool, now_s: float) -> JobRecord:
    """Update the record from the scheduler's workers."""
    if is_there:
        return replace(job, joined=True, missing_since_s=None)
    # A job whose worker never joined may still be queued.
    if job.joined and job.missing_since_s is None:
        return replace(job, missing_since_s=now_s)
    return job


def jobs_file(command: str) -> str:
    """Path of the list of a driver's jobs. command: `Config.command_name`."""
    return f"control/jobs-{command}.json"


def write_jobs(storage: Storage, jobs: Sequence[JobRecord], file: str) -> None:
    """Replace a list of jobs."""
    storage.put(file, json.dumps([asdict(job) for job in jobs], indent=1).encode())


def slurm_numbers(storage: Storage, jobs: Sequence[JobRecord]) -> list[str]:
    """Ids of all SLURM jobs of a run, including old ones; empty: none."""
    if not any("slurm" in job.system for job in jobs):
        return []
    # The lists have only current jobs. Each started job has a log with its id in the name.
    logs = (re.fullmatch(r"[a-z]+(?:-\d+)?-(\d+)(?:[_.]\d+)?\.log", name) for name in storage.list("log"))
    return sorted({job.job_id.partition(".")[0] for job in jobs} | {match[1] for match in logs if match})


def read_jobs(storage: Storage, file: str = "") -> list[JobRecord]:
    """Jobs of one list, or of all lists."""
    drivers = [f"control/{name}" for name in storage.list("control") if name.startswith("jobs-")]
    files = [file] if file else [SUBMITTED_FILE, *sorted(drivers)]
    jobs: list[JobRecord] = []
    for path in files:
        # The batch system knows the jobs, so an incomplete list is not an error.
        with suppress(NotFoundError, ValueError, TypeError, AttributeError):
            rows = parse_json(storage.get(path))
            jobs += [JobRecord(**{**row, "plugin_dirs": tuple(row.get("plugin_dirs", ()))}) for row in rows]
    return jobs
