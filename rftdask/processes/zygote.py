"""Nursery: processes of this machine that start in milliseconds, as forks of one that has imported what they need.

A run on one machine starts half a dozen processes that import torch, transformers or Dask, which takes each of them
seconds of a core. Two processes do it for all of them, beside each other. Python's fork server imports Dask, and Dask
forks its workers of it (fork_server.py). The nursery, a process of one thread, imports torch and transformers, and
forks for the workers what they ask it for (child.py): as soon as all is imported, so a worker may ask before. It is an
interpreter of its own, or, of a command that has only just begun, a fork of the fork server, once that has what both
take.

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
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

import msgpack
import setproctitle

T = TypeVar("T")

MODELS = "transformers.models.auto.modeling_auto"
"""What loading any model imports; it brings what finding a tokenizer takes, too."""
RANK = "rftdask.trainer.rank"
"""What a trainer's rank is."""
TORCH = "torch"
"""What checking an algorithm takes longest to import."""
TOKENIZERS = ("transformers.models", "transformers.tokenization_utils_tokenizers")
"""What having a tokenizer imports, and loading any model, too; none of it loads torch."""
REGISTERED = "rftdask.config.parts"
"""Module that imports the schema of a configuration."""
ADDRESS = "RFTDASK_NURSERY"
"""Environment of a worker: the socket of the nursery that forks for it."""
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""What a terminal or a batch system sends to all processes of a run, of which only the driver acts on it."""
_WAIT_POLICY = "OMP_WAIT_POLICY"
_WAITING = {_WAIT_POLICY: "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""Threads that wait for each other spin for the microseconds from one small operation to the next, and then sleep. By
themselves they spin on, which takes the cores from those that are waited for where others need them, too."""
# Threads are what a fork would not have.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_ALLOCATOR = {-3: 32 << 20, -1: 64 << 20}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, in bytes, where glibc's own end up once large tensors were freed. Below them
each step would give back, and fault in again, what it computes with; Dask has even less in the environment of what
starts after its workers."""
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!i")
"""A process id, then its exit code."""
_ASKER = "for-worker"
_CLOSE_S = 5.0
_FORK_S = 300.0
"""For a fork, which takes milliseconds once the imports are done, and those minutes from a storage that is busy."""
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
_libc = ctypes.CDLL(None)


def socket_folder() -> str:
    """Where sockets can be: TMPDIR, or /tmp where that is too long for their addresses."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES <= _ADDRESS_BYTES else "/tmp"


def with_wait_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that says how threads wait for each other: as it says itself, else as `_WAITING`."""
    return {**({} if _WAIT_POLICY in environment else _WAITING), **environment}


def import_environment() -> dict[str, str]:
    """That of this process, with what libraries read once, as they are imported where others are forked."""
    return {**_NO_THREADS, **with_wait_policy(os.environ)}


def can_fork(has_gpus: bool) -> bool:
    """Whether what has torch may be a fork: not where the libraries of a GPU were touched before it, nor on macOS."""
    return sys.platform == "linux" and not has_gpus


class Forked:
    """A process that the nursery forked, as its asker sees it; the part of subprocess.Popen that Child uses.

    Its stdin and stdout are pipes. Invariant: signals go through the nursery, which alone knows whose number it is.
    """

    def __init__(
        self,
        address: str,
        entry: str,
        args: Sequence[str],
        stderr: int,
        env: Mapping[str, str],
        *,
        needs: Sequence[str] | None = None,
    ) -> None:
        """Fork a process that calls `entry` ("module:function") with `args`, in this environment and no other, in the
        working folder and with the paths of modules that this process has.

        needs: modules after whose import it is forked; those that the nursery is not to import it imports by itself.
        None: all that the nursery is to import.
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
            place = [os.getcwd(), [*map(str, sys.path)], umask()]
            wanted = msgpack.packb([entry, list(args), dict(env), *place, needs], unicode_errors=_ANY_BYTES)
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

    def close(self) -> None:
        """Ask no more after it; it is killed, if it still runs, as soon as the nursery has imported what it is at."""
        self._nursery.close()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(OSError):
            self._nursery.send(b"k")


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Have what this thread starts, and all that is forked of that, begin without signals that are not for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StartedNursery:
    """The nursery of this process, as seen from here."""

    def __init__(self) -> None:
        self._driver = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="rftdask-nursery-", dir=socket_folder())  # only its owner may enter
        self.address = str(Path(self._folder, "socket"))
        self.control, self._theirs = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def start(self) -> None:
        """Start it as an interpreter."""
        fds = (self._listener.fileno(), self._theirs.fileno())
        # Modules are found as here, whatever the folder: not by PYTHONPATH alone, as a plain script may have it.
        path = [*map(str, sys.path)]
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main{(*fds, self._folder)}"
        with signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, pass_fds=fds, env=import_environment()
            )
        self.leave_to_it()

    def fork(self, not_for_it: Iterable[int]) -> None:
        """Start it as a fork of this process, which is a fork of the driver, with SIGNALS blocked and one thread; it
        ends with this one, too. not_for_it: descriptors that it is not to have.
        """
        self.control.close()
        parent = os.getpid()
        if os.fork():
            self.leave_to_it()
            return
        try:
            end_with(parent)
            for fd in not_for_it:
                os.close(fd)
            # As an interpreter of its own would have it.
            sys.argv[:], sys.modules["__main__"] = ["-c"], ModuleType("__main__")
            stdin = os.open(os.devnull, os.O_RDONLY)
            os.dup2(stdin, 0)
            os.close(stdin)
            main(self._listener.detach(), self._theirs.detach(), self._folder)
        finally:
            os._exit(1)

    def leave_to_it(self) -> None:
        """Close its ends, where there is a process that has them."""
        self._listener.close()
        self._theirs.close()

    def runs(self) -> bool:
        """Whether it has not ended."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        return not poller.poll(0)  # it tells nothing there but its end

    def have_imported(self, modules: Sequence[str]) -> None:
        """Let it import these, in this order, before it forks for a worker."""
        with contextlib.suppress(OSError):  # somebody kills it: nobody will answer
            self.control.sendall("".join(f"{module}\n" for module in modules).encode())

    def _end(self) -> None:
        # Nobody needs it any more, and it may be in the middle of its imports. Its forks end with it.
        if os.getpid() == self._driver:
            if self._process is not None:  # else it ends with the process that forked it
                self._process.kill()
                self._process.wait()
            self.control.close()
            self.remove_folder()

    def remove_folder(self) -> None:
        """Remove that of its socket, where it or its driver has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _leave() -> None:
    """In a fork of this process, by whomever: have nothing of the nursery, which ends with its driver."""
    global _started
    if _started is not None:
        _started.control.close()
        _started = None


