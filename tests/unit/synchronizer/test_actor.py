"""Promises of the synchronizer: every wait ends. A long poll interval rules out a wake-up by polling."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rftdask.errors import RoleError, WaitTimeout
from rftdask.storage import Storage
from rftdask.synchronizer import actor as actor_module
from rftdask.synchronizer.actor import SyncHandle, Synchronizer
from rftdask.synchronizer.published import WEIGHTS_POINTER
from tests.unit.synchronizer.sync_cases import new_storage, publish_weights

NEVER_S = 3600.0
"""Poll interval longer than any test."""


@pytest.fixture
def storage() -> Storage:
    return new_storage()


async def newest(actor: Synchronizer) -> Any:
    return await actor.wait_for_version(0, 0.001)


def run(actor: Synchronizer, story: Coroutine[Any, Any, Any]) -> Any:
    async def whole() -> Any:
        try:
            return await asyncio.wait_for(story, 30)
        finally:
            await actor.close()
            await actor.close()

    return asyncio.run(whole())


def test_waiting_ends_when_the_version_is_published(storage: Storage) -> None:
    actor = Synchronizer(storage.url, 0.001)

    async def story() -> Any:
        waiting = asyncio.create_task(actor.wait_for_version(2, 20))
        assert await newest(actor) is None
        publish_weights(storage, 1, b"w1")
        while (latest := await newest(actor)) is None:
            await asyncio.sleep(0.001)
        assert (latest.version, waiting.done()) == (1, False)
        return publish_weights(storage, 2, b"w2"), await waiting

    published, answer = run(actor, story())
    assert answer == published


def test_waiting_for_an_older_version_returns_the_newest_at_once(storage: Storage) -> None:
    publish_weights(storage, 5, b"w")
    actor = Synchronizer(storage.url, NEVER_S)
    answer = run(actor, actor.wait_for_version(2, 20))
    assert answer.version == 5


def test_a_hint_reads_the_pointer_at_once(storage: Storage) -> None:
    actor = Synchronizer(storage.url, NEVER_S)

    async def story() -> Any:
        waiting = asyncio.create_task(actor.wait_for_version(1, 20))
        await newest(actor)
        publish_weights(storage, 1, b"w")
        await actor.hint()
        return await waiting

    assert run(actor, story()).version == 1


def test_the_actor_ignores_a_garbage_pointer(storage: Storage) -> None:
    publish_weights(storage, 3, b"w")
    actor = Synchronizer(storage.url, 0.001)

    async def story() -> Any:
        assert (await newest(actor)).version == 3
        storage.put(WEIGHTS_POINTER, b"garbage")
        assert await actor.wait_for_version(4, 0.02) is None
        return await newest(actor)

    assert run(actor, story()).version == 3


def test_all_waiting_calls_are_woken_by_one_watcher(storage: Storage) -> None:
    actor = Synchronizer(storage.url, NEVER_S)

    async def story() -> Any:
        num_before = len(asyncio.all_tasks())
        waits = [asyncio.create_task(actor.wait_for_version(v, 20)) for v in (1, 1, 2)]
        await newest(actor)
        publish_weights(storage, 2, b"w")
        await actor.hint()
        answers = await asyncio.gather(*waits)
        await actor.close()
        for _ in range(5):
            await asyncio.sleep(0)
        return answers, len(asyncio.all_tasks()) - num_before

    answers, num_left = run(actor, story())
    assert [answer.version for answer in answers] == [2, 2, 2]
    assert num_left == 0, "there is a second watcher"


def test_without_a_cluster_the_handle_reads_the_pointer(storage: Storage) -> None:
    handle = SyncHandle(storage, None, poll_interval_s=0.001)
    handle.hint()
    assert handle.latest() is None
    published = publish_weights(storage, 4, b"w")
    assert handle.wait_for_version(3, deadline_s=20) == published
    assert handle.wait_for_version(4, deadline_s=0) == published


def test_the_deadline_error_names_the_missing_version(storage: Storage) -> None:
    publish_weights(storage, 2, b"w")
    with pytest.raises(WaitTimeout, match=r"policy version 3 was not published within 0 s; newest: 2\..*sync_timeout"):
        SyncHandle(storage, None, poll_interval_s=0.001).wait_for_version(3, deadline_s=0.01)


class BrokenClient:
    def __init__(self) -> None:
        self.num_calls = 0

    def get_dataset(self, name: str) -> Any:
        self.num_calls += 1
        raise OSError("the scheduler is gone")


def test_a_lost_actor_only_costs_time(storage: Storage) -> None:
    client = BrokenClient()
    handle = SyncHandle(storage, client, poll_interval_s=0.001)
    with pytest.raises(RoleError, match="wait for policy version 1 was cancelled"):
        handle.wait_for_version(1, deadline_s=60, is_cancelled=lambda: client.num_calls > 0)
    handle.hint()
    assert client.num_calls == 2
    publish_weights(storage, 1, b"w")
    assert handle.wait_for_version(1, deadline_s=20).version == 1


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the module a clock that advances only while it sleeps."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(actor_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


def test_a_handle_polls_no_faster_than_its_interval(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch)
    client = BrokenClient()
    with pytest.raises(WaitTimeout):
        SyncHandle(storage, client, poll_interval_s=0.25).wait_for_version(1, deadline_s=1.0)
    assert client.num_calls == 4


def test_a_local_pointer_is_polled_first_less_often_later(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch)
    client, looks = BrokenClient(), [0]

    def latest(self: SyncHandle) -> Any:
        looks[0] += 1
        return actor_module.latest_published(storage)

    monkeypatch.setattr(SyncHandle, "latest", latest)
    handle = SyncHandle(storage, client, poll_interval_s=0.05, is_near=True)
    with pytest.raises(WaitTimeout):
        handle.wait_for_version(1, deadline_s=0.9)
    assert (client.num_calls, looks[0] <= 100) == (0, True)
    with pytest.raises(WaitTimeout):
        handle.wait_for_version(1, deadline_s=1.5)
    assert client.num_calls > 0, "a longer wait goes through the actor"
