"""Promises of leases: at most one live holder of a role, whatever clocks and crashes do."""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from rftdask.config import replace
from rftdask.errors import DamagedError, FencedError
from rftdask.run.lease import Lease, LeaseWatch, lease_holder, lease_holders
from rftdask.run.run_folder import check_run, open_run
from rftdask.storage import Storage
from rftdask.testing.storage_faults import FaultyStorage
from tests.living import wait_until
from tests.unit.run.folder_cases import config


def names(storage: Storage) -> list[str]:
    return storage.list("control")


def test_a_second_living_holder_is_refused(storage: Storage) -> None:
    with Lease(storage, "trainer"):
        with pytest.raises(FencedError, match=f"trainer is process {os.getpid()} on {socket.gethostname()}"):
            Lease(storage, "trainer")
        with Lease(storage, "explorer"):
            assert names(storage) == ["lease-explorer-1.json", "lease-trainer-1.json"]


def test_a_released_role_is_free(storage: Storage) -> None:
    lease = Lease(storage, "trainer")
    holder = lease_holder(storage, "trainer")
    assert holder is not None
    assert holder["pid"] == os.getpid()
    lease.release()
    lease.release()
    assert lease_holder(storage, "trainer") is None
    with Lease(storage, "trainer") as second:
        assert not second.lost
        assert names(storage) == ["lease-trainer-1.json", "lease-trainer-2.json"]


