"""Promises of ranks that publish together: each writes its part; all parts are one version or none."""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftdask.errors import StorageError, StorageRefusedError
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import (
    INDEX_FILE,
    WEIGHTS_POINTER,
    Published,
    is_loadable,
    latest_published,
    model_file,
    published_versions,
    read_pointer,
    read_published,
)
from rftdask.synchronizer.publisher import Publisher
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.engines.strategies.base import distinct_state
from rftdask.trainer.engines.tensor_files import stage_tensors
from tests.thread_ranks import in_threads
from tests.unit.synchronizer.sync_cases import new_storage

TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder


def tensors(version: int) -> dict[str, Tensor]:
    """Five tensors of different sizes; some values change in each version."""
    rng = np.random.default_rng(0)
    made = {f"t{i}": torch.from_numpy(rng.normal(size=(40 * (i + 1), 16)).astype(np.float32)) for i in range(5)}
    for step in range(1, version):
        for tensor in made.values():
            tensor.view(-1)[step::97] *= 1.5
    return made


def publish_together(storages: list[Storage], versions: range, full_publish_interval: int = 1) -> list[list[Published]]:
    """Result of each rank, one per storage."""

    def rank(ranks: Ranks) -> list[Published]:
        publisher = Publisher(storages[ranks.rank], "main", full_publish_interval, ranks)
        return [publisher.publish(version, staged(version, ranks)) for version in versions]

    return in_threads(len(storages), rank)


