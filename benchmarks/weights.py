"""Cost of publishing a version of the weights and of loading it, against floors of the same disk and memory.

    python benchmarks/weights.py [--size 1.5B] [--dtype float32] [--folder DIR] [--repeats 3] [--no-checkpoint]
                                 [--quick] [--json FILE]

The policy has the shape of Qwen2.5 of that size and random float32 weights; it is published in --dtype, the data type
of its engine. Rows:

- blocking: how long a training step waits for a publication: `TorchEngine.weights`, the copy off the device in the data
  type of the engine. "first" copies into newly allocated memory, which happens once in a run, or twice with deltas.
  Floor: one `copy_` of the same tensors into memory that is already allocated.
- visible: from the start of a publication until the pointer names it. Floor: one sequential write of the same number of
  bytes with an fsync at its end, like `dd conv=fsync`.
- verify: the read of a version by the first engine's worker on a machine before the engine loads it, and by the next
  worker. Floor: a read of the file.
- load: the version mapped and copied from the disk into the model of an engine. Floor: the same read.
- delta, at two learning rates: every value has moved by the rate times a normal number, about the largest movement of
  Adam. Rows are its bytes; visible; made: a machine builds the whole from the version before; in place: an engine that
  serves the version before. Bytes and calls to storage of the trainer and of one machine are counted on a memory
  storage, which gets the same calls as an object store.
- checkpoint: the copy of the float32 weights and of the two moments of AdamW that a step waits for, and the time of its
  write. Floors: one more copy of the same tensors, and a write of the same number of bytes at the speed of the floor
  above.
- methods (weight_methods.py): each transport of weights with 1, 4 and 16 simulated engines: blocking, visible, until
  all engines have read every byte, bytes that all processes moved, host peaks of an engine's and of the trainer's
  process. Floors of the same round: one more copy, and one write of the bytes to where the method puts them.

7B does not fit the memory of a small machine: its float32 weights take 30 GB. For 7B, the values of one layer stand for
those of all, and four ranks of one machine write their parts one after the other, so that the memory is that of one
rank; times are sums over the ranks. Methods are omitted, because /dev/shm could not hold the weights.

Bytes are those that the process asked the system to read and write (rchar and wchar of /proc/self/io); host peaks are
of this process (VmHWM), above its level before. Each floor is measured in the same round as its row, and ratios are of
medians. The benchmark needs about 16 GB of memory for 0.5B, 13 GB for 1.5B (without checkpoints, methods, changes in
place and counted calls), and 8 GB for 7B, whose files temporarily take 31 GB of the disk. It cleans up.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Report, make_parser
from transformers import AutoModelForCausalLM, Qwen2Config
from weight_methods import Staged, cases, run_methods

from rftdask.algorithm.compose import make_algorithm
from rftdask.config import load_config
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import FileEntry, Manifest, commit_folder, put_files
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import model_file, published_as, read_published, weights_folder
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.tensor_heads import read_head
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.strategies.base import distinct_state
from rftdask.trainer.engines.tensor_files import stage_tensors
from rftdask.trainer.engines.torch_engine import TorchEngine

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_PARTS = 4
"""Number of ranks of 7B."""
_PIECE = 64 * 2**20
TIMEOUT_S = 600.0


class Used:
    """Seconds, bytes and memory of a block. Example: `with Used() as used: work()`, then `used.wall_s`."""

    def __enter__(self) -> Used:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        self._io, self._held = _io(), _status("VmRSS")
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._began
        read, written = _io()
        self.read_bytes, self.written_bytes = read - self._io[0], written - self._io[1]
        self.peak_bytes = max(0, _status("VmHWM") - self._held)


def _io() -> tuple[int, int]:
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]), int(told["wchar"])


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def write_model(folder: str, size: str) -> None:
    build_toy_model(folder, hidden_size=32, num_layers=1, num_heads=2)  # for its tokenizer
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[size], vocab_size=512 if size == "tiny" else 151_936, num_key_value_heads=2,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def make_engine(folder: str, dtype: str) -> TorchEngine:
    tree = {
        "mode": "train",
        "model": {"model_path": folder, "max_model_len": 64, "max_response_tokens": 32},
        "buffer": {"batch_size": 4},
        "explorer": {"rollout_model": {"dtype": dtype}},
        "seed": 0,
    }
    return TorchEngine(load_config(tree), make_algorithm("grpo", kl_loss_fn="none"))


def drop_caches(path: Path) -> None:
    """Drop the pages of a file from the system's cache, so that it is read from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_floor(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])
        os.fsync(file.fileno())


