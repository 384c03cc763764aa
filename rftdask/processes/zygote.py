"""Zygote: a preloaded fork server that starts processes of this machine in milliseconds.

A run starts half a dozen processes that import torch, transformers or Dask, which takes each of them seconds of a
core. On Linux without GPUs the imports happen once, in two processes:

- Python's own fork server imports Dask. Dask forks the workers of this machine from it (fork_server.py).
- The zygote (this file) imports torch, transformers and the trainer's rank. Workers ask it for engines and ranks
  (child.py), and the driver has it check algorithms and read tokenizers (`call`), so the driver never imports torch.

The life of a zygote:

1. The driver creates a folder with a listening socket `control`. The fork server forks the zygote as soon as it has
   imported what both need; without a fork server `start_zygote` starts an interpreter. The zygote connects to
   `control` and creates `socket`, its address.
2. The zygote has one thread, since a fork would lack the others. Its loop imports one module, accepts requests, and
   forks for each request whose modules are imported.
3. `ForkedProcess(address, entry, args)` sends a request: entry point, environment, working directory, module path,
   umask and the descriptors of stdin, stdout and stderr. The fork takes over all of these and calls the entry point.
4. The connection stays open. The zygote sends the process id, later the exit code. A byte from the requesting process,
   or the end of its connection, kills the fork.
5. The zygote ends when the driver's end of `control` closes, and the kernel kills its forks.

GPU libraries must not be loaded before a fork, so a machine with GPUs, macOS, and children whose environment affects
imports use new interpreters (child.py), which behave the same and start later.
Invariant: a forked process behaves as a started one; no fork outlives its zygote, and no zygote its driver.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgpack
import setproctitle

from rftdask.storage.temporary import TemporaryFolder

T = TypeVar("T")

MODELS = "transformers.models.auto.modeling_auto"
"""Module that loading any model imports; it includes the imports of a tokenizer."""
RANK = "rftdask.trainer.rank"
TORCH = "torch"
"""Longest import of an algorithm's checks."""
TOKENIZERS = ("transformers.models", "transformers.tokenization_utils_tokenizers")
"""Modules that loading a tokenizer imports; none of them imports torch."""
REGISTERED = "rftdask.config.preload"
"""Module that reads the registered parts of configurations and builds their validator."""
ZYGOTE_ADDRESS = "RFTDASK_ZYGOTE"
"""Environment variable of a worker: socket of the zygote that forks for it."""
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals that a terminal or a batch system sends to all processes of a run. Only the driver acts on them."""
_WAIT_POLICY = "OMP_WAIT_POLICY"
_PASSIVE_WAIT = {_WAIT_POLICY: "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""OpenMP threads spin for microseconds between small operations, then sleep. The default spins on and takes cores from
other processes."""
# A fork would not have the threads of its parent.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_ALLOCATOR = {-3: 32 << 20, -1: 64 << 20}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, the values that glibc reaches once large tensors were freed. With
lower ones each training step would return its memory and fault it in again."""
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!i")
"""A process id, later its exit code."""
_TITLE = "for-worker"
_SOCKET, _CONTROL = "socket", "control"
_POLL_INTERVAL_S = 0.005
_START_TIMEOUT_S = 60.0
_REQUEST_TIMEOUT_S = 5.0
_FORK_TIMEOUT_S = 300.0
"""A fork takes milliseconds after the imports, which take minutes on a busy file system."""
_CALL_TIMEOUT_S = 300.0
_ANY_BYTES = "surrogateescape"
"""Error handler that os.environ uses for values that are not UTF-8."""
_PR_SET_PDEATHSIG = 1
_ADDRESS_BYTES = 107
"""Longest path of a Unix socket."""
_SOCKET_NAME_BYTES = 37
"""Longest socket name below the folder: a slash and a UUID (vLLM), or those of the zygote. Python uses 32."""
# Without this, a title overwrites the environment that ps and /proc show of a process. Dask sets titles as well.
os.environ.setdefault("SPT_NOENV", "1")
_libc = ctypes.CDLL(None)


def socket_folder() -> str:
    """Folder for Unix sockets: TMPDIR, or /tmp if TMPDIR is too long for a socket address."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES <= _ADDRESS_BYTES else "/tmp"


def with_wait_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """Add `_PASSIVE_WAIT` to an environment that does not set OMP_WAIT_POLICY."""
    return {**({} if _WAIT_POLICY in environment else _PASSIVE_WAIT), **environment}


def import_environment() -> dict[str, str]:
    """Environment of a process that others are forked from: libraries read these variables once, at import."""
    return {**_NO_THREADS, **with_wait_policy(os.environ)}


