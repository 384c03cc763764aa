"""Worker process of a batch job or of `rftdask join`, for a run whose scheduler is on another machine.

It starts a worker for each scheduler of the run: after the loss of a scheduler it waits for the next one. It ends when
the run removes its address, or when no scheduler answers for a while.

It is the nanny of its workers. Workers, engines and ranks are forks (processes/zygote.py), so replacements start at
once. Importing this module imports neither Dask nor a configuration, because the first worker of a job waits for it.
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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rftdask.cluster.layout import EXPLORER_RESOURCE, TRAINER_RESOURCE, WORKER_IMPORTS, imports_ahead
from rftdask.cluster.preloads import UMASK_VARIABLE, worker_options
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.engines.vllm_follower import ADDRESS, NODES, Nodes, follow
from rftdask.errors import RoleError
from rftdask.processes.dask_cluster import set_config
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.gpus import has_gpu_devices
from rftdask.processes.poll import wait_for
from rftdask.processes.zygote import TOKENIZERS, ZYGOTE_ADDRESS, can_fork, start_zygote, umask
from rftdask.storage.staging import stage_here, sweep

if TYPE_CHECKING:
    from rftdask.config import Config

_POLL_INTERVAL_S = 0.5
_CONNECT_TIMEOUT_S = 5.0
MAX_FAILURES = 3
"""Consecutive workers that end with an error, until the process fails."""

log = logging.getLogger(__name__)


def join(config: Config, folder: SecretsDir, role: str, patience_s: float) -> int:
    """Run workers until the run ends. Returns: the number of started workers, one for each scheduler.

    Args: patience_s: time to wait for a scheduler, at the start and after its loss.
    Raises: RoleError: workers fail.
    """
    if config.cluster.local_cache_dir is not None:
        stage_here(config.cluster.local_cache_dir, config.cluster.stage_keep)
    job = os.environ.get("SLURM_JOB_ID", socket.gethostname())
    return _keep_worker(
        folder,
        f"{role}-{os.environ.get('SLURM_PROCID', '0')}-{job}-{os.getpid()}",
        [
            *folder.worker_options(config.cluster.tls, config.cluster.interface),
            *worker_options(role, config.stage_configs()),
            *("--death-timeout", f"{patience_s:.0f}", "--local-directory", os.environ.get("TMPDIR", "/tmp")),
        ],
        imports_ahead(config.stage_configs(), [role]),
        patience_s,
    )


def main() -> None:
    """Entry point of a job: runs `dask worker` with the given options for each scheduler of the run.

    Exits with an error if workers fail, so that the batch system knows.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--death-timeout", type=float, required=True)
    parser.add_argument("--interface")
    parser.add_argument("--imports", default="", help="modules that engines and ranks import, separated by commas")
    parser.add_argument("--engine-every", type=int, default=0, help="start an engine in every Nth task of a node")
    parser.add_argument("--span", type=int, default=1, help="tasks of each worker, one per node")
    ours, options = parser.parse_known_args()
    options += ["--scheduler-file", str(ours.scheduler_file), "--death-timeout", f"{ours.death_timeout:.0f}"]
    options += ["--interface", ours.interface] if ours.interface else []
    imports = ours.imports.split(",") if ours.imports else []
    try:
        if ours.span == 1:
            # A job may run several tasks.
            name = f"{ours.name}-{os.environ.get('SLURM_PROCID', '0')}"
            task, every = int(os.environ.get("SLURM_LOCALID", "0")), ours.engine_every
            trainer, explorer = f"{TRAINER_RESOURCE}=1", f"{EXPLORER_RESOURCE}=1"
            engine = [sys.executable, "-m", "rftdask.cluster.join", "--name", f"{ours.name}-engine"]
            engine += ["--imports", ours.imports, *(explorer if word == trainer else word for word in options)]
            with _running(engine) if every and task % every == 0 else nullcontext():
                _keep_worker(SecretsDir(ours.scheduler_file.parent), name, options, imports, ours.death_timeout)
            return
        number, node = divmod(int(os.environ.get("SLURM_PROCID", "0")), ours.span)
        nodes = _share_engine(ours.scheduler_file.parent / f"engine-{ours.name}-{number}", ours.span, ours.interface)
        if node:
            follow(nodes, node)
            return
        try:
            folder = SecretsDir(ours.scheduler_file.parent)
            _keep_worker(folder, f"{ours.name}-{number}", options, imports, ours.death_timeout)
        finally:
            nodes.end()
    except RoleError as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    """Run another process during the block. If it fails, this process ends as well."""
    with subprocess.Popen(command) as other:
        ended = threading.Event()

        def watch() -> None:
            if other.wait() and not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            other.terminate()


