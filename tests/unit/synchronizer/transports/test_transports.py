"""Promises of transports between machines. Kills and real machines are tested in tests/integration/weights."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rftdask.errors import NotFoundError, UserError, WaitTimeout
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.manifest import FileEntry
from rftdask.synchronizer.node_cache import SHARED_MEMORY, NodeCache, copy_name, held_block
from rftdask.synchronizer.published import Published
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports import group_broadcast as group_broadcast
from rftdask.synchronizer.transports.dask_broadcast import _take, above
from rftdask.synchronizer.transports.group_broadcast import RendezvousServer, group_transport
from rftdask.synchronizer.transports.memory import InMemoryPublisher

DATA = b"weights" * 100
ENTRY = FileEntry.of(DATA)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path / "memory"))
    return tmp_path / "memory"


def test_the_tree_is_binary_and_ends_at_the_first_peer() -> None:
    peers = list("gfedcba")
    assert {peer: above(peer, peers)[:1] for peer in peers} == {
        **{"a": [], "b": ["a"], "c": ["a"]},
        **{"d": ["b"], "e": ["b"], "f": ["c"], "g": ["c"]},
    }
    assert above("g", peers) == ["c", "a"]
    assert above("x", []) == [], "a machine that has just joined asks the holder"


class Sources:
    """Responses by address, instead of calls to other workers."""

    def __init__(self, said: dict[str, bytes | Exception | None]) -> None:
        self.said, self.asked = said, list[str]()

    def ask(self, address: str, *, number: int) -> bytes | None:
        self.asked.append(address)
        said = self.said[address]
        if isinstance(said, Exception):
            raise said
        return said


def test_the_nearest_ancestor_with_the_block_sends_it() -> None:
    sources = Sources({"near": None, "far": DATA, "holder": DATA})
    assert _take(sources.ask, ["near", "far", "holder"], "weights/1/m", ENTRY, 0) == DATA
    assert sources.asked == ["near", "far"]


def test_a_dead_or_hung_or_wrong_source_is_asked_once() -> None:
    faults = {"dead": OSError("no route"), "hangs": TimeoutError(), "refuses": UserError("mine"), "other": b"x" * 700}
    sources, order = Sources({**faults, "holder": DATA}), [*faults, "holder"]
    for _ in range(2):
        assert _take(sources.ask, order, "weights/1/m", ENTRY, 0) == DATA
    assert sources.asked == [*faults, "holder", "holder"]


def test_a_block_without_a_source_is_an_error() -> None:
    sources = Sources({"near": None, "holder": None})
    with pytest.raises(NotFoundError, match="no reachable worker holds block 3 of weights/1/m"):
        _take(sources.ask, ["near", "holder"], "weights/1/m", ENTRY, 3)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


def held(storage: Storage, address: str = "tcp://127.0.0.1:1") -> tuple[Publisher, Published]:
    publisher = Publisher(storage, "main", holder=InMemoryPublisher(storage, address))
    return publisher, publisher.publish(1, {"model.safetensors": bytearray(DATA)})


def test_a_block_is_present_or_being_fetched_or_missing(storage: Storage, memory: Path) -> None:
    publisher, published = held(storage)
    name = [copy_name(storage, published.part("model.safetensors"))]
    assert held_block(name, "model.safetensors", 0) == DATA
    publisher.write_held()
    assert held_block(name, "model.safetensors", 0) is False

    def slow(number: int) -> bytes:
        looks.append(held_block(name, "model.safetensors", number))
        return DATA

    looks: list[bytes | bool] = []
    NodeCache(storage, published, 5.0, lambda *_: slow).close()
    assert looks == [True], "while a process fetches it"
    assert held_block(name, "model.safetensors", 0) is False
    for copy, file in (("../x", "model.safetensors"), (name[0], "../../secret")):
        with pytest.raises(ValueError, match="is not a file of a version"):
            held_block([copy], file, 0)


def test_the_manifest_holds_the_address_of_each_file(storage: Storage) -> None:
    _, published = held(storage)
    assert published.held is not None
    assert published.held == {"model.safetensors": "tcp://127.0.0.1:1"}


@pytest.fixture
def server(storage: Storage) -> Iterator[Published]:
    _, published = held(storage, RendezvousServer(storage, "127.0.0.1").address)
    yield published


def take(published: Published) -> bytes:
    return bytes(group_transport("127.0.0.1")(published, "model.safetensors", ENTRY)(0))


def test_members_that_join_together_or_late_get_the_file(server: Published) -> None:
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(take, [server] * 3)) == [DATA] * 3
    assert take(server) == DATA


@pytest.fixture
def silent(server: Published, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Store of the server, to which a member has sent a join request before it fell silent."""
    assert server.held is not None
    monkeypatch.setattr(group_broadcast, "_ANSWER_S", 3.0)
    store = group_broadcast._store(server.held["model.safetensors"], is_master=False)
    request = [1, server.content_hash, "model.safetensors", "reply-key-of-a-dead-member"]
    store.queue_push(group_broadcast._JOIN_REQUESTS, json.dumps(request))
    return store


@pytest.mark.usefixtures("silent")
def test_a_silent_member_costs_the_others_one_group(server: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WaitTimeout, match="did not arrive from"):
        take(server)
    monkeypatch.setattr(group_broadcast, "_ANSWER_S", 60.0)  # all members are alive, but the machine may be busy
    assert take(server) == DATA


def test_a_silent_member_does_not_stop_the_rank(silent: Any, caplog: pytest.LogCaptureFixture) -> None:
    silent.wait(["reply-key-of-a-dead-member"], timedelta(seconds=60))
    for _ in range(5):
        time.sleep(0.05)  # Python code of a rank that trains meanwhile
    assert not caplog.messages, "the group still waits"
    while not caplog.messages:
        time.sleep(0.05)
    assert "version 1 did not reach all of 1 machines" in caplog.messages[0]


def test_a_rank_that_is_gone_is_an_error_without_a_wait(storage: Storage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    _, published = held(storage, address)
    with pytest.raises(NotFoundError, match=f"cannot fetch .* from {address}: .*refused"):
        take(published)


def test_a_released_version_is_refused_with_the_reason(server: Published, storage: Storage) -> None:
    storage.remove("weights/1")
    with pytest.raises(NotFoundError, match="version 1 is no longer in memory"):
        take(server)
