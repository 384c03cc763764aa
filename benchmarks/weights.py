"""What it costs to publish a version of the weights and to load it, against floors of the same disk and memory.

    python benchmarks/weights.py [--size 1.5B] [--dtype float32] [--folder DIR] [--repeats 3] [--quick] [--json FILE]

The policy has the shape of Qwen2.5 of that size and random weights in float32; it is published in --dtype, the data
type of its engine. Rows:

- blocking: how long a training step waits for a publication: `TorchEngine.weights`, the copy off the device in the
  data type of the engine. Floor: one `copy_` of the same tensors into host memory that is there already.
- visible: from the beginning of a publication until the pointer names it, `weights` and `publish_weights`. Floor: one
  sequential write of as many bytes with an fsync at its end, as `dd conv=fsync` makes it.
- verify: what the first engine's worker on a machine reads of a version before the engine loads it, and the next
  worker. Floor: a read of the file.
- load: the version mapped and copied into the model of an engine, from the disk. Floor: the same read.
- checkpoint: the copy of the state that a step waits for, and how long its writing takes.

Bytes are what the process asked of the system to read and write (rchar and wchar of /proc/self/io); host peaks are of
this process (VmHWM), above what it held before. All floors are measured in the same round as what they are compared
with, and ratios are of medians. It needs some 6 GB of memory and disk for 0.5B, 20 GB for 1.5B, and cleans up.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
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
from rftdask.storage import open_storage
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.strategies.base import distinct_state
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.weights.node_copy import NodeCopy
from rftdask.weights.published import publish_weights

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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="0.5B")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--folder", default=None, help="where the disk is that is measured")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    report, size = Report(arguments), "tiny" if arguments.quick else arguments.size
    folder = tempfile.mkdtemp(prefix="rftdask-weights-", dir=arguments.folder)
    try:
        write_model(f"{folder}/model", size)
        run(report, folder, size, arguments.dtype, 1 if arguments.quick else arguments.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write()


def run(report: Report, folder: str, size: str, dtype: str, repeats: int) -> None:
    trainer = make_engine(f"{folder}/model", dtype)
    storage = open_storage(f"{folder}/run")
    engine = TransformersEngine(f"{folder}/model", dtype=dtype)
    tensors = distinct_state(trainer._model)
    into = {name: torch.empty_like(tensor, dtype=getattr(torch, dtype)) for name, tensor in tensors.items()}
    for tensor in into.values():
        tensor.zero_()  # so that its memory is there
    took: dict[str, list[Used]] = {}

    def note(name: str, work: Callable[[], Any]) -> Any:
        used, result = measure(work)
        took.setdefault(name, []).append(used)
        return result

    def copy_floor() -> None:
        for name, tensor in tensors.items():
            into[name].copy_(tensor)

    plain = Path(folder, "plain")
    for version in range(1, repeats + 1):
        note("copy floor", copy_floor)
        weights = note("blocking", trainer.weights)
        published = note("written", partial(publish_weights, storage, version, weights, "main"))
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
        files = note("checkpoint copy", trainer.state_files)
        checkpoint_bytes = sum(len(data) for data in files.values())
        note("checkpoint", partial(Checkpoints(storage, "main").save, version, files, {}))
        del files
        storage.remove(published.folder)
        storage.remove(f"global_step_{version}")

    def seconds(name: str) -> float:
        return median(used.wall_s for used in took[name])

    print(
        f"{size} in {dtype}: {num_bytes / 1e9:.2f} GB a version, {checkpoint_bytes / 1e9:.2f} GB a checkpoint; "
        f"{repeats} rounds"
    )
    floors = {"blocking": "copy floor", "visible": "write floor", "verify": "read floor", "load": "read floor"}
    times = {name: seconds(name) for name in took} | {"visible": seconds("blocking") + seconds("written")}
    for name, floor in floors.items():
        goal = {"goal": 1 / 1.2, "goal_of": "ratio"} if name in ("blocking", "visible") else {}
        report.add(
            f"{size} {dtype}, {name}", times[name], "s", less_is_better=True, against=floor, other=times[floor], **goal
        )
    report.add(f"{size} {dtype}, verify by the next worker", times["verify again"], "s", less_is_better=True)
    rate = times["write floor"] / num_bytes * checkpoint_bytes
    report.add(
        f"{size}, checkpoint copy",
        times["checkpoint copy"],
        "s",
        less_is_better=True,
        against="copy floor for its bytes",
        other=times["copy floor"] / num_bytes * checkpoint_bytes,
    )
    report.add(
        f"{size}, checkpoint written", times["checkpoint"], "s", less_is_better=True, against="write floor", other=rate
    )
    for name in ("blocking", "written", "verify", "load", "checkpoint copy", "checkpoint"):
        used = took[name][-1]
        report.add(f"{size}, {name}: bytes read", used.read_bytes / 1e9, "GB", less_is_better=True)
        report.add(f"{size}, {name}: bytes written", used.written_bytes / 1e9, "GB", less_is_better=True)
        report.add(f"{size}, {name}: host peak above the model", used.peak_bytes / 1e9, "GB", less_is_better=True)


if __name__ == "__main__":
    main()
