"""JuicerService: client of the HTTP service of Data-Juicer in Trinity-RFT, with its protocol.

    GET  /health                                            200: it is running
    POST /create {"operators": [{name: args}], "np", "pipeline_type": "experience"}          -> {"session_id"}
    POST /process_experience  multipart: session_id, arrow_data (a stream of Arrow)          -> a stream of Arrow
    POST /close {"session_id"}
    any other status                                        {"error": text, which may be a traceback}

Rows of datasets are sent as experiences, which are just rows to the service: /process_task would read and write files
on its machine. The service answers when all is done, so the deadline covers the whole request. A session that the
service has lost, for example by a restart, is created again.
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

from rftdask.data.juicer.base import SILENCE_S, Juicer, OperatorResult, Pipeline, RowResult
from rftdask.data.juicer.runner import OTHER_ROWS, ROW, STATS, compare_rows, number_rows
from rftdask.errors import DataError, ProcessLostError, UserError, WaitTimeout
from rftdask.storage.safe_text import safe

KEY = "service.data_juicer.server_url"
_SHORT_S = 30.0
"""Timeout of requests without work on rows; the first /create imports Data-Juicer."""
_MAX_ERROR_CHARS = 2000
_RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
"""Begin of the line of a traceback with the exception."""


class JuicerService(Juicer):
    """One session with one pipeline."""

    def __init__(self, url: str, pipeline: Pipeline, *, silence_s: float = SILENCE_S) -> None:
        """Create a session.

        Raises: UserError: the service refuses the pipeline, or the protocol does not support it; ProcessLostError: it
        does not answer; WaitTimeout.
        """
        if pipeline.custom_operator_paths:
            raise UserError(
                f"custom_operator_paths of a recipe: the protocol of {KEY} does not support them; install these "
                "operators in the service, or leave the key out to run them in a process of the run"
            )
        self._url, self._pipeline, self._silence_s = url.rstrip("/"), pipeline, silence_s
        self._session = ""
        self._request("/health", None, _SHORT_S)
        self._create()

    def run(
        self, rows: Sequence[Mapping[str, Any]], say: Callable[[OperatorResult], None] = lambda result: None
    ) -> list[RowResult]:
        """See Juicer; `say` is called once, for all operators together."""
        import pyarrow as pa  # late: no check of a file needs it

        before = [dict(row) for row in rows]
        try:
            table = pa.Table.from_pylist(number_rows(before))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"the rows for {self._url}: {error}; the values of a column must be of one type") from error
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
            raise DataError(f"{self._url}/process_experience: the answer is not an Arrow stream: {error}") from error
        for row in after:
            if isinstance(row.get(STATS), str):  # with newer releases of package datasets
                row[STATS] = json.loads(row[STATS])
        if any(ROW not in row for row in after):
            raise UserError(f"one of the operators {names} of Data-Juicer at {self._url}: {OTHER_ROWS}")
        remaining = {row[ROW] for row in after}
        say(OperatorResult(names, len(after), [number for number in range(len(before)) if number not in remaining]))
        return [RowResult(**line) for line in compare_rows(before, table.to_pylist(), after)]

    def close(self) -> None:
        session, self._session = self._session, ""
        if session:
            # The service may be gone, and a remaining session costs it only some bytes.
            with contextlib.suppress(UserError, ProcessLostError, WaitTimeout, _SessionGone):
                self._post("/close", {"session_id": session})

    def _create(self) -> None:
        # The protocol has no common text key, so each operator gets it.
        operators = [
            {name: {"text_key": self._pipeline.text_key, **args} for name, args in entry.items()}
            for entry in self._pipeline.operators
        ]
        request = {"operators": operators, "np": self._pipeline.num_process, "pipeline_type": "experience"}
        answer = self._post("/create", request)
        if not isinstance(answer.get("session_id"), str):
            raise UserError(f"{self._url}/create: no session_id in the answer: {KEY} is not the URL of this service")
        self._session = answer["session_id"]

    def _process(self, data: bytes) -> bytes:
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="session_id"\r\n\r\n{self._session}\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="arrow_data"; filename="dataset.arrow"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
        return self._request("/process_experience", body, self._silence_s, f"multipart/form-data; boundary={boundary}")

    def _post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        body = self._request(path, json.dumps(message).encode(), _SHORT_S)
        with contextlib.suppress(ValueError):
            answer = json.loads(body)
            return answer if isinstance(answer, dict) else {}
        return {}

    def _request(self, path: str, body: bytes | None, timeout_s: float, kind: str = "application/json") -> bytes:
        """Return the body of a 200 answer. Raises: _SessionGone; as __init__ and `run`."""
        at = f"{self._url}{path}"
        try:
            request = urllib.request.Request(at, data=body, headers={"Content-Type": kind} if body else {})
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            with error:
                text = _error_text(error.read())
            if error.code == http.client.NOT_FOUND and "session" in text.lower():
                raise _SessionGone from error
            kind_of = DataError if path == "/process_experience" else UserError
            raise kind_of(f"Data-Juicer at {at}: status {error.code}: {safe(text)}") from error
        except TimeoutError as error:
            raise WaitTimeout(f"Data-Juicer at {at}: no answer after {timeout_s:.0f} s") from error
        except ValueError as error:  # not a URL
            raise UserError(f"{KEY}: {at}: {error}; use a URL such as http://localhost:5005") from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            if isinstance(why, TimeoutError):
                raise WaitTimeout(f"Data-Juicer at {at}: no connection after {timeout_s:.0f} s") from error
            raise ProcessLostError(f"Data-Juicer at {at} does not answer: {why} ({KEY})", None) from error


class _SessionGone(Exception):
    """The service does not know the session."""


def _error_text(body: bytes) -> str:
    """Return the text of an error; of a traceback only the exception."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError):
        tree = json.loads(text)
        text = str(tree.get("error", text)) if isinstance(tree, dict) else text
    lines = text.strip().splitlines()
    raised = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[raised[-1] :] if raised else lines)[:_MAX_ERROR_CHARS]
