"""Serve: the pages of a run to the browser of this machine, and to nobody else.

Invariants: it listens on 127.0.0.1 only, answers GET and HEAD only, writes nothing, and answers no request that was
made for another host name, so that a page elsewhere cannot read the run by pointing its own name at this machine.
"""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rftdask.errors import DataError, UserError
from rftdask.provenance.browse import Browser, Filter
from rftdask.provenance.pages import CONTENT_POLICY, experience_page, list_page, message_page

ADDRESS = "127.0.0.1"


class ViewServer(ThreadingHTTPServer):
    """The pages of one run.

    Example:
        with ViewServer("runs/project/name") as server:
            print(server.address); server.serve_forever()
    """

    daemon_threads = True

    def __init__(self, url: str | Path, port: int = 0) -> None:
        """Port 0 takes a free one. Raises: DataError: no run folder; OSError: the port is taken."""
        self._url = url
        self._lock = threading.Lock()
        self._browser = Browser(url)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def browser(self) -> Browser:
        with self._lock:
            return self._browser

    def read_again(self) -> None:
        """Show what the run has by now."""
        browser = Browser(self._url)
        with self._lock:
            self._browser = browser


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (ADDRESS, "localhost"):
            self._send(HTTPStatus.FORBIDDEN, message_page("Not here", f"this server answers for {ADDRESS} alone"))
            return
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            self._answer(parts.path, query)
        except DataError as error:
            self._send(HTTPStatus.BAD_REQUEST, message_page("Not understood", str(error)))

    do_HEAD = do_GET

    def _answer(self, path: str, query: dict[str, str]) -> None:
        browser = self.server.browser
        if path == "/":
            page = query.get("page", "1")
            if not page.isdecimal():
                raise DataError(f"page must be a number, not {page!r}")
            self._send(HTTPStatus.OK, list_page(browser, Filter.from_query(query), int(page)))
        elif path == "/experience":
            row = query.get("row", "")
            shown = browser.show(query.get("stage", ""), query.get("shard", ""), int(row)) if row.isdecimal() else None
            if shown is None:
                self._send(HTTPStatus.NOT_FOUND, message_page("Not found", "the run has no such experience"))
            else:
                self._send(HTTPStatus.OK, experience_page(browser, shown))
        elif path == "/reload":
            self.server.read_again()
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", "/")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(HTTPStatus.NOT_FOUND, message_page("Not found", "there is no such page"))

    def _send(self, status: HTTPStatus, page: str) -> None:
        data = page.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", CONTENT_POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is the user's."""


def serve(url: str | Path, port: int, *, open_browser: bool, say: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. Raises: UserError: the port is taken, or `url` is no run folder."""
    try:
        server = ViewServer(url, port)
    except OSError as error:
        raise UserError(
            f"port {port} of {ADDRESS} cannot be had: {error.strerror}; --port 0 takes a free one"
        ) from error
    with server:
        say(f"{server.address}  (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
