"""Promises of the zygote: a fork behaves as an interpreter, and outlives neither zygote nor driver."""

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

from rftdask.errors import ConfigError, ProcessLostError, RoleError
from rftdask.models.toy import build_toy_model
from rftdask.processes import zygote as module
from rftdask.processes.child import Child
from rftdask.processes.zygote import ZYGOTE_ADDRESS, call, start_zygote
from tests.living import python_path, wait_until_gone

HERE = Path(__file__).parent
LONG_S = 60.0


@pytest.fixture
def forked(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Child]:
    """A forked child that sends the state of its process."""
    monkeypatch.setenv(ZYGOTE_ADDRESS, address)
    monkeypatch.setenv("SET_LATER", "by the worker")
    child = Child("child_targets:look", {}, name="look", threads=3, env={"OWN": "1"}, log_file=tmp_path / "log")
    yield child
    child.close()


def test_a_fork_has_only_the_imports_of_its_zygote(forked: Child) -> None:
    seen = forked.receive(LONG_S)
    environment = {"SET_LATER": "by the worker", "OWN": "1", "OMP_NUM_THREADS": "3", ZYGOTE_ADDRESS: None}
    assert {name: seen["environment"].get(name) for name in environment} == environment
    assert seen["session"] == forked.pid, "it receives no signals of the terminal"
    assert seen["blocked"] == []
    assert seen["descriptors"] <= 12, "pipes of siblings, which would keep them running"
    assert "child_targets:look" in " ".join(psutil.Process(forked.pid).cmdline()), "ps shows the target"


def test_forks_draw_different_random_numbers(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ZYGOTE_ADDRESS, address)
    children = [Child("child_targets:draw", {}, name="draw", log_file=tmp_path / "log") for _ in range(2)]
    drawn = [tuple(child.receive(LONG_S)) for child in children]
    for child in children:
        child.close()
    assert len({*drawn[0], *drawn[1]}) == 4


def test_the_signal_that_ended_a_fork_is_reported(forked: Child) -> None:
    forked.receive(LONG_S)
    os.kill(forked.pid, signal.SIGSEGV)
    with pytest.raises(ProcessLostError, match="ended with code -11"):
        forked.receive(LONG_S)
    assert not forked.alive()


@pytest.mark.slow
def test_after_a_killed_zygote_children_are_interpreters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sys.path.insert(0, str(HERE))
    monkeypatch.setattr(module, "_started", None)
    monkeypatch.setenv(ZYGOTE_ADDRESS, start_zygote(["json.tool"]))
    monkeypatch.setenv("PYTHONPATH", python_path(HERE))
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
    monkeypatch.setenv(ZYGOTE_ADDRESS, start_zygote())
    third = Child("child_targets:look", {}, name="look", log_file=tmp_path / "log")
    assert "json.tool" in third.receive(LONG_S)["modules"], "a new zygote has the same imports"
    third.close()
    sys.path.remove(str(HERE))


