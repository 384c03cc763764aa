"""Scaling of the explorer's loop: the real loop and Dask scheduler, with workers that only sleep.

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--workers 1,4,16,64,256] [--seconds 15] [--quick] [--json FILE]

A simulated engine generates TOKENS_PER_S tokens a second for every rollout, all rollouts of a unit in parallel and one
unit at a time; lengths are lognormal with a long tail, cut off at MAX_TOKENS. Workers are threads of this process, so
its CPU seconds are those of scheduler, driver and workers together, an upper bound on the work of a scheduler. A worker
mostly waits for the longest response of its unit; the occupancy of its slots is a separate row, and longtail.py
measures how high it can be. Measures:

- experiences/s for each number of workers, against workers that always have a unit, and CPU per experience;
- tokens / (slots x time x TOKENS_PER_S) during the run;
- the time from a published policy version until the last worker knows;
- the cost of the end of a log with 1,000 and with 1,000,000 shards (the storage of benchmarks/buffer.py);
- asynchronous against lock-step training, on equal workers and experiences: the ratio of their wall times.
"""

from __future__ import annotations

import heapq
import json
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np
from buffer import measure_long_log
from distributed import Client, LocalCluster, get_client, get_worker
from report import Report, make_parser

from rftdask.config import load_config
from rftdask.explorer.explorer import Explorer
from rftdask.processes.dask_cluster import DASK_CONFIG
from rftdask.processes.dask_task import workers_of
from rftdask.processes.poll import wait_for
from rftdask.rollouts.work_units import RolloutResult, RolloutTask, Sums
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.actor import SyncHandle, start_synchronizer
from rftdask.synchronizer.published import MODEL_FILE
from rftdask.synchronizer.publisher import Publisher

TASKS_PER_BATCH, REPEAT_TIMES = 4, 8
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 800, 1.0, 16_384
"""Parameters of the lengths of responses, as those of a reasoning model: the longest are about ten times the median."""
TOKENS_PER_S = 2_000
"""Speed of one rollout: 50 to 100 times that of real engines, so that a unit takes seconds instead of minutes."""


def lengths(step: int, unit_index: int) -> np.ndarray:
    """Return the numbers of tokens of the responses of a work unit."""
    random = np.random.default_rng((step, unit_index))
    return np.minimum(random.lognormal(np.log(MEDIAN_TOKENS), SIGMA, TASKS_PER_BATCH * REPEAT_TIMES), MAX_TOKENS)


def unit_seconds(step: int, unit_index: int) -> float:
    """Return the seconds of a work unit, which are those of its longest response."""
    return float(lengths(step, unit_index).max()) / TOKENS_PER_S


def simulate(unit: RolloutTask) -> RolloutResult:
    """Simulate a work unit: wait for the weights it needs, sleep, and write nothing."""
    began = time.perf_counter()
    if unit.weights.version:
        SyncHandle(open_storage(unit.url), None, 0.02).wait_for_version(unit.weights.version, 600)
    waited = time.perf_counter()
    time.sleep(unit_seconds(unit.explore_step, unit.unit_index))
    num = len(unit.tasks) * unit.repeat_times
    return RolloutResult(
        unit.key,
        (),
        unit.weights.version,
        "",
        num_rollouts=num,
        sums=Sums({"wait_s": (waited - began, "")}, {"rollouts": num, "rewarded": num}),
    )


class Finished(NamedTuple):
    """A finished work unit."""

    at: float
    took_s: float
    num: int
    """Number of experiences."""
    share: float
    """Mean share of the slots in use during the unit."""


