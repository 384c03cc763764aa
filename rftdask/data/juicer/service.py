"""JuicerService: our end of the HTTP service of Data-Juicer that Trinity-RFT has, with its protocol.

    GET  /health                                            200: it is there
    POST /create {"operators": [{name: args}], "np", "pipeline_type": "experience"}          -> {"session_id"}
    POST /process_experience  multipart: session_id, arrow_data (a stream of Arrow)          -> a stream of Arrow
    POST /close {"session_id"}
    any other status                                        {"error": text, which may be a traceback}

Rows of datasets go the way of experiences, which are rows to the service: /process_task would read and write files of
the service's machine. It says nothing until all is done, so its deadline is that of one answer. A session that the
service has lost, as one that began anew has, is made again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rftdask.data.juicer.base import SILENCE_S, Juicer, OperatorResult, Pipeline, RowResult
from rftdask.data.juicer.runner import OTHER_ROWS, ROW, STATS, compare_rows, number_rows
from rftdask.errors import DataError, ProcessLostError, UserError, WaitTimeout
from rftdask.storage.safe_text import safe

KEY = "service.data_juicer.server_url"
_SHORT_S = 30.0
"""For an answer that takes no work; /create reads the recipe, and imports Data-Juicer the first time."""
_MOST_TEXT = 2000
_RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
"""Beginning of the line of a traceback that says what was raised."""


class JuicerService(Juicer):
    """One session with one pipeline."""

    def __init__(self, url: str, pipeline: Pipeline, *, silence_s: float = SILENCE_S) -> None:
        """Raises: UserError: it refuses the pipeline, or the protocol cannot carry it; ProcessLostError: it does not
        answer; WaitTimeout.
        """
        if pipeline.custom_operator_paths:
            raise UserError(
                f"custom_operator_paths of a recipe: the protocol of {KEY} cannot carry them; give the service these "
                "operators, or leave the key out, so that a process of the run has them"
            )
        self._url, self._pipeline, self._silence_s = url.rstrip("/"), pipeline, silence_s
        self._session = ""
        self._ask("/health", None, _SHORT_S)
        self._create()

    def run(
        self, rows: Sequence[Mapping[str, Any]], say: Callable[[OperatorResult], None] = lambda result: None
    ) -> list[RowResult]:
        """See Juicer; `say` is told once, of all operators together."""
        given = [dict(row) for row in rows]
        try:
            table = pa.Table.from_pylist(number_rows(given))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"the rows for {self._url}: {error}; a column has values of one type") from error
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data, names = sink.getvalue().to_pybytes(), ", ".join(self._pipeline.names)
        try:
            answer = self._process(data)
        except _SessionGone:
            self._create()
            answer = self._process(data)
        try:
            with pa.ipc.open_stream(answer) as reader:
                after = reader.read_all().to_pylist()
        except pa.ArrowInvalid as error:
            raise DataError(f"{self._url}/process_experience: the answer is no stream of Arrow: {error}") from error
        for row in after:
            if isinstance(row.get(STATS), str):  # as newer releases of its library of datasets hold them
                row[STATS] = json.loads(row[STATS])
        if any(ROW not in row for row in after):
            raise UserError(f"operators {names} of Data-Juicer at {self._url}: {OTHER_ROWS}")
        left = {row[ROW] for row in after}
        say(OperatorResult(names, len(after), [number for number in range(len(given)) if number not in left]))
        return [RowResult(**line) for line in compare_rows(given, table.to_pylist(), after)]

    def check(self) -> None:
        """Have it make its operators, over no rows: it takes any when a session begins. Raises: as `run`."""
        self.run([])

    def close(self) -> None:
        """End the session."""
        session, self._session = self._session, ""
        if session:
            # The service may be gone, and a session that stays is some bytes of its memory.
            with contextlib.suppress(UserError, ProcessLostError, WaitTimeout, _SessionGone):
                self._post("/close", {"session_id": session})

    def _create(self) -> None:
        # The text key in each operator, where a recipe would have it for all.
        operators = [
            {name: {"text_key": self._pipeline.text_key, **args} for name, args in entry.items()}
            for entry in self._pipeline.operators
        ]
        told = {"operators": operators, "np": self._pipeline.num_process, "pipeline_type": "experience"}
        answer = self._post("/create", told)
        if not isinstance(answer.get("session_id"), str):
            raise UserError(f"{self._url}/create: it gives no session_id: {KEY} is another service's address")
        self._session = answer["session_id"]

    def _process(self, data: bytes) -> bytes:
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="session_id"\r\n\r\n{self._session}\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="arrow_data"; filename="dataset.arrow"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
        return self._ask("/process_experience", body, self._silence_s, f"multipart/form-data; boundary={boundary}")

    def _post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._ask(path, json.dumps(message).encode(), _SHORT_S)
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def _ask(self, path: str, body: bytes | None, timeout_s: float, kind: str = "application/json") -> bytes:
        """The answer of 200. Raises: _SessionGone; as __init__ and `run`."""
        at = f"{self._url}{path}"
        try:
            request = urllib.request.Request(at, data=body, headers={"Content-Type": kind} if body else {})
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            with error:
                text = _said(error.read())
            if error.code == http.client.NOT_FOUND and "session" in text.lower():
                raise _SessionGone from error
            kind_of = DataError if path == "/process_experience" else UserError
            raise kind_of(f"Data-Juicer at {at}: status {error.code}: {safe(text)}") from error
        except TimeoutError as error:
            raise WaitTimeout(f"Data-Juicer at {at}: no answer after {timeout_s:.0f} s") from error
        except ValueError as error:  # no address
            raise UserError(f"{KEY}: {at}: {error}; give one such as http://localhost:5005") from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            if isinstance(why, TimeoutError):
                raise WaitTimeout(f"Data-Juicer at {at}: no connection after {timeout_s:.0f} s") from error
            raise ProcessLostError(f"Data-Juicer at {at} does not answer: {why} ({KEY})", None) from error


class _SessionGone(Exception):
    """The service does not know the session."""


def _said(answer: bytes) -> str:
    """The text of an error; of a traceback what was raised."""
    text = answer.decode(errors="replace")
    with contextlib.suppress(ValueError):
        told = json.loads(text)
        text = str(told.get("error", text)) if isinstance(told, dict) else text
    lines = text.strip().splitlines()
    raised = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[raised[-1] :] if raised else lines)[:_MOST_TEXT]
