"""Join: a worker for one role, on this machine, of a run whose scheduler is somewhere else. Scripts and srun start it.

It outlives a scheduler that is killed or that may return: the worker ends, and another one is started as soon as a
scheduler answers again. It ends well with the run, which takes its address back, or when none answers for a while.

It is the nanny of its workers. They, and the engines and ranks below them, are forks of one process that has imported
what they need (nursery.py): so what follows a worker, an engine, a rank or a scheduler that was lost starts at once.
The job's first worker waits for this module, which therefore loads neither Dask nor a configuration as it is imported.
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
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rftdask.cluster.layout import (
    EXPLORER_RESOURCE,
    TRAINER_RESOURCE,
    WORKER_IMPORTS,
    amount_of,
    auxiliary_sizes,
    imports_ahead,
)
from rftdask.cluster.preloads import LEAVING, UMASK_VARIABLE
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.engines.vllm_follower import ADDRESS, NODES, Nodes, follow
from rftdask.errors import RoleError
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.gpus import has_gpu_devices
from rftdask.processes.poll import wait_for
from rftdask.processes.zygote import ADDRESS as NURSERY_ADDRESS
from rftdask.processes.zygote import TOKENIZERS, can_fork, start_nursery, umask
from rftdask.storage.staging import stage_here, sweep

if TYPE_CHECKING:
    from rftdask.config import Config

_LOOK_S = 0.5
_KNOCK_S = 5.0
MAX_FAILURES = 3
"""Workers in a row that ended with an error."""

log = logging.getLogger(__name__)


def join(config: Config, folder: PrivateFolder, role: str, patience_s: float) -> int:
    """Work until the run is over; the number of workers that were started, one for each scheduler.

    Args: patience_s: how long to wait for a scheduler, at the start and after one was killed.
    Raises: RoleError: workers cannot be started here.
    """
    if config.cluster.local_cache_dir is not None:
        stage_here(config.cluster.local_cache_dir, config.cluster.stage_keep)
    job = os.environ.get("SLURM_JOB_ID", socket.gethostname())
    largest = max(auxiliary_sizes(config.stage_configs()), default=1)
    return _keep_worker(
        folder,
        f"{role}-{os.environ.get('SLURM_PROCID', '0')}-{job}-{os.getpid()}",
        [
            *folder.worker_options(config.cluster.tls, config.cluster.interface),
            *f"--resources {role}={amount_of(role, largest)} --nthreads 1 --memory-limit 0 --no-dashboard".split(),
            *(*LEAVING, "--death-timeout", f"{patience_s:.0f}"),
            *("--local-directory", os.environ.get("TMPDIR", "/tmp")),
        ],
        imports_ahead(config.stage_configs(), [role]),
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
    parser.add_argument("--imports", default="", help="modules that engines and ranks import, with commas between them")
    parser.add_argument("--engine-every", type=int, default=0, help="tasks of a node, the first with an engine, too")
    parser.add_argument("--span", type=int, default=1, help="tasks of the job that are one worker, a node each")
    ours, options = parser.parse_known_args()
    options += ["--scheduler-file", str(ours.scheduler_file), "--death-timeout", f"{ours.death_timeout:.0f}"]
    options += ["--interface", ours.interface] if ours.interface else []
    imports = ours.imports.split(",") if ours.imports else []
    try:
        if ours.span == 1:
            # A job may run it several times, as tasks of one step.
            name = f"{ours.name}-{os.environ.get('SLURM_PROCID', '0')}"
            place, every = int(os.environ.get("SLURM_LOCALID", "0")), ours.engine_every
            engine = [f"{EXPLORER_RESOURCE}=1" if each == f"{TRAINER_RESOURCE}=1" else each for each in options]
            beside = [sys.executable, "-m", "rftdask.cluster.join", "--name", f"{ours.name}-engine"]
            beside += ["--imports", ours.imports, *engine]
            with _beside(beside) if every and place % every == 0 else nullcontext():
                _keep_worker(PrivateFolder(ours.scheduler_file.parent), name, options, imports, ours.death_timeout)
            return
        number, node = divmod(int(os.environ.get("SLURM_PROCID", "0")), ours.span)
        nodes = _share_engine(ours.scheduler_file.parent / f"engine-{ours.name}-{number}", ours.span, ours.interface)
        if node:
            follow(nodes, node)
            return
        try:
            folder = PrivateFolder(ours.scheduler_file.parent)
            _keep_worker(folder, f"{ours.name}-{number}", options, imports, ours.death_timeout)
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


def _keep_worker(
    folder: PrivateFolder, name: str, options: Sequence[str], imports: Sequence[str], patience_s: float
) -> int:
    with ExitStack() as stack:
        stack.callback(sweep)
        environment: dict[str, str] = {}
        if sys.platform == "linux":
            may_fork = can_fork(has_gpu_devices())
            start_fork_server((*WORKER_IMPORTS, *(TOKENIZERS if may_fork else ())))
            environment = {UMASK_VARIABLE: str(umask())}
            if may_fork:
                environment[NURSERY_ADDRESS] = start_nursery(imports)
        return _keep_workers(folder, name, options, environment, patience_s)


def _keep_workers(
    folder: PrivateFolder, name: str, options: Sequence[str], environment: dict[str, str], patience_s: float
) -> int:
    started, failures = 0, 0
    while wait_for(lambda: _answers(folder.read_address()), patience_s, _LOOK_S):
        started += 1
        # A new name for each worker: the scheduler refuses one that it still knows.
        code = _work(["--name", f"{name}-{started}", *options], environment)
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


def _work(options: list[str], environment: dict[str, str]) -> int:
    """`dask worker` in this process, the worker itself a fork that has the environment, too; its exit code.

    SIGTERM ends this process, after the nanny has said that its worker leaves (preloads.py).
    """
    import dask  # late: as above
    from distributed.cli.dask_worker import main as dask_worker

    from rftdask.processes.dask_cluster import DASK_CONFIG, METHOD  # late: as above

    method = "forkserver" if UMASK_VARIABLE in environment else "spawn"
    told, tells = socket.socketpair()
    told.setblocking(False)
    tells.setblocking(False)

    def on_terminate(*_: object) -> None:
        # SLURM may send it more than once, and Dask, which waits for it while there is a worker, takes the first alone.
        if _count_terminate(told) == 1:
            raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, on_terminate)
    heard_by = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    code = 0
    try:
        with dask.config.set({**DASK_CONFIG, METHOD: method, "distributed.nanny.environ": environment}):
            dask_worker(options, "dask worker")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:
        # As the end of a process would have it: the last lines of its log, and a code.
        traceback.print_exc()
        code = 1
    finally:
        signal.set_wakeup_fd(heard_by)
        with told, tells:
            if _count_terminate(told):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
                raise SystemExit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
    return code


def _count_terminate(told: socket.socket) -> int:
    """How often SIGTERM came, by what Python writes there for every signal before it calls anybody."""
    try:
        return told.recv(1 << 12, socket.MSG_PEEK).count(signal.SIGTERM)
    except BlockingIOError:
        return 0


if __name__ == "__main__":
    main()
