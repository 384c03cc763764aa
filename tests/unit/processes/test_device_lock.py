"""Promises of turns on a shared device.

- A rank and an engine never have it together; engines have it together.
- Whoever waits is next: an engine that has nothing to do sees that it is wanted, and none overtakes a rank.
- A turn ends with its process, also by kill -9.
- Ranks and engines of several devices do not wait in a circle.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rftdask.errors import WaitTimeout
from rftdask.processes.device_lock import VARIABLE, DeviceTurn, shared_devices


def rank(folder: Path, number: int = 0) -> DeviceTurn:
    return DeviceTurn(folder, [number], alone=True)


def engine(folder: Path, *numbers: int) -> DeviceTurn:
    return DeviceTurn(folder, numbers or [0], alone=False)


def test_a_rank_and_an_engine_take_turns(tmp_path: Path) -> None:
    trainer, sampler = rank(tmp_path), engine(tmp_path)
    assert sampler.try_take()
    assert not sampler.is_wanted
    assert not trainer.try_take()
    assert sampler.is_wanted  # it stands at the door
    sampler.leave()
    assert not sampler.try_take()  # and is next, also where the engine is quicker
    assert trainer.try_take()
    assert trainer.held
    assert not sampler.try_take()
    trainer.leave()
    assert sampler.try_take()


def test_engines_have_it_together_and_one_may_join_another_past_a_rank(tmp_path: Path) -> None:
    policy, judge, trainer = engine(tmp_path), engine(tmp_path), rank(tmp_path)
    assert policy.try_take()
    assert not trainer.try_take()
    assert not judge.try_take()
    assert judge.try_take(beside=True)
    policy.leave()
    assert not trainer.try_take()
    judge.leave()
    assert trainer.try_take()


def test_an_engine_of_several_devices_has_all_of_them_or_none(tmp_path: Path) -> None:
    split, zero, one = engine(tmp_path, 0, 1), rank(tmp_path, 0), rank(tmp_path, 1)
    assert one.try_take()
    assert not split.try_take()
    assert zero.try_take()  # the engine keeps nothing of what it did not get whole
    zero.leave()
    one.leave()
    assert split.try_take()
    assert not zero.try_take()


def test_a_wait_ends_with_the_turn_or_its_deadline(tmp_path: Path) -> None:
    trainer, sampler = rank(tmp_path), engine(tmp_path)
    trainer.wait(1)
    with pytest.raises(WaitTimeout, match=r"device 0 is shared by turns, and a trainer rank did not leave it for 0 s"):
        sampler.wait(0.05)
    threading.Timer(0.1, trainer.leave).start()
    sampler.wait(10)
    assert sampler.held


def test_a_turn_ends_with_its_process_even_by_kill(tmp_path: Path) -> None:
    code = (
        "import sys; from rftdask.processes.device_lock import DeviceTurn as T; "
        "t = T.of_this_process(alone=True); t.wait(9);"
    )
    env = {**os.environ, **shared_devices(tmp_path, [0])}
    assert env[VARIABLE] == f"{tmp_path}:0"
    command = [sys.executable, "-c", code + "print('has it', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        sampler = engine(tmp_path)
        assert not sampler.try_take()
        other.send_signal(signal.SIGKILL)
        sampler.wait(10)


def test_nobody_is_there_beside_a_rank_and_everybody_gets_a_turn(tmp_path: Path) -> None:
    inside: list[str] = []
    seen: dict[str, int] = {}
    problems: list[str] = []
    over = threading.Event()

    def work(name: str, turn: DeviceTurn) -> None:
        while not over.is_set():
            turn.wait(20)
            inside.append(name)
            if name.startswith("rank") and any(each.startswith("engine") for each in inside):
                problems.append(str(inside))
            seen[name] = seen.get(name, 0) + 1
            time.sleep(0.002)
            inside.remove(name)
            turn.leave()
            time.sleep(0.002)

    turns = {"rank": rank(tmp_path), "engine a": engine(tmp_path), "engine b": engine(tmp_path)}
    threads = [threading.Thread(target=work, args=pair) for pair in turns.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60  # a machine may be busy with other tests
    while min(seen.get(name, 0) for name in turns) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join(20)
    assert not problems
    assert min(seen.get(name, 0) for name in turns) >= 2


def test_a_process_that_shares_nothing_has_no_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert DeviceTurn.of_this_process(alone=True) is None
    assert shared_devices(tmp_path, ()) == {}