def _share_engine(folder: Path, count: int, interface: str | None) -> Nodes:
    """Set the environment of an engine over several nodes: their number, its folder and the network interface."""
    from distributed.utils import get_ip, get_ip_interface  # late: most engines use one node

    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[NODES] = f"{count}:{folder}"
    os.environ.setdefault(ADDRESS, get_ip() if interface is None else get_ip_interface(interface))
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    return Nodes(count, folder)


def _keep_worker(
    folder: SecretsDir, name: str, options: Sequence[str], imports: Sequence[str], patience_s: float
) -> int:
    started, failures, environment = 0, 0, dict[str, str]()
    try:
        if sys.platform == "linux":
            environment = {UMASK_VARIABLE: str(umask())}
            if can_fork(has_gpu_devices()):
                start_fork_server((*WORKER_IMPORTS, *TOKENIZERS), imports)
                environment[ZYGOTE_ADDRESS] = start_zygote(imports)
            else:
                start_fork_server(WORKER_IMPORTS)
        while wait_for(lambda: _answers(folder.read_address()), patience_s, _POLL_INTERVAL_S):
            started += 1
            # A new name, because the scheduler refuses names of known workers.
            code = _work(["--name", f"{name}-{started}", *options], environment)
            # Only consecutive failures count, since workers of a long run may be killed at times.
            failures = failures + 1 if code else 0
            if folder.read_address() is None:
                break  # the run has ended; a killed driver would have left the address
            if failures >= MAX_FAILURES:
                raise RoleError(
                    f"{failures} workers {name} in a row ended with an error (the last with code {code}); see the log "
                    "above"
                )
        return started
    finally:
        sweep()


def _answers(address: str | None) -> bool:
    """True if a process listens at the address. Dask's worker would retry for half a minute."""
    if address is None:
        return False
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _work(options: list[str], environment: dict[str, str]) -> int:
    """Run `dask worker` in this process, with the environment for the worker. Returns: its exit code.

    SIGTERM ends this process, after the nanny has reported that its worker leaves (preloads.py).
    """
    from distributed.cli.dask_worker import main as dask_worker  # late: as above

    signals, wakeup = socket.socketpair()
    signals.setblocking(False)
    wakeup.setblocking(False)

    def on_terminate(*_: object) -> None:
        # SLURM may send it several times, and Dask handles only the first one.
        if _count_terminate(signals) == 1:
            raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, on_terminate)
    previous_fd = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    code = 0
    try:
        with set_config({"distributed.nanny.environ": environment}, forks=UMASK_VARIABLE in environment):
            dask_worker(options, "dask worker")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:
        # Like the end of a process: a traceback in the log, and an exit code.
        traceback.print_exc()
        code = 1
    finally:
        signal.set_wakeup_fd(previous_fd)
        with signals, wakeup:
            if _count_terminate(signals):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
                raise SystemExit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
    return code


def _count_terminate(signals: socket.socket) -> int:
    """Number of received SIGTERM. Python writes each signal to the socket before it calls handlers."""
    try:
        return signals.recv(1 << 12, socket.MSG_PEEK).count(signal.SIGTERM)
    except BlockingIOError:
        return 0


if __name__ == "__main__":
    main()
