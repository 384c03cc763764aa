"""Jobs of a run seen from another process: their states, why the run ended, its logs, and how to end it.

The module reads only storage and the batch system, so it works for active, waiting and dead runs.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import kill
from pathlib import Path
from socket import gethostname
from time import sleep
from typing import TYPE_CHECKING

from rftdask.cluster.base import find_cluster
from rftdask.cluster.batch_cluster import BatchCluster, for_all_jobs, log_folder, states_of, system_of
from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, JOB_PREFIX, JobRecord, read_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import Config, load_config
from rftdask.errors import DataError, NotFoundError, UserError, WaitTimeout
from rftdask.monitor.logs import COPY_EVERY_S
from rftdask.processes.poll import wait_for
from rftdask.reports.jobs import DRIVER_ROLES, processes_of, read_run_jobs
from rftdask.run.lease import lease_holder
from rftdask.run.run_folder import RUN_FILE, STOP_FILE, folders_of, read_run, read_run_config
from rftdask.storage import Storage, open_storage

if TYPE_CHECKING:
    from distributed import Client

_POLL_INTERVAL_S = 1.0


def cancel(url: str, deadline_s: float, say: Callable[[str], None]) -> None:
    """End a run with a checkpoint, wherever it runs, and wait for its end. Idempotent.

    Raises: DataError: no run; WaitTimeout: it did not end in time, and its jobs were cancelled; UserError: it runs on
    another machine without a batch system.
    """
    storage = open_storage(url)
    config = _config_of(storage)
    folder = SecretsDir.base_of(config, storage)
    if issubclass(system := find_cluster(config.cluster.type, config.explorer.plugin_dirs), BatchCluster):
        system.record_submitted(config, folder, storage)
    drivers = [job for job in read_jobs(storage) if job.role in DRIVER_ROLES]
    if not drivers:
        processes = processes_of(storage)
        if not processes:
            say(f"no process works on {storage.url}")
        for host, pid in processes:
            if host != gethostname():
                raise UserError(f"process {pid} on {host} works on {storage.url}; press Ctrl-C there")
            say(f"process {pid} writes a checkpoint and ends")
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGINT)
        if not wait_for(lambda: not processes_of(storage), deadline_s, _POLL_INTERVAL_S):
            pids = ", ".join(str(pid) for _, pid in sorted(processes_of(storage)))
            raise WaitTimeout(f"{storage.url} had not ended after {deadline_s:.0f} s: process {pids} still runs")
        return
    # Created before the jobs are listed, so that a driver which starts in between finds it and ends.
    (folder.path / CANCELLED_FILE).touch(mode=0o600)
    alive, by_file = states_of(drivers), False

    def end(job: JobRecord) -> None:
        nonlocal by_file
        if alive[job.job_id].startswith("PENDING"):
            say(f"job {job.job_id} ({job.name}) had not started; it is cancelled")
            system_of(job).cancel(job.job_id)
        else:
            say(f"job {job.job_id} ({job.name}) writes a checkpoint and ends")
            by_file |= not system_of(job).interrupt(job.job_id)

    for_all_jobs([job for job in drivers if job.job_id in alive], end)

    def has_ended() -> bool:
        active = states_of(drivers)
        # Without a signal, the trainer of the active stage polls for this file.
        for stage in folders_of(storage).values() if by_file else ():
            if active and lease_holder(stage, "trainer") is not None:
                stage.put(STOP_FILE, b"stop\n")
        return not active

    in_time = wait_for(has_ended, deadline_s, _POLL_INTERVAL_S)
    # Also the workers, in case the driver could not cancel them.
    workers = [job for job in read_jobs(storage) if job.role not in DRIVER_ROLES]
    for_all_jobs([*drivers, *workers], lambda job: system_of(job).cancel(job.job_id))
    if not in_time:
        raise WaitTimeout(f"the run had not ended after {deadline_s:.0f} s: its jobs were killed, its checkpoints stay")


def read_logs(url: str, role: str, num_lines: int) -> Iterator[tuple[str, list[str]]]:
    """Yield name and last lines of each log of a run and its stages whose name begins with `role`. "": all logs.

    Raises: DataError: no such log.
    """
    with _log_folders(url) as folders:
        files = _log_files(folders, role)
        if not files:
            names = (path.name.removeprefix(JOB_PREFIX) for path in _log_files(folders, "").values())
            roles = {name.split("-")[0].split(".")[0] for name in names}
            if not roles:
                read_run(open_storage(url))  # raises DataError without a run
                raise DataError(f"{url} has no logs yet; try again when a role has started")
            raise DataError(f"{url} has no log of {role!r}; choose one of: {', '.join(sorted(roles))}")
        for name, path in files.items():
            with path.open(encoding="utf-8", errors="replace") as lines:
                yield name, [line.rstrip("\n") for line in deque(lines, num_lines)]


def follow_logs(url: str, role: str, num_lines: int, poll_s: float | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the same as `read_logs`, then new lines forever, also of new logs.

    poll_s: seconds between polls. None: 1 s, or the copy interval of remote logs.
    """
    read, last = dict[str, int](), num_lines
    # Polling more often than remote logs are copied would fetch the same lines again.
    if poll_s is None:
        poll_s = COPY_EVERY_S if "://" in open_storage(url).url else _POLL_INTERVAL_S
    while True:
        with _log_folders(url) as folders:
            for name, path in _log_files(folders, role).items():
                if path.stat().st_size < read.get(name, 0):
                    read[name] = 0  # the log was rotated, and this file is new
                # Read as bytes, since positions in a text file are opaque.
                with path.open("rb") as file:
                    file.seek(read.get(name, 0))
                    whole, newline, _ = file.read().rpartition(b"\n")
                if newline:  # an incomplete line waits for the next poll
                    read[name] = read.get(name, 0) + len(whole) + 1
                    yield name, whole.decode(errors="replace").split("\n")[-last:]
        last = 0  # from now on all lines: [-0:] is the whole list
        sleep(poll_s)