def since_boot(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def plant(storage: Storage, number: int = 1, **fields: Any) -> None:
    process = psutil.Process()
    lease = {"host": socket.gethostname(), "pid": os.getpid(), "started_s": since_boot(process)}
    content = {**lease, "time_s": time.time(), "released": False, **fields}
    storage.put(f"control/lease-trainer-{number}.json", json.dumps(content).encode())


def test_the_role_of_a_dead_process_is_taken_over_at_once(storage: Storage) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        dead = process.pid
    plant(storage, pid=dead)
    assert lease_holder(storage, "trainer") is None
    Lease(storage, "trainer").release()
    assert names(storage)[-1] == "lease-trainer-2.json"


def test_a_zombie_holds_no_lease(storage: Storage) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        zombie = psutil.Process(process.pid)
        while zombie.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        plant(storage, pid=zombie.pid, started_s=since_boot(zombie))
        assert lease_holder(storage, "trainer") is None
        Lease(storage, "trainer").release()


def test_another_process_with_the_same_pid_is_not_the_holder(storage: Storage) -> None:
    plant(storage, started_s=since_boot(psutil.Process()) - 60)
    Lease(storage, "trainer", sleep=lambda seconds: None).release()


@pytest.mark.parametrize("by_s", [-86400.0, -1.0, 1.0, 86400.0])
def test_a_set_clock_ends_no_lease_of_this_host(storage: Storage, by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(storage)
    # The boot time of Linux, from which psutil computes the start of processes.
    set_s = psutil.boot_time() + by_s
    monkeypatch.setattr(psutil, "boot_time", lambda: set_s)
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: set_s)
    assert lease_holder(storage, "trainer") is not None
    assert LeaseWatch(storage).is_held("trainer", 1)


@pytest.mark.parametrize(("age_s", "free"), [(0.0, False), (3600.0, True)])
def test_a_holder_on_another_machine_lives_while_it_renews(storage: Storage, age_s: float, free: bool) -> None:
    plant(storage, host="elsewhere", time_s=time.time() - age_s)
    assert (lease_holder(storage, "trainer") is None) is free
    if free:
        Lease(storage, "trainer", sleep=lambda seconds: None).release()
    else:
        with pytest.raises(FencedError, match="on elsewhere"):
            Lease(storage, "trainer")


def test_an_incomplete_lease_is_free(storage: Storage) -> None:
    storage.put("control/lease-trainer-4.json", b"")
    Lease(storage, "trainer").release()
    assert names(storage)[-1] == "lease-trainer-5.json"


@pytest.mark.parametrize("change", [{"pid": -5}, {"pid": True}, {"pid": 1e30}, {"time_s": "x"}, {"released": 0}])
def test_a_malformed_lease_is_free(change: dict[str, object], storage: Storage) -> None:
    plant(storage, **change)
    assert lease_holder(storage, "trainer") is None
    Lease(storage, "trainer").release()


def test_a_lease_with_the_last_number_must_be_removed(storage: Storage) -> None:
    for name in ("lease-trainer-99999999999999999999999.json", "lease-trainer-1e3.json", "lease-trainer--1.json"):
        storage.put(f"control/{name}", b"{}")
        Lease(storage, "trainer").release()
    storage.put("control/lease-trainer-999999999999999.json", b"{}")
    with pytest.raises(
        DamagedError, match=r"lease-trainer-999999999999999.json has the largest possible number.* remove it"
    ):
        Lease(storage, "trainer")


def test_a_holder_that_sees_a_higher_number_has_lost(storage: Storage) -> None:
    lease = Lease(storage, "trainer", heartbeat_s=0.001)
    plant(storage, number=2, host="elsewhere")
    wait_until(lambda: lease.lost)
    before = storage.get("control/lease-trainer-2.json")
    lease.release()
    assert storage.get("control/lease-trainer-2.json") == before
    assert not json.loads(storage.get("control/lease-trainer-1.json"))["released"]


@pytest.mark.parametrize(
    ("role", "other", "steps", "why"),
    [
        ("trainer", "trainer", None, "another process has just started as trainer"),
        ("explorer", "explorer.b", 4, r"explorer.b is process"),
    ],
)
def test_of_two_simultaneous_starts_one_wins(
    storage: Storage, role: str, other: str, steps: int | None, why: str
) -> None:
    others: list[Lease] = []

    def overtake(verb: str, path: str, stage: str) -> None:
        if (verb, stage) == ("put_new", "before") and not others:
            others.append(Lease(storage, other, explore_steps=steps))

    with pytest.raises(FencedError, match=why):
        Lease(FaultyStorage(storage, overtake), role)
    others[0].release()


def test_named_explorers_with_equal_steps_run_together(storage: Storage) -> None:
    open_run(storage, config())
    with Lease(storage, "explorer.a", explore_steps=4), Lease(storage, "explorer.b", explore_steps=4):
        assert list(lease_holders(storage)) == ["explorer.a", "explorer.b"]
        named = replace(config(), {"mode": "explore", "explorer.name": "c"})
        check_run(storage, named, explore_steps=4)
        Lease(storage, "trainer").release()
        with pytest.raises(FencedError, match=r"explorer.a is process .* another explorer.name"):
            check_run(storage, replace(named, {"explorer.name": "a"}), explore_steps=4)
        for steps, why in (
            (5, "it makes 4 explore steps, and this command 5"),
            (None, "of mode explore, with one of mode"),
        ):
            with pytest.raises(FencedError, match=why):
                check_run(storage, named, explore_steps=steps)
            with pytest.raises(FencedError, match=why):
                Lease(storage, "explorer.c", explore_steps=steps)
    assert lease_holders(storage) == {}, "refused explorers hold no lease"


def test_an_unnamed_explorer_excludes_others(storage: Storage) -> None:
    with Lease(storage, "explorer"), pytest.raises(FencedError, match="explorer is process"):
        Lease(storage, "explorer.b", explore_steps=4)


def test_a_lease_watch_uses_only_its_own_clock(storage: Storage) -> None:
    now = [0.0]
    watch = LeaseWatch(storage, lambda: now[0])
    plant(storage, host="elsewhere", time_s=0.0)  # its clock is years behind
    assert watch.is_held("trainer", 1)
    now[0] = 29.0
    assert watch.is_held("trainer", 1)
    plant(storage, host="elsewhere", time_s=5.0)
    now[0] = 58.0
    assert watch.is_held("trainer", 1)
    now[0] = 100.0
    assert not watch.is_held("trainer", 1)
    plant(storage, host="elsewhere", released=True)
    assert not watch.is_held("trainer", 1)
    assert not watch.is_held("trainer", 2)
