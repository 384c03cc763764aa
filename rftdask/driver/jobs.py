"""Jobs: a run on a batch system as its user sees it from elsewhere: its jobs, why it ended, its logs, its end.

Reads storage and the batch system and nothing else, so it tells the same of a run that lives, waits or is dead.
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

from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, JOB_PREFIX, read_jobs
from rftdask.config import Config, load_config
from rftdask.errors import DataError, NotFoundError, UserError, WaitTimeout
from rftdask.monitor.logs import COPY_EVERY_S
from rftdask.processes.poll import wait_for
from rftdask.reports.jobs import DRIVER_ROLES, processes_of, system_of
from rftdask.run.lease import lease_holder
from rftdask.run.run_folder import RUN_FILE, STOP_FILE, folders_of, read_run, read_run_config
from rftdask.storage import Storage, open_storage

if TYPE_CHECKING:  # they load Dask
    from distributed import Client


_LOOK_S = 1.0


def cancel(url: str, deadline_s: float, say: Callable[[str], None]) -> None:
    """End a run with a checkpoint, wherever it runs, and wait for its end. Idempotent.

    Raises: DataError: there is no run; WaitTimeout: it did not end in time, and its jobs were cancelled; UserError: it
    runs on another machine without a batch system.
    """
    from rftdask.cluster.secrets_folder import PrivateFolder  # late: it loads Dask

    storage = open_storage(url)
    records = read_jobs(storage)
    drivers = [job for job in records if job.role in DRIVER_ROLES]
    if not drivers:
        read_run(storage)  # raises where there is no run
        processes = processes_of(storage)
        if not processes:
            say(f"nobody works on {storage.url}")
        for host, pid in processes:
            if host != gethostname():
                raise UserError(f"{storage.url} is worked on by process {pid} on {host}; press Ctrl-C there")
            say(f"process {pid} writes a checkpoint and ends")
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGINT)
        if not wait_for(lambda: not processes_of(storage), deadline_s, _LOOK_S):
            told = ", ".join(str(pid) for _, pid in sorted(processes_of(storage)))
            raise WaitTimeout(f"{storage.url} had not ended after {deadline_s:.0f} s: process {told} still runs")
        return
    folder = PrivateFolder.base_of(_config_of(storage), storage)
    # Before anybody asks which jobs run: one that starts in between must find it.
    (folder.path / CANCELLED_FILE).touch(mode=0o600)  # a driver that is about to start looks for it
    from rftdask.cluster.jobqueue import states_of  # late: it loads Dask

    alive, by_file = states_of(drivers), False
    for job in drivers:
        state = alive.get(job.job_id)
        if state is not None and not state.startswith("PENDING"):
            say(f"job {job.job_id} ({job.name}) writes a checkpoint and ends")
            by_file |= not system_of(job).interrupt(job.job_id)
        elif state is not None:
            say(f"job {job.job_id} ({job.name}) had not started; it is cancelled")
            system_of(job).cancel(job.job_id)

    def has_ended() -> bool:
        left = states_of(drivers)
        # Without a signal: the trainer of the stage that runs looks for a file.
        for stage in folders_of(storage).values() if by_file else ():
            if left and lease_holder(stage, "trainer") is not None:
                stage.put(STOP_FILE, b"stop\n")
        return not left

    in_time = wait_for(has_ended, deadline_s, _LOOK_S)
    # Its workers, if it could not cancel them itself.
    for job in (*drivers, *(job for job in read_jobs(storage) if job.role not in DRIVER_ROLES)):
        system_of(job).cancel(job.job_id)
    if not in_time:
        raise WaitTimeout(f"the run had not ended after {deadline_s:.0f} s: its jobs were killed, its checkpoints stay")


def read_logs(url: str, role: str, num_lines: int) -> Iterator[tuple[str, list[str]]]:
    """Name and last lines of each log of a run and its stages whose name begins with `role`; "" is all of them.

    Raises: DataError: there is none.
    """
    with _log_folders(url) as folders:
        files = _log_files(folders, role)
        if not files:
            names = (path.name.removeprefix(JOB_PREFIX) for path in _log_files(folders, "").values())
            there = {name.split("-")[0].split(".")[0] for name in names}
            if not there:
                read_run(open_storage(url))  # raises where there is no run
                raise DataError(f"{url} has no logs yet")
            raise DataError(f"{url} has no log of {role!r}; there are: {', '.join(sorted(there))}")
        for name, path in files.items():
            with path.open(encoding="utf-8", errors="replace") as lines:
                yield name, [line.rstrip("\n") for line in deque(lines, num_lines)]


def follow_logs(url: str, role: str, num_lines: int, look_s: float | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield what `read_logs` does, then the lines that come, also of new logs; ends when nobody asks for more.

    look_s: between two looks; None: as often as it costs little.
    """
    read, last = dict[str, int](), num_lines
    # Remote logs are copied that often; looking more often would fetch the same again.
    usual_s = COPY_EVERY_S if "://" in open_storage(url).url else _LOOK_S
    while True:
        with _log_folders(url) as folders:
            for name, path in _log_files(folders, role).items():
                if path.stat().st_size < read.get(name, 0):
                    read[name] = 0  # it was set aside, and this is a new one
                # By bytes: a place in a file of characters is no number that can be kept.
                with path.open("rb") as file:
                    file.seek(read.get(name, 0))
                    whole, newline, _ = file.read().rpartition(b"\n")
                if newline:  # a line that is still being written waits for the next look
                    read[name] = read.get(name, 0) + len(whole) + 1
                    yield name, whole.decode(errors="replace").split("\n")[-last:]
        last = 0  # from now on all that comes: [-0:] is everything
        sleep(usual_s if look_s is None else look_s)


