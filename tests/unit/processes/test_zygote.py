"""Promises of the nursery: a fork is as good as an interpreter of its own, and outlives neither nursery nor driver."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import rftdask
from rftdask.errors import ConfigError, ProcessLostError, RoleError
from rftdask.models.toy import build_toy_model
from rftdask.processes import zygote as module
from rftdask.processes.child import Child
from rftdask.processes.zygote import ADDRESS, call, start_nursery
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
    monkeypatch.setattr(module, "_started", None)
    monkeypatch.setenv(ADDRESS, start_nursery(["json.tool"]))
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
    monkeypatch.setenv(ADDRESS, start_nursery())
    third = Child("child_targets:look", {}, name="look", log_file=tmp_path / "log")
    assert "json.tool" in third.receive(LONG_S)["modules"], "the next run has another nursery, with the same imports"
    third.close()
    sys.path.remove(str(HERE))


DRIVER = """
import sys, time
from pathlib import Path
from rftdask.processes.child import Child
from rftdask.processes.zygote import ADDRESS, start_nursery
import os
os.environ[ADDRESS] = start_nursery(["json.tool"])
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
    assert len(below) == 2, below  # the nursery and the fork
    _, alive = psutil.wait_procs(below, timeout=LONG_S)
    assert not alive


def test_what_is_in_the_middle_of_its_imports_ends_with_its_driver(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(600)\n")
    driver = "import psutil; from rftdask.processes.zygote import start_nursery; start_nursery(['sleepy']); "
    driver += "from rftdask.processes.fork_server import start_fork_server; start_fork_server(['sleepy']); "
    driver += "print([child.pid for child in psutil.Process().children()])"
    path = os.pathsep.join([str(tmp_path), str(Path(rftdask.__file__).parents[1])])
    command = [sys.executable, "-c", driver]
    env = {**os.environ, "PYTHONPATH": path}
    # Both have its stdout, too: it ends in time if all three have ended.
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=LONG_S)
    for pid in json.loads(done.stdout):
        wait_until_gone(pid)


def broken(kind: str) -> int:
    """For `call`: raises, ends, or returns the process's id."""
    if kind == "raises":
        raise ConfigError(["a.b: no", "c.d: no"])
    if kind.startswith("hangs but in") and kind != f"hangs but in {os.getpid()}":
        time.sleep(3600)
    if kind.startswith("ends but in") and kind != f"ends but in {os.getpid()}":
        os._exit(3)
    return os.getpid()


def test_a_call_returns_and_raises_what_the_function_does(address: str) -> None:
    assert call(broken, "returns") != os.getpid()
    with pytest.raises(ConfigError) as caught:
        call(broken, "raises")
    assert caught.value.problems == ["a.b: no", "c.d: no"]
    assert call(broken, f"ends but in {os.getpid()}") == os.getpid(), "who kills a fork does not end a run"


def test_a_call_that_is_not_answered_is_one_here(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALL_S", 0.3)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert call(broken, f"hangs but in {os.getpid()}") == os.getpid()
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before:
            wait_until_gone(child.pid)


def test_the_collector_looks_at_nothing_that_the_nursery_imported(address: str) -> None:
    assert call(gc.isenabled) and call(gc.get_freeze_count) > 10_000


def test_without_a_nursery_a_call_is_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_started", None)
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


@pytest.mark.parametrize(
    ("needs", "may_begin"),
    [((), True), (["torch"], False), (["json"], True), (["json", "torch"], False), (None, False)],
)
def test_a_fork_begins_once_what_it_needs_is_imported(needs: list[str] | None, may_begin: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks = module._Nursery(ours, theirs)
        request = module._Request(ours, [], "json:loads", [], {}, "/", [], 0o022, needs)
        forks._to_import = ["torch", "transformers"]
        assert forks._may_fork(request) is may_begin
        forks._to_import = []
        assert forks._may_fork(request)
        forks._wake.close()
        forks._woken.close()


def test_who_needs_all_that_is_to_be_imported_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    (tmp_path / "endless.py").write_text(
        f"import time\nfrom pathlib import Path\nwhile not Path({str(stop)!r}).exists(): time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "_started", None)
    monkeypatch.setattr(module, "_wanted", [])
    with ThreadPoolExecutor(1) as thread:
        start_nursery(["endless"])
        last = thread.submit(call, sorted, ["b", "a"])
        with pytest.raises(TimeoutError):
            last.result(0.5)
        stop.touch()
        assert last.result(LONG_S) == ["a", "b"]


def test_a_fork_is_where_its_asker_is_by_then(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A notebook changes its folder, and where it looks for modules, between two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    assert call(os.getcwd) == str(tmp_path)
    assert call(paths)[0] == str(tmp_path / "modules")


def paths() -> list[str]:
    """For `call`."""
    return sys.path


def test_a_fork_writes_files_as_its_asker(address: str) -> None:
    before = os.umask(0o077)
    try:
        assert call(module.umask) == 0o077
    finally:
        os.umask(before)
    assert call(module.umask) == module.umask() == before


def test_a_tokenizer_comes_without_torch(tmp_path: Path) -> None:
    """A worker has the very tokenizer that transformers makes, and not the seconds of torch that finding it takes."""
    build_toy_model(tmp_path, seed=0)
    code = (
        "import sys\n"
        "from rftdask.data.tokenizer import read_tokenizer\n"
        "from rftdask.processes.zygote import MODELS, start_nursery\n"
        "start_nursery([MODELS])\n"
        "tokenizer = read_tokenizer(sys.argv[1], False)\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "from transformers import AutoTokenizer\n"
        "own = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "assert type(tokenizer) is type(own)\n"
        "assert tokenizer.encode('1 + 2 = <|eos|>') == own.encode('1 + 2 = <|eos|>')\n"
        "assert tokenizer.decode(range(60)) == own.decode(range(60))\n"
        "chat = [{'role': 'user', 'content': '1 + 2'}]\n"
        "assert tokenizer.apply_chat_template(chat) == own.apply_chat_template(chat)\n"
        "assert tokenizer.special_tokens_map == own.special_tokens_map\n"
        "assert tokenizer.added_tokens_decoder == own.added_tokens_decoder\n"
        "assert tokenizer.init_kwargs == own.init_kwargs\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(rftdask.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=4 * LONG_S
    )
    assert done.returncode == 0, done.stderr
