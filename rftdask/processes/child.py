"""Child: a process below a Dask worker, for code that may block, hang or hold a GPU (engines, trainer ranks).

Parent and child exchange msgpack messages over the child's stdin and stdout. The child ends when its stdin closes, so
it never outlives its worker. Its prints go to a log file, whose last lines are part of the error when it dies. If a
zygote exists (zygote.py), the child is its fork and skips the imports. This module knows neither Dask nor the tasks of
children.

Parent:
    child = Child("rftdask.engines.server:serve", {"model_path": ...}, threads=1)
    answer = child.request({"method": "generate", ...}, timeout_s=600)
Child:
    def serve(spec: dict, channel: Channel) -> None:
        for message in channel: channel.send(...)
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgpack

from rftdask import errors
from rftdask.errors import (
    ConfigError,
    OperatorError,
    ProcessLostError,
    RftError,
    RoleError,
    UserError,
    WaitTimeout,
    lacks_training,
)
from rftdask.processes.zygote import ZYGOTE_ADDRESS, ForkedProcess, with_wait_policy
from rftdask.storage.safe_text import SafeFormatter, encodable, safe
from rftdask.storage.temporary import TemporaryFolder

_MODULE = "rftdask.processes.child"  # __name__ is __main__ in a new interpreter
_READ_BYTES = 1 << 20
_TAIL_LINES = 20
LOG_LEVEL = "RFTDASK_LOG_LEVEL"
"""Environment variable: log level of children."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RFTDASK_THREADS")


def _messages(stream: IO[bytes]) -> Iterator[Any]:
    """Messages until the end of the stream; an incomplete last one is dropped."""
    # A buffered file would wait until the buffer of the unpacker is full.
    raw = os.fdopen(stream.fileno(), "rb", buffering=0, closefd=False)
    return iter(msgpack.Unpacker(raw, read_size=_READ_BYTES, max_buffer_size=0, strict_map_key=False))


def _start_process(
    target: str, threads: int, stderr: IO[bytes], env: Mapping[str, str], *, may_fork: bool, needs: Sequence[str] | None
) -> subprocess.Popen[bytes] | ForkedProcess:
    variables = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    # Dask's nanny sets the math libraries to one thread; a child has its own cores.
    environment = with_wait_policy({**os.environ, **variables, "TOKENIZERS_PARALLELISM": "false", **env})
    # Dask makes the allocator return memory at once. In training each activation would cause page faults, a third of
    # the time.
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    address = environment.pop(ZYGOTE_ADDRESS, None)
    if address is not None and may_fork:
        with contextlib.suppress(OSError):  # the zygote has ended
            return ForkedProcess(address, f"{_MODULE}:main", (target,), stderr.fileno(), environment, needs=needs)
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        # Only the driver acts on Ctrl-C; a child ends when its stdin closes.
        start_new_session=True,
    )


