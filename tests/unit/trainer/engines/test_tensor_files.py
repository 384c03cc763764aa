"""Tensor files, on one rank: loading restores every bit, and mismatches are rejected with names."""

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from rftdask.errors import DamagedError, RoleError
from rftdask.processes.ranks import Ranks
from rftdask.storage.base import Data
from rftdask.storage.local import LocalStorage
from rftdask.synchronizer import manifest
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines import tensor_files
from rftdask.trainer.engines.tensor_files import SavedTensors, save_tensors, stage_tensors
from tests.numerics import shifted_seed
from tests.thread_ranks import in_threads

NAME = "actor/optim.safetensors"
ALONE = Ranks()


class Shelf(dict[str, bytes]):
    """Files that note how they are read."""

    def __init__(self, files: dict[str, bytes], damaged_after: int = 99) -> None:
        super().__init__(files)
        self.reads: list[str] = []
        self._damaged_after = damaged_after

    def __getitem__(self, name: str) -> bytes:
        self.reads.append(name)
        if len(self.reads) > self._damaged_after:
            raise DamagedError(f"{name} is damaged")
        return super().__getitem__(name)


def some_tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(shifted_seed(1))
    return {
        "layer.weight/exp_avg": torch.randn(5, 3, generator=random),
        "layer.weight/step": torch.tensor(7.0),
        "half": torch.randn(4, generator=random).to(torch.bfloat16),
        "none": torch.zeros(0, 3),
        "count": torch.tensor(2),
        "turned": torch.randn(2, 6, generator=random).T,
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_loads(files: dict[str, bytes], expected: dict[str, Tensor], name: str = NAME) -> None:
    into = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    SavedTensors(name, files, ALONE).load(into)
    assert_equal(into, expected)


@pytest.mark.parametrize("spread", [False, True])
def test_loading_restores_every_bit(spread: bool) -> None:
    files = save_tensors(NAME, some_tensors(), ALONE, spread=spread)
    assert_equal(load(bytes(files[NAME])), some_tensors())
    assert list(files) == [NAME]
    assert files == save_tensors(NAME, dict(reversed(some_tensors().items())), ALONE, spread=spread)
    shelf = Shelf(files)
    assert_loads(shelf, some_tensors())
    assert shelf.reads == [NAME]


def test_staged_bytes_equal_those_of_safetensors() -> None:
    sizes = {"w": (3, 5), "a.b": (7,), "scalar": (), "nothing": (0, 4)}
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    expected = save(tensors, {"format": "pt"})
    staged = stage_tensors(tensors, ALONE)
    tensors["w"].zero_()
    assert staged == expected


def test_staging_converts_floating_point_tensors_only() -> None:
    tensors = {"w": torch.randn(3, 5), "count": torch.arange(4), "cut": torch.randn(4, 6)[:, ::2]}
    staged = load(bytes(stage_tensors(tensors, ALONE, torch.bfloat16)))
    assert_equal(staged, {**tensors, "w": tensors["w"].bfloat16(), "cut": tensors["cut"].bfloat16()})


def test_a_head_is_json_with_the_offsets_of_tensors() -> None:
    data = bytes(save_tensors(NAME, some_tensors(), ALONE, spread=True)[NAME])
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(head["__metadata__"]) == ["DCP_SHARDING_INFO"]
    sharding = json.loads(head["__metadata__"]["DCP_SHARDING_INFO"])
    assert sharding["layer.weight/exp_avg"] == {"saved_offsets": [0, 0]}
    assert sharding.keys() == some_tensors().keys()


def test_pytorch_reads_our_files(tmp_path: Path) -> None:
    ((_, data),) = save_tensors(NAME, some_tensors(), ALONE, spread=True).items()
    (tmp_path / "optim.safetensors").write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(save({"weight": torch.ones(3)}, {"format": "pt"}))
    expected = {**some_tensors(), "weight": torch.ones(3)}
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert_equal(found, expected)


def test_a_file_of_whole_tensors_is_read_as_it_is() -> None:
    whole = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    assert_loads({"model.safetensors": save(whole, {"format": "pt"})}, whole, "model.safetensors")


def part_name(number: int) -> str:
    return f"actor/optim-{number}.safetensors" if number else NAME


def cut(tensor: Tensor, rows: Sequence[int], columns: Sequence[int]) -> dict[str, bytes]:
    """A file for each part."""
    files = {}
    for number, ((top, bottom), (left, right)) in enumerate(product(pairwise(rows), pairwise(columns))):
        head = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [top, left]}})}
        files[part_name(number)] = save({"w": tensor[top:bottom, left:right].contiguous()}, head)
    return files


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, size - 1), max_size=4).map(lambda places: sorted({0, *places, size}))


@given(cuts(7), cuts(5))
def test_the_whole_is_loaded_however_it_was_cut(rows: list[int], columns: list[int]) -> None:
    whole = torch.arange(35.0).view(7, 5)
    shelf = Shelf(cut(whole, rows, columns))
    assert_loads(shelf, {"w": whole})
    # Each was looked into, and the last of them was still there when they were needed.
    assert len(shelf.reads) == 2 * len(shelf) - 1