@contextlib.contextmanager
def _log_folders(url: str) -> Iterator[list[tuple[str, Path]]]:
    """Yield (stage, log folder) of a run, whose stage is "", and of its stages; temporary local copies if remote."""
    storage = open_storage(url)
    folders = list[tuple[str, Path]]()
    with contextlib.ExitStack() as stack:
        for stage, folder in folders_of(storage).items():
            with contextlib.suppress(NotFoundError):  # no logs yet
                folders.append((stage, stack.enter_context(folder.local_copy("log"))))
        if "://" in storage.url:  # batch jobs write their logs to the private folder
            folders.append(("", log_folder(storage, SecretsDir.base_of(_config_of(storage), storage))))
        yield folders


def _log_files(folders: Sequence[tuple[str, Path]], role: str) -> dict[str, Path]:
    """Return logs by name, such as "driver.log" or, of a stage, "grpo/trainer-0-12.log"."""
    # LSF writes .out and .err; PBS and Grid Engine name a log by its job: rftdask-controller-demo.o12.
    patterns = (f"{role}*.log", f"{role}*.out", f"{role}*.err", f"{JOB_PREFIX}{role}*-*.[oe][0-9]*")
    return {
        f"{stage}/{path.relative_to(folder)}".lstrip("/"): path
        for stage, folder in folders
        for pattern in patterns
        for path in sorted(folder.rglob(pattern))
    }


def connect(url: str, timeout_s: float = 30.0) -> Client:
    """Connect a distributed.Client to the run's scheduler, from a machine that can reach it.

    Raises: UserError: the run has no cluster now, or its keys belong to another user; WaitTimeout: no answer.
    """
    from distributed import Client  # late: other commands need no Dask

    storage = open_storage(url)
    folder = SecretsDir.of(_config_of(storage), storage)
    address = folder.read_address()
    if address is None:
        why = read_run_jobs(url).why or "it has just started or ended"
        raise UserError(f"{storage.url} has no scheduler now: {why}; see rftdask status {storage.url}")
    try:
        return Client(
            address,
            security=folder.security() if address.startswith("tls") else None,
            timeout=timeout_s,
            # A notebook may have its own default client.
            set_as_default=False,
        )
    except OSError as error:
        raise WaitTimeout(f"the scheduler at {address} did not answer in {timeout_s:.0f} s: {error}") from error


def _config_of(storage: Storage) -> Config:
    if storage.exists(RUN_FILE):
        return read_run_config(storage)
    # The run was submitted and has not started; it can be found only if its private folder is in the run folder.
    submitted = Path(storage.url).absolute() / "control" / "private" / CONFIG_FILE
    if not submitted.exists():
        read_run(storage)
    return load_config(submitted, was_checked=True)
