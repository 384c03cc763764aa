"""Python's own fork server, with the modules that Dask's workers need imported once (zygote.py explains why).

Dask forks the workers of this machine from it. A worker imports nothing of the script that starts it, and no signal
interrupts its start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.spawn
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

import setproctitle

from rftdask.processes import zygote

_PRELOADER = "rftdask.processes.fork_server_preload"
_PLAN = "RFTDASK_PRELOAD"
"""Environment variable of a starting fork server: JSON with the modules to import and the arguments of a zygote."""
_PARENT_CHECK_S = 0.2
_MAX_DESCRIPTORS = 256
"""More than a fork server has opened."""
_is_started = False
WITHOUT_MAIN: set[str] = set()
"""Names of processes that do not import the script that starts them."""
_preparation_data = multiprocessing.spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    # Python imports the user's script in each process. A script without a `__main__` guard would start its run again;
    # our processes need nothing of it, because what they receive is importable or pickled by value.
    # `%reset` in a notebook deletes __spec__, which Python reads.
    vars(sys.modules["__main__"]).setdefault("__spec__", None)
    data = _preparation_data(name)
    if name in WITHOUT_MAIN:
        for key in ("init_main_from_name", "init_main_from_path"):
            data.pop(key, None)
    return data


multiprocessing.spawn.get_preparation_data = _without_main


def start_fork_server(modules: Sequence[str], zygote_modules: Sequence[str] | None = None) -> None:
    """Start the fork server of this process, which imports `modules` in the background. It ends with this process. A
    running server keeps what it has imported.

    zygote_modules: modules that the zygote imports, which is started as well. None: start no zygote.
    """
    global _is_started
    # Workers must not import the client of the zygote after the fork. `preload` imports all modules; a server that
    # Python starts again after a kill has no variable, and imports them one after the other.
    modules = [zygote.__name__, *modules]
    plan: dict[str, Any] = {"driver": os.getpid(), "modules": modules}
    if zygote_modules is not None and _is_started:
        zygote.start_zygote(zygote_modules)
    elif zygote_modules is not None:
        zygote.start_zygote(zygote_modules, lambda *arguments: plan.update(zygote=arguments))
    _is_started = True
    forkserver.set_forkserver_preload([_PRELOADER, *modules])
    variables = {**zygote.import_environment(), _PLAN: json.dumps(plan)}
    added = variables.keys() - os.environ.keys()
    temporary_folder = tempfile.tempdir
    with zygote.signals_blocked():
        resource_tracker.ensure_running()  # its first call unblocks two signals
        signal.pthread_sigmask(signal.SIG_BLOCK, zygote.SIGNALS)
        os.environ.update({name: variables[name] for name in added})
        try:
            tempfile.tempdir = zygote.socket_folder()  # of the server's socket; Python creates a folder there once
            forkserver.ensure_running()
        finally:
            tempfile.tempdir = temporary_folder
            for name in added:
                del os.environ[name]


def preload() -> None:
    """Import the modules of a starting fork server and fork the zygote from it.

    The garbage collector is off meanwhile and ignores the modules later: a collection writes to every object, and so
    copies its page in every fork.
    """
    # Before any worker replaces the environment, in which setproctitle finds where to write titles.
    setproctitle.setproctitle(f"rftdask fork server of {os.getppid()}")
    if _PLAN not in os.environ:
        return
    plan = json.loads(os.environ.pop(_PLAN))

    def end_with_driver(*_: object) -> None:
        if os.getppid() != plan["driver"]:
            os._exit(1)

    # Python's fork server notices the end of its driver only when all imports are done.
    signal.signal(signal.SIGALRM, end_with_driver)
    signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_S, _PARENT_CHECK_S)
    gc.disable()
    # The modules that the zygote also needs come first.
    modules = sorted(plan["modules"], key=lambda name: name not in (zygote.REGISTERED, *zygote.TOKENIZERS))
    for name in modules:
        if "zygote" in plan and name not in (zygote.REGISTERED, *zygote.TOKENIZERS):
            _fork_zygote(*plan.pop("zygote"))
        with contextlib.suppress(ImportError):  # a fork that needs the module raises this again
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _fork_zygote(folder: str, modules: Sequence[str]) -> None:
    if os.fork():
        # The zygote is not a worker, whose end Python's fork server would expect.
        warnings.filterwarnings("ignore", "forkserver: waitpid")
        return
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.closerange(3, _MAX_DESCRIPTORS)  # the sockets of the fork server
        zygote.main(folder, modules)
    finally:
        os._exit(1)
