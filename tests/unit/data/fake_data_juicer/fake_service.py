"""A service with the protocol of Trinity-RFT's Data-Juicer service, in a thread of the test.

It supports text_length_filter(min_len), upper_mapper, fails_mapper, hangs_mapper (until it is closed) and
counts_aggregator, parses multipart forms with the standard library, and records its requests in a list.
"""

import email
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa


class FakeService:
    """Usage: `with serving() as service: ... service.url, service.asked`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []
        self.sessions: dict[str, list[dict[str, Any]]] = {}
        self.ended = threading.Event()

    def answer(self, path: str, kind: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append(path)
        if path == "/health":
            return 200, b'{"status": "ok"}'
        if path == "/process_experience":
            form = {
                str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
                for part in email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body).get_payload()
            }
            return self.process(form["session_id"].decode(), form["arrow_data"])
        told = json.loads(body)
        if path == "/create":
            if told["pipeline_type"] != "experience" or not told["operators"]:
                return 400, b'{"error": "Failed to parse config"}'
            self.sessions[name := f"s{len(self.asked)}"] = told["operators"]
            return 200, json.dumps({"session_id": name}).encode()
        if path == "/close" and self.sessions.pop(told["session_id"], None) is not None:
            return 200, b'{"message": "closed"}'
        return 404, b'{"error": "Session ID not found."}'

    def process(self, session: str, data: bytes) -> tuple[int, bytes]:
        if session not in self.sessions:
            return 404, b'{"error": "Session ID not found."}'
        table = pa.ipc.open_stream(data).read_all()
        rows = table.to_pylist()
        for entry in self.sessions[session]:
            for name, args in entry.items():
                if name == "hangs_mapper":
                    self.ended.wait(60)
                if name == "fails_mapper":
                    text = "Experience processing failed:\nTraceback\nRuntimeError: no such verb"
                    return 500, json.dumps({"error": text}).encode()
                if not name.endswith(("_filter", "_mapper", "_aggregator")):
                    return 500, json.dumps({"error": f"Traceback\n  in it\nValueError: no {name}\nmore"}).encode()
                if name == "counts_aggregator":
                    rows = [{"count": len(rows)}]
                    continue
                for row in rows:
                    text = row[args["text_key"]]
                    if name == "upper_mapper":
                        row[args["text_key"]] = text.upper()
                    else:
                        row["__dj__stats__"] = json.dumps({"text_len": len(text)})  # as datasets 5 has it
                rows = [row for row in rows if len(row[args["text_key"]]) >= args.get("min_len", 0)]
        # Without rows it has the columns that came, as a dataset has.
        found = pa.Table.from_pylist(rows) if rows else pa.Table.from_pylist([], table.schema)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, found.schema) as writer:
            writer.write_table(found)
        return 200, sink.getvalue().to_pybytes()


@contextmanager
def serving() -> Iterator[FakeService]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = service.answer(self.path, self.headers.get("Content-Type", ""), body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = FakeService(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
