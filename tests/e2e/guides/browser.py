"""A real browser for tests of pages: headless Chromium, controlled through its DevTools protocol.

    with Chromium() as browser:
        browser.open(url); browser.wait_for("document.querySelectorAll('canvas').length > 3"); browser.evaluate("...")

It needs chromium on the PATH, and tornado, which comes with Dask, for the web socket.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

DEADLINE_S = 90.0
"""Seconds for one action of a page, on a busy machine."""
LAPTOP, PHONE = (1280, 860), (390, 844)


def require_chromium() -> str:
    """Return the path of Chromium; skip the test if it is not installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("NO BROWSER: install chromium to see whether the studio's pages work in one")
    return program


class Chromium:
    """One tab. `requests` are the requested URLs, `errors` the errors of its scripts."""

    def __init__(self, program: str | None = None) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="rftdask-chromium-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [
                program or require_chromium(),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
                *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
                "--remote-debugging-port=0",
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        try:
            self._loop.run_until_complete(self._connect())
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            self.resize(*LAPTOP)
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        port_file = Path(self._profile.name) / "DevToolsActivePort"
        deadline = time.monotonic() + DEADLINE_S
        while not (port_file.exists() and port_file.read_text().strip()):
            assert self._process.poll() is None, "chromium ended by itself"
            assert time.monotonic() < deadline, "chromium did not begin to listen"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        listed = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
        tab = next(target for target in json.loads(listed.body) if target["type"] == "page")
        self._socket = await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=1 << 28)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run one command of the protocol and return its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), DEADLINE_S))

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            text = await self._socket.read_message()
            assert text is not None, "chromium has closed the connection"
            message = json.loads(text)
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Resize to a laptop or a phone, light or dark."""
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded and its scripts have started."""
        self.evaluate("window.isOld = true")
        assert "errorText" not in self.call("Page.navigate", url=url)
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until an expression is true on the page; during navigation no expression is true."""
        deadline = time.monotonic() + deadline_s
        # A missing value counts as false.
        expression = f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {condition}; errors: {self.errors}"
            self._loop.run_until_complete(asyncio.sleep(0.05))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Return a PNG of the visible part or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._loop.is_closed():
            self._loop.close()
        self._profile.cleanup()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