def can_fork(has_gpus: bool) -> bool:
    """True if a process with torch may be a fork: on Linux, and not after GPU libraries were loaded."""
    return sys.platform == "linux" and not has_gpus


class ForkedProcess:
    """A fork of the zygote, with the part of the interface of subprocess.Popen that Child uses.

    stdin and stdout are pipes. Signals go through the zygote, which knows whether the process id is still in use.
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
        """Fork a process that calls `entry` ("module:function") with `args` and only this environment. It takes over
        the working directory, module path and umask of this process.

        needs: modules to wait for if the zygote is about to import them. None: wait for all of its modules.
        Raises: OSError: the zygote has ended.
        """
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._zygote = socket.socket(socket.AF_UNIX)
        child_stdin, stdin = os.pipe()
        stdout, child_stdout = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb")
        self._zygote.settimeout(_FORK_TIMEOUT_S)
        try:
            _connect(self._zygote, address)
            process_state = [os.getcwd(), [*map(str, sys.path)], umask()]
            request = msgpack.packb([entry, list(args), dict(env), *process_state, needs], unicode_errors=_ANY_BYTES)
            socket.send_fds(self._zygote, [_LENGTH.pack(len(request))], [child_stdin, child_stdout, stderr])
            self._zygote.sendall(request)
            reply = self._zygote.recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(reply) < _NUMBER.size:
                raise ConnectionError("the zygote has ended")
            (self.pid,) = _NUMBER.unpack(reply)
        except BaseException:
            for end in (self.stdin, self.stdout, self._zygote):
                end.close()
            raise
        finally:
            os.close(child_stdin)
            os.close(child_stdout)

    def poll(self) -> int | None:
        """Exit code, negative for a signal. None: the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Raises: subprocess.TimeoutExpired: it still runs after `timeout` seconds."""
        poller = select.poll()
        with self._lock:  # another thread closes the socket once it has read the exit code
            if self.returncode is not None:
                return self.returncode
            poller.register(self._zygote, select.POLLIN)
        if not poller.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        with self._lock:  # only one of several waiting threads reads the exit code
            if self.returncode is None:
                reply = b""
                with contextlib.suppress(OSError):
                    reply = self._zygote.recv(_NUMBER.size, socket.MSG_WAITALL)
                # The zygote was killed without a reply, and its forks with it.
                self.returncode = _NUMBER.unpack(reply)[0] if reply else -signal.SIGKILL
                self._zygote.close()
            return self.returncode

    def close(self) -> None:
        """Close the connection, which kills the process if it still runs."""
        self._zygote.close()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._zygote.send(b"k")


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGNALS in this thread and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ZygoteProcess:
    """The driver's handle of its zygote, which connects to the socket `control` in `folder` once it has started."""

    def __init__(self) -> None:
        self._driver = os.getpid()
        self._temporary = TemporaryFolder("forks", socket_folder())
        self.folder = self._temporary.name
        self.address = str(Path(self.folder, _SOCKET))
        self._listener = _listen(Path(self.folder, _CONTROL))
        self._listener.settimeout(_START_TIMEOUT_S)
        self._control: socket.socket | None = None
        self.interpreter: subprocess.Popen[bytes] | None = None
        """Its process, unless the fork server forks it."""
        atexit.register(self._kill)

    def is_running(self) -> bool:
        """True if the process has not ended, also while it starts."""
        if self._control is None:
            if not _is_readable(self._listener, 0.0):
                return self.interpreter is None or self.interpreter.poll() is None
            self._control = self._listener.accept()[0]
        return not _is_readable(self._control, 0.0)  # the zygote sends nothing, so only its end is readable

    def preload(self, modules: Sequence[str]) -> None:
        """Queue imports, in this order. Waits for a zygote that is starting."""
        with contextlib.suppress(OSError):  # the zygote was killed: requests fail, and their callers do without it
            if self._control is None:
                self._control = self._listener.accept()[0]
            self._control.sendall("".join(f"{module}\n" for module in modules).encode())

    def close(self) -> None:
        """Close the sockets, which ends the zygote unless another process has them."""
        self._listener.close()
        if self._control is not None:
            self._control.close()

    def _kill(self) -> None:
        if os.getpid() != self._driver:
            return
        # It may be in the middle of an import. Its forks end with it.
        if self.is_running() and self._control is not None:
            os.kill(_peer_pid(self._control), signal.SIGKILL)
        elif self.interpreter is not None:
            self.interpreter.kill()
        self.close()
        if self.interpreter is not None:
            self.interpreter.wait()
        self._temporary.cleanup()


