"""JuicerProcess: our end of the process that has Data-Juicer (runner.py), in the Python of its own environment.

    with JuicerProcess(environment, Pipeline(operators, "prompt"), log_file) as process:
        for result in process.run(rows_file, out_file):      # rows as lines of JSON in, what became of them out
            print(result.operator, result.rows)

What it and its libraries say goes to `log_file`, whose tail is part of the error when it dies. It may work for hours,
so its deadline is one of silence: neither an answer nor a byte in its log. It cannot install anything, neither through
Data-Juicer (runner.py) nor through pip or uv. When this end goes, it ends with all that it has forked.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rftdask.data.juicer.environment import Environment
from rftdask.errors import DataError, NotInstalledError, ProcessLostError, UserError, WaitTimeout
from rftdask.text.terminal import safe

SILENCE_S = 1800.0
"""Longest silence of an operator: a model that it loads or downloads, or one answer of a server."""
_LOOK_S, _CLOSE_S = 1.0, 5.0
_TAIL_LINES = 20
_RUNNER = Path(__file__).with_name("runner.py")
_NO_INSTALLS = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}
"""Of the programs that some operators call in place of Data-Juicer's own installer."""


@dataclass(frozen=True)
class Pipeline:
    """What is run over the rows."""

    operators: Sequence[Mapping[str, Mapping[str, Any]]]
    """[{name: args}, ...], run in this order."""
    text_key: str
    """The column that operators of text read, unless their own `text_key` says another one."""
    num_process: int = 1
    """Processes of each operator, at most."""
    custom_operator_paths: Sequence[str] = ()
    """Files and folders with operators of the user's."""


@dataclass(frozen=True)
class OperatorResult:
    """What an operator left."""

    operator: str
    rows: int
    dropped: Sequence[int]
    """Numbers of the rows that are gone, ascending."""


class JuicerProcess:
    """One process with one pipeline, for any number of `run`s; a context manager."""

    def __init__(
        self,
        environment: Environment,
        pipeline: Pipeline,
        log_file: Path,
        *,
        only_check: bool = False,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Start it and wait until its operators are made, or only looked at: that they and their arguments exist.

        Raises: UserError: an operator or an argument does not exist; NotInstalledError: an operator needs a package.
        """
        self._log_file, self._silence_s = log_file, silence_s
        # Whatever of ours is in the environment is for our interpreter; Ray is never started.
        variables = {key: value for key, value in os.environ.items() if key not in ("RAY_JOB", "PYTHONPATH")}
        try:
            with log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(environment.python), "-I", str(_RUNNER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**variables, **_NO_INSTALLS},
                    start_new_session=True,  # Ctrl-C is for this end; and so that its forks end with it
                )
        except OSError as error:
            raise NotInstalledError(f"{environment.python}: {error}; make it again: rftdask data setup") from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._pump, name="data-juicer-reader", daemon=True).start()
        try:
            self._send({**asdict(pipeline), "only_check": only_check})
            self._receive()
        except BaseException:
            self.close()
            raise

    def run(self, rows: Path, out: Path) -> Iterator[OperatorResult]:
        """Run the operators over the lines of `rows`, one after another; at the end `out` is as runner.py says.

        Raises: DataError: an operator failed on the rows; NotInstalledError: it needs a package; ProcessLostError: the
            process died; WaitTimeout: it has been silent too long, and was ended.
        """
        self._send({"rows": str(rows), "out": str(out)})
        while "done" not in (message := self._receive()):
            yield OperatorResult(message["operator"], message["rows"], message["dropped"])

    def close(self) -> None:
        """End the process and what it has forked; idempotent."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_CLOSE_S)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()  # type: ignore[union-attr]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        except OSError as error:
            raise self._death() from error

    def _receive(self) -> dict[str, Any]:
        heard, said = time.monotonic(), -1
        while True:
            try:
                line = self._lines.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                if (size := self._log_file.stat().st_size) != said:
                    heard, said = time.monotonic(), size
                elif time.monotonic() - heard > self._silence_s:
                    self.close()
                    raise WaitTimeout(
                        f"Data-Juicer has said nothing for {self._silence_s:.0f} s and was ended{self._tail()}"
                    ) from None
        if not line:
            raise self._death()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise self._error(**message)
        return message

    def _error(self, error: str, operator: str, kind: str, packages: Sequence[str]) -> UserError:
        who = f"operator {operator} of Data-Juicer" if operator else "Data-Juicer"
        if kind == "needs":
            needed = " ".join(f"--with {package!r}" for package in packages)
            why = f" ({safe(error)})" if error else ""
            return NotInstalledError(f"{who} needs {', '.join(packages)}: rftdask data setup {needed}{why}")
        if kind == "wrong":
            return UserError(f"{who}: {safe(error)}")
        return DataError(f"{who} failed: {safe(error)}{self._tail()}")

    def _death(self) -> ProcessLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its pipe ends a moment before it does, and the code says what ended it.
            self._process.wait(_CLOSE_S)
        code = self._process.returncode
        return ProcessLostError(f"the process of Data-Juicer ended with code {code}{self._tail()}", code)

    def _tail(self) -> str:
        lines = self._log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "; its last lines:\n" + "\n".join(f"  | {safe(line)}" for line in lines) if lines else ""