@contextlib.contextmanager
def _log_folders(url: str) -> Iterator[list[tuple[str, Path]]]:
    """(stage, where it logs): a run, "", and its stages; a copy for as long as the context, if remote."""
    from rftdask.cluster.jobqueue import log_folder  # late: it loads Dask
    from rftdask.cluster.secrets_folder import PrivateFolder

    storage = open_storage(url)
    found = list[tuple[str, Path]]()
    with contextlib.ExitStack() as stack:
        for stage, folder in folders_of(storage).items():
            with contextlib.suppress(NotFoundError):  # it has not logged
                found.append((stage, stack.enter_context(folder.local_copy("log"))))
        if "://" in storage.url:  # jobs of a batch system log beside their keys
            found.append(("", log_folder(storage, PrivateFolder.base_of(_config_of(storage), storage))))
        yield found


def _log_files(folders: Sequence[tuple[str, Path]], role: str) -> dict[str, Path]:
    """Logs by name: "driver.log", "grpo/trainer-0-12.log" of a stage; on remote storage each start has a folder."""
    # Of LSF .out and .err; PBS and Grid Engine name a log by its job alone: rftdask-controller-demo.o12.
    forms = (f"{role}*.log", f"{role}*.out", f"{role}*.err", f"{JOB_PREFIX}{role}*-*.[oe][0-9]*")
    found = [
        (stage, folder, path) for stage, folder in folders for form in forms for path in sorted(folder.rglob(form))
    ]
    return {f"{stage}/{path.relative_to(folder)}".lstrip("/"): path for stage, folder, path in found}


def connect(url: str, timeout_s: float = 30.0) -> Client:
    """Connect a distributed.Client to the run's scheduler, for a notebook on a machine that reaches it.

    Raises: UserError: the run has no cluster now, or its keys are another user's; WaitTimeout: it does not answer.
    """
    from distributed import Client  # late: the other commands load no Dask

    from rftdask.cluster.secrets_folder import PrivateFolder  # late: it loads Dask

    storage = open_storage(url)
    folder = PrivateFolder.of(_config_of(storage), storage)
    address = folder.read_address()
    if address is None:
        raise UserError(f"{storage.url} has no scheduler now; rftdask status {storage.url} tells where it stands")
    try:
        return Client(
            address,
            security=folder.security() if address.startswith("tls") else None,
            timeout=timeout_s,
            # A notebook may have a client of its own, whose place this one must not take.
            set_as_default=False,
        )
    except OSError as error:
        raise WaitTimeout(f"the scheduler at {address} did not answer in {timeout_s:.0f} s: {error}") from error


def _config_of(storage: Storage) -> Config:
    if storage.exists(RUN_FILE):
        return read_run_config(storage)
    # It was submitted and has not started: only a run that keeps its private folder with it can be found then.
    submitted = Path(storage.url).absolute() / "control" / "private" / CONFIG_FILE
    if not submitted.exists():
        read_run(storage)
    return load_config(submitted, was_checked=True)
