"""Promises of the fork server of a command that has just begun: what its forks have, and that it outlives nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import rftdask
from tests.living import wait_until_gone

LONG_S = 60.0
RUNS = """
import json, multiprocessing, os, sys, threading
from rftdask.processes.fork_server import WITHOUT_MAIN, begin_fork_server, start_fork_server
from rftdask.processes.zygote import call
import looking
print(json.dumps("imported"), flush=True)
WITHOUT_MAIN.update(["ours"])
HAS_THREAD and threading.Thread(target=threading.Event().wait, daemon=True).start()
begin_fork_server(["json.tool"], ["colorsys"])
start_fork_server(["wave"])
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
from rftdask.processes.zygote import asker_of

def look(end):
    names = ("json.tool", "wave", "rftdask.processes.forked_imports")
    blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    title = open(f"/proc/{os.getppid()}/cmdline").read()
    has = [*(name in sys.modules for name in names), "rftdask fork server of" in title]
    end.send([*has, blocked, os.environ.get("OPENBLAS_NUM_THREADS"), os.getppid()])

def look_around():
    nursery = psutil.Process().parent()
    modules = [name in sys.modules for name in ("json.tool", "colorsys", "wave")]
    script = [*sys.argv, getattr(sys.modules["__main__"], "__file__", None), os.readlink(f"/proc/{nursery.pid}/fd/0")]
    asker = asker_of(psutil.Process().cmdline())
    return modules, script, nursery.num_fds(), nursery.cmdline(), asker, nursery.parent().pid

def stay(end):
    end.send(os.getpid())
    signal.pause()

def look_below(end):
    process = multiprocessing.get_context("forkserver").Process(target=look, args=(end,), name="ours")
    process.start()
    process.join(30)
"""


def drive(tmp_path: Path, script: str, *, stderr: int | None = None, **variables: object) -> subprocess.Popen[str]:
    """A driver of its own, as a plain script in a folder, whose command line is short; variables: of its
    environment.
    """
    (tmp_path / "looking.py").write_text(LOOKING)
    (tmp_path / "driver.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), str(Path(rftdask.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}
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


@pytest.mark.parametrize("has_thread", [False, True])
def test_forks_have_what_the_command_and_the_server_import_and_nothing_of_the_script(
    tmp_path: Path, has_thread: bool
) -> None:
    with drive(tmp_path, RUNS.replace("HAS_THREAD", str(has_thread))) as driver:
        told, _ = driver.communicate(timeout=LONG_S)
    assert driver.returncode == 0
    # Once: the script that starts a process is not run in it.
    imported, around, answer, below = map(json.loads, told.splitlines())
    # A process that has a thread is not forked, so its server is an interpreter, which has not what they share.
    assert [imported, answer[:-1]] == ["imported", [not has_thread, True, True, not has_thread, 3, "1"]]
    assert answer[-1] != driver.pid
    modules, script, num_descriptors, command_line, asker, parent = around
    assert modules == [True, True, False], "what the nursery shares and has apart, and not what the server has"
    assert script == ["-c", None, "/dev/null"], "as an interpreter of its own"
    assert num_descriptors <= 8 and command_line[0] == f"rftdask nursery of {driver.pid}"
    assert asker == driver.pid, "who looks at ps sees whom a fork belongs to, however short the command was"
    assert parent == (driver.pid if has_thread else answer[-1])
    assert below[-1] != answer[-1], "a fork that has forks itself has a server of its own"


FORKS = """
import os, time
pid = os.fork()
if not pid:
    time.sleep(600)
