"""Speed of the experience log: writes, reads, delay until a rollout is trainable, and cost of a long log.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/buffer.py [--folder DIR] [--reference] [--quick] [--json FILE]

Rows have 512 tokens (128 of the prompt; ids uniform over 150,000, so that the data does not compress better than in a
run), two texts and four metrics, in arrays as the runner passes them. Everything is durable: two fsyncs per shard. One
thread writes or reads. Rates are per wall second and per CPU second of the process, because fsync waits for the disk.
Each rate is printed with the floor of the same run: for writing, pyarrow writes the same columns from ready arrays
once, with the same two fsyncs; for reading, the bytes are copied and checksummed. Compare `x of the floor` between
days, since a slow machine slows both. `--reference` also measures the buffers of Trinity-RFT through their actor, on
rows of the same size; this needs Trinity-RFT and ray. DIR is on the disk to measure (default: the folder of temporary
files).
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from report import Report, make_parser

from rftdask.buffer.batches.batch import batch_from_table
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.log_source import EntryReader, LogSource
from rftdask.buffer.batches.selection import Cursor, SampleRule
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.file_log import STEPS_PER_BUCKET, ParquetLog
from rftdask.buffer.log.log import first_open_step, note_complete
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.writer import UnitWriter
from rftdask.errors import NotFoundError
from rftdask.storage import Storage, open_storage

NUM_TOKENS, PROMPT_LENGTH, VOCAB_SIZE, GROUP_SIZE = 512, 128, 150_000, 8


def make_group(random: np.random.Generator, task: int, explore_step: int = 1) -> list[Experience]:
    """Return the rollouts of one task."""
    return [
        Experience(
            taskset="gsm8k",
            epoch=0,
            task_index=task,
            rollout=rollout,
            explore_step=explore_step,
            tokens=random.integers(0, VOCAB_SIZE, NUM_TOKENS, dtype=np.int32),
            prompt_length=PROMPT_LENGTH,
            rollout_logprobs=-random.exponential(1.0, NUM_TOKENS - PROMPT_LENGTH).astype(np.float32),
            reward=float(rollout % 2),
            prompt_text="How many eggs are left of a dozen? " * 8,
            response_text="Let me think about that step by step. " * 24,
            truth="7",
            metrics={"accuracy": 1.0, "num_prompt_tokens": 128.0, "num_response_tokens": 384.0, "truncated": 0.0},
        )
        for rollout in range(GROUP_SIZE)
    ]


def make_rows(num_rows: int) -> list[Experience]:
    random = np.random.default_rng(0)
    return [row for task in range(num_rows // GROUP_SIZE) for row in make_group(random, task)]


def add_rates(
    report: Report,
    work: str,
    num: float,
    wall_s: list[float],
    cpu_s: list[float],
    unit: str,
    *,
    floor: str = "",
    floor_s: float = 0.0,
    goal: float | None = None,
) -> None:
    """Add the medians over the runs, per wall second and per CPU second. floor_s: CPU seconds of the floor."""
    cpu = max(statistics.median(cpu_s), 1e-9)
    report.add(f"{work}, by the wall", num / statistics.median(wall_s), f"{unit}/s")
    other = num / floor_s if floor_s else None
    report.add(work, num / cpu, f"{unit} per CPU second", against=floor, other=other, goal=goal)


def timed(call: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """Return (wall seconds, CPU seconds) of the runs."""
    wall, cpu = [], []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    return wall, cpu


def add_percentiles(report: Report, work: str, values_s: Sequence[float], goal_ms: float) -> None:
    """Add median and 99th percentile. goal_ms: goal of the 99th percentile."""
    p50, p99 = np.percentile(values_s, [50, 99]) * 1e3
    report.add(f"{work}, median of {len(values_s)}", p50, "ms", less_is_better=True)
    report.add(f"{work}, 99th percentile", p99, "ms", less_is_better=True, goal=goal_ms)


# ---- the machine


def measure_machine(report: Report, repeats: int) -> None:
    """Measure an interpreter loop, a copy and a checksum in memory, to compare the machine between days."""

    def loop() -> None:
        for _ in range(10_000_000):
            pass

    data = np.frombuffer(os.urandom(64 << 20), np.uint8)
    into = np.empty_like(data)
    add_rates(report, "machine: an empty loop, 10 M rounds", 10, *timed(loop, 3), "M rounds")
    add_rates(report, "machine: numpy copy", 64, *timed(lambda: np.copyto(into, data), repeats), "MiB")
    add_rates(report, "machine: crc32", 64, *timed(lambda: zlib.crc32(data), repeats), "MiB")


def measure_disk(report: Report, folder: Path, repeats: int) -> None:
    data = os.urandom(64 << 20)
    path = folder / "raw"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    add_rates(report, "raw disk: write and fsync 64 MiB", 64, *timed(write, repeats), "MiB")
    add_rates(report, "raw disk: read it (page cache)", 64, *timed(path.read_bytes, repeats), "MiB")
    path.unlink()


# ---- writing and reading


def measure_log(
    report: Report, folder: Path, rows_per_shard: int, repeats: int, write_goal: float, read_goal: float | None
) -> None:
    """Measure writes and reads, alternating with their floors. Goals are in experiences per CPU second."""
    storage = open_storage(str(folder / f"log-{rows_per_shard}"))
    log = ParquetLog(storage)
    rows = make_rows(rows_per_shard)
    num_shards = max(1, 2048 // rows_per_shard)
    numbers = iter(range(1, 1_000_000))
    table = experiences_to_table(rows)

    def write() -> None:
        for _ in range(num_shards):
            log.commit(rows, explore_step=next(numbers), unit=0)

    def write_floor() -> None:
        for _ in range(num_shards):
            sink = io.BytesIO()
            pq.write_table(table, sink, compression="lz4", use_dictionary=False, write_statistics=False)
            storage.put(f"floor/{next(numbers)}", sink.getvalue())

    num = num_shards * rows_per_shard
    floor_cpu_s, wall_s, cpu_s = in_turn(write_floor, write, repeats)
    work = f"durable writes, {rows_per_shard} rows a shard"
    floor = "pyarrow and two syncs"
    add_rates(report, work, num, wall_s, cpu_s, "experiences", floor=floor, floor_s=floor_cpu_s, goal=write_goal)
    names = log.shards()[:num_shards]
    columns = EntryReader(log).columns

    def read() -> None:
        for name in names:
            batch_from_table(log.read(name, columns))

    def read_floor() -> None:
        for name in names:
            data = np.frombuffer(storage.get(log.path(name)), np.uint8)
            zlib.crc32(data)
            data.copy()

    floor_cpu_s, wall_s, cpu_s = in_turn(read_floor, read, repeats)
    work = f"reads into training arrays, {rows_per_shard} rows a shard"
    floor = "copy and checksum"
    add_rates(report, work, num, wall_s, cpu_s, "experiences", floor=floor, floor_s=floor_cpu_s, goal=read_goal)
    size = len(storage.get(log.path(names[0])))
    report.add(
        f"an experience at rest, {rows_per_shard} rows a shard", size / rows_per_shard, "bytes", less_is_better=True
    )


def in_turn(
    floor: Callable[[], object], call: Callable[[], object], repeats: int
) -> tuple[float, list[float], list[float]]:
    """Return the median CPU seconds of the floor, and wall and CPU seconds of the runs of `call`, after one untimed run
    each.
    """
    floor(), call()
    runs = [(timed(floor, 1), timed(call, 1)) for _ in range(repeats)]
    floor_cpu_s = statistics.median(cpu[0] for (_, cpu), _ in runs)
    return floor_cpu_s, [wall[0] for _, (wall, _) in runs], [cpu[0] for _, (_, cpu) in runs]


def measure_share(report: Report, folder: Path, num_ranks: int = 8) -> None:
    """Measure the part of a batch of 64 shards of 64 rows that one of several ranks reads."""
    counted = CountingStorage(open_storage(str(folder / "share")))
    log = ParquetLog(counted)
    random = np.random.default_rng(0)
    for batch in range(64):
        rows = [row for task in range(8) for row in make_group(random, batch * 8 + task)]
        log.commit(rows, explore_step=1, unit=batch)
    rule = SampleRule(groups_per_batch=512, tasks_per_step=512, ordered=True)
    entry = LogSource(log, Ledger(counted), rule, tasks_per_unit=8, max_read_timeout_s=60).entry(1)
    assert entry is not None
    num_rows = sum(len(rows.rows) for rows in entry.use)
    share = num_rows // num_ranks
    counted.num_bytes = 0
    LogSource(log, Ledger(counted), rule, tasks_per_unit=8, max_read_timeout_s=60).read(entry, range(share, 2 * share))
    report.add(
        f"read by one of {num_ranks} ranks, {num_rows} rows in 64 shards",
        counted.num_bytes / 1e6,
        "MB",
        less_is_better=True,
        against="its share of the bytes",
        other=sum(counted.sizes.values()) / 1e6 / num_ranks,
    )


class CountingStorage(Storage):
    """Storage that counts the bytes read from shards."""

    def __init__(self, inner: Storage) -> None:
        self.inner, self.url = inner, inner.url
        self.num_bytes = 0
        self.sizes: dict[str, int] = {}

    def put(self, path: str, data: bytes) -> None:
        self.inner.put(path, data)
        if path.endswith(".parquet"):
            self.sizes[path] = len(data)

    def put_new(self, path: str, data: bytes) -> bool:
        return self.inner.put_new(path, data)

    def get(self, path: str) -> bytes:
        data = self.inner.get(path)
        if path.endswith(".parquet"):
            self.num_bytes += len(data)
        return data

    def list(self, folder: str = "") -> list[str]:
        return self.inner.list(folder)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        return self.inner.local_copy(path)


# ---- delays


def reader_of(storage: Storage, num_tasks: int) -> LogSource:
    rule = SampleRule(groups_per_batch=1, tasks_per_step=num_tasks, ordered=False)
    return LogSource(ParquetLog(storage), Ledger(storage), rule, tasks_per_unit=num_tasks, max_read_timeout_s=60)


def commit_shards(url: str, num: int, pause_s: float, committed: Any) -> None:
    """Commit shards of 64 rows in a separate process and report when each commit returned; all processes share the
    clock.
    """
    log = ParquetLog(open_storage(url))
    rows = make_rows(64)
    random = np.random.default_rng(1)
    for step in range(1, num + 1):
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        log.commit(rows, explore_step=step, unit=0)
        committed.put((step, time.monotonic()))


def measure_visibility(report: Report, folder: Path, num: int) -> None:
    """Measure from the return of a commit to the end of the listing that shows it, at the poll interval of a waiting
    trainer.
    """
    storage = open_storage(str(folder / "visibility"))
    context = multiprocessing.get_context("spawn")
    committed = context.Queue()
    writer = context.Process(target=commit_shards, args=(storage.url, num, 0.05, committed))
    writer.start()
    rule = SampleRule(groups_per_batch=8, tasks_per_step=8, ordered=True)
    log = SeenLog(storage)
    source = LogSource(log, Ledger(storage), rule, tasks_per_unit=8, max_read_timeout_s=60)
    source.entry(1)  # the writer has started
    began, began_cpu = time.perf_counter(), time.thread_time()
    for step in range(2, num + 1):
        source.entry(step)
    share = (time.thread_time() - began_cpu) / (time.perf_counter() - began)
    times = dict(committed.get(timeout=30) for _ in range(num))
    writer.join()
    delays_s = [max(0.0, log.seen[step] - times[step]) for step in range(2, num + 1)]
    add_percentiles(report, "commit to visible, by listing", delays_s, 50)
    report.add("CPU of the waiting trainer, reading and ledger included", share, "cores", less_is_better=True)


class SeenLog(ParquetLog):
    """Log that remembers when a listing first showed each step."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.seen: dict[int, float] = {}

    def loose_shards(self, first_step: int = 1) -> list[Any]:
        names = super().loose_shards(first_step)
        now = time.monotonic()
        for name in names:
            self.seen.setdefault(name.explore_step, now)
        return names


