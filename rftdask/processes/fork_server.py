"""Fork server: Python's own, of which Dask forks the workers of this machine, with what they import imported once.

It is an interpreter of its own, or, of a command that has only just begun and so has neither threads nor anything of
the user's, a fork of that, which forks the nursery as soon as it has what both import. A worker's process neither
imports the script that starts it nor is ended by a signal half-way through its start.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from rftdask.processes import zygote as nursery
from rftdask.processes.zygote import SIGNALS, import_environment, signals_blocked, socket_folder

IMPORTS = "RFTDASK_IMPORTS"
"""Environment of a fork server that begins: the modules that forked_imports.py imports, with commas between them."""
_IMPORTER = "rftdask.processes.forked_imports"
WITHOUT_MAIN: set[str] = set()
"""Names of processes that need nothing of the script that starts them."""
_preparation_data = multiprocessing.spawn.get_preparation_data
_spawn = multiprocessing.util.spawnv_passfds
_waiting: int | None = None
"""Where a server that waits for it is told what to import; None: there is none."""


def _without_main(name: str) -> dict[str, Any]:
    # Python has a process of its own import the script that starts it: one without a `__main__` guard would start its
    # run in each of ours, which need nothing of it, for what they are sent is of modules or pickled by value.
    # What `%reset` of a notebook takes away, and Python reads.
    vars(sys.modules["__main__"]).setdefault("__spec__", None)
    data = _preparation_data(name)
    if name in WITHOUT_MAIN:
        for key in ("init_main_from_name", "init_main_from_path"):
            data.pop(key, None)
    return data


multiprocessing.spawn.get_preparation_data = _without_main


def begin_fork_server(shared: Sequence[str], apart: Sequence[str]) -> None:
    """Fork the fork server of this process, which imports `shared`, forks the nursery, which imports `apart`, and waits
    for `start_fork_server` to say what more it is to import itself. For a process that has only just begun: of one that
    has threads there is but the nursery, as an interpreter.
    """
    global _waiting
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        nursery.start_nursery([*shared, *apart])
        return
    with nursery.nursery_to_fork(apart) as to_fork:
        read, _waiting = os.pipe()
        try:
            _ensure_running([], _fork)
        except _Forked as forked:
            os.close(_waiting)
            forked.serve(read, shared, to_fork)
        os.close(read)


class _Forked(BaseException):
    """In the fork that is to be a server, leaves what Python does around its start, which is for who starts it."""

    def __init__(self, code: str, descriptors: Iterable[int]) -> None:
        """code: what Python would have an interpreter run, which has these descriptors."""
        super().__init__()
        self._code, self._kept = code, {number: os.dup(number) for number in descriptors}

    def serve(self, waiting: int, shared: Sequence[str], to_fork: nursery.StartedNursery) -> NoReturn:
        """Be the server. waiting: where it is told what to import, once the nursery has been forked."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            # Else ps shows the command twice, and who sends a signal to it by its name hits this.
            setproctitle.setproctitle(f"rftdask fork server of {os.getppid()}")
            os.environ.update(import_environment())
            gc.disable()
            for name in shared:
                with contextlib.suppress(ImportError):  # a fork that needs it says so
                    importlib.import_module(name)
            # It is no worker, as Python would tell the user, should somebody kill it.
            warnings.filterwarnings("ignore", "forkserver: waitpid")
            tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
            to_fork.fork([waiting, tracker, *self._kept.values()])
            for number, kept in self._kept.items():
                os.dup2(kept, number, inheritable=False)
                os.close(kept)
            with open(waiting) as told:
                # A line, and not to the end: a fork of the driver, by whomever, has the other end, too. Nothing: the
                # driver has ended, and so will this.
                imports = told.readline().strip()
            os.environ[IMPORTS] = imports
            exec(self._code, {})
        finally:
            to_fork.remove_folder()
            os._exit(0)


def _fork(_: str, args: Sequence[str], passed: Iterable[int]) -> int:
    """As `_spawn`, without an interpreter."""
    if pid := os.fork():
        return pid
    raise _Forked(args[-1], passed)


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the fork server of this process, which imports its modules while the caller goes on. Idempotent: one that
    runs keeps what it has. It ends with this process.
    """
    global _waiting
    # What a worker needs of the nursery must not be imported in a fork. The first module imports them all; a server
    # that Python starts again, because somebody killed this one, has no such variable, and imports them one by one.
    imports = [nursery.__name__, *modules]
    told = ",".join(imports)
    if _waiting is not None:
        with contextlib.suppress(BrokenPipeError), open(_waiting, "w") as waiting:
            waiting.write(f"{told}\n")
        _waiting = None
    with _variables({**import_environment(), IMPORTS: told}):
        _ensure_running(imports)


def _ensure_running(imports: Sequence[str], start: Callable[..., int] = _spawn) -> None:
    """start: as Python's own, from the program, its arguments and the descriptors that it keeps to the process id."""
    forkserver.set_forkserver_preload([_IMPORTER, *imports])
    temporary = tempfile.tempdir
    with signals_blocked():
        resource_tracker.ensure_running()  # it unblocks two of them, the first time
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            tempfile.tempdir = socket_folder()  # for the socket of the server, in a folder that Python makes once
            multiprocessing.util.spawnv_passfds = start
            forkserver.ensure_running()
        finally:
            multiprocessing.util.spawnv_passfds = _spawn
            tempfile.tempdir = temporary
    atexit.unregister(_end)
    atexit.register(_end, os.getpid())


@contextlib.contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    """Have those in the environment that are not there."""
    added = given.keys() - os.environ.keys()
    os.environ.update({name: given[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _end(driver: int) -> None:
    # Nobody needs it any more, and it may be in the middle of its imports. Its forks of workers end with it.
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None and os.getpid() == driver:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
