"""Promises of the fork server and its zygote: what their forks have, and when they end."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.living import python_path, wait_until_gone

LONG_S = 60.0
RUNS = """
import json, multiprocessing, os, sys
from rftdask.processes.fork_server import WITHOUT_MAIN, start_fork_server
from rftdask.processes.zygote import call
import looking
print(json.dumps("imported"), flush=True)
WITHOUT_MAIN.update(["ours"])
start_fork_server(["json.tool", "wave"], ["colorsys"])
print(json.dumps(call(looking.look_around)), flush=True)
context = multiprocessing.get_context("forkserver")
for function in ("looking.look", "looking.look_below"):
    module, _, name = function.partition(".")
    ours, theirs = context.Pipe()
    process = context.Process(target=getattr(__import__(module), name), args=(theirs,), name="ours")
    process.start()
    if ours.poll(60):
        print(json.dumps(ours.recv()), flush=True)
    process.join(60)
"""
LOOKING = """
import multiprocessing, os, psutil, signal, sys
from rftdask.processes.zygote import requester_of

def look(end):
    blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    title = open(f"/proc/{os.getppid()}/cmdline").read()
    has = [*(name in sys.modules for name in ("json.tool", "wave", "colorsys")), "rftdask fork server of" in title]
    end.send([*has, blocked, os.environ.get("OPENBLAS_NUM_THREADS"), os.getppid()])

def look_around():
    zygote = psutil.Process().parent()
    modules = [name in sys.modules for name in ("json.tool", "wave", "colorsys")]
    script = [*sys.argv, getattr(sys.modules["__main__"], "__file__", None)]
    requester = requester_of(psutil.Process().cmdline())
    return modules, script, zygote.num_fds(), zygote.cmdline(), requester, zygote.pid, zygote.ppid()

def stay(end):
    end.send(os.getpid())
    signal.pause()

def look_below(end):
    process = multiprocessing.get_context("forkserver").Process(target=look, args=(end,), name="ours")
    process.start()
    process.join(30)
"""


def drive(tmp_path: Path, script: str, *, stderr: int | None = None, **variables: Any) -> subprocess.Popen[str]:
    """Start a plain script with a short command line as the driver, in its folder and with these variables."""
    (tmp_path / "looking.py").write_text(LOOKING)
    (tmp_path / "driver.py").write_text(script)
    variables = {name: str(value) for name, value in variables.items()}
    environment: dict[str, str] = {**os.environ, "PYTHONPATH": python_path(tmp_path), **variables}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.Popen(
        ["python", "driver.py", "a", "short", "one"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=stderr,
    )


def test_forks_have_the_imports_and_nothing_of_the_script(tmp_path: Path) -> None:
    with drive(tmp_path, RUNS) as driver:
        output, _ = driver.communicate(timeout=LONG_S)
    assert driver.returncode == 0
    # Once: the script that starts a process does not run in it.
    imported, around, answer, below = map(json.loads, output.splitlines())
    assert [imported, answer[:-1]] == ["imported", [True, True, False, True, 3, "1"]]
    modules, script, num_descriptors, command_line, requester, _, zygote_parent = around
    assert modules == [False, False, True], "the zygote has what both need and its own modules"
    assert script == ["-c", None], "like an interpreter of its own"
    assert num_descriptors <= 8 and command_line[0] == f"rftdask zygote of {driver.pid}"
    assert requester == driver.pid, "ps shows which process a fork belongs to, however short the command was"
    assert zygote_parent == answer[-1], "the fork server forked the zygote"
    assert below[-1] != answer[-1], "a fork that forks has a fork server of its own"


@pytest.mark.parametrize("is_killed", [False, True])
def test_server_and_zygote_end_with_their_driver(tmp_path: Path, is_killed: bool) -> None:
    script = "import os, psutil, signal\n"
    script += "from rftdask.processes.fork_server import start_fork_server\n"
    script += "from rftdask.processes.zygote import call\n"
    script += "start_fork_server(['wave'], ['colorsys'])\ncall(len, [])\n"
    script += "print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)\n"
    script += "os.kill(os.getpid(), signal.SIGKILL)\n" * is_killed
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # short enough for a socket address
        with drive(tmp_path, script, TMPDIR=temporary) as driver:
            assert driver.stdout is not None
            pids = [*map(int, driver.stdout.readline().split())]
        assert len(pids) >= 3  # the server, its zygote, and Python's resource tracker
        for pid in pids:
            wait_until_gone(pid)
        assert not [*Path(temporary).glob("rftdask-*")]


@pytest.mark.parametrize("victim", ["zygote", "server"])
def test_a_driver_has_a_zygote_again_after_a_kill(tmp_path: Path, victim: str) -> None:
    script = "import os, psutil, sys\n"
    script += "from rftdask.processes.fork_server import start_fork_server\n"
    script += "from rftdask.processes.zygote import call, start_zygote\n"
    script += "import looking\nstart_fork_server(['wave'], ['json.tool', 'colorsys'])\n"
    script += "zygote, server = map(psutil.Process, call(looking.look_around)[-2:])\n"
    script += f"{victim}.kill()\n"
    script += f"try:\n    while {victim}.status() != 'zombie': pass\nexcept psutil.NoSuchProcess: pass\n"
    script += "start_zygote()\nprint(call(looking.look_around)[0], flush=True)\n"
    with drive(tmp_path, script, stderr=subprocess.STDOUT) as driver:
        output, _ = driver.communicate(timeout=LONG_S)
    assert output == "[True, False, True]\n", "and no message that the user could not understand"


def test_a_worker_outliving_the_driver_does_not_keep_the_zygote(tmp_path: Path) -> None:
    script = RUNS.replace("looking.look_below", "looking.stay")
    script = script.replace("process.join(60)", "process.join(name == 'look' and 60 or 600)")
    with drive(tmp_path, script) as driver:
        assert driver.stdout is not None
        _, around, _, worker = (json.loads(driver.stdout.readline()) for _ in range(4))
        driver.kill()
        try:
            wait_until_gone(around[-2])
        finally:
            os.kill(worker, 9)
        wait_until_gone(around[-1])


def test_a_fork_of_the_driver_does_not_keep_its_zygote(tmp_path: Path) -> None:
    script = "import os, time\nfrom rftdask.processes.zygote import call, start_zygote\n"
    script += "start_zygote()\nzygote = call(os.getppid)\n"
    script += "pid = os.fork() or time.sleep(600)\nprint(pid, zygote, flush=True)\n"
    script += "time.sleep(600)\n"
    with drive(tmp_path, script) as driver:
        assert driver.stdout is not None
        fork, zygote = map(int, driver.stdout.readline().split())
        driver.kill()
        wait_until_gone(zygote)
        assert psutil.pid_exists(fork), "the user's process, which the user ends"
        os.kill(fork, 9)
