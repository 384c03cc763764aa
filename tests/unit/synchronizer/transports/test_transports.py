"""Promises of the ways between machines: a block comes from the nearest that has it, and who is dead, late or gives
something else is left out; of a group that loses a member each of the others hears, in time, and gets the version in
the next one. What kills and real machines do to them is in tests/integration/weights.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from rftdask.errors import NotFoundError, UserError, WaitTimeout
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.manifest import FileEntry
from rftdask.synchronizer.node_cache import SHARED_MEMORY, NodeCopy, copy_name, held_block
from rftdask.synchronizer.published import Published
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports import group_broadcast as process_group
from rftdask.synchronizer.transports.dask_broadcast import _take, above
from rftdask.synchronizer.transports.group_broadcast import Door, over_group
from rftdask.synchronizer.transports.memory import Holder

DATA = b"weights" * 100
ENTRY = FileEntry.of(DATA)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path / "memory"))
    return tmp_path / "memory"


# ---- the tree


def test_each_has_two_below_and_the_way_up_ends_at_the_first() -> None:
    peers = list("gfedcba")
    assert {peer: above(peer, peers)[:1] for peer in peers} == {
        **{"a": [], "b": ["a"], "c": ["a"]},
        **{"d": ["b"], "e": ["b"], "f": ["c"], "g": ["c"]},
    }
    assert above("g", peers) == ["c", "a"]
    assert above("x", []) == [], "one that has just joined asks the holder"


class Sources:
    """What each address says, in place of calls to other workers."""

    def __init__(self, said: dict[str, bytes | Exception | None]) -> None:
        self.said, self.asked = said, list[str]()

    def ask(self, address: str, *, number: int) -> bytes | None:
        self.asked.append(address)
        said = self.said[address]
        if isinstance(said, Exception):
            raise said
        return said


def test_the_nearest_that_has_the_block_gives_it() -> None:
    sources = Sources({"near": None, "far": DATA, "holder": DATA})
    assert _take(sources.ask, ["near", "far", "holder"], "weights/1/m", ENTRY, 0) == DATA
    assert sources.asked == ["near", "far"]


def test_who_is_dead_hangs_or_gives_other_bytes_is_asked_once() -> None:
    faults = {"dead": OSError("no route"), "hangs": TimeoutError(), "refuses": UserError("mine"), "other": b"x" * 700}
    sources, order = Sources({**faults, "holder": DATA}), [*faults, "holder"]
    for _ in range(2):
        assert _take(sources.ask, order, "weights/1/m", ENTRY, 0) == DATA
    assert sources.asked == [*faults, "holder", "holder"]


def test_a_block_that_nobody_has_is_an_error() -> None:
    sources = Sources({"near": None, "holder": None})
    with pytest.raises(NotFoundError, match="block 3 of weights/1/m is in the memory of no worker"):
        _take(sources.ask, ["near", "holder"], "weights/1/m", ENTRY, 3)


# ---- what is on a machine


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


def held(storage: Storage, address: str = "tcp://127.0.0.1:1") -> tuple[Publisher, Published]:
    publisher = Publisher(storage, "main", holder=Holder(storage, address))
    return publisher, publisher.publish(1, {"model.safetensors": bytearray(DATA)})


def test_a_block_is_here_is_coming_or_is_not_here(storage: Storage, memory: Path) -> None:
    publisher, published = held(storage)
    name = [copy_name(storage, published.part("model.safetensors"))]
    assert held_block(name, "model.safetensors", 0) == DATA
    publisher.write_held()
    assert held_block(name, "model.safetensors", 0) is False

    def slow(number: int) -> bytes:
        looks.append(held_block(name, "model.safetensors", number))
        return DATA

    looks: list[bytes | bool] = []
    NodeCopy(storage, published, 5.0, lambda *_: slow).close()
    assert looks == [True], "while somebody brings it"
    assert held_block(name, "model.safetensors", 0) is False
    for copy, file in (("../x", "model.safetensors"), (name[0], "../../secret")):
        with pytest.raises(ValueError, match="is no file of a version"):
            held_block([copy], file, 0)


def test_the_manifest_says_where_each_file_is(storage: Storage) -> None:
    _, published = held(storage)
    assert published.held is not None
    assert published.held.addresses == (("model.safetensors", "tcp://127.0.0.1:1"),)


# ---- the group


@pytest.fixture
def door(storage: Storage) -> Iterator[Published]:
    _, published = held(storage, Door(storage, "127.0.0.1").address)
    yield published


def take(published: Published) -> bytes:
    return bytes(over_group("127.0.0.1")(published, "model.safetensors", ENTRY)(0))


def test_members_that_come_together_or_late_get_the_file(door: Published) -> None:
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(take, [door] * 3)) == [DATA] * 3
    assert take(door) == DATA


def test_who_never_takes_part_costs_the_others_one_group(door: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    assert door.held is not None
    monkeypatch.setattr(process_group, "_ANSWER_S", 3.0)
    store = process_group._store(dict(door.held.addresses)["model.safetensors"], is_master=False)
    store.queue_push(process_group._KNOCKS, f'[1, "{door.content_hash}", "model.safetensors", "of-one-that-died"]')
    with pytest.raises(WaitTimeout, match="did not come from"):
        take(door)
    monkeypatch.setattr(process_group, "_ANSWER_S", 60.0)  # nobody is dead any more, and the machine may be busy
    assert take(door) == DATA


def test_who_never_takes_part_does_not_stop_the_process_of_the_rank(
    door: Published, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert door.held is not None
    monkeypatch.setattr(process_group, "_ANSWER_S", 3.0)
    store = process_group._store(dict(door.held.addresses)["model.safetensors"], is_master=False)
    store.queue_push(process_group._KNOCKS, f'[1, "{door.content_hash}", "model.safetensors", "of-one-that-died"]')
    store.wait(["of-one-that-died"], timedelta(seconds=60))
    for _ in range(5):
        time.sleep(0.05)  # as a rank that trains meanwhile: any call of Python
    assert not caplog.messages, "the group is still waited for"
    while not caplog.messages:
        time.sleep(0.05)
    assert "version 1 did not reach all of 1 machines" in caplog.messages[0]


def test_a_rank_that_is_gone_is_told_without_waiting_for_it(storage: Storage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    _, published = held(storage, address)
    with pytest.raises(NotFoundError, match=f"is not to be had from {address}: .*refused"):
        take(published)


def test_what_is_held_no_more_is_refused_by_its_reason(door: Published, storage: Storage) -> None:
    storage.remove("weights/1")
    with pytest.raises(NotFoundError, match="version 1 is held no more"):
        take(door)
