"""Measurements that need a GPU: parts a to j, each a few minutes, as rows of one table in docs/gpu.md.

    python benchmarks/gpu.py [--parts a b ...] [--append FILE] [--json FILE]     on a GPU; `make gpu PART=a`
    python benchmarks/gpu.py --tiny                                              anywhere: tiny shapes, no valid numbers

    a  CUDA works, and a NCCL group of one rank (gloo on a CPU)
    b  attention over packed rows in half precision against SDPA in float32: heads of 64 to 256, shared keys,
    windows
    c  logprobs of the train engine on the GPU, by autocast and of fsdp2's weights in bfloat16, against those of the
       same weights in float32 on the CPU
    d  every algorithm makes two steps on the GPU, with finite losses
    e  tokens/s, MFU and peak of a train step, full and LoRA, against a bare loop and TRL (benchmarks/gpu_train.py)
    f  the peak against `rftdask estimate`: 0.6 billion weights, full and LoRA; LoRA on seven billion
    g  seconds to publish weights, to load them into an engine and to prove that they are served: 0.6 and seven
    billion
    h  a step that does not fit ends in one line that names the keys to change
    i  rollouts of the engine against `generate` of transformers (benchmarks/generate.py), and of vLLM if installed
    j  a run whose trainer and engine alternate on the GPU learns, is killed with -9, and resumes

Weights are random, with the shapes in gpu_train.py, so nothing is downloaded. A part that cannot run, or whose package
is missing, is a row with the reason. A broken bound makes the exit code 1. Each part is a process, which is ended with
its descendants after 8 minutes, or 25 minutes after the first part began; its rows up to then are in the table, with a
row that reports the end.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from gpu_train import NO_PEFT, free, make_config, make_engine, model_folder, write_model
from kill_quickstart import SHORT
from report import Report, make_parser
from torch.nn.functional import scaled_dot_product_attention

from rftdask.algorithm.compose import build_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, join_batches, supervised_batch
from rftdask.config import load_config
from rftdask.config.schema.algorithm import registered_parts
from rftdask.engines.client import EngineClient
from rftdask.engines.spec import engine_spec
from rftdask.models.model_shape import read_shape
from rftdask.storage import open_storage
from rftdask.synchronizer.published import latest_published
from rftdask.synchronizer.publisher import Publisher
from rftdask.trainer.attention import packed_attention
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.packing import pack_rows

HERE = Path(__file__).parent
DATASETS = ("cpt", "dpo", "kto", "orpo", "reward_model", "sft", "simpo")
"""Algorithms that learn from a dataset."""
MAX_DLOGP = 0.01
"""Bound of part c on the mean over tokens, in nats."""
NUM_ROWS = 4
"""Number of rows of part c, each of 1,024 tokens."""
PART_S, ALL_S = 480, 1500
LARGE_BYTES = 70e9
"""Memory of a GPU that is large enough for seven billion weights."""
CONTEXT = multiprocessing.get_context("forkserver")
"""Parts are forks of a process that has imported their modules and has not touched a GPU."""
CONTEXT.set_forkserver_preload(["gpu_train", "rftdask.engines.transformers", "rftdask.trainer.engines.torch_engine"])
HEADER = "| part | what | found | bound |\n|---|---|---|---|\n"


Row = tuple[str, str, str, str, bool | None]
"""(part, what, result, bound, True if the bound holds or None without a bound)."""


@dataclass
class Place:
    """Device and folder of the parts, and receiver of their rows."""

    device: str
    quick: bool
    folder: Path
    on_row: Callable[[Row], object]
    """Receives each row as soon as it is measured."""

    def add(self, part: str, what: str, found: str, bound: str = "", holds: bool | None = None) -> None:
        """Print and send one row. holds: True if `found` keeps the bound; None: there is no bound."""
        verdict = {True: "holds", False: "BROKEN", None: ""}[holds]
        print(f"{part}  {what:64} {found:>24}  {bound} {verdict}".rstrip(), flush=True)
        self.on_row((part, what, found, f"{bound} {verdict}".strip(), holds))

    @property
    def models(self) -> Path:
        """Folder of the models that the parts share."""
        return self.folder / "models"

    @property
    def model(self) -> str:
        """Folder of a model of 0.6 billion weights; a tiny one if `quick`."""
        return model_folder(self.models, self.quick)

    @property
    def is_large(self) -> bool:
        """True if seven billion weights are tried."""
        return self.quick or torch.cuda.get_device_properties(0).total_memory > LARGE_BYTES


def part_a(place: Place) -> None:
    if place.device == "cuda":
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        place.add("a", "device", f"{name}, sm_{major}{minor}, {torch.cuda.device_count()} in all")
    backend = "nccl" if place.device == "cuda" else "gloo"
    with group_of_one(place):
        total = torch.ones(4, device=place.device)
        dist.all_reduce(total)
    place.add("a", f"sum over a group of one, {backend}", str(total.sum().item()), "= 4", total.sum().item() == 4)


@contextmanager
def group_of_one(place: Place) -> Iterator[None]:
    """Process group as a rank has it."""
    backend = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def part_b(place: Place) -> None:
    # Rows that attend only to themselves; then rows that share a prefix stored once, as a trainer packs them.
    lengths, prompt = ((50, 7), 5) if place.quick else ((700, 512, 64, 48), 40)
    half = torch.bfloat16 if place.device == "cuda" else torch.float32
    for lean, (size, heads, keys, window) in product(
        (False, True), ((64, 8, 8, None), (128, 16, 8, None), (128, 8, 1, 33), (256, 4, 2, None))
    ):
        tokens = [np.arange(length) for length in lengths]
        rows = pack_rows(tokens, np.full(len(lengths), prompt), np.ones(len(lengths)), place.device, lean=lean)
        spans, places_S = rows.spans, torch.arange(len(rows.tokens_S), device=place.device)
        torch.manual_seed(0)
        shape = len(places_S), size
        inputs = [torch.randn(1, n, *shape, device=place.device, dtype=half) for n in (heads, keys, keys)]
        query, key, value = (each.clone().requires_grad_() for each in inputs)
        module = torch.nn.Module().to(place.device)
        out, _ = packed_attention(module, query, key, value, None, spans=spans, sliding_window=window)
        out.sum().backward()
        exact = [each.float().clone().requires_grad_() for each in inputs]
        pieces, seen_K = [], places_S if spans.seen_K is None else spans.seen_K
        for queries, seen in zip(places_S.split(list(spans.lengths)), seen_K.split(list(spans.seen)), strict=True):
            place_K = torch.arange(len(seen), device=place.device)
            behind = place_K[len(seen) - len(queries) :, None] - place_K
            mask = (behind >= 0) & (behind < (window or len(seen)))
            part = [each[:, :, places] for each, places in zip(exact, (queries, seen, seen), strict=True)]
            attended = scaled_dot_product_attention(*part, attn_mask=mask, enable_gqa=heads != keys)
            pieces.append(attended.transpose(1, 2))
        wanted = torch.cat(pieces, 1)
        wanted.sum().backward()
        far = _apart(out, wanted)
        grads = max(_apart(a.grad, b.grad) for a, b in zip((query, key, value), exact, strict=True))
        bound = 0.02 if half is torch.bfloat16 else 1e-5
        what = f"heads of {size}, {heads} of queries, {keys} of keys, window {window}{', shared prompts' * lean}"
        place.add("b", what, f"{far:.1e}, gradients {grads:.1e}", f"<= {bound:g}", max(far, grads) <= bound)


def _apart(one: Any, other: Any) -> float:
    """Return the norm of the difference, relative to that of `other`."""
    one, other = one.detach(), other.detach()
    return float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12))


def part_c(place: Place) -> None:
    config, size = make_config(place.model, False), read_shape(place.model).vocab_size
    random = np.random.default_rng(0)
    rows = [(random.integers(2, size, 1024).tolist(), 16, None) for _ in range(NUM_ROWS)]
    batch = supervised_batch(rows, [f"row {number}" for number in range(NUM_ROWS)])

    def logprobs(engine: TorchEngine) -> np.ndarray:
        """Return the logprobs [Q] of all response tokens, as a train step computes them."""
        passes = engine._plan(batch, np.arange(len(batch)))
        with torch.no_grad(), torch.autocast(place.device, torch.bfloat16, enabled=engine._device.type == "cuda"):
            scored = passes.score_tokens(engine._device_batch(batch), lambda **inputs: engine._policy(**inputs)[0])
        return np.asarray(scored.cpu())

    exact = logprobs(make_engine(config, "cpu"))
    dtype = "bfloat16" if place.device == "cuda" else "float32"
    with group_of_one(place):
        for way in ("autocast", "fsdp2"):
            gaps = np.abs(exact - logprobs(make_engine(config, place.device, sharded=way == "fsdp2")))
            mean, bound = float(gaps.mean()), f"<= {MAX_DLOGP}"
            what = f"mean |dlogp| of {len(gaps):,} tokens, {dtype} by {way}, against float32"
            place.add("c", what, f"{mean:.2g}, at most {gaps.max():.2g}", bound, mean <= MAX_DLOGP)
            free()


def part_d(place: Place) -> None:
    folder = str(place.folder / "tiny")
    write_model(folder, True)
    names = ("dpo", "grpo", "mix", "ppo") if place.quick else sorted(registered_parts("algorithm_type"))
    for name in names:
        tree: dict[str, Any] = {
            "mode": "train", "model": {"model_path": folder, "max_model_len": 512}, "buffer": {"train_batch_size": 16},
            "algorithm": {"algorithm_type": name}, "trainer": {"max_token_len_per_gpu": 512}, "seed": 0,
        }  # fmt: skip
        data = {"path": "rows.jsonl"}  # listed but never read: the batch is made here
        if name in ("mix", "mix_chord"):
            tree["buffer"]["trainer_input"] = {"auxiliary_buffers": {"sft": data}}
        elif name in ("on_policy_distill", "jsd"):
            tree["explorer"] = {"auxiliary_models": [{"model_path": folder}]}
        elif name in DATASETS:
            tree["buffer"]["trainer_input"] = {"experience_buffer": data}
        try:
            config = load_config(tree)
            engine = TorchEngine(config, build_algorithm(config), device=place.device)
            losses = [engine.train_step(_batch_for(name, step), step)["loss"] for step in (1, 2)]
            place.add("d", name, ", ".join(f"{loss:.3g}" for loss in losses), "finite", all(map(math.isfinite, losses)))
        except Exception as error:
            place.add("d", name, " ".join(f"{type(error).__name__}: {error}".split())[:150], "no error", False)


def _batch_for(name: str, seed: int) -> TrainingBatch:
    """Return 16 rows of 3 to 60 tokens: four groups of rollouts, pairs, or rows of a dataset."""
    random, size = (
        np.random.default_rng(seed),
        {"dpo": 2, "orpo": 2, "simpo": 2, "reward_model": 2, "kto": 1}.get(name, 4),
    )
    rows = [(random.integers(2, 500, random.integers(3, 60)).tolist(), 2, None) for _ in range(16)]
    batch = supervised_batch(rows, [f"taskset_0/0/{i // size}/{i % size}/0" for i in range(16)], size)
    if name in DATASETS:
        return replace(batch, rewards=np.arange(16, dtype=np.float32) % 2) if name == "kto" else batch
    sampled = replace(
        batch,
        rewards=random.random(16).astype(np.float32),
        rollout_logprobs=-6.0 - random.random(len(batch.rollout_logprobs)).astype(np.float32),
        experts=np.zeros(16, bool),
        baselines=np.full(16, 0.5, np.float32),
    )
    shown = supervised_batch([([5, 6, 7, 8], 2, None)], ["dataset:x/0/0"])
    return join_batches([sampled, shown]) if name in ("mix", "mix_chord") else sampled


def part_e(place: Place) -> None:
    if not find_spec("trl"):
        place.add("e", "TRL for comparison", "skipped: it is not installed here (extra conformance)")
    if not find_spec("peft"):
        place.add("e", "LoRA", f"skipped: {NO_PEFT}")
    for row in _other(place, "e", "gpu_train.py", "--models", str(place.models)):
        result = f"{row['ours']:.4g} {row['unit']}"
        against = f"{row['ratio']:.2f} times as good as {row['against']}" if row["against"] else ""
        goal = f"aim {row['goal']:g}: {'reached' if row['ours'] >= row['goal'] else 'missed'}" if row["goal"] else ""
        place.add("e", row["work"], result, against or goal)


def part_f(place: Place) -> None:
    if not find_spec("peft"):
        place.add("f", "LoRA", f"skipped: {NO_PEFT}")
    elif not place.is_large:
        place.add("f", "LoRA on seven billion weights", "skipped: it is for a GPU of 80 GB")
    for row in _other(place, "f", "gpu_train.py", "--peak", "--models", str(place.models)):
        bound, holds = "", None
        if row["other"] is not None:
            share = row["ours"] / row["other"]
            bound, holds = f"{share:.2f} of the estimate, 0.8 to 1.1", place.quick or 0.8 <= share <= 1.1
        place.add("f", row["work"], f"{row['ours']:.4g} {row['unit']}", bound, holds)


def part_g(place: Place) -> None:
    _publish(place, place.model, "0.6B")
    if place.is_large:
        _publish(place, model_folder(place.models, place.quick, large=True), "7B")
    else:
        place.add("g", "seven billion weights", "skipped: it is for a GPU of 80 GB")


def _publish(place: Place, model: str, name: str) -> None:
    """Publish as the ranks do, and load as an explorer's worker does, into an engine in its own process."""
    engine, storage = make_engine(make_config(model, False), place.device), open_storage(str(place.folder / "weights"))
    began = time.perf_counter()
    weights, fingerprint = engine.weights(), engine.fingerprint()
    gathered = time.perf_counter()
    Publisher(storage, "main").publish(1, weights, fingerprint)
    written = time.perf_counter()
    size = sum(map(len, weights.values())) / 1e9
    del engine, weights
    free()
    tree: dict[str, Any] = {
        "model": {"model_path": model, "max_prompt_tokens": 32, "max_response_tokens": 32},
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},  # listed but never read
    }
    config = load_config(tree)
    client = EngineClient(engine_spec(config.explorer.rollout_model, config, torch.get_num_threads(), None))
    try:
        client.wait_ready()
        published = latest_published(storage)
        assert published is not None, "the pointer names what was published"
        loaded = time.perf_counter()
        client.load(storage, published)
        proven = time.perf_counter()
    finally:
        client.close()
    shutil.rmtree(storage.url)  # 15 GB for the large model
    place.add("g", f"{name}: {size:.2g} GB brought together, with a fingerprint", f"{gathered - began:.2f} s")
    place.add("g", f"{name}: written and made visible", f"{written - gathered:.2f} s")
    place.add("g", f"{name}: loaded into an engine and proven", f"{proven - loaded:.2f} s")