os.register_at_fork(after_in_child=_leave)
_started: StartedNursery | None = None
_wanted: list[str] = []
"""Modules that it was to import."""
_starting = threading.Lock()


def start_nursery(modules: Sequence[str] = ()) -> str:
    """Have `modules` imported by the nursery of this process, in this order, while the caller goes on; the address of
    its socket. It is started if there is none that runs, and ends with this process.
    """
    global _started
    with _starting:
        _wanted.extend(name for name in modules if name not in _wanted)
        if _started is None or not _started.runs():
            _started, modules = StartedNursery(), _wanted
            _started.start()
        _started.have_imported(modules)
        return _started.address


@contextlib.contextmanager
def nursery_to_fork(modules: Sequence[str]) -> Iterator[StartedNursery]:
    """A block in which a process that has only just begun forks one that forks its nursery; then as `start_nursery`."""
    global _started
    started = StartedNursery()
    yield started
    started.leave_to_it()
    _wanted.extend(modules)
    _started = started
    _started.have_imported(modules)


def call(function: Callable[..., T], *args: Any, needs: Sequence[str] | None = None) -> T:
    """What `function`, of a module, returns or raises in a fork of the nursery that this process has started or, being
    a worker, asks; its imports are not this process's then. Where there is no nursery, that process does not answer
    (somebody kills it), or its answer cannot be brought over: in this one. needs: as of `Forked`.
    """
    address = os.environ.get(ADDRESS) if _started is None else _started.address
    if address is None:
        return function(*args)
    try:
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
        forked = Forked(address, f"{__name__}:answer", (), 2, environment, needs=needs)
        with contextlib.closing(forked), forked.stdin, forked.stdout:
            forked.stdin.write(pickle.dumps((function, args)))
            forked.stdin.close()
            poller = select.poll()
            poller.register(forked.stdout, select.POLLIN)
            if not poller.poll(1000 * _CALL_S):
                raise TimeoutError
            value, error = pickle.loads(forked.stdout.read())
    except Exception:  # of the way there and back; what the function raises comes as `error`
        return function(*args)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def answer() -> None:
    """Entry of a fork that `call` asks for: read what to do, do it, and tell what came of it."""
    # What the function prints is no part of the answer.
    with os.fdopen(os.dup(1), "wb") as told, os.fdopen(0, "rb") as asked:
        os.dup2(2, 1)
        answer: tuple[Any, Exception | None]
        try:
            function, args = pickle.load(asked)
            answer = function(*args), None
        except Exception as error:  # raised again by who called
            answer = None, error
        told.write(pickle.dumps(answer))


def main(listener: int, driver: int, folder: str) -> None:
    """Entry of the nursery. listener, driver: descriptors of the sockets where workers ask, and of the driver."""
    of = socket.socket(fileno=driver)
    setproctitle.setproctitle(f"rftdask nursery of {_peer(of)}")
    # What is imported is no garbage, and a look of the collector would copy its pages in every fork.
    gc.disable()
    with contextlib.suppress(AttributeError):  # another C library
        for number, size in _ALLOCATOR.items():
            _libc.mallopt(number, size)
    _Nursery(socket.socket(fileno=listener), of).run()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


