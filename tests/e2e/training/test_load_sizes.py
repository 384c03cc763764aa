"""Ranks that hold parts of the weights (fsdp2) load only their parts: measured in the memory of real processes."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import supervised_batch
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.errors import DamagedError
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.storage.base import Data
from rftdask.storage.local import LocalStorage
from rftdask.trainer import model
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.strategies.base import DDP, Strategy, local
from rftdask.trainer.engines.strategies.fsdp2 import FSDP2
from rftdask.trainer.engines.strategies.tensor import TensorParallel
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.e2e.gloo_ranks import run_ranks
from tests.unit.trainer.trainer_cases import engine_config

MIB = 2**20
LAYERS, HIDDEN, INNER = 8, 448, 1664
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a critic": ("tied", "ppo", {}),
    "adapters": ("tied", "grpo", {"model__lora_configs": [{"lora_rank": 4}]}),
    "adapters of directions": ("tied", "grpo", {"model__lora_configs": [{"lora_rank": 4, "use_dora": True}]}),
    "a head of one number": ("tied", "reward_model", {"model__lora_configs": [{"lora_rank": 4}]}),
    "a reference, untied": ("untied", "dpo", {}),
    "experts": ("experts", "sft", {}),
    "pickles": ("pickles", "sft", {}),
}


def free_at_once() -> None:
    """Make freed memory return to the system at once from now on."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD


@contextmanager
def watched() -> Iterator[list[int]]:
    """Measure the process's memory, in bytes above its start, hundreds of times a second."""
    free_at_once()

    def own_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    ended, before = threading.Event(), own_bytes()
    samples: list[int] = []

    def look() -> None:
        while not ended.is_set():
            samples.append(own_bytes() - before)
            time.sleep(0.003)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


class CountedSlice:
    num_bytes = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, part: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._inner[part]
        CountedSlice.num_bytes += tensor.nbytes
        return tensor


class CountedFile:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._inner = safe_open(*arguments, **options)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._inner.keys())

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self._inner.get_slice(name))


def strategy_of(ranks: Ranks, cut: TensorParallel | None = None) -> Strategy:
    return FSDP2(ranks, torch.device("cpu"), TrainerConfig(), cut) if ranks.size > 1 else Strategy(ranks)


def engine(path: str, algorithm: str, ranks: Ranks, cut: TensorParallel | None = None, **overrides: Any) -> TorchEngine:
    return TorchEngine(engine_config(path, **overrides), make_algorithm(algorithm), strategy_of(ranks, cut))


def load_large(gangs: dict[int, Ranks], small: str, large: str) -> dict[tuple[int, bool], tuple[int, int, int]]:
    """Return, by number of ranks and tensor parallelism: peak bytes of memory until the weights are loaded, and until
    the engine is ready; and bytes read from the files.
    """
    sizes = {}
    model.load_policy = noted = Noted(model.load_policy)
    model.safe_open = CountedFile  # type: ignore[assignment,misc]
    cut = TensorParallel(gangs[4], gangs[2], gangs[4].across(2), torch.device("cpu"))
    for size, pairs in ((2, None), (4, None), (4, cut)):
        engine(small, "sft", gangs[size], pairs)  # imports and other one-time allocations
        CountedSlice.num_bytes = 0
        with watched() as seen:
            noted.seen = seen
            made = engine(large, "sft", gangs[size], pairs)
        sizes[size, pairs is not None] = max(seen[: noted.num_seen]), max(seen), CountedSlice.num_bytes
        del made
        gc.collect()
    return sizes


class Noted:
    """`load_policy`, whose end is recorded."""

    def __init__(self, usual: Callable[..., Any]) -> None:
        self._usual = usual
        self.seen: list[int] = []
        self.num_seen = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self._usual(*arguments, **options)
        self.num_seen = len(self.seen)
        return result