"""
KILLS = """
import os, signal
from multiprocessing.forkserver import _forkserver
os.kill(_forkserver._forkserver_pid, signal.SIGKILL)
os.waitid(os.P_PID, _forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)
"""


@pytest.mark.parametrize(("between", "has_it"), [(FORKS, True), (KILLS, False)])
def test_a_server_that_waits_is_told_beside_forks_of_its_command_or_there_is_another(
    tmp_path: Path, between: str, has_it: bool
) -> None:
    """Code of the user's that forks while the configuration is read, and somebody who kills the server then."""
    script = RUNS.replace("HAS_THREAD", "False").replace("start_fork_server([", between + "start_fork_server([")
    script += "if 'pid' in globals(): os.kill(pid, 9)\n"
    with drive(tmp_path, script) as driver:
        told, _ = driver.communicate(timeout=LONG_S)
    assert driver.returncode == 0
    _, _, answer, _ = map(json.loads, told.splitlines())
    assert answer[:2] == [has_it, True]


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server_ends_with_its_command_whether_or_not_it_was_told_what_to_import(
    tmp_path: Path, is_told: bool, is_killed: bool
) -> None:
    script = "import os, psutil, signal\n"
    script += "from rftdask.processes.fork_server import begin_fork_server, start_fork_server\n"
    script += "begin_fork_server(['json.tool'], ['colorsys'])\n"
    script += "start_fork_server(['wave'])\n" * is_told
    script += "from rftdask.processes.zygote import call\ncall(len, [])\n"  # there is a nursery
    script += "print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)\n"
    script += "os.kill(os.getpid(), signal.SIGKILL)\n" * is_killed
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # a short one, where sockets may be
        with drive(tmp_path, script, TMPDIR=temporary) as driver:
            assert driver.stdout is not None
            pids = [*map(int, driver.stdout.readline().split())]
        assert len(pids) >= 3  # the server, its nursery, and Python's resource tracker
        for pid in pids:
            wait_until_gone(pid)
        assert not [*Path(temporary).glob("rftdask-*")]


@pytest.mark.parametrize("victim", ["nursery", "server"])
def test_a_nursery_that_is_killed_or_whose_server_is_leaves_its_driver_another(tmp_path: Path, victim: str) -> None:
    script = "import multiprocessing.forkserver, os, psutil, sys\n"
    script += "from rftdask.processes.fork_server import begin_fork_server, start_fork_server\n"
    script += "from rftdask.processes.zygote import call, start_nursery\n"
    script += "import looking\nbegin_fork_server(['json.tool'], ['json.tool', 'colorsys'])\nstart_fork_server([])\n"
    script += "number = multiprocessing.forkserver._forkserver._forkserver_pid\nserver = psutil.Process(number)\n"
    script += "call(len, [])\nnursery, = server.children()\n"
    script += f"{victim}.kill()\nnursery.wait(60)\n"
    script += "start_nursery()\nprint(call(looking.look_around)[0], server.is_running(), flush=True)\n"
    with drive(tmp_path, script, stderr=subprocess.STDOUT) as driver:
        told, _ = driver.communicate(timeout=LONG_S)
    assert told == "[True, True, False] True\n", "nothing is told that the user could not understand"


def test_a_worker_that_outlives_the_driver_does_not_keep_the_nursery(tmp_path: Path) -> None:
    script = RUNS.replace("HAS_THREAD", "False").replace("looking.look_below", "looking.stay")
    script = script.replace("process.join(60)", "process.join(name == 'look' and 60 or 600)")
    with drive(tmp_path, script) as driver:
        assert driver.stdout is not None
        _, around, _, worker = (json.loads(driver.stdout.readline()) for _ in range(4))
        [nursery] = [one for one in psutil.Process(around[-1]).children() if "nursery of" in one.cmdline()[0]]
        driver.kill()
        try:
            wait_until_gone(nursery.pid)
        finally:
            os.kill(worker, 9)
        wait_until_gone(around[-1])


def test_a_fork_of_the_driver_does_not_keep_its_nursery(tmp_path: Path) -> None:
    script = "import os, time\nfrom rftdask.processes.zygote import start_nursery\n"
    script += "import rftdask.processes.zygote as module\nstart_nursery()\n"
    script += "pid = os.fork() or time.sleep(600)\nprint(pid, module._started._process.pid, flush=True)\n"
    script += "time.sleep(600)\n"
    with drive(tmp_path, script) as driver:
        assert driver.stdout is not None
        fork, nursery = map(int, driver.stdout.readline().split())
        driver.kill()
        wait_until_gone(nursery)
        assert psutil.pid_exists(fork), "as any process of the user's, which ends when he ends it"
        os.kill(fork, 9)
