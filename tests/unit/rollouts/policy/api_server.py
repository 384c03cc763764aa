"""An OpenAI-shaped HTTP server in a thread, for tests. It gives planned answers and records requests."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a-key-that-nobody-else-has"
HANG, DROP = "hang", "drop"


class ApiServer(ThreadingHTTPServer):
    """`plan`: outcomes of the next requests, each a status, HANG or DROP; later requests get an answer."""

    daemon_threads = True

    def __init__(self, reply: Callable[[dict[str, Any]], Any], plan: Sequence[int | str] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.plan = list(plan)
        self.requests: list[dict[str, Any]] = []
        self.retry_after = ("retry-after-ms", "1")
        """Header of every answer."""
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that gave up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({"path": self.path, **body})
            step = self.server.plan.pop(0) if self.server.plan else 200
        if self.headers["Authorization"] != f"Bearer {KEY}":
            step = 401
        if step == HANG:
            self.server.over.wait(60)
        if step in (HANG, DROP):
            self.close_connection = True
            return
        self._send(int(step), _completion(self.path, self.server.reply(body)) if step == 200 else _error(int(step)))

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header(*self.server.retry_after)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _error(status: int) -> dict[str, Any]:
    return {"error": {"message": f"planned status {status}", "type": "test", "code": None}}


def _completion(path: str, reply: Any) -> dict[str, Any]:
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    choice = {"index": 0, "finish_reason": "stop"}
    choice |= {"message": message} if path.endswith("/chat/completions") else {"text": reply, "logprobs": None}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "1", "object": "completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@contextmanager
def api_server(reply: Callable[[dict[str, Any]], Any] | str, *plan: int | str) -> Iterator[ApiServer]:
    server = ApiServer(reply if callable(reply) else lambda body: reply, plan)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join(30)
