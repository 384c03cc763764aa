"""Join: a worker for one role, on this machine, of a run whose scheduler is somewhere else. Scripts and srun start it.

It outlives a scheduler that is killed or that may return: the worker ends, and another one is started as soon as a
scheduler answers again. It ends well with the run, which takes its address back, or when none answers for a while.

Every worker of a job starts after it, and has it beside it as long as it lives: so it loads neither Dask nor a
configuration.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rftdask.cluster.layout import EXPLORER_RESOURCE, TRAINER_RESOURCE
from rftdask.cluster.preloads import LEAVING
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.engines.vllm_follower import ADDRESS, NODES, Nodes, follow
from rftdask.errors import RoleError
from rftdask.processes.poll import wait_for
from rftdask.storage.staging import stage_here, sweep

if TYPE_CHECKING:
    from rftdask.config import Config

_LOOK_S = 0.5
_KNOCK_S = 5.0
_PASS_ON_S = 1.0
MAX_FAILURES = 3
"""Workers in a row that ended with an error."""

log = logging.getLogger(__name__)


def join(config: Config, folder: PrivateFolder, role: str, patience_s: float) -> int:
    """Work until the run is over; the number of workers that were started, one for each scheduler.

    Args: patience_s: how long to wait for a scheduler, at the start and after one was killed.
    Raises: RoleError: workers cannot be started here.
    """
    if config.cluster.stage_to is not None:
        stage_here(config.cluster.stage_to, config.cluster.stage_keep)
    job = os.environ.get("SLURM_JOB_ID", socket.gethostname())
    return _keep_worker(
        folder,
        f"{role}-{os.environ.get('SLURM_PROCID', '0')}-{job}-{os.getpid()}",
        [
            *folder.worker_options(config.cluster.tls, config.cluster.interface),
            *f"--resources {role}=1 --nthreads 1 --memory-limit 0 --no-dashboard".split(),
            *(*LEAVING, "--death-timeout", f"{patience_s:.0f}"),
            *("--local-directory", os.environ.get("TMPDIR", "/tmp")),
        ],
        patience_s,
    )


def main() -> None:
    """Entry of a job: `dask worker` with the given options, one after the other for each scheduler of the run.

    It exits with an error where workers cannot be started, so that its batch system knows.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--death-timeout", type=float, required=True)
    parser.add_argument("--interface")
    parser.add_argument("--engine-every", type=int, default=0, help="tasks of a node, the first with an engine, too")
    parser.add_argument("--span", type=int, default=1, help="tasks of the job that are one worker, a node each")
    ours, options = parser.parse_known_args()
    options += ["--scheduler-file", str(ours.scheduler_file), "--death-timeout", f"{ours.death_timeout:.0f}"]
    options += ["--interface", ours.interface] if ours.interface else []
    try:
        if ours.span == 1:
            # A job may run it several times, as tasks of one step.
            name = f"{ours.name}-{os.environ.get('SLURM_PROCID', '0')}"
            place, every = int(os.environ.get("SLURM_LOCALID", "0")), ours.engine_every
            engine = [f"{EXPLORER_RESOURCE}=1" if each == f"{TRAINER_RESOURCE}=1" else each for each in options]
            beside = [sys.executable, "-m", "rftdask.cluster.join", "--name", f"{ours.name}-engine", *engine]
            with _beside(beside) if every and place % every == 0 else nullcontext():
                _keep_worker(PrivateFolder(ours.scheduler_file.parent), name, options, ours.death_timeout)
            return
        number, node = divmod(int(os.environ.get("SLURM_PROCID", "0")), ours.span)
        nodes = _share_engine(ours.scheduler_file.parent / f"engine-{ours.name}-{number}", ours.span, ours.interface)
        if node:
            follow(nodes, node)
            return
        try:
            folder = PrivateFolder(ours.scheduler_file.parent)
            _keep_worker(folder, f"{ours.name}-{number}", options, ours.death_timeout)
        finally:
            nodes.end()
    except RoleError as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def _beside(command: list[str]) -> Iterator[None]:
    """Have another process beside this one: if one of them fails, neither goes on."""
    with subprocess.Popen(command) as other:
        ended = threading.Event()

        def watch() -> None:
            if other.wait() and not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="beside", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            other.terminate()


def _share_engine(folder: Path, count: int, interface: str | None) -> Nodes:
    """Say to the engine of this task what it shares with those of the other nodes, and on which interface."""
    from distributed.utils import get_ip, get_ip_interface  # late: most jobs share no engine

    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[NODES] = f"{count}:{folder}"
    os.environ.setdefault(ADDRESS, get_ip() if interface is None else get_ip_interface(interface))
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    return Nodes(count, folder)


def _keep_worker(folder: PrivateFolder, name: str, options: Sequence[str], patience_s: float) -> int:
    try:
        return _keep_workers(folder, name, options, patience_s)
    finally:
        sweep()


def _keep_workers(folder: PrivateFolder, name: str, options: Sequence[str], patience_s: float) -> int:
    started, failures = 0, 0
    while wait_for(lambda: _answers(folder.read_address()), patience_s, _LOOK_S):
        started += 1
        # A new name for each worker: the scheduler refuses one that it still knows.
        code = _run([sys.executable, "-m", "distributed.cli.dask_worker", "--name", f"{name}-{started}", *options])
        # In a row alone: in a run of days a worker may be killed now and then, and the next one works.
        failures = failures + 1 if code else 0
        if folder.read_address() is None:
            break  # it said that the run is over; one that was killed would have said nothing
        if failures >= MAX_FAILURES:
            raise RoleError(
                f"{failures} workers {name} in a row ended with an error (the last with code {code}); what they said "
                "is above"
            )
    return started


def _answers(address: str | None) -> bool:
    """Whether somebody listens there; Dask's worker would knock for half a minute where nobody does any more."""
    if address is None:
        return False
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), _KNOCK_S).close()
    except OSError:
        return False
    return True


def _run(command: list[str]) -> int:
    """Its exit code. SIGTERM is passed on, and ends this process as soon as the worker has ended."""
    with subprocess.Popen(command) as worker:
        told: list[int] = []

        def on_terminate(number: int, _: object) -> None:
            told.append(number)
            # SLURM sends SIGTERM to this process alone or to all of the step. A worker that gets it twice ends before
            # it has said that it leaves, so it is passed on to one that is still there after a moment.
            passing_on = threading.Timer(_PASS_ON_S, worker.terminate)
            passing_on.daemon = True
            passing_on.start()

        before = signal.signal(signal.SIGTERM, on_terminate)
        try:
            code = worker.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if told:
        raise SystemExit(128 + signal.SIGTERM)
    return code


if __name__ == "__main__":
    main()