def resume(gangs: dict[int, Ranks], folder: str, path: str) -> tuple[list[int], dict[str, list[int]], bool, str]:
    """Resume ranks from what four ranks saved. Returns the bytes that each of the four saved; the bytes that each read,
    by the way it resumed; whether the four hold the same state as before; and the error of a rank about a file that
    changes after it was verified.
    """
    ranks, storage = gangs[4], CountingStorage(folder)
    made = engine(path, "sft", ranks)
    made.train_step(supervised_batch([([1, 2, 3, 4], 2, None)] * 4, [f"t/0/0/{i}/0" for i in range(4)], 1), 1)
    files = made.state_files()
    Checkpoints(storage, "main", ranks=ranks).save(1, files, {"step": 1})
    saved = ranks.all_gather(sum(map(len, files.values())))
    ways: dict[str, tuple[Ranks, Strategy]] = {
        "two": (gangs[2], strategy_of(gangs[2])),
        "whole": (ranks, DDP(ranks)),
        "four": (ranks, strategy_of(ranks)),
    }
    read = {}
    for way, (gang, strategy) in ways.items():
        again = TorchEngine(engine_config(path, seed=5), make_algorithm("sft"), strategy)
        storage.num_bytes = 0
        newest = Checkpoints(storage, "main", ranks=gang).load_newest()
        assert newest is not None
        again.load_state_files(newest[2])
        read[way] = gang.all_gather(storage.num_bytes)
    same, error_text = again.state_files() == files, ""
    newest = Checkpoints(storage, "main", ranks=ranks).load_newest()
    assert newest is not None
    if ranks.all_gather(None) and ranks.is_rank0:
        damaged = Path(folder, "global_step_1/actor/optim-2.safetensors")
        data = damaged.read_bytes()
        damaged.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    ranks.all_gather(None)
    try:
        again.load_state_files(newest[2])
    except DamagedError as error:
        error_text = str(error)
    return saved, read, same, error_text


def resume_large(gangs: dict[int, Ranks], small: str, large: str, folder: str) -> dict[str, tuple[int, int, int]]:
    """Return, by the way in which ranks resume from what four saved: bytes of weights and optimizer that this rank then
    holds; its peak of memory, measured before its model is created; and bytes it read of the checkpoint. A rank that
    did not take part has no entry.
    """
    free_at_once()
    ranks, storage = gangs[4], CountingStorage(folder)
    batch = supervised_batch([([1, 2, 3, 4], 2, None)] * 4, [f"t/0/0/{i}/0" for i in range(4)], 1)

    def resumed(storage: LocalStorage, path: str, gang: Ranks, strategy: Strategy) -> TorchEngine:
        again = TorchEngine(engine_config(path), make_algorithm("sft"), strategy)
        loaded = Checkpoints(storage, "main", ranks=gang).load_newest()
        assert loaded is not None
        again.load_state_files(loaded[2])
        return again

    # From the small model, for imports and other one-time allocations.
    once = LocalStorage(f"{folder}-once")
    for files, path in ((once, small), (storage, large)):
        first = engine(path, "sft", ranks)
        first.train_step(batch, 1)
        Checkpoints(files, "main", ranks=ranks).save(1, first.state_files(), {"step": 1})
    del first
    resumed(once, small, ranks, strategy_of(ranks))
    ways: dict[str, tuple[Ranks, Callable[[Ranks], Strategy]]] = {
        "four": (ranks, strategy_of),
        "two": (gangs[2], strategy_of),
        "two, each all of it": (gangs[2], DDP),
    }
    sizes = {}
    for way, (gang, strategy) in ways.items():
        gc.collect()
        ranks.all_gather(None)
        if ranks.rank >= gang.size:
            continue
        storage.num_bytes = 0
        with watched() as seen:
            again = resumed(storage, large, gang, strategy(gang))
        sizes[way] = sum(local(tensor).nbytes for tensor in again._tensors()), max(seen), storage.num_bytes
        del again
    ranks.all_gather(None)
    return sizes


class CountingStorage(LocalStorage):
    num_bytes = 0

    def get(self, path: str) -> bytes:
        data = super().get(path)
        self.num_bytes += len(data)
        return data

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        data = super().get_part(path, start, stop)
        self.num_bytes += len(data)
        return data


def load_cases(gangs: dict[int, Ranks], folder: str) -> dict[str, bool]:
    """Return, by case, whether four ranks hold what one rank holds."""
    same: dict[str, bool] = {}
    for case, (name, algorithm, options) in CASES.items():
        alone, found = (engine(f"{folder}/{name}", algorithm, gangs[size], **options) for size in (1, 4))
        own, expected = _weights_in(found.state_files()), _weights_in(alone.state_files())
        names = {name for part in gangs[4].all_gather(list(own)) for name in part}
        same[case] = names == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    return same


