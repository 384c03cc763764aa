"""An S3 service with the faults of real ones: a proxy that injects faults in front of a moto server.

As a separate process (`S3Process`) it includes moto and picks faults at random, with a seed, for every method. So runs
of many processes can use it without replacing anything inside the storage. At its end it reports the injected faults.
"""

import functools
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>played by the proxy</Message></Error>"
REFUSED = {"refused": (503, "ServiceUnavailable"), "throttled": (503, "SlowDown"), "expired": (400, "ExpiredToken")}
REFUSED |= {"conflict": (409, "ConditionalRequestConflict"), "forbidden": (403, "AccessDenied")}
PLAYED = REFUSED | {"lost": (500, "InternalError"), "rival": (500, "InternalError")}
WAITS = {"slow": 0.3, "stalled": 3.0}
"""Fault -> delay of the answer in seconds; clients wait for READ_TIMEOUT_S."""
READ_TIMEOUT_S = 1.5


class FaultyS3(ThreadingHTTPServer):
    """Forwards to `endpoint`; every PUT of an object takes the next word of `script`, if one is left.

    "lost": done, but answered with 500. "dropped": done, then the connection is closed without an answer. "rival": a
    rival creates the object with the same bytes, ours is answered with 500. "slow", "stalled": done and answered, late;
    the second later than clients wait. "reset": not done, closed without an answer. Others: not done, answered as in
    REFUSED.
    """

    daemon_threads = True

    def __init__(self, endpoint: str, choose: Callable[[str, str], str] | None = None) -> None:
        """choose: returns the fault for a request by method and path, replaces the script."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = endpoint.removeprefix("http://")
        self.script: list[str] = []
        self.num_puts = 0
        self.num_calls = self.num_bytes = 0
        """Requests of any kind, and the bytes of their bodies and of the answers'."""
        self.choose = choose or self._next_of_script

    def _next_of_script(self, method: str, path: str) -> str:
        return self.script.pop(0) if method == "PUT" and self.script else "pass"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def log_message(self, format: str, *args: object) -> None:
        pass

    def play(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_put = self.command == "PUT"
        self.server.num_puts += is_put
        word = self.server.choose(self.command, self.path)
        if word in WAITS:
            time.sleep(WAITS[word])
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "expect")}
        if word == "rival":
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("x-amz-meta-")}
        if word not in (*REFUSED, "reset"):
            status, reply_headers, reply = self.forward(headers, body)
            self.server.num_calls += 1
            self.server.num_bytes += len(body) + len(reply)
        if word in ("dropped", "reset"):
            self.close_connection = True
            return
        if word in PLAYED:
            status, reply_headers, reply = PLAYED[word][0], {}, ERROR.format(PLAYED[word][1]).encode()
        self.send_response(status)
        for name, value in reply_headers.items():
            self.send_header(name, value)
        if "Content-Length" not in reply_headers:
            self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = play

    def forward(self, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, body, headers)
            reply = upstream.getresponse()
            content = reply.read()
            kept = {k: v for k, v in reply.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
            return reply.status, kept, content
        finally:
            upstream.close()


class Dice:
    """A fault for about one request in `every`, of the possible kinds the one injected least so far.

    So every kind occurs even in a short run.
    """

    def __init__(self, every: float, seed: int) -> None:
        self.every = every
        self.always = "pass"
        """Another word: the answer to every request."""
        self.played: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def choose(self, method: str, path: str) -> str:
        if self.always != "pass":
            return self.always
        is_list = method == "GET" and "list-type=" in path
        words = ["slow"] if is_list else []
        words += ["lost"] if method in ("PUT", "POST", "DELETE") else []
        words += ["dropped", "refused", "stalled"]
        with self._lock:
            word = ""
            if self._random.random() < 1 / self.every:
                fewest = min(self._faults[word] for word in words)
                word = self._random.choice([word for word in words if self._faults[word] == fewest])
                self._faults[word] += 1
            self.played[f"{'LIST' if is_list else method} {word}".strip()] += 1
        return word or "pass"


def start_moto() -> Any:
    """A moto server on a free port. Its create-only check and write are not atomic, unlike those of S3, so a lock
    serializes them."""
    from moto.s3.responses import S3Response  # late: not needed to inject faults
    from moto.server import ThreadedMotoServer

    usual, lock = getattr(S3Response.put_object, "__wrapped__", S3Response.put_object), threading.Lock()

    @functools.wraps(usual)
    def put_object(response: Any) -> Any:
        with lock:
            return usual(response)

    S3Response.put_object = put_object
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server


def serve(every: float, seed: int) -> None:
    """moto and the proxy, until stdin closes; each line of it is the next answer to every request, or "pass"."""
    endpoint = "http://{}:{}".format(*start_moto().get_host_and_port())
    dice = Dice(every, seed)
    proxy = FaultyS3(endpoint, dice.choose)
    bucket = http.client.HTTPConnection(proxy.upstream, timeout=30)
    bucket.request("PUT", "/bucket", headers={"Content-Length": "0"})
    assert bucket.getresponse().status == 200
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{proxy.server_port}", endpoint, flush=True)
    for line in sys.stdin:
        dice.always = line.strip()
        print(dice.always, flush=True)
    print(json.dumps(dice.played), flush=True)
    os._exit(0)  # not waiting for the threads of connections that clients keep open


class S3Process:
    """The service as a process. `env` is what clients need, `played` what it did, once it is closed."""

    def __init__(self, every: float, seed: int) -> None:
        """every: one in this many requests gets a fault."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(every), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # moto logs every request
            text=True,
        )
        assert self._process.stdout is not None
        endpoints = self._process.stdout.readline().split()
        assert endpoints, "the S3 service did not start"
        self.endpoint, self._upstream = endpoints
        self.played: dict[str, int] = {}
        self.env = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "dummy",
            "AWS_SECRET_ACCESS_KEY": "dummy",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # bodies as they are, no trailers
            "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": READ_TIMEOUT_S}}),
        }

    def keys(self, prefix: str) -> list[str]:
        """List at most 1,000 keys below `prefix` in the bucket, without the proxy."""
        url = f"{self._upstream}/bucket?list-type=2&prefix={urllib.parse.quote(prefix)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return re.findall(r"<Key>([^<]*)</Key>", reply.read().decode())

    def answer(self, word: str) -> None:
        """From now on, answer every request with this fault; "pass": as before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{word}\n"

    def close(self) -> None:
        out, _ = self._process.communicate(timeout=30)
        self.played = json.loads(out)


def mark_folder(url: str) -> None:
    """Create the empty object that other programs use as a folder."""
    import s3fs  # late: the proxy process needs none

    bucket, _, folder = url.removeprefix("s3://").partition("/")
    s3fs.S3FileSystem(skip_instance_cache=True).call_s3("put_object", Bucket=bucket, Key=f"{folder}/", Body=b"")


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
