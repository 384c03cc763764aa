"""Fork server: Python's own, of which Dask forks the workers of this machine, with what they import imported once.

A worker's process neither imports the script that starts it nor is ended by a signal half-way through its start.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.spawn
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from rftdask.processes import nursery
from rftdask.processes.nursery import ENVIRONMENT, SIGNALS, signals_blocked, socket_folder

IMPORTS = "RFTDASK_IMPORTS"
"""Environment of a fork server that begins: the modules that forked_imports.py imports, with commas between them."""
WITHOUT_MAIN: set[str] = set()
"""Names of processes that need nothing of the script that starts them."""
_preparation_data = multiprocessing.spawn.get_preparation_data


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


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the fork server of this process, which imports its modules while the caller goes on. Idempotent: one that
    runs keeps what it has. It ends with this process.
    """
    # What a worker needs of the nursery must not be imported in a fork. The first module imports them all; a server
    # that Python starts again, because somebody killed this one, has no such variable, and imports them one by one.
    imports = [nursery.__name__, *modules]
    forkserver.set_forkserver_preload(["rftdask.processes.forked_imports", *imports])
    environment = {**ENVIRONMENT, IMPORTS: ",".join(imports)}
    added = environment.keys() - os.environ.keys()
    temporary = tempfile.tempdir
    with signals_blocked():
        resource_tracker.ensure_running()  # it unblocks two of them, the first time
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.environ.update({name: environment[name] for name in added})
        try:
            tempfile.tempdir = socket_folder()  # for the socket of the server, in a folder that Python makes once
            forkserver.ensure_running()
        finally:
            tempfile.tempdir = temporary
            for name in added:
                del os.environ[name]
    atexit.unregister(_end)
    atexit.register(_end, os.getpid())


def _end(driver: int) -> None:
    # Nobody needs it any more, and it may be in the middle of its imports. Its forks of workers end with it.
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None and os.getpid() == driver:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
