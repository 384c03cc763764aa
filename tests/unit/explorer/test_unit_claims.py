"""Promises of the claims by which explorers of different names share a run:

- a unit is its first claimer's until that one ends, dies or holds it for too long; then the next one's;
- who restarts under a name has what its predecessor left, at once;
- two loops on one log submit every unit once, and each of them ends when all are committed;
- what another explorer has committed is not rolled out again, also where the log was read before;
- one explorer makes the evaluations, and the next one when it is gone;
- an explorer without a name that is alone writes no claim, and what it is at as soon as there is another; one with a
  name always does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rftdask.explorer.unit_claims import EVALUATIONS, Claims
from rftdask.run.lease import Lease
from rftdask.storage import Storage, open_storage
from rftdask.testing.fake_dask import FakeClient
from tests.unit.explorer.test_explorer import committed, make_explorer, stage

UNIT = (3, 1)


@pytest.fixture
def storage() -> Iterator[Storage]:
    storage = open_storage("memory://claims")
    yield storage
    for name in storage.list():
        storage.remove(name.rstrip("/"))


def claims_of(storage: Storage, name: str, now: list[float] | None = None) -> Claims:
    clock = now or [0.0]
    return Claims(storage, Lease(storage, f"explorer.{name}", explore_steps=4), 100.0, lambda: clock[0])


def sees(claims: Claims, unit: tuple[int, int] = UNIT) -> bool:
    claims.look(set())
    return claims.is_others(unit)


def test_a_unit_is_its_first_claimers_until_it_gives_it_back(storage: Storage) -> None:
    first, second = claims_of(storage, "a"), claims_of(storage, "b")
    assert first.take(UNIT)
    assert not second.take(UNIT)
    assert sees(second)
    assert not sees(first)
    first.give_back(UNIT)
    assert not sees(second)
    assert second.take(UNIT)


def test_the_claim_of_who_ended_is_taken_over_by_one(storage: Storage) -> None:
    lease = Lease(storage, "explorer.a", explore_steps=4)
    assert Claims(storage, lease, 100.0).take(UNIT)
    others = [claims_of(storage, name) for name in "bc"]
    assert [sees(each) for each in others] == [True, True]
    lease.release()
    assert [sees(each) for each in others] == [False, False]
    assert [each.take(UNIT) for each in others] == [True, False]
    others[0].give_back(UNIT)
    assert storage.list("control/claims") == []


def test_who_restarts_under_a_name_has_what_its_predecessor_left(storage: Storage) -> None:
    lease = Lease(storage, "explorer.a", explore_steps=4)
    assert Claims(storage, lease, 100.0).take(UNIT)
    lease.release()
    again = claims_of(storage, "a")
    assert not sees(again)
    assert again.take(UNIT)


def test_a_claim_that_is_held_for_too_long_is_nobodys(storage: Storage) -> None:
    now = [0.0]
    assert claims_of(storage, "a").take(UNIT)
    second = claims_of(storage, "b", now)
    assert sees(second)
    now[0] = 101.0
    assert not sees(second)
    assert second.take(UNIT)


def test_claims_of_what_is_committed_go_once_nobody_holds_them(storage: Storage) -> None:
    lease = Lease(storage, "explorer.a", explore_steps=4)
    assert Claims(storage, lease, 100.0).take(UNIT)
    second = claims_of(storage, "b")
    second.look({UNIT})
    assert storage.list("control/claims") == ["00000003-0001-1.json"]
    lease.release()
    second.look({UNIT})
    assert storage.list("control/claims") == []


def test_a_claim_that_cannot_be_read_is_nobodys(storage: Storage) -> None:
    storage.put("control/claims/00000003-0001-1.json", b"{")
    claims = claims_of(storage, "a")
    assert not sees(claims)
    assert claims.take(UNIT)


def test_who_is_alone_claims_without_a_file_and_writes_what_it_is_at_once_it_is_not(storage: Storage) -> None:
    lease, committed_unit = Lease(storage, "explorer", explore_steps=4), (3, 0)
    first = Claims(storage, lease, 100.0, lambda: 0.0)
    first.look(set())
    assert all(first.take(unit) for unit in (UNIT, committed_unit, (3, 2)))
    first.give_back(committed_unit)
    assert (first.is_sole, storage.list("control/claims")) == (True, [])
    assert first.take(EVALUATIONS)
    second = claims_of(storage, "b")
    assert sees(second, EVALUATIONS) and not sees(second)
    assert second.take((3, 2)), "what the first is at is not known yet"
    first.look(set())
    assert (first.is_sole, first.is_others((3, 2))) == (False, True)
    assert [sees(second, unit) for unit in (UNIT, committed_unit, (3, 2))] == [True, False, False]
    lease.release()
    second.look(set())
    assert second.take(committed_unit)
    assert "00000003-0000-1.json" in storage.list("control/claims")


# ---- the loop


def explorer_of(client: FakeClient, name: str, explorer_name: str, cancelled=lambda: False):  # type: ignore[no-untyped-def]
    config = stage(name, "buffer.total_steps=12", "buffer.batch_size=4", f"explorer.name={explorer_name}")
    storage = open_storage(f"memory://explorer-loop/{name}")
    lease = Lease(storage, f"explorer.{explorer_name}", explore_steps=12)
    return make_explorer(client, config, lambda event: None, cancelled, Claims(storage, lease, 100.0)), lease


def test_two_loops_submit_each_unit_once_and_end_when_all_are_committed() -> None:
    clients = [FakeClient(then=committed) for _ in "ab"]
    explorers = [explorer_of(client, "shared", name)[0] for client, name in zip(clients, "ab", strict=True)]
    for explorer in explorers:
        explorer.open()
    threads = [threading.Thread(target=explorer.run) for explorer in explorers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    units = [unit.key for client in clients for unit in client.submitted]
    assert sorted(units) == [("experiences", step, unit) for step in range(1, 13) for unit in (0, 1)]
    assert open_storage("memory://explorer-loop/shared").list("control/claims") == []


def test_who_has_made_the_rest_waits_for_what_others_are_at_and_takes_it_up_when_they_end() -> None:
    client = FakeClient(then=committed)
    explorer, _ = explorer_of(client, "left", "a")
    storage = open_storage("memory://explorer-loop/left")
    other = Lease(storage, "explorer.b", explore_steps=12)
    assert Claims(storage, other, 100.0).take((12, 1))
    explorer.open()
    thread = threading.Thread(target=explorer.run)
    thread.start()
    until = time.monotonic() + 60
    while len(client.submitted) < 23 and time.monotonic() < until:
        time.sleep(0.01)
    other.release()
    thread.join(60)
    assert not thread.is_alive()
    assert client.submitted[-1].key == ("experiences", 12, 1)


def test_what_was_committed_meanwhile_is_not_submitted() -> None:
    first, second = FakeClient(then=committed), FakeClient(then=committed)
    early, _ = explorer_of(first, "meanwhile", "a")
    early.open()  # reads an empty log
    late, lease = explorer_of(second, "meanwhile", "b")
    late.open()
    late.run()
    lease.release()
    early.run()
    assert len(second.submitted) == 24
    assert first.submitted == []


def test_one_explorer_evaluates_and_the_next_one_when_it_is_gone(storage: Storage) -> None:
    lease = Lease(storage, "explorer.a", explore_steps=4)
    assert Claims(storage, lease, 100.0).take(EVALUATIONS)
    second = claims_of(storage, "b")
    assert sees(second, EVALUATIONS)
    lease.release()
    assert not sees(second, EVALUATIONS)
    assert second.take(EVALUATIONS)