def _listen(path: Path) -> socket.socket:
    # The name appears when the socket listens, since a connection to a bound one is refused.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}~")
    listener.listen()
    os.rename(f"{path}~", path)
    return listener


def _connect(connection: socket.socket, address: str) -> None:
    """Connect to a zygote, after waiting for it to start. Raises: OSError: it has ended."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            connection.connect(address)
            return
        except FileNotFoundError:
            if not os.path.exists(os.path.dirname(address)) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_INTERVAL_S)


def _is_readable(file: IO[bytes] | socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


def _forget_zygote() -> None:
    # A fork of the driver must not keep the sockets open by which the zygote sees the end of its driver.
    global _started
    if _started is not None:
        _started.close()
        _started = None


os.register_at_fork(after_in_child=_forget_zygote)
_started: ZygoteProcess | None = None
_modules: list[str] = []
"""All modules that were requested, for a zygote that replaces a killed one."""
_starting = threading.Lock()


def _start_interpreter(folder: str, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    # A plain script may have extended sys.path, which PYTHONPATH does not show.
    code = f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; from {__name__} import main; main{folder, modules}"
    with signals_blocked():
        command = [sys.executable, "-P", "-c", code]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=import_environment())


def start_zygote(
    modules: Sequence[str] = (),
    start: Callable[[str, Sequence[str]], subprocess.Popen[bytes] | None] = _start_interpreter,
) -> str:
    """Queue imports in the zygote of this process and return its address. Starts a zygote if none runs.

    start: starts the process that calls `main` with the folder of the zygote and the modules to import; returns the
    process if it is a child of this one.
    """
    global _started
    with _starting:
        new = [name for name in modules if name not in _modules]
        _modules.extend(new)
        if _started is None or not _started.is_running():
            if _started is not None and _started.interpreter is not None:
                _started.interpreter.wait()
            _started = ZygoteProcess()
            _started.interpreter = start(_started.folder, _modules)
        elif new:
            _started.preload(new)
        return _started.address


def call(function: Callable[..., T], *args: Any, needs: Sequence[str] | None = None) -> T:
    """Call a function of a module in a fork of the zygote, so that this process does not import what it imports.

    The function runs in this process if there is no zygote, if the fork is killed or does not answer, or if the answer
    cannot be pickled. needs: see `ForkedProcess`.
    Returns, raises: what the function does.
    """
    if needs and _started is not None and _started.is_running():
        start_zygote(needs)  # otherwise each fork would import them
    address = os.environ.get(ZYGOTE_ADDRESS) if _started is None else _started.address
    if address is None:
        return function(*args)
    try:
        environment = {name: value for name, value in os.environ.items() if name != ZYGOTE_ADDRESS}
        process = ForkedProcess(address, f"{__name__}:answer_call", (), 2, environment, needs=needs)
        with contextlib.closing(process), process.stdin, process.stdout:
            process.stdin.write(pickle.dumps((function, args)))
            process.stdin.close()
            if not _is_readable(process.stdout, _CALL_TIMEOUT_S):
                raise TimeoutError
            value, error = pickle.loads(process.stdout.read())
    except Exception:  # of the transport; an exception of the function is `error`
        return function(*args)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def answer_call() -> None:
    """Entry point of the fork that `call` starts."""
    # Prints of the function go to stderr, because stdout carries the answer.
    with os.fdopen(os.dup(1), "wb") as stdout, os.fdopen(0, "rb") as stdin:
        os.dup2(2, 1)
        answer: tuple[Any, Exception | None]
        try:
            function, args = pickle.load(stdin)
            answer = function(*args), None
        except Exception as error:  # `call` raises it
            answer = None, error
        stdout.write(pickle.dumps(answer))


def main(folder: str, modules: Sequence[str]) -> None:
    """Entry point of the zygote, which imports `modules`. folder: that of its sockets."""
    driver = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # the driver has ended
        driver.connect(str(Path(folder, _CONTROL)))
        setproctitle.setproctitle(f"rftdask zygote of {_peer_pid(driver)}")
    # Modules are not garbage, and a collection would copy their pages in every fork.
    gc.disable()
    with contextlib.suppress(AttributeError):  # a C library without mallopt
        for option, size in _ALLOCATOR.items():
            _libc.mallopt(option, size)
    Zygote(_listen(Path(folder, _SOCKET)), driver, modules).run()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


@dataclass(frozen=True)
class _Request:
    connection: socket.socket
    fds: list[int]
    """stdin, stdout and stderr of the fork."""
    entry: str
    args: list[str]
    env: dict[str, str]
    working_dir: str
    path: list[str]
    umask: int
    needs: list[str] | None
    """See `ForkedProcess`."""

    def close(self) -> None:
        self.connection.close()
        for fd in self.fds:
            os.close(fd)


class Zygote:
    """The loop of the zygote: imports, forks, kills, and sends exit codes."""

    def __init__(self, listener: socket.socket, driver: socket.socket, modules: Sequence[str] = ()) -> None:
        self._listener, self._driver = listener, driver
        self._to_import = [*modules]
        self._connections: dict[int, socket.socket] = {}
        """Connection of the requesting process, by process id of the running fork."""
        self._partial_line = b""
        self._requests: list[_Request] = []
        """Requests that wait for imports."""
        self._wake, self._wakeup = socket.socketpair()

    def run(self) -> None:
        """Serve until the driver's socket closes."""
        for end in (self._wake, self._wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        while True:
            sockets: list[Any] = [self._driver, self._listener, self._wake, *self._connections.values()]
            ready = select.select(sockets, [], [], 0.0 if self._to_import or self._requests else None)[0]
            if self._driver in ready:
                try:
                    data = self._driver.recv(1 << 16)
                except OSError:
                    return
                if not data:
                    return
                *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                self._to_import += map(bytes.decode, lines)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap()
            # A byte or the end of a connection: kill. Reaped forks are not in the dict, so no foreign process is hit.
            for pid in [pid for pid, connection in self._connections.items() if connection in ready]:
                with contextlib.suppress(OSError):
                    self._connections[pid].recv(64)
                os.kill(pid, signal.SIGKILL)
            if self._listener in ready:
                self._accept(self._listener.accept()[0])
                continue  # more requests may have come, and an import takes long
            if (request := next(filter(self._may_fork, self._requests), None)) is not None:
                self._requests.remove(request)
                self._fork(request)
            elif self._to_import:
                with contextlib.suppress(ImportError):  # a fork that needs the module raises this again
                    importlib.import_module(self._to_import.pop(0))

    def _accept(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        fds: list[int] = []
        try:
            head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
            with connection.makefile("rb") as stream:
                data = stream.read(_LENGTH.unpack(head)[0])
            self._requests.append(_Request(connection, fds, *msgpack.unpackb(data, unicode_errors=_ANY_BYTES)))
        except (OSError, struct.error, ValueError, TypeError):  # the requesting process died
            _Request(connection, fds, "", [], {}, "", [], 0, None).close()

    def _may_fork(self, request: _Request) -> bool:
        missing = self._to_import if request.needs is None else set(request.needs).intersection(self._to_import)
        return not missing

    def _fork(self, request: _Request) -> None:
        zygote = os.getpid()
        gc.freeze()  # the collector of the fork ignores what exists now
        try:
            pid = os.fork()
        except OSError:  # out of memory
            request.close()
            return
        if pid == 0:
            # The fork must never return into this loop.
            try:
                self._become(request, zygote)
                module, _, function = request.entry.partition(":")
                # The most important part first: a title may be no longer than the zygote's command line.
                title = [_TITLE, str(_peer_pid(request.connection)), *(request.args or [request.entry])]
                setproctitle.setproctitle(" ".join(title))
                getattr(importlib.import_module(module), function)(*request.args)
            finally:
                os._exit(1)
        for fd in request.fds:
            os.close(fd)
        self._connections[pid] = request.connection
        with contextlib.suppress(OSError):
            request.connection.send(_NUMBER.pack(pid))

    def _become(self, request: _Request, zygote: int) -> None:
        """Turn the fork into the process that was requested: nothing of the zygote but its modules."""
        os.setsid()
        die_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for fd, source in enumerate(request.fds):
            os.dup2(source, fd)
            os.close(source)
        for end in (self._driver, self._listener, self._wake, self._wakeup, *self._connections.values()):
            end.close()
        for other in self._requests:
            other.close()
        os.environ.clear()
        os.environ.update(request.env)
        os.chdir(request.working_dir)
        sys.path[:] = request.path
        os.umask(request.umask)
        reseed_numpy()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.enable()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._connections.pop(ended[0])
                with contextlib.suppress(OSError), connection:
                    connection.send(_NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))


def requester_of(command_line: Sequence[str]) -> int | None:
    """Process id of the process that requested a fork, from the fork's title. None: not a fork of a zygote."""
    match = re.match(rf"{_TITLE} (\d+) ", " ".join(command_line))
    return int(match[1]) if match else None


def _peer_pid(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def umask() -> int:
    """File mode mask of this process. Linux shows it in /proc; os.umask can only read it by setting it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def reseed_numpy() -> None:
    """Seed NumPy's global generator anew after a fork, as Python does with its own."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent `parent` ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
