"""Promises of a child process, a fork or an interpreter: an answer per message, typed errors, and no orphan."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from rftdask.errors import FencedError, ProcessLostError, RoleError, UserError, WaitTimeout
from rftdask.processes.child import Child
from rftdask.processes.zygote import ZYGOTE_ADDRESS
from tests.living import python_path, wait_until_gone

HERE = Path(__file__).parent
ENV = {
    "PYTHONPATH": python_path(HERE),
    "PYTHONUNBUFFERED": "",  # the default of most machines
}


LONG_S = 60.0


class Starter:
    """Starts children, which the fixture ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def __call__(self, target: str, **spec: Any) -> Child:
        log_file = self.folder / f"{target}.log"
        child = Child(f"child_targets:{target}", spec, name=target, threads=3, env=ENV, log_file=log_file)
        self.children.append(child)
        return child


@pytest.fixture(params=["interpreter", "fork"])
def start(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    if request.param == "fork":
        monkeypatch.setenv(ZYGOTE_ADDRESS, request.getfixturevalue("address"))
    yield starter
    for child in starter.children:
        child.close()
        child.close()


def test_a_child_answers_and_ends_when_it_is_closed(start: Starter) -> None:
    child = start("echo", model="m", size=3)
    answer = child.request({"data": b"\x00\xff", "list": [1, 2.5, None]}, LONG_S)
    assert answer == {
        "message": {"data": b"\x00\xff", "list": [1, 2.5, None]},
        "spec": {"model": "m", "size": 3},
        "threads": "3",
    }
    assert child.request(["big", b"x" * 3_000_000], LONG_S)["message"][1] == b"x" * 3_000_000
    assert child.alive()
    child.close()
    assert not child.alive()
    wait_until_gone(child.pid)
    with pytest.raises(RoleError, match="echo"):
        child.send("too late")


def test_prints_of_a_child_go_to_its_log(start: Starter, tmp_path: Path) -> None:
    child = start("noisy")
    assert [child.request(n, LONG_S) for n in (1, 2)] == [1, 2]
    child.close()
    text = (tmp_path / "noisy.log").read_text()
    for line in ("printed 1", "printed 2", "to stderr", "straight to descriptor one"):
        assert line in text


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("fenced", FencedError, "^ledger/main/00000007.json was written by somebody else$"),
        ("lone", FencedError, r"^\\ud800$"),
        ("config", UserError, "(?s)2 problems in file.yaml:.*one: bad.*two: bad"),
        (
            "other",
            RoleError,
            "(?s)fail failed: ZeroDivisionError: it divided by nothing .log: .*fail.log.*"
            "Traceback .most recent call last.:.*child_targets.py.*, in fail.*Error: it divided by nothing$",
        ),
    ],
)
def test_a_childs_error_is_raised_by_parents(start: Starter, tmp_path: Path, kind: str, error: type, text: str) -> None:
    child = start("fail", kind=kind)
    with pytest.raises(error, match=text) as caught:
        child.receive(LONG_S)
    assert type(caught.value) is error
    log = (tmp_path / "fail.log").read_text()
    assert "about to fail" in log
    assert "Traceback" in log
    with pytest.raises(RoleError, match="ended with code 1"):
        child.receive(LONG_S)


def test_a_message_that_cannot_be_encoded_costs_no_child(start: Starter) -> None:
    child = start("echo")
    with pytest.raises(UnicodeEncodeError):
        child.send({"text": "a\ud800"})
    assert child.request("b", LONG_S)["message"] == "b"


def test_a_child_ends_when_its_channel_is_broken() -> None:
    command = [sys.executable, "-m", "rftdask.processes.child", "child_targets:busy"]
    broken = msgpack.packb({}) + b"\xc1"  # a byte that msgpack never uses
    ended = subprocess.run(command, input=broken, env={**os.environ, **ENV}, capture_output=True, timeout=LONG_S)
    assert ended.returncode == 1 and b"FormatError" in ended.stderr


def test_the_error_of_a_dead_child_has_its_last_lines(start: Starter) -> None:
    child = start("die")
    with pytest.raises(RoleError) as caught:
        child.receive(LONG_S)
    text = str(caught.value)
    assert f"die (pid {child.pid}) ended with code 7; its last lines:" in text
    assert text.endswith("  | line 29")
    assert "line 9\n" not in text
    with pytest.raises(RoleError):
        child.receive(LONG_S)


def test_the_error_of_a_killed_child_names_the_signal(start: Starter) -> None:
    child = start("busy")
    assert child.receive(LONG_S) == child.pid
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="ended with code -9"):
        child.receive(LONG_S)


def test_messages_sent_before_the_end_are_received(start: Starter) -> None:
    child = start("answer_then_end")
    assert child.receive(LONG_S) == "last words"
    with pytest.raises(RoleError, match="ended with code 0"):
        child.receive(LONG_S)


def test_threads_of_a_child_wait_passively_by_default(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start("wait_policy").receive(LONG_S) == ["PASSIVE", "1000"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert start("wait_policy").receive(LONG_S) == ["ACTIVE", None]


def test_waiting_for_a_silent_child_has_a_deadline(start: Starter) -> None:
    child = start("busy")
    child.receive(LONG_S)
    with pytest.raises(WaitTimeout, match=rf"busy \(pid {child.pid}\) sent no message for 0 s"):
        child.receive(0.01)


def test_a_busy_child_ends_with_its_pipe(start: Starter) -> None:
    child = start("busy")
    child.receive(LONG_S)
    child.close(LONG_S)
    assert not child.alive()
    with pytest.raises(RoleError, match="ended with code 0"):  # not killed
        child.receive(LONG_S)


def test_a_missing_target_is_an_error(start: Starter) -> None:
    with pytest.raises(RoleError, match=r"AttributeError.*no_such_target"):
        start("no_such_target").receive(LONG_S)


PARENT = """
import sys, time
from pathlib import Path
from rftdask.processes.child import Child
child = Child("child_targets:busy", {}, name="busy", log_file=Path(sys.argv[1]))
print(child.receive(60), flush=True)
if sys.argv[2] == "half":  # a message that is cut off by the kill
    child._process.stdin.write(b"\\x00\\x00\\x10\\x00half a message")
    child._process.stdin.flush()
time.sleep(600)
"""


@pytest.mark.parametrize("last_message", ["whole", "half"])
def test_no_child_outlives_a_killed_parent(tmp_path: Path, last_message: str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "busy.log"), last_message]
    with subprocess.Popen(command, env={**os.environ, **ENV}, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        if last_message == "half":
            time.sleep(0.1)  # for the half to be on its way; without it the test proves less, not more
        parent.kill()
    try:
        wait_until_gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