def test_other_files_with_similar_names_are_ignored() -> None:
    files = save_tensors(NAME, some_tensors(), ALONE, spread=True)
    others = ("actor/optim-x.safetensors", "critic/optim.safetensors", "actor/optim.safetensors2")
    assert_loads(files | dict.fromkeys(others, b""), some_tensors())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1000)  # the heads below are shorter
    for module in (manifest, tensor_files):
        monkeypatch.setattr(module, "PIECE_BYTES", 70)


def saved_parts(folder: Path, files: Mapping[str, Data]) -> LocalStorage:
    storage = LocalStorage(folder)
    Checkpoints(storage, "main").save(1, files, {})
    return storage


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_are_filled_piece_by_piece_wherever_these_end(tmp_path: Path, size: int) -> None:
    whole = torch.randn(23, 41, generator=torch.Generator().manual_seed(shifted_seed(2)))
    storage = saved_parts(tmp_path, cut(whole, [0, 9, 10, 23], [0, 20, 41]))

    def load_parts(ranks: Ranks) -> None:
        found = Checkpoints(storage, "main", ranks=ranks).load_newest()
        assert found is not None
        saved = SavedTensors(NAME, found[2], ranks)
        for into in (torch.empty(23, 41), torch.empty(23, 41, dtype=torch.float64), torch.empty(41, 23).T):
            saved.load({"w": into})
            assert torch.equal(into.float(), whole)

    in_threads(size, load_parts)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [1, 2])
def test_neighbors_read_as_many_bytes_each_and_all_once(tmp_path: Path, size: int) -> None:
    tensors = {f"w{number}": torch.arange(700.0) + number for number in range(4)}
    storage = saved_parts(tmp_path, save_tensors(NAME, tensors, ALONE, spread=True))

    class Counting(LocalStorage):
        num_bytes = 0

        def get_part(self, path: str, start: int, stop: int) -> bytes:
            data = super().get_part(path, start, stop)
            self.num_bytes += len(data)
            return data

    def load_counted(ranks: Ranks) -> int:
        counting = Counting(tmp_path)
        found = Checkpoints(counting, "main", ranks=ranks).load_newest()
        assert found is not None
        counting.num_bytes = 0
        saved = SavedTensors(NAME, found[2], ranks)
        into = {name: torch.empty(700) for name in tensors}
        saved.load(into)
        assert_equal(into, tensors)
        return counting.num_bytes

    num_bytes = len(storage.get(f"global_step_1/{NAME}"))
    read = in_threads(size, load_counted)
    assert sum(read) == num_bytes
    assert max(read) - min(read) <= 1000 + num_bytes % 1000


@pytest.mark.usefixtures("small_pieces")
def test_a_change_after_verification_is_raised_at_the_end(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.arange(700.0) for number in range(4)}
    storage = saved_parts(tmp_path, save_tensors(NAME, tensors, ALONE, spread=True))

    def load_damaged(ranks: Ranks) -> str:
        found = Checkpoints(storage, "main", ranks=ranks).load_newest()
        assert found is not None
        saved = SavedTensors(NAME, found[2], ranks)
        if ranks.all_gather(None) and ranks.is_rank0:
            data = storage.get(f"global_step_1/{NAME}")
            storage.put(f"global_step_1/{NAME}", data[:2500] + bytes([data[2500] ^ 1]) + data[2501:])
        ranks.all_gather(None)
        try:
            saved.load({name: torch.empty(700) for name in tensors})
        except DamagedError as error:
            return str(error)
        return ""

    # Of rank 0 are the first blocks, and no rank continues.
    texts = in_threads(2, load_damaged)
    assert "optim.safetensors from byte 2000: 1000 bytes do not match" in texts[0]
    assert texts[1] == texts[0]


def test_parts_without_offsets_are_refused() -> None:
    # As versions before 0.1 wrote them.
    files = {part_name(number): save({"w": torch.ones(2)}, {"rftdask": "{}"}) for number in range(2)}
    with pytest.raises(RoleError, match=r"optim\.safetensors of the checkpoint has parts .*rftdask convert"):
        SavedTensors(NAME, files, ALONE)


def test_missing_files_are_named() -> None:
    with pytest.raises(RoleError, match=r"the checkpoint has no actor/optim\.safetensors"):
        SavedTensors(NAME, {"actor/model.safetensors": b""}, ALONE)


def test_other_names_and_shapes_are_refused() -> None:
    files = save_tensors(NAME, {"a": torch.ones(2), "b": torch.ones(3)}, ALONE, spread=True)
    with pytest.raises(RoleError, match=r"does not fit the model, .*: missing \[\], unexpected \['b'\]"):
        SavedTensors(NAME, files, ALONE).load({"a": torch.ones(2)})
    with pytest.raises(RoleError, match=r"does not fit the model, .*: missing \['c'\], unexpected \[\]"):
        SavedTensors(NAME, files, ALONE).load({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(3)})
    with pytest.raises(RoleError, match=r"does not fit the model: b is \[3\], in the model \[4\]"):
        SavedTensors(NAME, files, ALONE).load({"a": torch.ones(2), "b": torch.ones(4)})


def test_a_damaged_file_is_reported_as_damaged() -> None:
    shelf = Shelf(cut(torch.ones(4, 2), [0, 2, 4], [0, 2]), damaged_after=2)
    saved = SavedTensors(NAME, shelf, ALONE)
    with pytest.raises(DamagedError, match=r"optim\.safetensors is damaged"):
        saved.load({"w": torch.empty(4, 2)})
