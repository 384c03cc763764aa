"""Promises of `rftdask serve` about arbitrary bytes on its socket: each request is answered before a deadline and never
with a 5xx, each error has the shape of the API, and afterwards the server works and every stored reward is readable.

The same module is a command, which `make fuzz` starts with 20,000 requests and with Schemathesis:

    python -m tests.integration.serving.test_fuzzed_requests [--requests N] [--seed S] [--schemathesis PROGRAM]
"""

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from rftdask.buffer.log import open_log
from rftdask.config import load_config
from rftdask.storage import open_storage
from tests.integration import run_cases as runs
from tests.unit.serve.test_server_edges import BODIES, changed, check_error

pytestmark = pytest.mark.slow
TOKEN = "a-token"
DEADLINE_S = 60.0
"""Seconds for an answer on a busy machine; an idle one needs milliseconds."""
UNREAD_BYTES = 1 << 16
"""The connection of a longer request may be reset, because the server refuses it before it has read all of it."""
REQUESTS_PER_SESSION = 32
EXAMPLES = 100
"""Requests of Schemathesis for each path."""
SCHEMATHESIS_S = 1800.0
"""Seconds for all requests of Schemathesis."""
PATHS = (*BODIES, "/health", "/openapi.json", "/v1/models", "/v1/models/policy", "/v1/embeddings", "/")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "BREW", "P\xd6ST", "")
KINDS = ("text/plain", "application/json; charset=utf-16", "multipart/form-data", "\xff", "")
NAMES = ("X-Session-ID", "X-Task-ID", "X-Stainless-Retry-Count", "X-Api-Key", "Accept", "Range", "Upgrade")
LINES = ("Expect: 100-continue", "Connection: upgrade", "Connection: close", "Transfer-Encoding: gzip", "a" * 70_000)
ODD = ("", "\x00", "\xff", "%00", "%ed%a0%80", "..", "*", "%2e%2e%2f", "/", "a" * 3000, "?a=%", "[", "::1", "a b", "1")

AFTERWARDS: dict[str, Any] = {
    "/sessions/last/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
    "/feedback": {"session_id": "last", "reward": 1},
    "/commit": {},
}
"""Valid requests at the end."""


@dataclass(frozen=True)
class Request:
    data: bytes
    method: str = "POST"
    is_whole: bool = True
    """False: its end may be missing, so that the server may close the connection without an answer."""


def request_of(rng: random.Random, session: str) -> Request:
    """A request that is valid or has some faults. session: name of the session that it uses or rewards."""

    def seldom(part: Any, share: float, others: Any) -> Any:
        return rng.choice(others) if rng.random() < share else part

    url, body = rng.choice(PATHS), b""
    method = seldom("POST" if url in BODIES else "GET", 0.1, METHODS)
    if url in BODIES:
        tree: Any = BODIES[url]
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            tree = changed(tree, rng)
        if isinstance(tree, dict) and tree.get("session_id") == "s":
            tree = {**tree, "session_id": session}
        body = encoded(tree, rng)
    if url.startswith("/v1/") and rng.random() < 0.5:
        url = f"/sessions/{seldom(session, 0.2, ODD)}{url}"
    place = rng.randrange(len(url) + 1)
    url = url[:place] + seldom("", 0.1, ODD) + url[place:]
    keys = ("wrong", "", f"{session}.wrong", "\xe9", "\x00")
    headers = [
        f"Authorization: Bearer {seldom(TOKEN, 0.05, keys)}",
        f"Host: {seldom('here', 0.05, ODD)}",
        f"Content-Type: {seldom('application/json', 0.1, KINDS)}",
        *([f"{rng.choice(NAMES)}: {rng.choice((session, 'websocket', *ODD))}"] if rng.random() < 0.2 else []),
        *([rng.choice(LINES)] if rng.random() < 0.03 else []),
    ]
    header, sent, is_whole = framed(body, rng)
    head = "\r\n".join([f"{method} {url} HTTP/{seldom('1.1', 0.1, ('1.0', '2', ''))}", *headers, *header])
    data = head.encode("latin-1") + b"\r\n\r\n" + sent
    if rng.random() < 0.05:
        place = rng.randrange(len(data))
        data, is_whole = data[:place] + rng.choice((b"", b"\xff", b"\r\n", b"\x00")) + data[place + 1 :], False
    return Request(data, method, is_whole)


