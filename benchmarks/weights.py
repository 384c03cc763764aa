"""What it costs to publish a version of the weights and to load it, against floors of the same disk and memory.

    python benchmarks/weights.py [--size 1.5B] [--dtype float32] [--folder DIR] [--repeats 3] [--no-checkpoint]
                                 [--quick] [--json FILE]

The policy has the shape of Qwen2.5 of that size and random weights in float32; it is published in --dtype, the data
type of its engine. Rows:

- blocking: how long a training step waits for a publication: `TorchEngine.weights`, the copy off the device in the
  data type of the engine; first: into memory that has to be made, which happens once in a run, or twice with deltas.
  Floor: one `copy_` of the same tensors into host memory that is there already.
- visible: from the beginning of a publication until the pointer names it. Floor: one sequential write of as many bytes
  with an fsync at its end, as `dd conv=fsync` makes it.
- verify: what the first engine's worker on a machine reads of a version before the engine loads it, and the next
  worker. Floor: a read of the file.
- load: the version mapped and copied into the model of an engine, from the disk. Floor: the same read.
- delta, at two learning rates: every value has moved by the rate times a normal number, about the most that Adam moves
  it. Its bytes; visible; made: the whole as a machine makes it of the version before; in place: an engine that serves
  the version before. Bytes and calls to storage, of the trainer and of one machine, are counted at a storage in memory,
  which gets the calls that an object store would.
- checkpoint: the copy of the state that a step waits for, and how long its writing takes.

Bytes are what the process asked of the system to read and write (rchar and wchar of /proc/self/io); host peaks are of
this process (VmHWM), above what it held before. All floors are measured in the same round as what they are compared
with, and ratios are of medians. It needs some 7 GB of memory and disk for 0.5B, 16 GB for 1.5B without checkpoints, and
cleans up.
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

from rftdask.algorithm.compose import make_algorithm
from rftdask.config import load_config
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_model
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import Data
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.strategies.base import distinct_state
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.weights.node_copy import NodeCopy
from rftdask.weights.published import read_published
from rftdask.weights.publisher import Publisher

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
_PIECE = 64 * 2**20
TIMEOUT_S = 600.0


class Used:
    """Seconds, bytes and memory of a block. Example: `with Used() as used: work()`, then `used.wall_s`."""

    def __enter__(self) -> Used:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
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
    """Let the system forget the pages of a file, so that it is read from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_floor(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])
        os.fsync(file.fileno())


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
    """What each part took, round by round."""

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
    parser.add_argument("--folder", default=None, help="where the disk is that is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-checkpoint", action="store_true", help="leave out what takes the most memory")
    arguments = parser.parse_args()
    report, size = Report(arguments), "tiny" if arguments.quick else arguments.size
    folder = tempfile.mkdtemp(prefix="rftdask-weights-", dir=arguments.folder)
    try:
        write_model(f"{folder}/model", size)
        repeats = 1 if arguments.quick else arguments.repeats
        run(report, folder, size, arguments.dtype, repeats, checkpoints=not arguments.no_checkpoint)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write()


LEARNING_RATES = (1e-6, 1e-5)


def run(report: Report, folder: str, size: str, dtype: str, repeats: int, *, checkpoints: bool) -> None:
    trainer = make_engine(f"{folder}/model", dtype)
    storage = open_storage(f"{folder}/run")
    publisher = Publisher(storage, "main")
    engine = TransformersEngine(f"{folder}/model", dtype=dtype)
    tensors, into = distinct_state(trainer._model), engine._model.state_dict()
    times = Times()
    note = times.note

    def copy_floor() -> None:
        for name, tensor in tensors.items():
            into[name].copy_(tensor)

    plain = Path(folder, "plain")
    note("first copy", trainer.weights)
    trainer.reuse(trainer.weights())
    for version in range(1, repeats + 1):
        note("copy floor", copy_floor)
        trainer.reuse(publisher.take_spare())
        weights = note("blocking", trainer.weights)
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
        served = note("verify", partial(NodeCopy, storage, published, TIMEOUT_S))
        note("verify again", partial(NodeCopy, storage, published, TIMEOUT_S)).close()
        served.close()
        drop_caches(file)
        note("load", partial(engine.load_weights, version, [file]))
        if checkpoints:
            files = note("checkpoint copy", trainer.state_files)
            checkpoint_bytes = sum(len(data) for data in files.values())
            note("checkpoint", partial(Checkpoints(storage, "main").save, version, files, {}))
            del files
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
            against="copy floor for its bytes",
            other=took["copy floor"] * share,
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
        run_deltas(report, trainer, engine, storage, times, size, repeats)
    for name in ("first copy", "blocking", "written", "verify", "load", "checkpoint copy", "checkpoint"):
        if name not in times.took:
            continue
        used = times.took[name][-1]
        report.add(f"{size}, {name}: bytes read", used.read_bytes / 1e9, "GB", less_is_better=True)
        report.add(f"{size}, {name}: bytes written", used.written_bytes / 1e9, "GB", less_is_better=True)
        report.add(f"{size}, {name}: host peak above the model", used.peak_bytes / 1e9, "GB", less_is_better=True)


def run_deltas(
    report: Report,
    trainer: TorchEngine,
    engine: TransformersEngine,
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
            assert published.delta is not None, "it is no delta"
            delta_bytes = sum(entry.size_bytes for _, entry in published.delta.files)
            served = NodeCopy(storage, base, TIMEOUT_S)
            made = times.note(f"delta made {lr}", partial(NodeCopy, storage, published, TIMEOUT_S))
            engine.load_weights(base.version, served.files)
            changes = NodeCopy(storage, published.changes, TIMEOUT_S)
            assert times.note(f"delta in place {lr}", partial(engine.try_load_changes, version, changes.files, None))
            for copy in (served, made, changes):
                copy.close()
        took = {name: times.seconds(f"delta {name} {lr}") for name in ("written", "made", "in place")}
        visible = times.seconds("delta copy") + took["written"]
        report.add(f"{size}, lr {lr:g}, delta", 100 * delta_bytes / num_bytes, "% of the whole", less_is_better=True)
        against = {"against": "write floor of the whole", "other": times.seconds("write floor")}
        report.add(f"{size}, lr {lr:g}, delta visible", visible, "s", less_is_better=True, **against)
        report.add(f"{size}, lr {lr:g}, delta made by a machine", took["made"], "s", less_is_better=True)
        report.add(f"{size}, lr {lr:g}, delta in place", took["in place"], "s", less_is_better=True)
        first += 1 + repeats
        del weights, publisher
        for kind, (calls, moved) in count_calls(trainer, tensors, lr).items():
            report.add(f"{size}, lr {lr:g}, {kind}: calls", calls, "calls", less_is_better=True)
            report.add(f"{size}, lr {lr:g}, {kind}: bytes", moved / 1e9, "GB", less_is_better=True)


def move(tensors: Mapping[str, torch.Tensor], lr: float) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn_like(tensor), alpha=lr)


def count_calls(trainer: TorchEngine, tensors: Mapping[str, torch.Tensor], lr: float) -> dict[str, tuple[int, int]]:
    """(calls, bytes) of the trainer's publication and of a machine that serves the version before, whole and delta."""
    inner, counts, lock = open_storage("memory://weights-benchmark"), [0, 0], threading.Lock()

    class Counted(FaultyStorage):
        def count(self, data: Data) -> None:
            with lock:  # blocks are read by several threads
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
        copy = NodeCopy(storage, read_published(storage, version) or published, TIMEOUT_S)
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
