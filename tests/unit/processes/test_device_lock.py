"""Promises of the lock of a shared device: a rank excludes engines, which share it; it ends with its process."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rftdask.errors import WaitTimeout
from rftdask.processes.device_lock import DEVICES_VARIABLE, DeviceLock, shared_devices
from tests.living import wait_until


def rank(folder: Path, number: int = 0) -> DeviceLock:
    return DeviceLock(folder, [number], exclusive=True)


def engine(folder: Path, *numbers: int) -> DeviceLock:
    return DeviceLock(folder, numbers or [0], exclusive=False)


def test_a_rank_and_an_engine_alternate(tmp_path: Path) -> None:
    trainer, sampler = rank(tmp_path), engine(tmp_path)
    assert sampler.try_acquire()
    assert not sampler.is_wanted
    assert not trainer.try_acquire()
    assert sampler.is_wanted  # the rank has the gate
    sampler.release()
    assert not sampler.try_acquire()  # the rank is next, even if the engine is quicker
    assert trainer.try_acquire()
    assert trainer.held
    assert not sampler.try_acquire()
    trainer.release()
    assert sampler.try_acquire()


def test_engines_share_and_may_join_another_past_a_rank(tmp_path: Path) -> None:
    policy, judge, trainer = engine(tmp_path), engine(tmp_path), rank(tmp_path)
    assert policy.try_acquire()
    assert not trainer.try_acquire()
    assert not judge.try_acquire()
    assert judge.try_acquire(skip_gate=True)
    policy.release()
    assert not trainer.try_acquire()
    judge.release()
    assert trainer.try_acquire()


def test_an_engine_acquires_all_of_its_devices_or_none(tmp_path: Path) -> None:
    split, zero, one = engine(tmp_path, 0, 1), rank(tmp_path, 0), rank(tmp_path, 1)
    assert one.try_acquire()
    assert not split.try_acquire()
    assert zero.try_acquire()  # the engine keeps no part of its devices
    zero.release()
    one.release()
    assert split.try_acquire()
    assert not zero.try_acquire()


def test_a_wait_ends_with_the_lock_or_its_deadline(tmp_path: Path) -> None:
    trainer, sampler = rank(tmp_path), engine(tmp_path)
    trainer.acquire(1)
    with pytest.raises(WaitTimeout, match=r"a trainer rank did not release the shared device 0 for 0 s"):
        sampler.acquire(0.05)
    threading.Timer(0.1, trainer.release).start()
    sampler.acquire(10)
    assert sampler.held


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import sys; from rftdask.processes.device_lock import DeviceLock as T; "
        "t = T.from_environment(exclusive=True); t.acquire(9);"
    )
    env = {**os.environ, **shared_devices(tmp_path, [0])}
    assert env[DEVICES_VARIABLE] == f"{tmp_path}:0"
    command = [sys.executable, "-c", code + "print('has it', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        sampler = engine(tmp_path)
        assert not sampler.try_acquire()
        other.send_signal(signal.SIGKILL)
        sampler.acquire(10)


def test_ranks_exclude_engines_and_all_get_the_device(tmp_path: Path) -> None:
    inside: list[str] = []
    seen: dict[str, int] = {}
    problems: list[str] = []
    over = threading.Event()

    def work(name: str, lock: DeviceLock) -> None:
        while not over.is_set():
            lock.acquire(20)
            inside.append(name)
            if name.startswith("rank") and any(each.startswith("engine") for each in inside):
                problems.append(str(inside))
            seen[name] = seen.get(name, 0) + 1
            time.sleep(0.002)
            inside.remove(name)
            lock.release()
            time.sleep(0.002)

    locks = {"rank": rank(tmp_path), "engine a": engine(tmp_path), "engine b": engine(tmp_path)}
    threads = [threading.Thread(target=work, args=pair) for pair in locks.items()]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: min(seen.get(name, 0) for name in locks) >= 2)
    finally:
        over.set()
    for thread in threads:
        thread.join(20)
    assert not problems


def test_a_process_that_shares_no_device_has_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    assert DeviceLock.from_environment(exclusive=True) is None
    assert shared_devices(tmp_path, ()) == {}