def copy_all(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    for name, target in into.items():
        target.copy_(tensors[name])


def read_floor(path: Path) -> None:
    piece = bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def measure(work: Callable[[], Any]) -> tuple[Used, Any]:
    with Used() as used:
        result = work()
    return used, result


class Times:
    """Durations of each part, by round."""

    def __init__(self) -> None:
        self.took: dict[str, list[Used]] = {}

    def note(self, name: str, work: Callable[[], Any]) -> Any:
        used, result = measure(work)
        self.took.setdefault(name, []).append(used)
        return result

    def seconds(self, name: str) -> float:
        return median(used.wall_s for used in self.took[name])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="0.5B")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--folder", default=None, help="folder on the disk to measure")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-checkpoint", action="store_true", help="omit the parts that need the most memory")
    parser.add_argument(
        "--engines",
        type=int,
        nargs="*",
        default=[1, 4, 16],
        help="engine counts of the methods; without numbers, omit the methods",
    )
    parser.add_argument(
        "--machines", type=int, default=2, help="machines in addition to the trainer's, each with a copy in /dev/shm"
    )
    parser.add_argument("--only-methods", action="store_true")
    arguments = parser.parse_args()
    report, size = Report(arguments), "tiny" if arguments.quick else arguments.size
    folder = tempfile.mkdtemp(prefix="rftdask-weights-", dir=arguments.folder)
    try:
        repeats = 2 if arguments.quick else max(2, arguments.repeats)
        if size == "7B":
            run_in_parts(report, folder, SHAPES[size], repeats)
        else:
            write_model(f"{folder}/model", size)
            trainer = make_engine(f"{folder}/model", arguments.dtype)
            if not arguments.only_methods:
                run(report, trainer, folder, size, arguments.dtype, repeats, checkpoints=not arguments.no_checkpoint)
            engines = arguments.engines[:1] if arguments.quick else arguments.engines
            if engines:
                trainer.reuse(trainer.weights())  # only the first publication of a run allocates new memory

                tensors = distinct_state(trainer._model)

                def stage() -> Staged:
                    used, files = measure(trainer.weights)
                    floor, _ = measure(partial(copy_all, tensors, views(next(iter(files.values())))))
                    trainer.reuse(files)  # for the next case; this case has read it
                    return Staged(used.wall_s, floor.wall_s, dict(files))

                run_methods(report, folder, size, stage, cases(engines, arguments.machines))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write()


LEARNING_RATES = (1e-6, 1e-5)
TOLD_WHOLE = (
    "first copy", "blocking", "written", "verify", "load", "checkpoint copy", "checkpoint",
    *(f"delta {what} {lr}" for lr in LEARNING_RATES for what in ("written", "made", "in place")),
)  # fmt: skip
"""Parts whose bytes and host peaks are also reported."""


