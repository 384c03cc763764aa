"""Claims by which explorers of different names share a run: every unit is rolled out once."""

import threading

import pytest

from rftdask.explorer.unit_claims import EVALUATIONS, Claims
from rftdask.run.lease import Lease
from rftdask.storage import Storage, open_storage
from tests.living import wait_until
from tests.unit.explorer.fake_dask import FakeClient
from tests.unit.explorer.test_explorer import committed, make_explorer, stage

UNIT = (3, 1)


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Storage:
    # One per test: leases that a test does not release keep writing.
    return open_storage(f"memory://claims/{request.node.name}")


def claims_of(storage: Storage, name: str, now: list[float] | None = None) -> Claims:
    clock = now or [0.0]
    return Claims(storage, Lease(storage, f"explorer.{name}", explore_steps=12), 100.0, lambda: clock[0])


def taken(storage: Storage, unit: tuple[int, int] = UNIT, name: str = "a") -> Lease:
    """Lease of an explorer that has claimed the unit."""
    lease = Lease(storage, f"explorer.{name}", explore_steps=12)
    assert Claims(storage, lease, 100.0).take(unit)
    return lease


def sees(claims: Claims, unit: tuple[int, int] = UNIT) -> bool:
    claims.look(set())
    return unit in claims.others


def test_a_unit_belongs_to_its_first_claimer_until_given_back(storage: Storage) -> None:
    first, second = claims_of(storage, "a"), claims_of(storage, "b")
    assert first.take(UNIT)
    assert not second.take(UNIT)
    assert sees(second)
    assert not sees(first)
    first.give_back(UNIT)
    assert not sees(second)
    assert second.take(UNIT)


@pytest.mark.parametrize("unit", [UNIT, EVALUATIONS])
def test_the_claim_of_an_ended_explorer_is_taken_over_once(storage: Storage, unit: tuple[int, int]) -> None:
    lease = taken(storage, unit)
    others = [claims_of(storage, name) for name in "bc"]
    assert [sees(claims, unit) for claims in others] == [True, True]
    lease.release()
    assert [sees(claims, unit) for claims in others] == [False, False]
    assert [claims.take(unit) for claims in others] == [True, False]
    others[0].give_back(unit)
    assert storage.list("control/claims") == []


def test_a_restarted_explorer_gets_the_units_of_its_predecessor(storage: Storage) -> None:
    taken(storage).release()
    again = claims_of(storage, "a")
    assert not sees(again)
    assert again.take(UNIT)


def test_a_claim_expires_after_held_s(storage: Storage) -> None:
    now = [0.0]
    assert claims_of(storage, "a").take(UNIT)
    second = claims_of(storage, "b", now)
    assert sees(second)
    now[0] = 101.0
    assert not sees(second)
    assert second.take(UNIT)


def test_claims_of_committed_units_are_removed_once_released(storage: Storage) -> None:
    lease = taken(storage)
    second = claims_of(storage, "b")
    second.look({UNIT})
    assert storage.list("control/claims") == ["00000003-0001-1.json"]
    lease.release()
    second.look({UNIT})
    assert storage.list("control/claims") == []


def test_an_unreadable_claim_is_free(storage: Storage) -> None:
    storage.put("control/claims/00000003-0001-1.json", b"{")
    claims = claims_of(storage, "a")
    assert not sees(claims)
    assert claims.take(UNIT)


def test_a_sole_explorer_writes_claims_once_it_sees_another(storage: Storage) -> None:
    lease, committed_unit = Lease(storage, "explorer", explore_steps=12), (3, 0)
    first = Claims(storage, lease, 100.0, lambda: 0.0)
    first.look(set())
    assert all(first.take(unit) for unit in (UNIT, committed_unit, (3, 2)))
    first.give_back(committed_unit)
    assert (first.is_sole, storage.list("control/claims")) == (True, [])
    assert first.take(EVALUATIONS)
    second = claims_of(storage, "b")
    assert sees(second, EVALUATIONS) and not sees(second)
    assert second.take((3, 2)), "the claims of the first are not written yet"
    first.look(set())
    assert (first.is_sole, (3, 2) in first.others) == (False, True)
    assert [sees(second, unit) for unit in (UNIT, committed_unit, (3, 2))] == [True, False, False]
    lease.release()
    second.look(set())
    assert second.take(committed_unit)
    assert "00000003-0000-1.json" in storage.list("control/claims")


def explorer_of(client: FakeClient, name: str, explorer_name: str, cancelled=lambda: False):  # type: ignore[no-untyped-def]
    config = stage(name, "buffer.total_steps=12", "buffer.batch_size=4", f"explorer.name={explorer_name}")
    storage = open_storage(f"memory://explorer-loop/{name}")
    lease = Lease(storage, f"explorer.{explorer_name}", explore_steps=12)
    return make_explorer(client, config, lambda event: None, cancelled, Claims(storage, lease, 100.0)), lease


def test_two_explorers_submit_each_unit_once() -> None:
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


def test_an_explorer_waits_for_and_takes_over_units_of_others() -> None:
    client = FakeClient(then=committed)
    explorer, _ = explorer_of(client, "left", "a")
    storage = open_storage("memory://explorer-loop/left")
    other = taken(storage, (12, 1), "b")
    explorer.open()
    thread = threading.Thread(target=explorer.run)
    thread.start()
    wait_until(lambda: len(client.submitted) >= 23)
    other.release()
    thread.join(60)
    assert not thread.is_alive()
    assert client.submitted[-1].key == ("experiences", 12, 1)


def test_units_committed_meanwhile_are_not_submitted() -> None:
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