def encoded(tree: Any, rng: random.Random) -> bytes:
    """JSON of a value. One in four has a character in one of its texts that is not text, one in ten is not JSON."""
    text = json.dumps(tree)
    if rng.random() < 0.25 and (places := [match.end() for match in re.finditer(r'"(?=\w)', text)]):
        place = rng.choice(places)
        text = text[:place] + rng.choice((r"\ud800", r"\udfff", r"\u0000")) + text[place:]
    place = rng.randrange(len(text) + 1)
    others = (
        json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))),
        text[:place].encode(),
        text[:place].encode() + rng.choice((b"{", b"]", b",", b"-", b"\x00", b"\xff", b'"')) + text[place:].encode(),
        re.sub(r"\d+", rng.choice(("9" * 5000, "1e9999", "NaN", "-0", "1" + "0" * 400)), text).encode(),
        rng.choice((b"[" * 50_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000)),
        text.encode() + b" " * 500_000,
        rng.randbytes(100),
        b"",
    )
    return text.encode() if rng.random() < 0.9 else rng.choice(others)


def framed(body: bytes, rng: random.Random) -> tuple[list[str], bytes, bool]:
    """The header with the length of a body, the bytes to send, and False if their end may be missing. One length in ten
    is wrong."""
    size = rng.randrange(1, 1000)
    chunks = [body[place : place + size] for place in range(0, len(body), size)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    is_chunked = "Transfer-Encoding: chunked"
    if rng.random() < 0.9:
        right = ([f"Content-Length: {len(body)}"], body, True)
        return ([is_chunked], chunked + b"0\r\n\r\n", True) if rng.random() < 0.15 else right
    return rng.choice(
        (
            ([is_chunked], chunked + b"zz\r\n", True),
            ([is_chunked], chunked, False),
            ([f"Content-Length: {len(body) + 1}"], body, False),
            ([f"Content-Length: {len(body) // 2}"], body, True),
            ([f"Content-Length: {rng.choice(('-1', 'x', '', '1, 2', '+1'))}"], body, True),
            ([f"Content-Length: {'9' * 18}"], body, False),
            ([f"Content-Length: {len(body)}", is_chunked], body, False),
            ([], body, True),
        )
    )


@dataclass
class Outcome:
    num_generated: int = 0
    """Number of requests of Schemathesis."""
    results: Counter[str] = field(default_factory=Counter)
    """Number of other requests by class of the status, such as "4xx", or "closed"."""
    failures: list[str] = field(default_factory=list)
    rewarded: set[str] = field(default_factory=set)
    """Sessions whose reward was answered with 200."""

    def count(self, name: str, request: Request, answer: tuple[int, bytes] | None) -> None:
        self.results["closed" if answer is None else f"{answer[0] // 100}xx"] += 1
        try:
            if answer is None:
                assert not request.is_whole or len(request.data) > UNREAD_BYTES, "closed without an answer"
            elif request.method != "HEAD":  # whose answer has no body
                check(*answer)
                if answer[0] == 200 and b'"num_rows"' in answer[1]:
                    self.rewarded.add(json.loads(answer[1])["session_id"])
        except (AssertionError, ValueError, KeyError) as error:
            self.failures.append(f"{name}: {error} {answer!r:.500}, to {request.data!r:.1000}")


def check(status: int, body: bytes) -> None:
    if status >= 400:
        check_error(status, json.loads(body))
    elif body.startswith((b"data: ", b"event: ")):
        assert body.endswith(b"\n\n") and b'"server_error"' not in body
    elif status < 300:
        json.loads(body)


def answer_to(address: tuple[str, int], request: Request) -> tuple[int, bytes] | None:
    """Status and body of the answer; None: the connection was closed without one. Raises: TimeoutError."""
    with socket.create_connection(address, DEADLINE_S) as connection:
        try:
            connection.sendall(request.data)
            if not request.is_whole:
                connection.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # refused before its end
        try:
            answer = HTTPResponse(connection, method=request.method)
            answer.begin()
            return answer.status, answer.read()
        except (ConnectionError, HTTPException):
            return None


@contextmanager
def server(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL. Its log is `server.log` next to the configuration."""
    options = ("--port", "0", "model.max_prompt_tokens=2000", "buffer.batch_size=1")
    command = [sys.executable, "-m", "rftdask", "serve", str(config), *options]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "RFTDASK_SERVE_TOKEN": TOKEN}
    with (
        config.with_name("server.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("serving ").partition("/v1")[0]
        finally:
            process.kill()


def run_schemathesis(program: Path, url: str, seed: int, folder: Path) -> tuple[int, str]:
    """Let Schemathesis make requests of the server's OpenAPI document. Returns: their number, and what it reports.

    folder: where it may write.
    """
    # positive_data_acceptance: the document does not list each field that is a 400, nor templates that need some text.
    options = (
        f"--exclude-checks positive_data_acceptance --seed {seed} --max-examples {EXAMPLES} --continue-on-failure "
    )
    options += f"--request-timeout {DEADLINE_S} --no-color --generation-database none"
    command = [str(program.absolute()), "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {TOKEN}"]
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ended = subprocess.run([*command, *options.split()], **output, check=False, cwd=folder, timeout=SCHEMATHESIS_S)
    generated = re.search(r"([\d,]+) generated", ended.stdout)
    num_requests = int(generated[1].replace(",", "")) if generated else 0
    return num_requests, "" if ended.returncode == 0 and num_requests else ended.stdout


def fuzz(folder: Path, num_requests: int, seed: int, schemathesis: Path | None = None) -> Outcome:
    """Send the requests to a server in `folder`, which must be new, and end it. schemathesis: a program that makes the
    first of them.
    """
    outcome, config = Outcome(), runs.write_config(folder)
    with server(config) as (process, url):
        host, _, port = url.removeprefix("http://").partition(":")
        address, request = (host, int(port)), Request(b"")
        if schemathesis:
            outcome.num_generated, report = run_schemathesis(schemathesis, url, seed, folder)
            outcome.failures += [report] if report else []
        try:
            for number in range(num_requests - outcome.num_generated):
                # A generator for each, so that one request can be made again without those before.
                request = request_of(random.Random(f"{seed}/{number}"), f"s{number // REQUESTS_PER_SESSION}")
                outcome.count(f"request {number}", request, answer_to(address, request))
            for path, tree in AFTERWARDS.items():
                body, headers = json.dumps(tree).encode(), f"Host: here\r\nAuthorization: Bearer {TOKEN}"
                head = f"POST {path} HTTP/1.1\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n"
                request = Request(head.encode() + body)
                answer = answer_to(address, request)
                if answer is None or answer[0] != 200:
                    outcome.failures.append(f"{path} afterwards: {answer}")
        except OSError as error:  # no answer before the deadline, or no server
            outcome.failures.append(f"{error!r}, after {outcome.results.total()} requests, to {request.data!r:.1000}")
        process.terminate()
        if code := process.wait(DEADLINE_S):
            outcome.failures.append(f"the server ended with code {code}")
    if "Traceback" in (log := config.with_name("server.log").read_text()):
        outcome.failures.append(f"server.log: {log[log.index('Traceback') :]:.3000}")
    storage = open_storage(str(runs.run_folder(config)))
    experiences = open_log(storage, load_config(config))
    stored = {row["session"] for name in experiences.shards() for row in experiences.read(name).to_pylist()}
    if lost := outcome.rewarded - stored:
        outcome.failures.append(f"rewarded, but not in the log: {lost}")
    if unreadable := storage.list("serve/quarantine"):
        outcome.failures.append(f"in quarantine: {unreadable}")
    return outcome


def test_a_server_answers_arbitrary_requests(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path / "run", num_requests=500, seed=0)
    assert outcome.failures == []
    assert outcome.results["2xx"] > 50 and outcome.results["4xx"] > 50 and outcome.rewarded, outcome.results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--schemathesis", metavar="PROGRAM", type=Path, help="makes the first of the requests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rftdask-fuzz-") as folder:
        outcome = fuzz(Path(folder, "run"), args.requests, args.seed, args.schemathesis)
    for failure in outcome.failures[:20]:
        print(failure)
    print(f"seed {args.seed}: {outcome.num_generated} requests of Schemathesis, {outcome.results.total()} others")
    print(f"{dict(outcome.results)}, {len(outcome.rewarded)} sessions rewarded; {len(outcome.failures)} failures")
    sys.exit(bool(outcome.failures))


if __name__ == "__main__":
    main()