def run_in_parts(report: Report, folder: str, shape: Mapping[str, int], repeats: int) -> None:
    """Publish and verify a model whose ranks run one after the other."""
    width, between = shape["hidden_size"], shape["intermediate_size"]
    heads = 128 * 4  # keys and values
    layer = {
        "self_attn.q_proj.weight": (width, width), "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (heads, width), "self_attn.k_proj.bias": (heads,),
        "self_attn.v_proj.weight": (heads, width), "self_attn.v_proj.bias": (heads,),
        "self_attn.o_proj.weight": (width, width), "mlp.gate_proj.weight": (between, width),
        "mlp.up_proj.weight": (between, width), "mlp.down_proj.weight": (width, between),
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
    }  # fmt: skip
    # Not zeros: memory that was never written is one shared page of zeros.
    values = {name: torch.full(sizes, 0.02) for name, sizes in layer.items()}
    tensors = {
        f"model.layers.{number}.{name}": value
        for number in range(shape["num_hidden_layers"])
        for name, value in values.items()
    }
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = torch.full((152_064, width), 0.02)
    storage, times = open_storage(f"{folder}/run"), Times()
    plain, note, num_bytes = Path(folder, "plain"), times.note, 0
    for round_number in range(repeats + 1):  # the first round only allocates memory
        entries: dict[str, FileEntry] = {}
        for rank in range(_PARTS):
            ranks = Ranks()
            ranks.rank, ranks.size = rank, _PARTS
            file = stage_tensors(tensors, ranks, torch.bfloat16, shared=True)  # allocates the memory of this rank
            file = note("blocking", partial(stage_tensors, tensors, ranks, torch.bfloat16, shared=True, spare=file))
            into = views(file)

            note("copy floor", partial(copy_all, tensors, into))
            entries |= note("written", partial(put_files, storage, weights_folder(1), {model_file(rank, _PARTS): file}))
            note("write floor", partial(write_floor, plain, memoryview(file)))
            drop_caches(plain)
            note("read floor", partial(read_floor, plain))
            plain.unlink()
            del into, file
        num_bytes = sum(entry.size_bytes for entry in entries.values())
        manifest = Manifest("main", 1, entries)
        note("committed", partial(commit_folder, storage, weights_folder(1), manifest))
        published = published_as(manifest, weights_folder(1))
        for name in entries:
            drop_caches(Path(storage.url, weights_folder(1), name))
        note("verify", partial(NodeCache, storage, published, TIMEOUT_S)).close()
        storage.remove(weights_folder(1))
        if round_number == 0:
            times.took.clear()
    took = {name: sum(used.wall_s for used in all_used) / repeats for name, all_used in times.took.items()}
    took["visible"] = took["blocking"] + took["written"] + took["committed"]
    print(f"7B in bfloat16: {num_bytes / 1e9:.2f} GB a version, {_PARTS} ranks one after the other; {repeats} rounds")
    for name, floor in {"blocking": "copy floor", "visible": "write floor", "verify": "read floor"}.items():
        goal = {} if name == "verify" else {"goal": 1 / 1.2, "goal_of": "ratio"}
        what = f"7B bfloat16, {name}"
        report.add(what, took[name], "s", less_is_better=True, against=floor, other=took[floor], **goal)
    for name in ("blocking", "written", "verify"):
        peak = max(used.peak_bytes for used in times.took[name])
        report.add(f"7B, {name}: host peak of a rank above its part", peak / 1e9, "GB", less_is_better=True)


def views(file: Data) -> dict[str, torch.Tensor]:
    """Return the tensors in a file, except those of integers."""
    head, start = read_head(lambda begin, end: file[begin:end])
    memory, found = torch.frombuffer(file, dtype=torch.uint8), {}
    for name, told in head.items():
        if name != "__metadata__" and told["dtype"] in DTYPES:
            (begin, end), dtype = told["data_offsets"], DTYPES[told["dtype"]]
            found[name] = memory[start + begin : start + end].view(dtype).view(told["shape"])
    return found


def optimizer_state(trainer: TorchEngine) -> dict[str, torch.Tensor]:
    """Return the tensors of AdamW after the first step, by their names in a checkpoint."""
    optimizer = trainer._optimizer
    for weight in optimizer._trained.values():
        weight.grad = torch.zeros_like(weight)
        optimizer._step(0.0)
        optimizer._drop_gradients()
    return {
        name: tensor
        for parameter, state in optimizer._states()
        for key, value in state.items()
        for name, tensor in optimizer._flat(parameter, key, value).items()
    }