def _weights_in(files: Mapping[str, Data]) -> dict[str, torch.Tensor]:
    return {
        f"{file.partition('/')[0]} {name}": tensor
        for file, data in files.items()
        if "model" in file and file.endswith(".safetensors")
        for name, tensor in load(bytes(data)).items()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("small")
    build_toy_model(folder, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
    return str(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("large")
    build_toy_model(folder, hidden_size=HIDDEN, intermediate_size=INNER, num_layers=LAYERS, num_heads=4)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="30MB")
    return str(folder)


@pytest.mark.long
def test_a_rank_loads_only_its_part_of_the_weights(small: str, large: str, tmp_path: Path) -> None:
    tensor, layer = 4 * HIDDEN * INNER, 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    for found in run_ranks(4, tmp_path, load_large, small, large):
        for (size, cut), (loaded, peak, read) in found.items():
            part = (layer * LAYERS + 4 * 258 * HIDDEN * (2 if cut else 1)) / size
            assert loaded <= 1.2 * part + tensor, f"{size} ranks, {loaded / MIB:.0f} MiB"
            # A first pass, which inspects the model, gathers layers as training does.
            assert peak <= 1.2 * part + 4 * layer, f"{size} ranks, {peak / MIB:.0f} MiB"
            # The files are bfloat16, the weights float32.
            assert read <= 1.01 * part / 2, f"{size} ranks, {read / MIB:.0f} MiB"


@pytest.mark.long
def test_ranks_that_resume_read_each_byte_twice_over_all_of_them(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=64, intermediate_size=256, num_layers=4, num_heads=4)
    found = run_ranks(4, tmp_path, resume, str(tmp_path / "run"), str(tmp_path / "model"))
    assert all(same for _, _, same, _ in found)
    saved, read, _, told = found[0]
    # One rank has read it, and none continues.
    assert [each for *_, each in found] == [told] * 4
    assert "actor/optim-2.safetensors" in told and "do not match the manifest" in told
    assert max(saved) <= 1.2 * sum(saved) / 4, saved
    # In addition to the files: the manifest of a rank, and small files that all ranks read.
    assert {way: sum(each) < 2.1 * sum(saved) for way, each in read.items()} == dict.fromkeys(read, True), (saved, read)


@pytest.mark.long
def test_a_rank_that_resumes_holds_little_more_than_its_part(small: str, large: str, tmp_path: Path) -> None:
    found = run_ranks(4, tmp_path, resume_large, small, large, str(tmp_path / "run"))
    num_saved = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    tensor = 4 * HIDDEN * INNER
    for way, size, share in (("four", 4, 4), ("two", 2, 2), ("two, each all of it", 2, 1)):
        of_ranks = [rank[way] for rank in found if way in rank]
        assert len(of_ranks) == size
        for part, peak, _ in of_ranks:
            assert num_saved / share <= 1.02 * part, way
            assert peak <= 1.2 * part + tensor, f"{way}, {peak / MIB:.0f} MiB"
        # Once to verify it before anything is changed, and once to load it.
        assert sum(read for _, _, read in of_ranks) <= 2.02 * num_saved, way


@pytest.mark.long
def test_a_rank_loads_its_exact_share_of_the_whole_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 18, "intermediate_size": 33, "num_layers": 2, "num_heads": 3}
    for name in ("tied", "untied", "experts", "pickles"):
        build_toy_model(tmp_path / name, **sizes)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    whole.config.tie_word_embeddings = False
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach() + 1)
    whole.save_pretrained(tmp_path / "untied")
    torch.manual_seed(1)
    moe = Qwen3MoeConfig(
        **{"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4, "intermediate_size": 16},
        **{
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 6,  # with two-row units, the last rank has none
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
        },
    )
    Qwen3MoeForCausalLM(moe).save_pretrained(tmp_path / "experts")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "pickles")
    (tmp_path / "pickles" / "model.safetensors").unlink()
    torch.save(whole.state_dict(), tmp_path / "pickles" / "pytorch_model.bin")
    for found in run_ranks(4, tmp_path, load_cases, str(tmp_path)):
        assert found == dict.fromkeys(CASES, True)
