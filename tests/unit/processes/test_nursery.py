"""Promises of the nursery: a fork is as good as an interpreter of its own, and outlives neither nursery nor driver."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rftdask
from rftdask.errors import ConfigError, ProcessLostError, RoleError
from rftdask.processes import nursery as module
from rftdask.processes.child import Child
from rftdask.processes.nursery import ADDRESS, call, nursery, start
from tests.living import wait_until_gone

HERE = Path(__file__).parent
LONG_S = 60.0


@pytest.fixture
def forked(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Child]:
    """A child that answers what its process is like, and with a second message what happens to it."""
    monkeypatch.setenv(ADDRESS, address)
    monkeypatch.setenv("SET_LATER", "by the worker")
    child = Child("child_targets:look", {}, name="look", threads=3, env={"OWN": "1"}, log_file=tmp_path / "log")
    yield child
    child.close()


def test_a_fork_has_nothing_of_its_nursery_but_its_imports(forked: Child) -> None:
    seen = forked.receive(LONG_S)
    environment = {"SET_LATER": "by the worker", "OWN": "1", "OMP_NUM_THREADS": "3", ADDRESS: None}
    assert {name: seen["environment"].get(name) for name in environment} == environment
    assert seen["session"] == forked.pid, "a terminal's signals are not for it"
    assert seen["blocked"] == []
    assert seen["descriptors"] <= 12, "pipes of its siblings, which would not end with their worker"
    assert "child_targets:look" in " ".join(psutil.Process(forked.pid).cmdline()), "who looks at ps sees what it is"


def test_forks_draw_numbers_of_their_own(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ADDRESS, address)
    children = [Child("child_targets:draw", {}, name="draw", log_file=tmp_path / "log") for _ in range(2)]
    drawn = [tuple(child.receive(LONG_S)) for child in children]
    for child in children:
        child.close()
    assert len({*drawn[0], *drawn[1]}) == 4


def test_how_a_fork_ended_is_known(forked: Child) -> None:
    forked.receive(LONG_S)
    os.kill(forked.pid, signal.SIGSEGV)
    with pytest.raises(ProcessLostError, match="ended with code -11"):
        forked.receive(LONG_S)
    assert not forked.alive()


def test_forks_end_with_their_nursery_and_the_next_child_is_an_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sys.path.insert(0, str(HERE))
    start([])
    with nursery() as socket:
        monkeypatch.setenv(ADDRESS, socket)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(Path(rftdask.__file__).parents[1])]))
        child = Child("child_targets:echo", {}, name="echo", log_file=tmp_path / "log")
        assert child.request("x", LONG_S)["message"] == "x"
        parent = psutil.Process(child.pid).parent()
        assert parent is not None
        parent.kill()
        with pytest.raises(RoleError):
            child.receive(LONG_S)
        wait_until_gone(child.pid)
        child.close()
        second = Child("child_targets:echo", {}, name="echo", log_file=tmp_path / "log")
        assert second.request("y", LONG_S)["message"] == "y"
        assert psutil.Process(second.pid).ppid() == os.getpid()
        second.close()
    sys.path.remove(str(HERE))


DRIVER = """
import sys, time
from pathlib import Path
from rftdask.processes.child import Child
from rftdask.processes.nursery import ADDRESS, nursery, start
import os
start(["json.tool"])
with nursery() as socket:
    os.environ[ADDRESS] = socket
    child = Child("child_targets:look", {}, name="look", log_file=Path(sys.argv[1]))
    print("json.tool" in child.receive(60)["modules"], "json.tool" in sys.modules, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("temporary_bytes", [70, 71, 200])
def test_a_fork_has_the_imports_and_nothing_outlives_a_killed_driver(tmp_path: Path, temporary_bytes: int) -> None:
    """However long the name of TMPDIR is, of which a socket's address may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        temporary = Path(short, "x" * (temporary_bytes - len(short) - 1))
        temporary.mkdir()
        check_driver(tmp_path, temporary)


def check_driver(tmp_path: Path, temporary: Path) -> None:
    path = os.pathsep.join([str(HERE), str(Path(rftdask.__file__).parents[1])])
    file = tmp_path / "driver.py"
    file.write_text(DRIVER)
    command = [sys.executable, str(file), str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        told = driver.stdout.readline()
        below = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert told == "True False\n", "the fork has it, and the driver has not"
    assert len(below) >= 4, below  # the fork server, the nursery, the fork; a tracker
    _, alive = psutil.wait_procs(below, timeout=LONG_S)
    assert not alive


def test_a_fork_server_in_the_middle_of_its_imports_ends_with_its_driver(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(600)\n")
    driver = "import psutil; from rftdask.processes.nursery import start; start(['sleepy']); "
    driver += "print([child.pid for child in psutil.Process().children()])"
    path = os.pathsep.join([str(tmp_path), str(Path(rftdask.__file__).parents[1])])
    command = [sys.executable, "-c", driver]
    env = {**os.environ, "PYTHONPATH": path}
    # The fork server has its stdout, too: it ends in time if both have ended.
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=LONG_S)
    for pid in json.loads(done.stdout):
        wait_until_gone(pid)


def broken(kind: str) -> int:
    """For `call`: raises, ends, or returns the process's id."""
    if kind == "raises":
        raise ConfigError(["a.b: no", "c.d: no"])
    if kind.startswith("ends but in") and kind != f"ends but in {os.getpid()}":
        os._exit(3)
    return os.getpid()


def test_a_call_returns_and_raises_what_the_function_does(address: str) -> None:
    assert call(broken, "returns") != os.getpid()
    with pytest.raises(ConfigError) as caught:
        call(broken, "raises")
    assert caught.value.problems == ["a.b: no", "c.d: no"]
    assert call(broken, f"ends but in {os.getpid()}") == os.getpid(), "who kills a fork does not end a run"


def test_the_collector_looks_at_nothing_that_the_fork_server_imported(address: str) -> None:
    assert call(gc.isenabled) and call(gc.get_freeze_count) > 10_000


def test_without_a_fork_server_a_call_is_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_started", False)
    assert call(broken, "returns") == os.getpid()


def test_any_environment_reaches_a_fork(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ADDRESS, address)
    odd = {"LONG": "x" * 500_000, "NO_UTF8": os.fsdecode(b"\xff\xfe")}  # longer than a socket holds at once
    child = Child("child_targets:environment", {"names": list(odd)}, name="odd", env=odd, log_file=tmp_path / "log")
    assert child.receive(LONG_S) == [500_000, "fffe"]
    child.close()


def test_an_error_that_cannot_be_brought_over_is_raised_here(address: str) -> None:
    with pytest.raises(ValueError, match="of two arguments"):
        call(odd_error)


class OfTwo(ValueError):
    """As pickle cannot make it again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def odd_error() -> None:
    """For `call`."""
    raise OfTwo("of two", "arguments")
