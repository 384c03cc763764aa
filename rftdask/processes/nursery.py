"""Nursery: processes of this machine that start in milliseconds, as forks of one that has imported what they need.

A run on one machine starts half a dozen processes that import torch, transformers or Dask, which takes each of them
seconds of a core. Here one process does it for all of them: Python's own fork server, of which Dask forks its workers.
Below it is a nursery, a process of one thread, which forks for the workers what they ask it for (child.py).

Only on Linux, and where no GPU is planned: a GPU's libraries must not be touched before a fork. Elsewhere, and where a
child has an environment that its imports may read, a process is an interpreter of its own, which does the same later.
Invariant: a process that was forked behaves as one that was not; and no fork outlives its nursery, or that its driver.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.spawn
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

import msgpack
import setproctitle

T = TypeVar("T")

ADDRESS = "RFTDASK_NURSERY"
"""Environment of a worker: the socket of the nursery that forks for it."""
IMPORTS = "RFTDASK_IMPORTS"
"""Environment of a fork server that begins: the modules that forked_imports.py imports, with commas between them."""
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""What a terminal or a batch system sends to all processes of a run, of which only the driver acts on it."""
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # It would start threads, which a fork would not have.
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What libraries read once, as they are imported."""
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!i")
"""A process id, then its exit code."""
NURSERY = "rftdask nursery"
"""Name of its process."""
WITHOUT_MAIN = {NURSERY}
"""Names of processes that need nothing of the script that starts them."""
_ASKER = "for-worker"
_CLOSE_S = 5.0
_FORK_S = 60.0
"""For a fork, which takes milliseconds unless the machine is out of memory."""
_CALL_S = 300.0
"""For a call, which checks a configuration in seconds."""
_ANY_BYTES = "surrogateescape"
"""How os.environ has values that are no UTF-8."""
_PR_SET_PDEATHSIG = 1
_ADDRESS_BYTES = 107
"""Of a socket, with its name."""
_SOCKET_NAME_BYTES = 37
"""Of the longest name below the folder: a slash and a UUID, vLLM's; Python's and the nursery's take 32."""
# Else a title is written over what ps and /proc tell of a process's environment; Dask gives titles, too.
os.environ.setdefault("SPT_NOENV", "1")
_is_started = False
_context = multiprocessing.get_context("forkserver")
_libc = ctypes.CDLL(None)


def socket_folder() -> str:
    """Where sockets can be: TMPDIR, or /tmp where that is too long for their addresses."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES <= _ADDRESS_BYTES else "/tmp"


def can_fork(has_gpus: bool) -> bool:
    """Whether what has torch may be a fork: not where the libraries of a GPU were touched before it, nor on macOS."""
    return sys.platform == "linux" and not has_gpus


class Forked:
    """A process that the nursery forked, as its asker sees it; the part of subprocess.Popen that Child uses.

    Its stdin and stdout are pipes. Invariant: signals go through the nursery, which alone knows whose number it is.
    """

    def __init__(self, address: str, entry: str, args: Sequence[str], stderr: int, env: Mapping[str, str]) -> None:
        """Fork a process that calls `entry` ("module:function") with `args`, in this environment and no other.

        Raises: OSError: there is no nursery any more.
        """
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._nursery = socket.socket(socket.AF_UNIX)
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(ours_in, "wb")
        self.stdout: IO[bytes] = os.fdopen(ours_out, "rb")
        self._nursery.settimeout(_FORK_S)
        try:
            self._nursery.connect(address)
            wanted = msgpack.packb([entry, list(args), dict(env)], unicode_errors=_ANY_BYTES)
            socket.send_fds(self._nursery, [_LENGTH.pack(len(wanted))], [theirs_in, theirs_out, stderr])
            self._nursery.sendall(wanted)
            told = self._nursery.recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(told) < _NUMBER.size:
                raise ConnectionError("the nursery has ended")
            (self.pid,) = _NUMBER.unpack(told)
        except BaseException:
            for end in (self.stdin, self.stdout, self._nursery):
                end.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises: subprocess.TimeoutExpired: not after `timeout` seconds."""
        poller = select.poll()
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            poller.register(self._nursery, select.POLLIN)
        if not poller.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        with self._lock:  # one of several threads that waited takes the answer
            if self.returncode is None:
                told = b""
                with contextlib.suppress(OSError):
                    told = self._nursery.recv(_NUMBER.size, socket.MSG_WAITALL)
                # Nothing told: the nursery was killed, and so were its forks.
                self.returncode = _NUMBER.unpack(told)[0] if told else -signal.SIGKILL
                self._nursery.close()
            return self.returncode

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(OSError):
            self._nursery.send(b"k")


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