def finish_groups(url: str, num_batches: int, num_tasks: int, max_commit_delay_s: float, finished: Any) -> None:
    """Finish work units in a separate process; the ends of their groups are spread over some seconds."""
    log = ParquetLog(open_storage(url))
    random = np.random.default_rng(2)
    for step in range(1, num_batches + 1):
        groups = [make_group(random, task, step) for task in range(num_tasks)]
        with UnitWriter(
            log, explore_step=step, unit=0, num_tasks=num_tasks, max_commit_delay_s=max_commit_delay_s
        ) as writer:
            for slot in random.permutation(num_tasks).tolist():
                time.sleep(random.exponential(0.03))
                finished.put(((step, slot), time.monotonic()))
                writer.add(slot, groups[slot])
            writer.finish()


def measure_trainable(
    report: Report, folder: Path, num_batches: int, max_commit_delay_s: float = 0.25, num_tasks: int = 64
) -> None:
    """Measure from the end of a group's last rollout until the ledger has a batch with it and its arrays are loaded."""
    storage = open_storage(str(folder / "trainable"))
    context = multiprocessing.get_context("spawn")
    finished = context.Queue()
    arguments = (storage.url, num_batches, num_tasks, max_commit_delay_s, finished)
    writer = context.Process(target=finish_groups, args=arguments)
    writer.start()
    source = reader_of(storage, num_tasks)
    trainable: dict[tuple[int, int], float] = {}
    for step in range(1, num_batches * num_tasks + 1):
        entry = source.entry(step)
        assert entry is not None
        source.read(entry)
        trainable[entry.positions[0]] = time.monotonic()
    ended = dict(finished.get(timeout=30) for _ in range(num_batches * num_tasks))
    writer.join()
    delays_s = [
        trainable[position] - ended[position] for position in trainable if position[0] > 1
    ]  # the first warms up
    add_percentiles(report, f"finished rollout to trainable, flush age {max_commit_delay_s:g} s", delays_s, 350)