GREEDY = """
import torch
from rftdask.algorithm.losses.base import PolicyLoss


class Greedy(PolicyLoss):
    uses_advantages, schema = False, "sft"

    def __call__(self, inputs):
        torch.empty(2**50, dtype=torch.uint8)
"""


def part_h(place: Place) -> None:
    # On a GPU one row that takes 2 MB a token; on a CPU, where it would take long, a loss that allocates too much.
    kind, length = ("GPU", 400_000) if place.device == "cuda" else ("host", 100)
    folder = place.folder / "long"
    folder.mkdir()
    (folder / "greedy.py").write_text(GREEDY)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2" * length}) + "\n")
    tree: dict[str, Any] = {
        "mode": "train", "checkpoint_root_dir": str(folder / "runs"), "monitor": {"monitor_type": "none"},
        "model": {"model_path": place.model, "max_model_len": length + 100},
        "algorithm": {"algorithm_type": "sft"}, "trainer": {"total_steps": 1, "num_ranks": 1},
        "buffer": {
            "train_batch_size": 1,
            "trainer_input": {
                "experience_buffer": {"path": str(folder / "rows.jsonl"), "format": {"prompt_type": "plaintext"}}
            },
        },
    }  # fmt: skip
    if place.device == "cpu":
        tree["algorithm"]["policy_loss_fn"] = "greedy.Greedy"
        tree["explorer"] = {"plugin_dirs": [str(folder)]}
    (folder / "run.yaml").write_text(json.dumps(tree))
    command = [sys.executable, "-m", "rftdask", "run", str(folder / "run.yaml"), "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PART_S)
    wanted = f"out of {kind} memory while step 1 is trained"
    message = next((line for line in done.stderr.splitlines() if wanted in line), done.stderr.strip()[-120:])
    holds = wanted in message and done.returncode == 2
    place.add("h", message[:120], f"exit code {done.returncode}", f"2, {wanted}", holds)


def part_i(place: Place) -> None:
    engines = ["transformers", *(["vllm"] if find_spec("vllm") else [])]
    for engine in engines:
        sizes = [] if place.quick else ["--hidden", "1024", "--layers", "12"]
        for row in _other(place, "i", "generate.py", "--engine", engine, *sizes):
            result = f"{row['ours']:.4g} {row['unit']}" + (f", {row['ratio']:.2f} x" if row["ratio"] else "")
            place.add("i", f"{engine}: {row['work']} against {row['against']}", result)
    if len(engines) == 1:
        place.add("i", "vLLM", "skipped: it is not installed here")


def part_j(place: Place) -> None:
    has_dask_cuda = find_spec("dask_cuda") is not None
    if not has_dask_cuda:
        place.add("j", "dask-cuda's LocalCUDACluster", "skipped: it is not installed here (extra gpu)")
    cluster = "local-cuda" if has_dask_cuda and place.device == "cuda" else "local"
    runs = place.folder / "runs"
    quickstart = [sys.executable, str(HERE.parent / "examples" / "quickstart.py"), "cluster.colocate=true"]
    command = [*quickstart, f"cluster.type={cluster}", f"checkpoint_root_dir={runs}", *(SHORT if place.quick else ())]
    env = {**os.environ, "RFTDASK_RUNS": str(runs)}
    ledger = runs / "rftdask" / "quickstart" / "grpo" / "ledger" / "main"
    wanted, least = (1, 0.0) if place.quick else (4, 0.8)
    deadline = time.monotonic() + PART_S
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as first:
        while first.poll() is None and len(list(ledger.glob("*.json"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGKILL)
    killed_at = len(list(ledger.glob("*.json")))
    left = max(1.0, deadline - time.monotonic())
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=left)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    accuracy = last.partition(" -> ")[2].partition(" ")[0]
    what = f"{cluster}, by turns, killed with -9 at step {killed_at} of the second stage, and started again"
    learned = done.returncode == 0 and accuracy != "" and float(accuracy) >= least
    place.add("j", what, f"accuracy {accuracy or done.stderr.strip()[-60:]}", f">= {least}", learned)


def _other(place: Place, part: str, script: str, *options: str) -> list[dict[str, Any]]:
    """Return the rows of another benchmark. If it fails, its exit code becomes a row that fails this part."""
    file = place.folder / f"{script}.json"
    # GPU benchmarks name the option differently.
    quick = ["--tiny" if script.startswith("gpu") else "--quick"] if place.quick else []
    command = [sys.executable, str(HERE / script), "--json", str(file), *quick, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PART_S)
    if done.returncode:
        place.add(part, f"exit code of {script}", str(done.returncode), "0", False)
        print(done.stderr, file=sys.stderr)
        return []
    return list(json.loads(file.read_text())["rows"])


PARTS: dict[str, Callable[[Place], None]] = {
    "a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e, "f": part_f, "g": part_g, "h": part_h,
    "i": part_i, "j": part_j,
}  # fmt: skip


def serve(part: str, place: Place, rows: Connection) -> None:
    """Run a part in this process, which was started for it. Sends None at the end."""
    try:
        PARTS[part](replace(place, on_row=rows.send))
    except Exception as error:  # the other parts must still run
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        replace(place, on_row=rows.send).add(part, "the part itself", reason, "ends", False)
    rows.send(None)


def run_part(part: str, place: Place, limit_s: float) -> None:
    """Run a part in its own process, and end it with its descendants after `limit_s`."""
    deadline = time.monotonic() + limit_s
    mine, its = CONTEXT.Pipe(duplex=False)
    # Another process must not get connections and callbacks.
    process = CONTEXT.Process(target=serve, args=(part, replace(place, on_row=print), its))
    process.start()
    its.close()
    ended = ""
    try:
        while mine.poll(max(0.0, deadline - time.monotonic())):
            if (row := mine.recv()) is None:
                break
            place.on_row(row)
        else:
            ended = f"ended after {limit_s:.0f} s"
    except EOFError:
        process.join(10)
        ended = f"its process died, exit code {process.exitcode}"
    # A run's processes have sessions of their own, so no process group contains all of them.
    with suppress(psutil.NoSuchProcess):
        for child in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.join()
    if ended:
        place.add(part, "the part itself", ended, "ends", False)


def begin_table(file: Path, place: Place, parts: Sequence[str]) -> None:
    """Append a heading with the origin of the rows to a Markdown file, which begins with HEADER."""
    here = torch.cuda.get_device_name() if place.device == "cuda" else "no GPU: tiny shapes on the CPU"
    packages = ("torch", "transformers", "vllm", "dask-cuda", "trl", "torchao")
    versions = ", ".join(f"{name} {version(name)}" for name in packages if find_spec(name.replace("-", "_")))
    command = f"python benchmarks/gpu.py --parts {' '.join(parts)}{' --tiny' if place.quick else ''}"
    if HEADER not in (file.read_text() if file.exists() else ""):
        with file.open("a") as table:
            table.write(HEADER)
    append(file, ("", f"**{date.today()}: {here}**", versions, f"`{command}`"))


def append(file: Path, cells: Sequence[str]) -> None:
    """Add a row to the table at the end of a Markdown file."""
    with file.open("a") as table:
        table.write(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n")


def main() -> None:
    parser = make_parser(__doc__, "--tiny")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--append", type=Path, default=None, metavar="FILE", help="add to the table of this file")
    parser.add_argument("--limit", type=float, default=PART_S, metavar="S", help="seconds after which a part is ended")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        raise SystemExit("no GPU found; --tiny tests the script on the CPU without valid numbers")
    report, started, rows = Report(args), time.perf_counter(), list[Row]()

    def tell(row: Row) -> None:
        rows.append(row)
        if args.append is not None:  # at once, because a GPU may be taken away at any moment
            append(args.append, row[:4])

    with tempfile.TemporaryDirectory(prefix="rftdask-gpu-", ignore_cleanup_errors=True) as name:
        place = Place(device, args.quick, Path(name), tell)
        if args.append is not None:
            begin_table(args.append, place, args.parts)
        for part in args.parts:
            began = time.perf_counter()
            left_s = ALL_S - (began - started) if len(args.parts) > 1 else PART_S
            run_part(part, place, max(1.0, min(args.limit, left_s)))
            report.add(f"part {part}", time.perf_counter() - began, "s", less_is_better=True, goal=PART_S)
        took = time.perf_counter() - started
        holds = None if args.quick else took <= (ALL_S if len(args.parts) > 1 else PART_S)
        place.add("all", f"parts {' '.join(args.parts)}", f"{took:.0f} s", f"<= {ALL_S} s", holds)
    report.write()
    raise SystemExit(1 if any(row[4] is False for row in rows) else 0)


if __name__ == "__main__":
    main()
