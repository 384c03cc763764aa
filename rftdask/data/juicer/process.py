"""JuicerProcess: client of the process that runs Data-Juicer (runner.py), with the Python of its own environment.

    with JuicerProcess(environment, Pipeline(operators, "prompt")) as process:
        results = process.run(rows)

The output of the process goes to a log, whose last lines are part of the error if it dies. It may work for hours,
so its deadline is one of silence: neither an answer nor a byte in its log. It cannot install packages, neither through
Data-Juicer (runner.py) nor through pip or uv. When this client ends, the process ends with all its forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rftdask.data.juicer.base import SILENCE_S, Juicer, OperatorResult, Pipeline, RowResult
from rftdask.data.juicer.environment import Environment
from rftdask.errors import DataError, NotInstalledError, ProcessLostError, UserError, WaitTimeout
from rftdask.storage.safe_text import safe
from rftdask.storage.temporary import TemporaryFolder

_POLL_INTERVAL_S, _CLOSE_S = 1.0, 5.0
_TAIL_LINES = 20
_MAX_LOG_BYTES = 1 << 20
"""Size of the log at which the next `run` truncates it: a process may serve thousands of calls."""
_RUNNER = Path(__file__).with_name("runner.py")
_NO_INSTALLS = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}
"""Environment of the process: some operators call pip or uv instead of Data-Juicer's own installer."""


class JuicerProcess(Juicer):
    """One process with one pipeline."""

    def __init__(
        self,
        environment: Environment,
        pipeline: Pipeline,
        log_file: Path | None = None,
        *,
        only_check: bool = False,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Start the process and wait until its operators are made.

        Args: log_file: None: a temporary file. only_check: only check that the operators and their arguments exist.
        Raises: UserError: an operator or an argument does not exist; NotInstalledError: an operator needs a package.
        """
        self._folder = TemporaryFolder("juicer")
        self._log_file, self._silence_s = log_file or Path(self._folder.name, "log"), silence_s
        # PYTHONPATH is for our interpreter, and RAY_JOB would start Ray.
        variables = {key: value for key, value in os.environ.items() if key not in ("RAY_JOB", "PYTHONPATH")}
        try:
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(environment.python), "-I", str(_RUNNER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**variables, **_NO_INSTALLS},
                    start_new_session=True,  # not interrupted by Ctrl-C, and killed together with its forks
                )
        except OSError as error:
            self._folder.cleanup()
            raise NotInstalledError(f"{environment.python}: {error}; run `rftdask data setup` again") from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._pump, name="data-juicer-reader", daemon=True).start()
        try:
            self._send({**asdict(pipeline), "only_check": only_check})
            self._receive()
        except BaseException:
            self.close()
            raise

    def run(
        self, rows: Sequence[Mapping[str, Any]], say: Callable[[OperatorResult], None] = lambda result: None
    ) -> list[RowResult]:
        try:
            if self._log_file.stat().st_size > _MAX_LOG_BYTES:
                os.truncate(self._log_file, 0)
            source, out = Path(self._folder.name, "in.jsonl"), Path(self._folder.name, "out.jsonl")
            with source.open("w", encoding="utf-8") as file:
                for number, row in enumerate(rows):
                    try:
                        file.write(json.dumps(row) + "\n")
                    except TypeError as error:
                        raise DataError(f"row {number} for Data-Juicer: {error}; it takes only JSON") from error
            self._send({"rows": str(source), "out": str(out)})
            while "done" not in (message := self._receive()):
                say(OperatorResult(message["operator"], message["rows"], message["dropped"]))
            with out.open(encoding="utf-8") as file:
                return [RowResult(**json.loads(line)) for line in file]
        except BaseException:
            # If it is still running, its next message would be taken for the answer to another request.
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_CLOSE_S)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()  # type: ignore[union-attr]
        self._folder.cleanup()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise self._death() from error

    def _receive(self) -> dict[str, Any]:
        """Return the next message. The caller closes this object after an error."""
        last_output_s, log_bytes = time.monotonic(), -1
        while True:
            try:
                line = self._lines.get(timeout=_POLL_INTERVAL_S)
                break
            except queue.Empty:
                if (size := self._log_file.stat().st_size) != log_bytes:
                    last_output_s, log_bytes = time.monotonic(), size
                elif time.monotonic() - last_output_s > self._silence_s:
                    raise WaitTimeout(
                        f"Data-Juicer had no output for {self._silence_s:.0f} s and was killed{self._tail()}"
                    ) from None
        if not line:
            raise self._death()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise self._error(**message)
        return message

    def _error(self, error: str, operator: str, kind: str, packages: Sequence[str]) -> UserError:
        subject = f"operator {operator} of Data-Juicer" if operator else "Data-Juicer"
        if kind == "needs":
            needed = " ".join(f"--with {package!r}" for package in packages)
            why = f" ({safe(error)})" if error else ""
            return NotInstalledError(f"{subject} needs {', '.join(packages)}: rftdask data setup {needed}{why}")
        if kind == "wrong":
            return UserError(f"{subject}: {safe(error)}")
        return DataError(f"{subject} failed: {safe(error)}{self._tail()}")

    def _death(self) -> ProcessLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)  # the pipe closes a moment before the process ends
        code = self._process.returncode
        return ProcessLostError(f"the process of Data-Juicer ended with code {code}{self._tail()}", code)

    def _tail(self) -> str:
        lines = self._log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "; its last lines:\n" + "\n".join(f"  | {safe(line)}" for line in lines) if lines else ""