@dataclass(frozen=True)
class _Request:
    """What an asker wants, and its end of the connection."""

    asker: socket.socket
    fds: list[int]
    """What are to be stdin, stdout and stderr."""
    entry: str
    args: list[str]
    env: dict[str, str]
    folder: str
    """Working folder."""
    path: list[str]
    """Where modules are looked for."""
    mask: int
    """Of the modes of files."""
    needs: list[str] | None
    """See `Forked`."""


def _close(asker: socket.socket, fds: Sequence[int]) -> None:
    asker.close()
    for fd in fds:
        os.close(fd)


class _Nursery:
    """The loop of the nursery: it imports, forks, kills, and tells how forks ended."""

    def __init__(self, listener: socket.socket, driver: socket.socket) -> None:
        self._listener, self._driver = listener, driver
        self._askers: dict[int, socket.socket] = {}
        """Of the forks that run, by process id."""
        self._told = b""
        """The beginning of a line of the driver's."""
        self._to_import: list[str] = []
        self._waiting: list[_Request] = []
        """Requests for what has these modules."""
        self._wake, self._woken = socket.socketpair()

    def run(self) -> None:
        """Fork until the driver is gone; then the forks go, too."""
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        while True:
            waited: list[Any] = [self._driver, self._listener, self._wake, *self._askers.values()]
            ready = select.select(waited, [], [], 0.0 if self._to_import or self._waiting else None)[0]
            if self._driver in ready:
                told = self._driver.recv(1 << 16)
                if not told:
                    return
                *lines, self._told = (self._told + told).split(b"\n")
                for name in map(bytes.decode, lines):
                    if name not in sys.modules and name not in self._to_import:
                        self._to_import.append(name)
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
                self._take(self._listener.accept()[0])
                continue  # others may have asked meanwhile, and an import takes its time
            if (request := next(filter(self._may_fork, self._waiting), None)) is not None:
                self._waiting.remove(request)
                self._fork(request)
            elif self._to_import:
                with contextlib.suppress(ImportError):  # a fork that needs it says so
                    importlib.import_module(self._to_import.pop(0))

    def _take(self, asker: socket.socket) -> None:
        asker.settimeout(_CLOSE_S)
        fds: list[int] = []
        try:
            head, fds, _, _ = socket.recv_fds(asker, _LENGTH.size, 3)
            with asker.makefile("rb") as stream:  # as many pieces as it comes in
                wanted = stream.read(_LENGTH.unpack(head)[0])
            request = _Request(asker, fds, *msgpack.unpackb(wanted, unicode_errors=_ANY_BYTES))
        except (OSError, struct.error, ValueError, TypeError):  # it died as it asked
            _close(asker, fds)
            return
        self._waiting.append(request)

    def _may_fork(self, request: _Request) -> bool:
        missing = self._to_import if request.needs is None else set(request.needs).intersection(self._to_import)
        return not missing

    def _fork(self, request: _Request) -> None:
        nursery = os.getpid()
        gc.freeze()  # in the fork, the collector does not look at what is there now
        try:
            pid = os.fork()
        except OSError:  # there is no memory for another process
            _close(request.asker, request.fds)
            return
        if pid == 0:
            # Nothing of this loop may run in the fork, whatever happens.
            try:
                self._become(request, nursery)
                module, _, function = request.entry.partition(":")
                # What matters first: there may be room for no more than the command line of the driver had.
                title = [_ASKER, str(_peer(request.asker)), *(request.args or [request.entry])]
                setproctitle.setproctitle(" ".join(title))
                getattr(importlib.import_module(module), function)(*request.args)
            finally:
                os._exit(1)
        for fd in request.fds:
            os.close(fd)
        self._askers[pid] = request.asker
        with contextlib.suppress(OSError):
            request.asker.send(_NUMBER.pack(pid))

    def _become(self, request: _Request, nursery: int) -> None:
        os.setsid()
        end_with(nursery)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for fd, source in enumerate(request.fds):
            os.dup2(source, fd)
            os.close(source)
        for end in (self._driver, self._listener, self._wake, self._woken, *self._askers.values()):
            end.close()
        for other in self._waiting:
            _close(other.asker, other.fds)
        # As a started process would have it: only what the asker gave.
        os.environ.clear()
        os.environ.update(request.env)
        os.chdir(request.folder)
        sys.path[:] = request.path
        os.umask(request.mask)
        # One of its own, if it needs one: the driver's would complain of what a process that was killed has left.
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        reseed()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.enable()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                asker = self._askers.pop(dead[0])
                with contextlib.suppress(OSError), asker:
                    asker.send(_NUMBER.pack(os.waitstatus_to_exitcode(dead[1])))


def asker_of(command_line: Sequence[str]) -> int | None:
    """The process that asked for a fork, which is not its parent, from what ps shows of the fork. None: it is none."""
    found = re.match(rf"{_ASKER} (\d+) ", " ".join(command_line))
    return int(found[1]) if found else None


def _peer(asker: socket.socket) -> int:
    """The process at the other end."""
    pid, _, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


def umask() -> int:
    """The file mode mask of this process; of Linux, where nobody has to set it to read it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def reseed() -> None:
    """Give NumPy's global generator a state of its own, as Python gives its own after a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)