def staged(version: int, ranks: Ranks, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    file = stage_tensors(tensors(version), ranks, dtype, shared=True)
    return {model_file(ranks.rank, ranks.size): file} if file else {}


def loaded(storage: Storage, published: Published) -> dict[str, Tensor]:
    copy = NodeCache(storage, published, TIMEOUT_S)
    found = {name: tensor for path in copy.files for name, tensor in load(path.read_bytes()).items()}
    copy.close()
    return found


def assert_is(found: dict[str, Tensor], version: int) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in tensors(version).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("full_publish_interval", [1, 3])
def test_each_rank_writes_its_part_of_the_version(size: int, full_publish_interval: int) -> None:
    storage, puts = new_storage(), [list[str]() for _ in range(size)]

    def noting(rank: int) -> Storage:
        def note(verb: str, path: str, stage: str) -> None:
            if (verb, stage) == ("put", "before"):
                puts[rank].append(path)

        return FaultyStorage(storage, note)

    results = publish_together([noting(rank) for rank in range(size)], range(1, 6), full_publish_interval)
    assert all(result == results[0] for result in results), "all ranks return the publication"
    for version, published in enumerate(results[0], 1):
        assert read_published(storage, version) == published
        assert (published.delta is None) == (full_publish_interval == 1 or version % full_publish_interval == 1)
        assert len(published.files) == min(size, 5)
        assert is_loadable(storage, version)
        assert_is(loaded(storage, published), version)
    assert all(path.split("/")[1].isdigit() and "safetensors" in path for part in puts[1:] for path in part)
    assert [len(part) for part in puts[1:]] == [5 if rank < 5 else 0 for rank in range(1, size)]
    assert read_pointer(storage, WEIGHTS_POINTER) == 5


def test_parts_are_balanced_and_hold_each_tensor_once() -> None:
    def rank(ranks: Ranks) -> bytes:
        return bytes(stage_tensors(tensors(1), ranks, shared=True))

    parts = in_threads(3, rank)
    names = [name for part in parts for name in load(part)]
    assert sorted(names) == sorted(tensors(1))
    assert max(map(len, parts)) < 1.3 * min(map(len, parts))


def test_transformers_loads_the_files_of_two_ranks(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=32, num_layers=1, num_heads=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    state = distinct_state(model)
    storage = open_storage(str(tmp_path / "run"))

    def rank(ranks: Ranks) -> Published:
        file = stage_tensors(state, ranks, shared=True)
        return Publisher(storage, "main", 1, ranks).publish(1, {model_file(ranks.rank, 2): file})

    published = in_threads(2, rank)[0]
    folder = tmp_path / "run" / "weights" / "1"
    assert INDEX_FILE not in dict(published.files), "engines load only safetensors"
    index = json.loads((folder / INDEX_FILE).read_text())
    assert sorted(index["weight_map"]) == sorted(state)
    assert set(index["weight_map"].values()) == {name for name, _ in published.files}
    (folder / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_files_of_one_rank_have_no_index(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))

    def rank(ranks: Ranks) -> Published:
        files = {"adapter_model.safetensors": save(tensors(1)), "adapter_config.json": b"{}"}
        return Publisher(storage, "main", 1, ranks).publish(1, files if ranks.rank == 0 else {})

    published = in_threads(2, rank)[0]
    assert [name for name, _ in published.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (tmp_path / "weights" / "1" / INDEX_FILE).exists()


def test_a_rank_that_cannot_write_fails_all_ranks() -> None:
    storage = new_storage()

    def fail(verb: str, path: str, stage: str) -> None:
        if verb == "put":
            raise StorageRefusedError("the disk is full")

    def rank(ranks: Ranks) -> str:
        publisher = Publisher(storage if ranks.rank == 0 else FaultyStorage(storage, fail), "main", 1, ranks)
        with pytest.raises(StorageRefusedError) as raised:
            publisher.publish(1, staged(1, ranks))
        return str(raised.value)

    told = in_threads(2, rank)
    assert told == ["rank 1 could not write its part of version 1: the disk is full"] * 2
    assert latest_published(storage) is None and read_published(storage, 1) is None


def test_a_kill_of_any_rank_leaves_the_old_or_the_new_version() -> None:
    class Killed(StorageError):
        """Counter of writes of all ranks."""

    for killed_at in itertools.count():
        storage, puts = new_storage(), itertools.count()
        publish_together([storage, storage], range(1, 2))

        def kill(verb: str, path: str, stage: str, last: int = killed_at, puts: Iterator[int] = puts) -> None:
            if verb == "put" and next(puts) == last:
                raise Killed(f"{stage} {path}")

        def rank(ranks: Ranks, storage: Storage = storage, kill: Any = kill) -> bool:
            try:
                Publisher(FaultyStorage(storage, kill), "main", 1, ranks).publish(2, staged(2, ranks))
            except StorageError:
                return True
            return False

        killed = any(in_threads(2, rank))
        newest = latest_published(storage)
        assert newest is not None
        assert_is(loaded(storage, newest), newest.version)
        publish_together([storage, storage], range(2, 3))
        assert_is(loaded(storage, latest_published(storage) or newest), 2)
        if not killed:
            assert killed_at == 2 * 5, "two files, the index, the manifest, the pointer"
            return


def test_a_shared_file_is_written_by_the_lowest_rank() -> None:
    storage, written = new_storage(), list[int]()

    def rank(ranks: Ranks) -> Published:
        def note(verb: str, path: str, stage: str) -> None:
            if path.endswith("a.safetensors") and (verb, stage) == ("put", "before"):
                written.append(ranks.rank)

        files = {"a.safetensors": save({"x": torch.ones(3)})}
        return Publisher(FaultyStorage(storage, note), "main", 1, ranks).publish(1, files)

    assert [name for name, _ in in_threads(3, rank)[0].files] == ["a.safetensors"]
    assert written == [0]


def test_another_number_of_ranks_continues_publishing() -> None:
    storage = new_storage()
    publish_together([storage] * 2, range(1, 3), 10)
    again = publish_together([storage] * 3, range(2, 5), 10)[0]
    assert published_versions(storage) == [1, 2, 3, 4]
    assert [len(published.files) for published in again] == [2, 3, 3], "version 2 exists and is kept"
    assert [published.delta is None for published in again] == [False, True, False]
    for version, published in enumerate(again, 2):
        assert_is(loaded(storage, published), version)


@pytest.mark.parametrize("full_publish_interval", [1, 3])
def test_buffers_are_returned_once_no_delta_needs_them(full_publish_interval: int) -> None:
    storage = new_storage()
    publisher, spare = Publisher(storage, "main", full_publish_interval), b""
    memories = []
    for version in range(1, 8):
        file = stage_tensors(tensors(version), Ranks(), torch.bfloat16, spare=spare)
        memories.append(np.frombuffer(file, np.uint8).ctypes.data)
        published = publisher.publish(version, {"model.safetensors": file})
        spare = publisher.take_spare().get("model.safetensors", b"")
        assert_is(loaded(storage, published), version)
        del file
    assert not publisher.take_spare()
    assert len(set(memories)) == (1 if full_publish_interval == 1 else 2), "deltas need the previous version"
