"""Child: a process of our own below a Dask worker, for what may block, hang or hold a GPU (engines, trainer ranks).

The parent and the child speak msgpack over the child's stdin and stdout. The child ends when its stdin closes, whatever
it is doing, so no orphan outlives its worker. What the child prints goes to stderr, which goes to a log file whose tail
is part of the error when it dies. Where there is a nursery (nursery.py), the process is a fork of it, which has the
imports done. This module knows neither Dask nor what the child does.

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
import tempfile
import threading
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
from rftdask.storage.safe_text import SafeFormatter, safe

_MODULE = "rftdask.processes.child"  # also where this is __main__
_READ_BYTES = 1 << 20
_TAIL_LINES = 20
LOG_LEVEL = "RFTDASK_LOG_LEVEL"
"""Environment variable: least important message a child logs."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RFTDASK_THREADS")


def _messages(stream: IO[bytes]) -> Iterator[Any]:
    """The messages until the end of the stream; one that is cut off there is dropped."""
    # Unbuffered, because a buffered file would wait for as many bytes as the unpacker has room for.
    raw = os.fdopen(stream.fileno(), "rb", buffering=0, closefd=False)
    return iter(msgpack.Unpacker(raw, read_size=_READ_BYTES, max_buffer_size=0, strict_map_key=False))


def _send(stream: IO[bytes], message: Any) -> None:
    stream.write(msgpack.packb(message))
    stream.flush()


def _start_process(
    target: str,
    threads: int,
    stderr: IO[bytes],
    env: Mapping[str, str],
    *,
    may_fork: bool,
    needs: Sequence[str] | None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    variables = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    # Dask's nanny sets the math libraries to one thread; the child owns its cores and says so itself.
    environment = with_wait_policy({**os.environ, **variables, "TOKENIZERS_PARALLELISM": "false", **env})
    # Dask makes the allocator of its workers give memory back at once; in training that is a page fault for every
    # activation, and a third of the time.
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    address = environment.pop(ZYGOTE_ADDRESS, None)
    if address is not None and may_fork:
        with contextlib.suppress(OSError):  # it has ended; an interpreter of its own does the same, later
            return ForkedProcess(address, f"{_MODULE}:main", (target,), stderr.fileno(), environment, needs=needs)
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        # Ctrl-C in the terminal is for the driver; a child ends when its stdin closes.
        start_new_session=True,
    )


class Child:
    """The parent's end of one child process. `close` is idempotent; so is the child's death."""

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
        """Run `target` ("module:function") in a process of its own, with `threads` for its math libraries.

        may_fork: from what has imported torch and transformers already; not if `env` is to reach their imports.
        needs: modules that it imports, see `ForkedProcess`.
        """
        self.name = name
        self._own_folder = None if log_file else tempfile.TemporaryDirectory(prefix="rftdask-")
        self._log_file = log_file or Path(self._own_folder.name, f"{name}.log")  # type: ignore[union-attr]
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            self._process = _start_process(target, threads, log, env or {}, may_fork=may_fork, needs=needs)
        self._messages: queue.Queue[Any] = queue.Queue()
        # A reader of its own: a child that says much is never blocked by a parent that is busy.
        threading.Thread(target=self._pump, name=f"{name}-reader", daemon=True).start()
        self.send(dict(spec))

    @property
    def pid(self) -> int:
        """Its process id, also once it is dead."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the process has not ended; it may hang all the same."""
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Hand the child a message. Raises: ProcessLostError: it is dead."""
        assert self._process.stdin is not None
        try:
            _send(self._process.stdin, message)
        except (BrokenPipeError, ValueError) as error:
            raise self._death() from error

    def receive(self, timeout_s: float) -> Any:
        """The child's next message.

        Raises: WaitTimeout: none came; ProcessLostError: it ended, with its last lines; what the child raised.
        """
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise WaitTimeout(f"{self.name} (pid {self.pid}) said nothing for {timeout_s:.0f} s") from None
        if message is None:
            self._messages.put(None)
            raise self._death()
        if isinstance(message, dict) and "child_error" in message:
            raise self._failure(**message["child_error"])
        return message

    def request(self, message: Any, timeout_s: float) -> Any:
        """`send`, then `receive`: for children that answer each message with one."""
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
        with contextlib.suppress(OSError, ValueError), self._process.stdout as stream:
            for message in _messages(stream):
                self._messages.put(message)
        self._messages.put(None)

    def _failure(self, kind: str, text: str, traceback: str) -> RftError:
        """What the child raised, as an error of this process: our own by their class, others with their traceback."""
        # By the name of its class: exceptions do not travel, and a class of a library need not be importable here.
        known = getattr(errors, kind, None)
        if known is ConfigError:
            return UserError(text)  # its own arguments are lists; what counts is that a restart does not mend it
        if known is WaitTimeout:
            return RoleError(f"{self.name} failed: {text}")  # WaitTimeout of `receive` is the child's own silence
        if known is OperatorError:
            return OperatorError(f"{text}\n{traceback}")
        if isinstance(known, type) and issubclass(known, RftError):
            return known(text)
        return RoleError(f"{self.name} failed: {kind}: {text} (log: {self._log_file})\n{traceback}")

    def _death(self) -> ProcessLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its pipe ends a moment before it does, and the code says what ended it.
            self._process.wait(5)
        text = f"{self.name} (pid {self.pid}) ended with code {self._process.returncode}"
        with contextlib.suppress(OSError):
            tail = self._log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            text += "; its last lines:\n" + "\n".join(f"  | {line}" for line in tail)
        return ProcessLostError(text, self._process.returncode)


class Channel:
    """The child's end: iterate over the parent's messages, `send` answers and events."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._messages: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._pump, args=(source,), name="parent-watch", daemon=True).start()

    def _pump(self, source: IO[bytes]) -> None:
        for message in _messages(source):
            self._messages.put(message)
        # The parent closed the pipe or died. Nothing here outlives it: what matters is on storage already.
        os._exit(0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._messages.get()

    def try_receive(self, timeout_s: float = 0.0) -> Any | None:
        """The parent's next message, if there is one already or comes within `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(block=timeout_s > 0, timeout=timeout_s)
        return None

    def send(self, message: Any) -> None:
        """Hand the parent a message; safe to use from threads."""
        with self._lock:
            _send(self._sink, message)


def main(target: str) -> None:
    """Entry of the child process: the first message is the spec, then `target(spec, channel)` runs."""
    # Libraries print to stdout; the frames need it to themselves, so stdout becomes stderr.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the last lines before a kill are those one wants to see
    # SLURM sends SIGTERM to every process of a job that is to end; the driver ends what it has, in its order. A handler
    # in place of SIG_IGN, which the programs that a child starts would inherit.
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
        # The decision: every failure becomes a message to the parent and a non-zero exit; the traceback is in the log.
        import traceback

        lines = traceback.format_exc().rstrip()
        with contextlib.suppress(OSError):  # the disk of its log may be full
            print(safe(lines), file=sys.stderr, flush=True)
        # Our own errors come without a traceback, which has the notes of others.
        notes = getattr(error, "__notes__", []) if isinstance(error, RftError) else []
        kind, text = type(error).__name__, "\n".join([str(error), *notes])
        if isinstance(error, ImportError) and (remedy := lacks_training(error)):
            kind, text = "UserError", remedy
        told = {"kind": kind, "text": text, "traceback": lines}
        channel.send({"child_error": told})
        # Not sys.exit, which would wait for the threads and handlers of libraries.
        os._exit(1)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