def run(
    report: Report, trainer: TorchEngine, folder: str, size: str, dtype: str, repeats: int, *, checkpoints: bool
) -> None:
    storage = open_storage(f"{folder}/run")
    publisher = Publisher(storage, "main")
    engine = TransformersEngine(f"{folder}/model", dtype=dtype)
    tensors = distinct_state(trainer._model)
    times = Times()
    note = times.note

    plain = Path(folder, "plain")
    note("first copy", trainer.weights)
    trainer.reuse(trainer.weights())
    checkpoint, moments = Checkpoints(storage, "main"), optimizer_state(trainer) if checkpoints else {}
    for version in range(1, repeats + 1):
        trainer.reuse(publisher.take_spare())
        weights = note("blocking", trainer.weights)
        # Into the same memory, which is already allocated.
        note("copy floor", partial(copy_all, tensors, views(next(iter(weights.values())))))
        published = note("written", partial(publisher.publish, version, weights))
        ((name, data),) = weights.items()
        note("write floor", partial(write_floor, plain, memoryview(data)))
        num_bytes = len(data)
        del weights, data
        file = Path(storage.url, published.folder, name)
        drop_caches(plain)
        note("read floor", partial(read_floor, plain))
        plain.unlink()
        drop_caches(file)
        served = note("verify", partial(NodeCache, storage, published, TIMEOUT_S))
        note("verify again", partial(NodeCache, storage, published, TIMEOUT_S)).close()
        served.close()
        drop_caches(file)
        note("load", partial(engine.load_weights, version, [file]))
        if checkpoints:
            files = note("checkpoint copy" if version > 1 else "first checkpoint copy", trainer.state_files)
            checkpoint_bytes = sum(len(data) for data in files.values())
            into = {n: t for data in files.values() for n, t in views(data).items() if n in tensors | moments}
            note("checkpoint floor", partial(copy_all, tensors | moments, into))
            note("checkpoint", partial(checkpoint.save, version, files, {}))
            del files, into
            trainer.reuse(checkpoint.take_spare())
            storage.remove(f"global_step_{version}")
        storage.remove(published.folder)

    print(f"{size} in {dtype}: {num_bytes / 1e9:.2f} GB a version; {repeats} rounds")
    floors = {"blocking": "copy floor", "first copy": "copy floor", "visible": "write floor"}
    floors |= {"verify": "read floor", "load": "read floor"}
    took = {name: times.seconds(name) for name in times.took}
    took["visible"] = took["blocking"] + took["written"]
    for name, floor in floors.items():
        goal = {"goal": 1 / 1.2, "goal_of": "ratio"} if name in ("blocking", "visible") else {}
        report.add(
            f"{size} {dtype}, {name}", took[name], "s", less_is_better=True, against=floor, other=took[floor], **goal
        )
    report.add(f"{size} {dtype}, verify by the next worker", took["verify again"], "s", less_is_better=True)
    if checkpoints:
        share = checkpoint_bytes / num_bytes
        report.add(
            f"{size}, checkpoint copy",
            took["checkpoint copy"],
            "s",
            less_is_better=True,
            against="copy floor",
            other=took["checkpoint floor"],
            goal=1 / 1.2,
            goal_of="ratio",
        )
        report.add(
            f"{size}, checkpoint written",
            took["checkpoint"],
            "s",
            less_is_better=True,
            against="write floor",
            other=took["write floor"] * share,
        )
    if dtype != "float32":
        # Deltas need two copies of a version in addition to the trained model; with the engine's copy, 1.5B would not
        # fit.
        served = None if size == "1.5B" else engine
        del engine
        run_deltas(report, trainer, served, storage, times, size, repeats)
    for name in TOLD_WHOLE:
        if name not in times.took:
            continue
        used = times.took[name][-1]
        report.add(f"{size}, {name}: bytes read", used.read_bytes / 1e9, "GB", less_is_better=True)
        report.add(f"{size}, {name}: bytes written", used.written_bytes / 1e9, "GB", less_is_better=True)
        report.add(f"{size}, {name}: host peak above the model", used.peak_bytes / 1e9, "GB", less_is_better=True)