# ---- a long log


class LongRun(Storage):
    """A run of a million shards that nobody wrote: listings create the names, and writes are stored on top.

    It adds up the time that the calls would take: `latency_s` per call, one call per `page` listed names.
    """

    def __init__(self, num_shards: int, latency_s: float, page: int, inner: Storage, batches: int = 16) -> None:
        self.inner, self.url = inner, inner.url
        self.num_steps, self.batches = num_shards // batches, batches
        self.latency_s, self.page = latency_s, page
        self.num_calls, self.time_s = 0, 0.0

    def _call(self, pages: int = 1) -> None:
        self.num_calls += pages
        self.time_s += pages * self.latency_s

    def take(self) -> tuple[int, float]:
        """Return calls and seconds since the last call."""
        totals = self.num_calls, self.time_s
        self.num_calls, self.time_s = 0, 0.0
        return totals

    def _made_up(self, folder: str) -> list[str]:
        last_bucket = self.num_steps // STEPS_PER_BUCKET
        if folder == "experiences":
            return [f"{bucket:06d}/" for bucket in range(last_bucket + 1)]
        if folder == "ledger/main":
            return [f"{step:08d}.json" for step in range(1, self.num_steps + 1)]
        bucket = folder.removeprefix("experiences/")
        if folder == bucket or not bucket.isdigit() or int(bucket) > last_bucket:
            return []
        steps = range(max(1, int(bucket) * STEPS_PER_BUCKET), (int(bucket) + 1) * STEPS_PER_BUCKET)
        return [
            f"{step:08d}-{batch:04d}-0123456789ab-n512-v{step}-{step}-00000000.parquet"
            for step in steps
            if step <= self.num_steps
            for batch in range(self.batches)
        ]

    def list(self, folder: str = "") -> list[str]:
        names = sorted({*self._made_up(folder), *self.inner.list(folder)})
        self._call(max(1, -(-len(names) // self.page)) if self.page else 1)
        return names

    def get(self, path: str) -> bytes:
        self._call()
        step = path.removeprefix("ledger/main/").removesuffix(".json")
        if step.isdigit() and int(step) <= self.num_steps:
            return b"{}"
        return self.inner.get(path)

    def put(self, path: str, data: bytes) -> None:
        self._call()
        self.inner.put(path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        self._call()
        return self.inner.put_new(path, data)

    def remove(self, path: str) -> None:
        self._call()
        self.inner.remove(path)

    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        raise NotFoundError(path)


def measure_long_log(
    report: Report, num_shards: int, place: str, latency_s: float, page: int, everything: bool
) -> None:
    """Measure resuming, planning a batch and looking for new shards at the end of such a run."""
    storage = LongRun(num_shards, latency_s, page, open_storage(f"memory://long-{place}-{num_shards}"))
    last = storage.num_steps
    note_complete(storage, last // STEPS_PER_BUCKET * STEPS_PER_BUCKET)
    log = ParquetLog(storage)
    log_name = f"{num_shards:,} shards, {place} ({latency_s * 1e3:.0f} ms a call)"

    def measure(what: str, call: Callable[[], Any]) -> Any:
        storage.take()
        began = time.process_time()
        result = call()
        cpu_s = time.process_time() - began
        calls, time_s = storage.take()
        report.add(f"{log_name}: {what}, {calls} calls", 1e3 * (time_s + cpu_s), "ms", less_is_better=True)
        return result

    measure("an explorer resumes", lambda: log.shards(first_open_step(storage, log)))
    measure("a trainer resumes, 50 steps behind", lambda: Ledger(storage).last_of_run(max(1, last - 50)))
    random = np.random.default_rng(0)
    for batch in range(16):
        rows = [row for task in range(4) for row in make_group(random, task, last + 1)]
        log.commit(rows, explore_step=last + 1, unit=batch)
    rule = SampleRule(groups_per_batch=64, tasks_per_step=64, ordered=True)
    source = LogSource(log, Ledger(storage), rule, tasks_per_unit=4, max_read_timeout_s=60)
    source.load_state_dict(Cursor(last + 1, set()).state_dict())
    measure("a batch of 16 new shards is planned", lambda: source.entry(last + 1))
    measure("a look for new ones", lambda: (log.sealed_at(), log.shards(last + 2)))
    if everything:
        measure("listing all shards, to compare", lambda: log.shards())
        measure("listing the ledger, to compare", lambda: Ledger(storage).last_step())


# ---- the reference


def measure_reference(report: Report, folder: Path, num_rows: int) -> None:
    """Measure the queue and SQL buffers of Trinity-RFT through their actor, unmodified, on rows of the same size."""
    import ray  # late: installed only if its figures are wanted
    import torch
    from trinity.buffer.buffer import get_buffer_reader, get_buffer_writer
    from trinity.common.config import ExperienceBufferConfig
    from trinity.common.constants import StorageType
    from trinity.common.experience import EID
    from trinity.common.experience import Experience as Theirs

    random = np.random.default_rng(0)
    rows = [
        Theirs(
            eid=EID(task=i // GROUP_SIZE, run=i % GROUP_SIZE, step=0, batch=0),
            tokens=torch.from_numpy(random.integers(0, VOCAB_SIZE, NUM_TOKENS, dtype=np.int32)),
            logprobs=torch.from_numpy(-random.exponential(1.0, NUM_TOKENS - PROMPT_LENGTH).astype(np.float32)),
            prompt_length=PROMPT_LENGTH,
            reward=float(i % 2),
            info={},
            metrics={},
        )
        for i in range(num_rows)
    ]

    async def run(kind: StorageType) -> tuple[float, float]:
        config = ExperienceBufferConfig(
            name=f"bench-{kind}",
            storage_type=kind.value,
            path=str(folder / "reference.jsonl") if kind is StorageType.QUEUE else f"sqlite:///{folder}/reference.db",
            batch_size=num_rows,
            max_read_timeout=120,
            capacity=10 * num_rows,
            schema_type="experience",
        )
        writer, reader = get_buffer_writer(config), get_buffer_reader(config)
        await writer.acquire()
        began = time.perf_counter()
        await writer.write(rows)
        wrote = time.perf_counter()
        rows_read = await reader.read(batch_size=num_rows)
        ended = time.perf_counter()
        assert len(rows_read) == num_rows
        return num_rows / (wrote - began), num_rows / (ended - wrote)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="bench")
    try:
        for kind in (StorageType.QUEUE, StorageType.SQL):
            name = f"Trinity-RFT, {kind.value} through its actor"
            try:
                written, read = asyncio.run(run(kind))
                report.add(f"{name}: writes", written, "experiences/s")
                report.add(f"{name}: reads", read, "experiences/s")
            except ImportError as error:  # its SQL buffer needs greenlet but does not declare it
                print(f"{name} is not measured: {str(error).partition('.')[0]}")
    finally:
        ray.shutdown()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--reference", action="store_true", help="also Trinity-RFT's buffers, where installed")
    arguments = parser.parse_args()
    report, quick = Report(arguments), arguments.quick
    repeats = 2 if quick else 15
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=arguments.folder) as scratch:
        folder = Path(scratch)
        measure_machine(report, repeats)
        measure_disk(report, folder, repeats)
        measure_log(report, folder, 512, repeats, 40_000, 80_000)
        measure_log(report, folder, 64, repeats, 20_000, None)
        measure_share(report, folder)
        measure_visibility(report, folder, 20 if quick else 200)
        measure_trainable(report, folder, 2 if quick else 6)
        for place, latency_s, page in (("local", 0.001, 0), ("S3", 0.030, 1000)):
            for num_shards in (1_000, 1_000_000):
                measure_long_log(report, num_shards, place, latency_s, page, everything=not quick)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report.add("peak memory of this process", peak_mib, "MiB", less_is_better=True)
        if arguments.reference:
            measure_reference(report, folder, 512 if quick else 5_000)
    report.write()


if __name__ == "__main__":
    main()