def start(modules: Sequence[str]) -> None:
    """Start the fork server of this process, which imports its modules while the caller goes on. Idempotent: one that
    runs keeps what it has. It ends with this process.
    """
    global _is_started
    if not _is_started:
        atexit.register(_end_fork_server, os.getpid())
    _is_started = True
    # This module, too: what the nursery needs must not be imported in a fork. The first imports them all; a server that
    # Python starts again, because somebody killed this one, has no such variable, and imports them one by one.
    imports = [__name__, *modules]
    forkserver.set_forkserver_preload(["rftdask.processes.forked_imports", *imports])
    environment = {**_ENVIRONMENT, IMPORTS: ",".join(imports)}
    before = {name: os.environ.get(name) for name in environment}
    # Both servers, and all that is forked, have the mask of this thread.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # it unblocks two of them, the first time
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ.update({name: value for name, value in environment.items() if before[name] is None})
    temporary = tempfile.tempdir
    try:
        tempfile.tempdir = socket_folder()  # for the socket of the server, in a folder that Python makes once
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = temporary
        for name, value in before.items():
            if value is None:
                del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _end_fork_server(driver: int) -> None:
    # Nobody needs it any more, and it may be in the middle of its imports. Its forks of workers end with it.
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None and os.getpid() == driver:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def call(function: Callable[..., T], *args: Any) -> T:
    """What `function`, of a module, returns or raises in a fork of this process's fork server, once that is ready; its
    imports are not this process's then. Where there is no fork server, that process does not answer (somebody kills
    it), or its answer cannot be pickled: in this one.
    """
    if not _is_started:
        return function(*args)
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_call, args=(theirs, function, args), name=NURSERY, daemon=True)
    try:
        with ours:
            with theirs:
                process.start()
            if not ours.poll(_CALL_S):
                process.kill()
            value, error = ours.recv()
        process.join()
    except Exception:  # of the way there and back; what the function raises comes as `error`
        return function(*args)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _call(told: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    answer: tuple[Any, Exception | None]
    try:
        answer = function(*args), None
    except Exception as error:  # raised again by who called
        answer = None, error
    told.send(answer)
    told.close()


@contextlib.contextmanager
def nursery() -> Iterator[str]:
    """A nursery below the fork server: the address of its socket, in a folder that only its owner may enter."""
    folder = tempfile.mkdtemp(prefix="rftdask-nursery-", dir=socket_folder())
    address = str(Path(folder, "socket"))
    ours, theirs = _context.Pipe()
    with socket.socket(socket.AF_UNIX) as listener, theirs:
        listener.bind(address)
        listener.listen()
        args = (listener, theirs, umask())
        process = _context.Process(target=_Nursery.main, args=args, name=NURSERY, daemon=True)
        with contextlib.suppress(OSError, EOFError):  # somebody killed the fork server: nobody will answer there
            process.start()
    # Who leaves without an end to this block, such as a thread at the end of its process, ends the nursery, too: Python
    # would wait for it for ever.
    atexit.register(ours.close)
    try:
        yield address
    finally:
        atexit.unregister(ours.close)
        ours.close()
        if process.pid is not None:
            process.join(_CLOSE_S)
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


class _Nursery:
    """The loop of the nursery: it forks, kills, and tells how forks ended."""

    def __init__(self, listener: socket.socket, driver: Connection) -> None:
        self._listener, self._driver = listener, driver
        self._askers: dict[int, socket.socket] = {}
        """Of the forks that run, by process id."""
        self._wake, self._woken = socket.socketpair()

    @classmethod
    def main(cls, listener: socket.socket, driver: Connection, mask: int) -> None:
        """Entry: fork until the driver is gone; then the forks go, too. mask: theirs, as that of the driver now."""
        end_with(os.getppid())
        os.umask(mask)
        setproctitle.setproctitle(f"rftdask nursery of {os.getppid()}")
        gc.freeze()  # also what came since the imports: a look of the collector would copy its pages in every fork
        cls(listener, driver)._run()
        os._exit(0)

    def _run(self) -> None:
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        while True:
            waited: list[Any] = [self._driver, self._listener, self._wake, *self._askers.values()]
            ready = select.select(waited, [], [])[0]
            # Readable only when closed: the driver sends nothing.
            if self._driver in ready:
                return
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._bury()
            # Who asked has closed its end, or wants it dead; those that were buried are no one's any more.
            for pid in [pid for pid, asker in self._askers.items() if asker in ready]:
                with contextlib.suppress(OSError):
                    self._askers[pid].recv(64)
                os.kill(pid, signal.SIGKILL)
            if self._listener in ready:
                self._answer(self._listener.accept()[0])

    def _answer(self, asker: socket.socket) -> None:
        asker.settimeout(_CLOSE_S)
        fds: list[int] = []
        nursery = os.getpid()
        try:
            head, fds, _, _ = socket.recv_fds(asker, _LENGTH.size, 3)
            with asker.makefile("rb") as stream:  # as many pieces as it comes in
                wanted = stream.read(_LENGTH.unpack(head)[0])
            entry, args, env = msgpack.unpackb(wanted, unicode_errors=_ANY_BYTES)
            pid = os.fork()
        except (OSError, struct.error, ValueError):  # it died as it asked, or there is no memory for another process
            asker.close()
            for fd in fds:
                os.close(fd)
            return
        if pid == 0:
            # Nothing of this loop may run in the fork, whatever happens.
            try:
                self._become(env, fds, nursery)
                module, _, function = entry.partition(":")
                of = f"{_ASKER} {_peer(asker)}"
                setproctitle.setproctitle(" ".join([sys.executable, "-m", module, *args, of]))
                getattr(importlib.import_module(module), function)(*args)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        self._askers[pid] = asker
        with contextlib.suppress(OSError):
            asker.send(_NUMBER.pack(pid))

    def _become(self, env: dict[str, str], fds: list[int], nursery: int) -> None:
        os.setsid()
        end_with(nursery)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for fd, source in enumerate(fds):
            os.dup2(source, fd)
            os.close(source)
        self._driver.close()
        for end in (self._listener, self._wake, self._woken, *self._askers.values()):
            end.close()
        # As a started process would have it: only what the asker gave.
        os.environ.clear()
        os.environ.update(env)
        # One of its own, if it needs one: the driver's would complain of what a process that was killed has left.
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        reseed()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                asker = self._askers.pop(dead[0])
                with contextlib.suppress(OSError), asker:
                    asker.send(_NUMBER.pack(os.waitstatus_to_exitcode(dead[1])))


def asker_of(command_line: Sequence[str]) -> int | None:
    """The process that asked for a fork, which is not its parent, from what ps shows of the fork. None: it is none."""
    _, found, pid = " ".join(command_line).rpartition(f"{_ASKER} ")
    return int(pid) if found else None


def _peer(asker: socket.socket) -> int:
    """The process at the other end."""
    pid, _, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


def umask() -> int:
    """The file mode mask of this process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def reseed() -> None:
    """Give NumPy's global generator a state of its own, as Python gives its own after a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)