def run_deltas(
    report: Report,
    trainer: TorchEngine,
    engine: TransformersEngine | None,
    storage: Storage,
    times: Times,
    size: str,
    repeats: int,
) -> None:
    tensors = distinct_state(trainer._model)
    first = repeats + 1
    for lr in LEARNING_RATES:
        publisher = Publisher(storage, "main", 100)
        publisher.publish(first, trainer.weights())
        for version in range(first + 1, first + 1 + repeats):
            base = read_published(storage, version - 1)
            assert base is not None
            move(tensors, lr)
            trainer.reuse(publisher.take_spare())
            weights = times.note("delta copy", trainer.weights)
            num_bytes = sum(map(len, weights.values()))
            published = times.note(f"delta written {lr}", partial(publisher.publish, version, weights))
            assert published.delta is not None, "the publication is not a delta"
            delta_bytes = sum(entry.size_bytes for _, entry in published.delta.files)
            served = NodeCache(storage, base, TIMEOUT_S)
            made = times.note(f"delta made {lr}", partial(NodeCache, storage, published, TIMEOUT_S))
            if engine is not None:
                engine.load_weights(base.version, served.files)
                changes = NodeCache(storage, published.changes, TIMEOUT_S)
                change = partial(engine.try_load_changes, version, changes.files, None)
                assert times.note(f"delta in place {lr}", change)
                changes.close()
            for copy in (served, made):
                copy.close()
        took = {name: times.seconds(f"delta {name} {lr}") for name in ("written", "made")}
        visible = times.seconds("delta copy") + took["written"]
        report.add(f"{size}, lr {lr:g}, delta", 100 * delta_bytes / num_bytes, "% of the whole", less_is_better=True)
        against = {"against": "write floor of the whole", "other": times.seconds("write floor")}
        report.add(f"{size}, lr {lr:g}, delta visible", visible, "s", less_is_better=True, **against)
        report.add(f"{size}, lr {lr:g}, delta made by a machine", took["made"], "s", less_is_better=True)
        first += 1 + repeats
        del weights, publisher
        if engine is None:
            continue
        report.add(
            f"{size}, lr {lr:g}, delta in place", times.seconds(f"delta in place {lr}"), "s", less_is_better=True
        )
        for kind, (calls, moved) in count_calls(trainer, tensors, lr).items():
            report.add(f"{size}, lr {lr:g}, {kind}: calls", calls, "calls", less_is_better=True)
            report.add(f"{size}, lr {lr:g}, {kind}: bytes", moved / 1e9, "GB", less_is_better=True)


def move(tensors: Mapping[str, torch.Tensor], lr: float) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn_like(tensor), alpha=lr)


def count_calls(trainer: TorchEngine, tensors: Mapping[str, torch.Tensor], lr: float) -> dict[str, tuple[int, int]]:
    """Return (calls, bytes) of the trainer's publication and of a machine that serves the version before, whole and
    delta.
    """
    inner, counts, lock = open_storage("memory://weights-benchmark"), [0, 0], threading.Lock()

    class Counted(FaultyStorage):
        def count(self, data: Data) -> None:
            with lock:  # several threads read blocks
                counts[0], counts[1] = counts[0] + 1, counts[1] + len(data)

        def put(self, path: str, data: Data) -> None:
            self.count(data)
            inner.put(path, data)

        def get(self, path: str) -> bytes:
            data = inner.get(path)
            self.count(data)
            return data

        def get_part(self, path: str, start: int, stop: int) -> bytes:
            data = inner.get_part(path, start, stop)
            self.count(data)
            return data

    storage, found = Counted(inner, lambda verb, path, stage: None), {}
    publisher, held = Publisher(storage, "main", 2), None
    for version, kind in ((1, "whole"), (2, "delta")):
        move(tensors, lr)
        weights = trainer.weights()
        counts[:] = 0, 0
        published = publisher.publish(version, weights)
        found[f"{kind} published"] = counts[0], counts[1]
        counts[:] = 0, 0
        copy = NodeCache(storage, read_published(storage, version) or published, TIMEOUT_S)
        found[f"{kind} fetched by a machine"] = counts[0], counts[1]
        if held is not None:
            held.close()
        held = copy
    copy.close()
    for name in ("weights", "latest_state_dict_iteration.txt"):
        inner.remove(name)
    return found


if __name__ == "__main__":
    main()
