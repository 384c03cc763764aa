"""Workflows that go wrong in every way, for tests of the sandbox; found by dotted path, as a user's are."""

import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.turns import MultiTurnWorkflow

_at_fork: set[str] = set()
os.register_at_fork(after_in_child=lambda: _at_fork.update(sys.modules))


async def good(task: Task, model: PolicyModel) -> float:
    answer = await model.chat(task.messages)
    return float(answer.text == task.truth)


async def whatever_the_row_says(task: Task, model: PolicyModel) -> Any:
    """Do what the column `does` names, after a call of the policy."""
    await model.generate("p")
    return await globals()[task.row.get("does", "good")](task, model)


async def hangs(task: Task, model: PolicyModel) -> float:
    model.set_state(turn=7)
    await asyncio.sleep(3600)
    return 1.0


async def dies(task: Task, model: PolicyModel) -> float:
    print("about to die", flush=True)
    os._exit(3)


async def eats_memory(task: Task, model: PolicyModel) -> float:
    eaten = []
    while True:
        eaten.append(bytearray(16 << 20))


async def prints_without_end(task: Task, model: PolicyModel) -> float:
    while True:
        print("x" * 10_000)


async def prints(task: Task, model: PolicyModel) -> float:
    print("not flushed")
    return 1.0


async def blocks(task: Task, model: PolicyModel) -> float:
    while True:
        pass


async def sleeps_without_yielding(task: Task, model: PolicyModel) -> float:
    time.sleep(3600)
    return 1.0


async def ignores_its_cancellation(task: Task, model: PolicyModel) -> float:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def asks_without_end(task: Task, model: PolicyModel) -> float:
    while True:
        await model.generate("p")


async def returns_too_much(task: Task, model: PolicyModel) -> Any:
    return Reward(1.0, {"x" * (80 << 20): 1.0})


async def writes_to_the_stream(task: Task, model: PolicyModel) -> float:
    for fd in range(3, 20):
        try:
            os.write(fd, b"\x00\x00\x00\x05hello")
        except OSError:
            continue
    return 1.0


async def raises(task: Task, model: PolicyModel) -> float:
    raise KeyError("no such key")


async def returns(task: Task, model: PolicyModel) -> Any:
    return task.row["value"]


async def exits(task: Task, model: PolicyModel) -> float:
    sys.exit(4)


async def starts_a_program(task: Task, model: PolicyModel) -> float:
    program = subprocess.Popen(["sleep", "3600"], start_new_session=task.row.get("session", False))
    with open(task.row["file"], "w") as file:
        file.write(str(program.pid))
    if task.row.get("ends", False):
        return 1.0
    await asyncio.sleep(3600)
    return 1.0


async def signals_its_fork_server(task: Task, model: PolicyModel) -> float:
    """Once: the second time it is good."""
    if os.path.exists(task.row["file"]):
        return 1.0
    program = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    with open(task.row["file"], "w") as file:
        file.write(str(program.pid))
    os.kill(os.getppid(), task.row["signal"])
    await asyncio.sleep(3600)
    return 1.0


async def looks_around(task: Task, model: PolicyModel) -> Reward:
    """Tell, as 1.0, what of the machine is closed to it, after it has used what is open."""

    def is_refused(reach: Callable[[], Any]) -> bool:
        try:
            reach()
        except OSError:
            return True
        return False

    Path("made").write_text("here")
    closed = {
        "own_folder": os.listdir() == ["made"] and os.getcwd() == f"/tmp/rollout-{os.getpid()}",
        "files": is_refused(lambda: Path(task.row["outside"]).write_text("changed")),
        "tmp": not os.path.exists(task.row["in_tmp"]),
        "network": is_refused(lambda: socket.create_connection(("127.0.0.1", task.row["port"]), 5).close()),
        "processes": is_refused(lambda: os.kill(task.row["pid"], 0)) and os.getpid() < 1000,
    }
    return Reward(1.0, {**{name: float(found) for name, found in closed.items()}, "pid": float(os.getpid())})


async def fills_memory_with_its_children(task: Task, model: PolicyModel) -> float:
    """Four children, of which each takes the row's bytes, in a session of its own, and holds them."""
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            held = b"x" * task.row["bytes"]
            time.sleep(3600)
            os._exit(len(held) % 2)
    await asyncio.sleep(task.row["wait_s"])
    return 1.0


_seen = 0


def _handle(number: int, frame: Any) -> None: ...


async def changes_its_process(task: Task, model: PolicyModel) -> Reward:
    """Tell what others have changed of what belongs to a process, then change all of it."""
    global _seen
    umask = os.umask(0o077)
    traces = {
        "directory": os.getcwd() == task.row["folder"],
        "environment": "RFTDASK_TEST_TRACE" in os.environ,
        "global": _seen != 0,
        "path": "/rftdask-test-trace" in sys.path,
        "handler": signal.getsignal(signal.SIGUSR1) is _handle,
        "umask": umask == 0o077,
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 200,
        "random": random.random() == task.row["drawn"],
        "loop": getattr(asyncio.get_running_loop(), "trace", False),
    }
    os.chdir(task.row["folder"])
    os.environ["RFTDASK_TEST_TRACE"] = "1"
    _seen += 1
    sys.path.append("/rftdask-test-trace")
    signal.signal(signal.SIGUSR1, _handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    random.seed(3)
    asyncio.get_running_loop().trace = True  # type: ignore[attr-defined]
    return Reward(1.0, {name: float(found) for name, found in traces.items()})


async def tells_what_it_imported(task: Task, model: PolicyModel) -> Reward:
    await model.chat(task.messages)
    return Reward(1.0, {name: 1.0 for name in sys.modules.keys() - _at_fork})


def blocking(task: Task, model: Any) -> Reward:
    """A plain function: its model blocks, too."""
    first = model.chat(task.messages)
    client = model.openai_client()
    answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "again"}])
    with model.timer("tool"):
        time.sleep(0.01)
    same = first.text == answer.choices[0].message.content
    return Reward(float(same), steps=(Step("a", 0.0), Step("b", float(same))))


class Guess(MultiTurnWorkflow):
    """Asks until it hears the truth."""

    max_turns = 3

    async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
        self.heard = (await model.generate(f"turn {number}")).text
        return self.heard != task.truth

    async def reward(self, task: Task, model: PolicyModel) -> float:
        return float(self.heard == task.truth)


def slow_reward(response: str, truth: str, task: Task) -> float:
    """A reward that computes for a while, and asks for nothing."""
    ends = time.monotonic() + 0.01
    while time.monotonic() < ends:
        pass
    return float(truth in response)