class CountingExplorer(Explorer):
    """Explorer that remembers when each work unit finished."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.finished: list[Finished] = []

    def _count(self, unit: RolloutTask, result: RolloutResult) -> None:
        drawn = lengths(unit.explore_step, unit.unit_index)
        share = float(drawn.mean() / drawn.max())
        self.finished.append(
            Finished(time.perf_counter(), unit_seconds(unit.explore_step, unit.unit_index), result.num_rollouts, share)
        )
        super()._count(unit, result)


class Simulation:
    """The explorer's loop on simulated workers, with a trainer that takes `train_s` per step, or without a trainer."""

    def __init__(self, client: Client, workers: int, style: str, steps: int, train_s: float | None) -> None:
        self.storage: Storage = open_storage(f"memory://scale-{uuid.uuid4().hex}")
        self._train_s, self._steps = train_s, steps
        batch_size = TASKS_PER_BATCH * workers
        config = load_config(
            {
                "name": "scale",
                "mode": "explore" if train_s is None else "both",
                "checkpoint_root_dir": self.storage.url,
                "model": {"model_path": "none", "max_prompt_tokens": 16, "max_response_tokens": 8},
                "algorithm": {"algorithm_type": "grpo", "repeat_times": REPEAT_TIMES, "kl_loss_fn": "none"},
                "buffer": {
                    "batch_size": batch_size,
                    "total_epochs": 1,
                    "explorer_input": {
                        "taskset": {"path": tasks_file(), "format": {"prompt_type": "raw"}},
                        "default_reward_fn_type": "exact_reward",
                    },
                },
                "explorer": {"tasks_per_batch": TASKS_PER_BATCH, "rollout_model": {"engine_type": "fake"}},
                "trainer": {"trainer_type": "fake"},
                "synchronizer": {"sync_style": style, **({"sync_offset": 0} if style == "fixed" else {})},
                "monitor": {"monitor_type": "none"},
            }
        )
        self._trained: int | None = None
        self._units_per_step = workers
        self.explorer = CountingExplorer(
            client,
            self.storage,
            config,
            {config.buffer.explorer_input.train_tasksets[0].name: 1 << 16},
            num_steps=steps,
            threads=1,
            log_file=None,
            emit=lambda event: None,
            cancelled=lambda: False,
            trainer_ended_at=lambda: self._trained,
            task=simulate,
        )
        self.finished = self.explorer.finished

    def run(self) -> float:
        """Run to the end and return the wall seconds."""
        began = time.perf_counter()
        if self._train_s is not None:
            threading.Thread(target=self._train, daemon=True).start()
        self.explorer.open()
        self.explorer.run()
        return time.perf_counter() - began

    def _train(self) -> None:
        assert self._train_s is not None
        for step in range(1, self._steps + 1):
            while len(self.finished) < step * self._units_per_step:
                time.sleep(0.005)
            time.sleep(self._train_s)
            Publisher(self.storage, "main").publish(step, {MODEL_FILE: b"weights"})
            if step == self._steps:
                self._trained = step
            self.explorer.wake(step)


def tasks_file() -> str:
    path = Path(tempfile.gettempdir()) / "rftdask-scale-tasks.jsonl"
    path.write_text(json.dumps({"prompt": "1=", "response": "1"}) + "\n")
    return str(path)