DRIVER = """
import sys, time
from pathlib import Path
from rftdask.processes.child import Child
from rftdask.processes.zygote import ZYGOTE_ADDRESS, start_zygote
import os
os.environ[ZYGOTE_ADDRESS] = start_zygote(["json.tool"])
child = Child("child_targets:look", {}, name="look", log_file=Path(sys.argv[1]))
print("json.tool" in child.receive(60)["modules"], "json.tool" in sys.modules, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("temporary_bytes", [70, 71, 200])
def test_no_process_outlives_a_killed_driver(tmp_path: Path, temporary_bytes: int) -> None:
    """A socket address has at most 107 bytes, however long TMPDIR is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        temporary = Path(short, "x" * (temporary_bytes - len(short) - 1))
        temporary.mkdir()
        file = tmp_path / "driver.py"
        file.write_text(DRIVER)
        command = [sys.executable, str(file), str(tmp_path / "log")]
        environment = {**os.environ, "PYTHONPATH": python_path(HERE), "TMPDIR": str(temporary)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            modules = driver.stdout.readline()
            below = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
        assert modules == "True False\n", "only the fork has the module"
        assert len(below) == 2, below  # the zygote and the fork
        assert not psutil.wait_procs(below, timeout=LONG_S)[1]


def test_importing_processes_end_with_their_driver(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(600)\n")
    driver = "import psutil; from rftdask.processes.zygote import start_zygote; start_zygote(['sleepy']); "
    driver += "from rftdask.processes.fork_server import start_fork_server; start_fork_server(['sleepy']); "
    driver += "print([child.pid for child in psutil.Process().children()])"
    command = [sys.executable, "-c", driver]
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    # Both hold its stdout, so the wait for its end covers all three processes.
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=LONG_S)
    for pid in json.loads(done.stdout):
        wait_until_gone(pid)


def broken(kind: str) -> int:
    """Function for `call` that raises, hangs, ends its process, or returns the process id."""
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
    assert call(broken, f"ends but in {os.getpid()}") == os.getpid(), "a killed fork does not end the run"


def test_an_unanswered_call_runs_in_this_process(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALL_TIMEOUT_S", 0.3)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert call(broken, f"hangs but in {os.getpid()}") == os.getpid()
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before:
            wait_until_gone(child.pid)


def test_the_collector_ignores_the_imports_of_the_zygote(address: str) -> None:
    assert call(gc.isenabled) and call(gc.get_freeze_count) > 10_000


def is_imported(name: str) -> bool:
    return name in sys.modules


def test_a_needed_module_is_imported_once_for_all_calls(address: str) -> None:
    assert call(is_imported, "colorsys", needs=["colorsys"])


def test_without_a_zygote_a_call_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_started", None)
    assert call(broken, "returns") == os.getpid()


def test_any_environment_reaches_a_fork(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ZYGOTE_ADDRESS, address)
    odd = {"LONG": "x" * 500_000, "NO_UTF8": os.fsdecode(b"\xff\xfe")}  # longer than a socket holds at once
    child = Child("child_targets:environment", {"names": list(odd)}, name="odd", env=odd, log_file=tmp_path / "log")
    assert child.receive(LONG_S) == [500_000, "fffe"]
    child.close()


def test_an_error_that_does_not_unpickle_is_still_raised(address: str) -> None:
    with pytest.raises(ValueError, match="of two arguments"):
        call(odd_error)


class OfTwo(ValueError):
    """Pickle cannot restore an instance."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def odd_error() -> None:
    raise OfTwo("of two", "arguments")


@pytest.mark.parametrize(
    ("needs", "may_begin"),
    [((), True), (["torch"], False), (["json"], True), (["json", "torch"], False), (None, False)],
)
def test_a_fork_starts_once_its_modules_are_imported(needs: list[str] | None, may_begin: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks = module.Zygote(ours, theirs)
        request = module._Request(ours, [], "json:loads", [], {}, "/", [], 0o022, needs)
        forks._to_import = ["torch", "transformers"]
        assert forks._may_fork(request) is may_begin
        forks._to_import = []
        assert forks._may_fork(request)
        forks._wake.close()
        forks._wakeup.close()


def test_a_fork_without_named_modules_waits_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    (tmp_path / "endless.py").write_text(
        f"import time\nfrom pathlib import Path\nwhile not Path({str(stop)!r}).exists(): time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "_started", None)
    monkeypatch.setattr(module, "_modules", [])
    with ThreadPoolExecutor(1) as thread:
        start_zygote(["endless"])
        last = thread.submit(call, sorted, ["b", "a"])
        with pytest.raises(TimeoutError):
            last.result(0.5)
        stop.touch()
        assert last.result(LONG_S) == ["a", "b"]


def test_a_fork_has_our_folder_and_module_path(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A notebook may change both between two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    assert call(os.getcwd) == str(tmp_path)
    assert call(paths)[0] == str(tmp_path / "modules")


def paths() -> list[str]:
    return sys.path


def test_a_fork_has_the_umask_of_its_requester(address: str) -> None:
    before = os.umask(0o077)
    try:
        assert call(module.umask) == 0o077
    finally:
        os.umask(before)
    assert call(module.umask) == module.umask() == before


@pytest.mark.slow
def test_a_tokenizer_comes_without_torch(tmp_path: Path) -> None:
    """The tokenizer equals that of transformers, which would import torch for seconds."""
    build_toy_model(tmp_path, seed=0)
    code = (
        "import sys\n"
        "from rftdask.data.tokenizer import read_tokenizer\n"
        "from rftdask.processes.zygote import MODELS, start_zygote\n"
        "start_zygote([MODELS])\n"
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
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=4 * LONG_S
    )
    assert done.returncode == 0, done.stderr
