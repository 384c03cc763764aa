"""Overhead of the loop: a run on a local Dask cluster whose engine answers at once and whose train step does nothing.

    python benchmarks/loop.py [--steps 200] [--publishes 100] [--explorers 4] [--quick] [--json FILE]

Measures the overhead of a step in lock-step (explore, commit, ledger, empty train step, publish, load), its floor (the
durable writes of one step), the time from a moved pointer until all explorers know, and the times before the first
rollout and after the last step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed import get_client
from report import Report, make_parser

from rftdask import Experiment
from rftdask.cluster.layout import EXPLORER_RESOURCE, Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster
from rftdask.processes.dask_task import workers_of
from rftdask.storage import open_storage
from rftdask.synchronizer.actor import SyncHandle, start_synchronizer
from rftdask.synchronizer.published import MODEL_FILE
from rftdask.synchronizer.publisher import Publisher

_WRITES_PER_STEP = 5
"""Durable writes in a step: shard, ledger entry, weights, their manifest, pointer."""


def make_config(root: Path, steps: int) -> dict[str, Any]:
    tasks = root / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"{i}=", "response": str(i)}) + "\n" for i in range(64)))
    taskset = {"path": str(tasks), "format": {"prompt_type": "raw"}}
    return {
        "name": "loop",
        "checkpoint_root_dir": str(root / "runs"),
        "model": {"model_path": "none", "max_prompt_tokens": 16, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "kl_loss_fn": "none"},
        "buffer": {
            "batch_size": 4,
            "total_steps": steps,
            "explorer_input": {"taskset": taskset, "default_reward_fn_type": "exact_reward"},
        },
        "explorer": {"rollout_model": {"engine_type": "fake"}},
        "trainer": {"trainer_type": "fake"},
        "monitor": {"monitor_type": "none"},
    }


def measure_loop(root: Path, steps: int) -> dict[str, float]:
    """Return the seconds of a run's parts; the overhead of a step is the median over all but the first ten steps."""
    began = time.time()
    experiment = Experiment(**make_config(root, steps))
    experiment.run("none")
    ended = time.time()
    trainer = experiment.metrics("trainer").sort_values("step")
    explorer = experiment.metrics("explorer").sort_values("step")
    return {
        "step": float(trainer["step_s"].iloc[10:].median()),
        "start": float(explorer["time_s"].iloc[0]) - began,
        "end": ended - float(trainer["time_s"].iloc[-1]),
    }


def measure_writes(root: Path, count: int = 200) -> float:
    """Return the seconds of the durable writes of one step, one after another in this process."""
    storage = open_storage(root / "floor")
    times = []
    for number in range(count):
        began = time.perf_counter()
        for place in range(_WRITES_PER_STEP):
            storage.put(f"{place}/{number}", b"x" * 4096)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def wait_in_worker(url: str, version: int) -> float:
    """Return the time at which a worker knows of `version`."""
    SyncHandle(open_storage(url), get_client()).wait_for_version(version, 30)
    return time.time()


def measure_publish(root: Path, publishes: int, explorers: int) -> list[float]:
    """Return, for each publication, the seconds from the moved pointer until the last explorer knows."""
    storage = open_storage(root / "publish")
    plans = tuple(WorkerPlan(f"explorer-{i}", (EXPLORER_RESOURCE,), 1) for i in range(explorers))
    delays = []
    with LocalCluster(Layout(plans)) as cluster:
        workers = list(workers_of(cluster.client))
        start_synchronizer(cluster.client, storage.url, 0.05, "bench", workers[:1])
        for version in range(1, publishes + 1):
            futures = [
                cluster.client.submit(wait_in_worker, storage.url, version, workers=[w], pure=False) for w in workers
            ]
            time.sleep(0.1 + 0.05 * (version % 7) / 7)  # until all wait, at every phase of the polling
            Publisher(storage, "main").publish(version, {MODEL_FILE: b"weights"})
            moved = time.time()
            delays.append(max(future.result(timeout=60) for future in futures) - moved)
    return delays


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--publishes", type=int, default=100)
    parser.add_argument("--explorers", type=int, default=4)
    args = parser.parse_args()
    steps, publishes, explorers = (20, 5, 2) if args.quick else (args.steps, args.publishes, args.explorers)
    report = Report(args)
    with tempfile.TemporaryDirectory(prefix="rftdask-loop-") as folder:
        root = Path(folder)
        loop = measure_loop(root, steps)
        report.add(
            "overhead of a step in lock-step, median", 1e3 * loop["step"], "ms", less_is_better=True,
            against="its durable writes", other=1e3 * measure_writes(root), goal=20,
        )  # fmt: skip
        report.add("start to first rollout", loop["start"], "s", less_is_better=True)
        report.add("last step to exit, summary and report included", loop["end"], "s", less_is_better=True)
        delays = sorted(measure_publish(root, publishes, explorers))
        last = f"publish to visible, at the last of {explorers} explorers"
        report.add(f"{last}: mean", 1e3 * statistics.mean(delays), "ms", less_is_better=True, goal=100)
        p99 = delays[int(0.99 * (len(delays) - 1))]
        report.add(f"{last}: 99th percentile", 1e3 * p99, "ms", less_is_better=True)
    report.write()


if __name__ == "__main__":
    main()