class Child:
    """The parent's handle of a child process."""

    def __init__(
        self,
        target: str,
        spec: Mapping[str, Any],
        *,
        name: str,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        may_fork: bool = True,
        needs: Sequence[str] | None = None,
    ) -> None:
        """Run `target` ("module:function") in a new process, with `threads` threads for its math libraries.

        may_fork: the process may be a fork of the zygote. False: `env` affects imports.
        needs: modules that it imports, see `ForkedProcess`.
        """
        self.name = name
        self._own_folder = None if log_file else TemporaryFolder("child")
        self._log_file = log_file or Path(self._own_folder.name, f"{name}.log")  # type: ignore[union-attr]
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            self._process = _start_process(target, threads, log, env or {}, may_fork=may_fork, needs=needs)
        self.pid = self._process.pid
        self._messages: queue.Queue[Any] = queue.Queue()
        # A thread, so that a busy parent never blocks its child.
        threading.Thread(target=self._pump, name=f"{name}-reader", daemon=True).start()
        self.send(dict(spec))

    def alive(self) -> bool:
        """True if the process has not ended; it may hang."""
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Send the child a message. Raises: ProcessLostError: it has ended; ValueError: msgpack cannot encode it."""
        assert self._process.stdin is not None
        data = msgpack.packb(message)  # first: its error does not mean that the child has ended
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # ValueError: `close` was called
            raise self._death() from error

    def receive(self, timeout_s: float) -> Any:
        """Receive a message. Raises: WaitTimeout: none came; ProcessLostError: the child ended; errors of the child."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise WaitTimeout(f"{self.name} (pid {self.pid}) sent no message for {timeout_s:.0f} s") from None
        if message is None:
            self._messages.put(None)
            raise self._death()
        if isinstance(message, dict) and "child_error" in message:
            raise self._failure(**message["child_error"])
        return message

    def request(self, message: Any, timeout_s: float) -> Any:
        self.send(message)
        return self.receive(timeout_s)

    def close(self, grace_s: float = 2.0) -> None:
        """End the child: close its stdin, wait `grace_s`, then kill."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        try:
            with contextlib.suppress(OSError, ValueError), self._process.stdout as stream:
                for message in _messages(stream):
                    self._messages.put(message)
        finally:
            self._messages.put(None)

    def _failure(self, kind: str, text: str, traceback: str) -> RftError:
        """The child's error: an instance of our error classes, or a RoleError with the traceback."""
        # Classes are sent by name, because this process may be unable to import those of libraries.
        known = getattr(errors, kind, None)
        if known is ConfigError:
            return UserError(text)  # the constructor of ConfigError takes lists
        if known is WaitTimeout:
            return RoleError(f"{self.name} failed: {text}")  # a WaitTimeout of `receive` means that the child is silent
        if known is OperatorError:
            return OperatorError(f"{text}\n{traceback}")
        if isinstance(known, type) and issubclass(known, RftError):
            return known(text)
        return RoleError(f"{self.name} failed: {kind}: {text} (log: {self._log_file})\n{traceback}")

    def _death(self) -> ProcessLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The pipe closes a moment before the process has an exit code.
            self._process.wait(5)
        text = f"{self.name} (pid {self.pid}) ended with code {self._process.returncode}"
        with contextlib.suppress(OSError):
            tail = self._log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            text += "; its last lines:\n" + "\n".join(f"  | {line}" for line in tail)
        return ProcessLostError(text, self._process.returncode)


class Channel:
    """The child's connection: iterate over the parent's messages and `send` answers."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._messages: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._pump, args=(source,), name="parent-watch", daemon=True).start()

    def _pump(self, source: IO[bytes]) -> None:
        try:
            for message in _messages(source):
                self._messages.put(message)
        except Exception:  # a process without this thread would be alive and answer nobody
            print(safe(traceback.format_exc()), file=sys.stderr, flush=True)
            os._exit(1)
        # The parent closed the pipe or died. Results are on storage already.
        os._exit(0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._messages.get()

    def try_receive(self, timeout_s: float = 0.0) -> Any | None:
        """The parent's next message. None: no message within `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(block=timeout_s > 0, timeout=timeout_s)
        return None

    def send(self, message: Any) -> None:
        """Send the parent a message. Thread-safe."""
        data = msgpack.packb(message)
        with self._lock:
            self._sink.write(data)
            self._sink.flush()


def main(target: str) -> None:
    """Entry point of the child process: the first message is the spec, then `target(spec, channel)` runs."""
    # Messages use stdout, so prints of libraries go to stderr.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the last lines before a kill are part of the error
    # SLURM sends SIGTERM to every process of an ending job, and the driver ends its children in order. Programs that a
    # child starts would inherit SIG_IGN, but not a handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    channel = Channel(os.fdopen(0, "rb", closefd=False), sink)
    spec = next(iter(channel))
    module, _, function = target.partition(":")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(_LOG_FORMAT))
    logging.basicConfig(level=os.environ.get(LOG_LEVEL, "INFO"), handlers=[handler], force=True)
    try:
        getattr(importlib.import_module(module), function)(spec, channel)
    except Exception as error:
        lines = traceback.format_exc().rstrip()
        with contextlib.suppress(OSError):  # the disk may be full
            print(safe(lines), file=sys.stderr, flush=True)
        # The text of our own errors includes their notes; a traceback has those of other errors.
        notes = getattr(error, "__notes__", []) if isinstance(error, RftError) else []
        kind, text = type(error).__name__, encodable("\n".join([str(error), *notes]))
        if isinstance(error, ImportError) and (remedy := lacks_training(error)):
            kind, text = "UserError", remedy
        channel.send({"child_error": {"kind": kind, "text": text, "traceback": encodable(lines)}})
        # sys.exit would wait for threads and handlers of libraries.
        os._exit(1)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