@contextmanager
def simulated_workers(count: int) -> Iterator[Client]:
    with (
        dask.config.set(DASK_CONFIG),
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=False,
            resources={"explorer": 1},
            dashboard_address="127.0.0.1:0",
            memory_limit=0,  # all workers share one process, and each would count its whole memory
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(count, timeout=120)
        yield client


WAITS_TOPIC = "waits"
"""Topic on which each worker reports the version it is about to wait for."""


def wait_in_worker(url: str, version: int) -> float:
    get_worker().log_event(WAITS_TOPIC, version)
    SyncHandle(open_storage(url), get_client()).wait_for_version(version, 60)
    return time.perf_counter()


def all_wait(client: Client, version: int, num_workers: int) -> bool:
    return sum(message == version for _, message in client.get_events(WAITS_TOPIC)) == num_workers


def measure_notice(client: Client, publishes: int) -> float:
    """Return the median seconds from a moved pointer until the last worker knows."""
    storage = open_storage(f"memory://notice-{uuid.uuid4().hex}")
    names = list(workers_of(client))
    actor = start_synchronizer(client, storage.url, 0.05, uuid.uuid4().hex, names[:1])
    delays = []
    for version in range(1, publishes + 1):
        futures = [client.submit(wait_in_worker, storage.url, version, workers=[w], pure=False) for w in names]
        if not wait_for(partial(all_wait, client, version, len(names)), 120, 0.1):
            raise SystemExit(f"fewer than {len(names)} workers came to wait for a version")
        time.sleep(0.5)  # until the last worker waits
        Publisher(storage, "main").publish(version, {MODEL_FILE: b"weights"})
        moved = time.perf_counter()
        delays.append(max(future.result(timeout=120) for future in futures) - moved)
    client.unpublish_dataset("rftdask-synchronizer")
    actor.release()
    return statistics.median(delays)


def measure_workers(workers: int, seconds: float, publishes: int) -> dict[str, float]:
    mean_s = statistics.mean(unit_seconds(step, unit_index) for step in range(1, 40) for unit_index in range(50))
    always_busy = workers * TASKS_PER_BATCH * REPEAT_TIMES / mean_s
    with simulated_workers(workers) as client:
        notice_s = measure_notice(client, publishes)
        simulation = Simulation(client, workers, "fixed", round(seconds / mean_s) + 1, None)
        began, began_cpu = time.perf_counter(), time.process_time()
        simulation.run()
        cpu_s = time.process_time() - began_cpu
    # Utilization in the middle of the run, when there was work for all workers.
    first, last = began + 0.2 * seconds, began + 0.6 * seconds
    within = [max(0.0, min(each.at, last) - max(each.at - each.took_s, first)) for each in simulation.finished]
    slot_s = sum(busy_s * each.share for busy_s, each in zip(within, simulation.finished, strict=True))
    efficiency, occupancy = (total_s / (workers * (last - first)) for total_s in (sum(within), slot_s))
    total = sum(each.num for each in simulation.finished)
    return {
        "rate": efficiency * always_busy,
        "efficiency": efficiency,
        "occupancy": occupancy,
        "cpu_s": cpu_s / total,
        "notice_s": notice_s,
    }


def measure_async(workers: int, steps: int, train_s: float) -> tuple[float, float]:
    """Return the wall seconds of lock-step and of asynchronous training on the same units."""
    times: list[float] = []
    for style in ("fixed", "fully_async"):
        with simulated_workers(workers) as client:
            times.append(Simulation(client, workers, style, steps, train_s).run())
    return times[0], times[1]


def best_times(workers: int, steps: int, train_s: float) -> tuple[float, float]:
    """Return the times of `measure_async` if only the units and the train steps took time."""
    lock_step = sum(
        max(unit_seconds(step, unit_index) for unit_index in range(workers)) + train_s for step in range(1, steps + 1)
    )
    free, ends = [0.0] * workers, []
    for step in range(1, steps + 1):
        for unit_index in range(workers):
            ends.append(heapq.heappop(free) + unit_seconds(step, unit_index))
            heapq.heappush(free, ends[-1])
    trained = 0.0
    for ready in sorted(ends)[workers - 1 :: workers]:
        trained = max(trained, ready) + train_s
    return lock_step, trained


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", default="1,4,16,64,256")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of work for each number of workers")
    args = parser.parse_args()
    report = Report(args)
    counts = [1, 8] if args.quick else [int(text) for text in args.workers.split(",")]
    seconds = 3.0 if args.quick else args.seconds
    for workers in counts:
        row = measure_workers(workers, seconds, 2 if args.quick else 10)
        report.add(
            f"rollouts by {workers} workers", row["rate"], "experiences/s", against="workers that always have a unit",
            ratio=row["efficiency"],
        )  # fmt: skip
        report.add(f"slots in use of {workers} workers, a unit at a time", row["occupancy"], "occupancy")
        report.add(f"CPU of {workers} workers", 1e3 * row["cpu_s"], "ms per experience", less_is_better=True)
        notice_ms = 1e3 * row["notice_s"]
        report.add(f"all of {workers} workers know a new version", notice_ms, "ms", less_is_better=True)
    for num_shards in (1_000, 1_000_000):
        measure_long_log(report, num_shards, "local", 0.001, 0, everything=False)
    workers, steps = (4, 2) if args.quick else (16, 16)
    lock_step_s, async_s = measure_async(workers, steps, train_s=1.0)
    best_lock_step_s, best_async_s = best_times(workers, steps, train_s=1.0)
    report.add(
        f"asynchronous, {workers} workers, {steps} steps", async_s, "s", less_is_better=True, against="lock-step",
        other=lock_step_s, goal=1.6, goal_of="ratio",
    )  # fmt: skip
    report.add(
        "the same, if nothing but batches and train steps took time", best_async_s, "s", less_is_better=True,
        against="lock-step", other=best_lock_step_s,
    )  # fmt: skip
    report.write()


if __name__ == "__main__":
    main()
