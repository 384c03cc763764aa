"""Promises for engines that cannot fetch a version as published, because its base is gone or its holders are lost."""

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from rftdask.engines import client as clients
from rftdask.engines.client import EngineClient
from rftdask.errors import RoleError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.node_cache import SHARED_MEMORY
from rftdask.synchronizer.published import WHOLE_FILE, Published, read_published, read_requested_version
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from tests.unit.engines.engine_contract import engine_spec

TIMEOUT_S = 120.0
MODEL = "model.safetensors"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    """Engine shared by all tests; each test uses its own lineage."""
    started = EngineClient(engine_spec("fake"))
    started.wait_ready()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Temporary TMPDIR and in-memory folder, so that this process counts as a separate machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(clients, "_WHOLE_LOOK_S", 0.02)

    def be_on(machine: str) -> None:
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.setenv(SHARED_MEMORY, str(tmp_path / machine))

    be_on("trainer's")
    return be_on


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture
def lineage() -> str:
    return f"lineage-{next(_numbers)}"


def weights(version: int) -> dict[str, bytes]:
    """Weights of a version: 1 % of the values change from version to version."""
    values = np.zeros(10_000, np.uint16)
    values[: 100 * version] = 1
    return {MODEL: save({"weight": values})}


def publish_two(publisher: Publisher) -> Published:
    """Second version, which differs from the first in a few bytes."""
    publisher.publish(1, weights(1))
    return publisher.publish(2, weights(2))


@contextmanager
def answering(storage: Storage, answer: Callable[[int], object]) -> Iterator[list[int]]:
    """Trainer that handles requests for files between steps, while the block runs. Yields the requested versions."""
    asked: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            if version := read_requested_version(storage, WHOLE_FILE):
                storage.remove("control/whole_version.txt")
                asked.append(version)
                time.sleep(0.1)  # the requesting engine polls several times meanwhile
                answer(version)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield asked
    finally:
        ended.set()
        thread.join()
    assert read_requested_version(storage, WHOLE_FILE) == 0, "files are requested once"


def assert_serves(engine: EngineClient, published: Published) -> None:
    assert engine.weights == published
    assert engine._copy is not None
    assert [file.read_bytes() for file in engine._copy.files] == list(weights(published.version).values())


def remove_base(storage: Storage) -> None:
    storage.remove("weights/1")


def damage_base(storage: Storage) -> None:
    flip(storage, f"weights/1/{MODEL}")


def damage_delta(storage: Storage) -> None:
    flip(storage, f"weights/2/{MODEL}.delta")


def flip(storage: Storage, path: str) -> None:
    data = bytearray(storage.get(path))
    data[len(data) // 2] ^= 1
    storage.put(path, bytes(data))


@pytest.mark.parametrize("damage", [remove_base, damage_base, damage_delta])
def test_an_unusable_delta_is_loaded_from_files_of_the_trainer(
    storage: Storage, lineage: str, engine: EngineClient, damage: Callable[[Storage], None]
) -> None:
    publisher = Publisher(storage, lineage, full_publish_interval=10)
    published = publish_two(publisher)
    assert published.delta is not None
    damage(storage)
    with answering(storage, publisher.write_whole) as asked:
        engine.load(storage, published)
    assert asked == [2]
    assert_serves(engine, published)
    there = read_published(storage, 2)
    assert there == published and there is not None and there.delta is None


def test_a_usable_delta_requests_no_files(storage: Storage, lineage: str, engine: EngineClient) -> None:
    with answering(storage, lambda version: None) as asked:
        published = publish_two(Publisher(storage, lineage, full_publish_interval=10))
        engine.load(storage, published)
    assert_serves(engine, published)
    assert asked == []


def test_without_a_response_the_previous_version_stays_loaded(
    storage: Storage, lineage: str, engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_WHOLE_S", 0.1)
    publisher = Publisher(storage, lineage, full_publish_interval=10)
    published = publish_two(publisher)
    first = read_published(storage, 1)
    assert first is not None
    engine.load(storage, first)
    damage_delta(storage)
    with pytest.raises(StorageError, match=r"weights of version 2 cannot be loaded: .*do not match the manifest"):
        engine.load(storage, published)
    assert read_requested_version(storage, WHOLE_FILE) == 2
    assert engine.alive()
    assert_serves(engine, first)
    publisher.write_whole(2)
    engine.load(storage, published)
    assert_serves(engine, published)


def test_a_dead_engine_does_not_wait_for_files(storage: Storage, lineage: str) -> None:
    engine = EngineClient(engine_spec("fake"))
    engine.wait_ready()
    published = publish_two(Publisher(storage, lineage, full_publish_interval=10))
    damage_delta(storage)
    waits = threading.Event()

    def kill(version: int) -> None:
        waits.set()
        os.kill(engine._child.pid, signal.SIGKILL)

    with answering(storage, kill) as asked, pytest.raises(StorageError, match="version 2 cannot be loaded"):
        engine.load(storage, published)
    assert asked == [2]
    engine.close()


def hold_two(storage: Storage, lineage: str) -> tuple[Publisher, Published]:
    publisher = Publisher(storage, lineage, holder=InMemoryPublisher(storage))
    return publisher, publish_two(publisher)


def test_a_version_is_fetched_as_files_if_its_holders_fail(
    storage: Storage, lineage: str, engine: EngineClient, machines: Callable[[str], None]
) -> None:
    publisher, published = hold_two(storage, lineage)
    machines("engine's")
    with answering(storage, lambda version: publisher.write_held()) as asked:
        found = engine.fetch(storage, published, TIMEOUT_S)
        engine.load(storage, found)
    assert asked == [2]
    assert found == published and found.held is None
    assert_serves(engine, published)
    assert (read_published(storage, 1) or published).held is None, "other engines may wait for older versions"


def test_a_version_lost_with_its_holder_is_republished(
    storage: Storage, lineage: str, engine: EngineClient, machines: Callable[[str], None]
) -> None:
    lost, published = hold_two(storage, lineage)
    machines("engine's")
    resumed: list[Publisher] = []

    def resume(version: int) -> None:
        resumed.append(hold_two(storage, lineage)[0])  # on this machine

    with answering(storage, resume) as asked:
        found = engine.fetch(storage, published, TIMEOUT_S)
        engine.load(storage, found)
    assert asked == [2] and found.held is not None
    assert_serves(engine, published)
    for publisher in (lost, *resumed):
        publisher.write_held()


def test_without_time_it_is_tried_once_without_a_request(
    storage: Storage, lineage: str, engine: EngineClient, machines: Callable[[str], None]
) -> None:
    publisher, published = hold_two(storage, lineage)
    served = engine.weights
    machines("engine's")
    with pytest.raises(StorageError, match=r"weights of version 2 could not be fetched from memory: .*no process"):
        engine.fetch(storage, published, 0.0)
    assert read_requested_version(storage, WHOLE_FILE) == 0
    assert engine.weights == served and engine.alive()
    publisher.write_held()


def test_a_cancelled_fetch_stops_waiting(
    storage: Storage, lineage: str, engine: EngineClient, machines: Callable[[str], None]
) -> None:
    publisher, published = hold_two(storage, lineage)
    machines("engine's")
    is_cancelled = iter([False, True])
    with pytest.raises(RoleError, match="nobody wants them any more"):
        engine.fetch(storage, published, TIMEOUT_S, is_cancelled=lambda: next(is_cancelled))
    assert read_requested_version(storage, WHOLE_FILE) == 2
    publisher.write_held()
