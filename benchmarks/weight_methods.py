"""Comparison of the transports of weights, for `weights.py`: method x engines, each engine in a process.

Each engine process waits for the pointer, fetches the version to its machine as an explorer's worker does (`NodeCache`
with the transport of its method), and reads every byte of the mapped files once into reused memory, as loading does.
Machines are folders of /dev/shm: engines of one machine share a folder, so data between machines crosses loopback
sockets.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, Nanny, SpecCluster, get_worker
from report import Report

from rftdask.processes.dask_task import workers_of
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import FileEntry, remove_folder
from rftdask.synchronizer.node_cache import SHARED_MEMORY, NodeCache, Transport
from rftdask.synchronizer.published import Published, latest_published, weights_folder
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports.dask_broadcast import dask_transport, serve_blocks
from rftdask.synchronizer.transports.group_broadcast import RendezvousServer, group_transport
from rftdask.synchronizer.transports.memory import InMemoryPublisher

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Case:
    """A method and the placement of its engines."""

    method: str
    engines: int
    machines: int
    """Machines of the engines, other than the trainer's; 0: all engines are on the trainer's machine."""

    def __str__(self) -> str:
        where = "on the trainer's machine" if not self.machines else f"on {self.machines} other machines"
        return f"{self.method}, {self.engines} engines {where}"


@dataclass(frozen=True)
class Staged:
    """A copy of the weights."""

    blocking_s: float
    """Seconds that a step waits for it."""
    floor_s: float
    """Seconds of one more copy into the same memory."""
    files: dict[str, Data]


@dataclass(frozen=True)
class Served:
    """Report of an engine's process."""

    end_s: float
    """Time by the clock of the machine at which it had read every byte."""
    moved_bytes: int
    """Bytes read and written by system calls, including those from another machine."""
    peak_bytes: int
    """Peak of anonymous memory above its level before; mapped files belong to the machine."""


def cases(engines: Sequence[int], machines: int) -> list[Case]:
    """Return each method with each number of engines, on the trainer's machine and, if the method has a transport, on
    others.
    """
    local_cases = [Case(method, count, 0) for method in ("checkpoint", "memory") for count in engines]
    return local_cases + [
        Case(method, count, min(count, machines)) for method in ("memory", "nccl") for count in engines
    ]


def run_methods(report: Report, folder: str, size: str, stage: Callable[[], Staged], work: list[Case]) -> None:
    """Measure the methods. stage: copies the weights off the trainer."""
    memories = Path(os.environ.get(SHARED_MEMORY) or "/dev/shm", f"rftdask-benchmark-{os.getpid()}")
    names = ["trainer", *(f"engine-{number}" for number in range(max(case.engines for case in work)))]
    spec = {
        name: {
            "cls": Nanny,
            "options": {"name": name, "nthreads": 2, "memory_limit": 0, "dashboard": False, "host": HOST},
        }
        for name in names
    }
    (memories / "trainer").mkdir(parents=True)
    os.environ[SHARED_MEMORY] = str(memories / "trainer")
    try:
        no_page = {"cls": "distributed.Scheduler", "options": {"dashboard": False}}
        with SpecCluster(spec, scheduler=no_page) as cluster, Client(cluster, set_as_default=False) as client:
            workers = workers_of(client)
            addresses = {str(worker["name"]): address for address, worker in workers.items()}
            give = client.submit(_give, str(memories / "trainer"), workers=["trainer"], pure=False)
            give.result(timeout=TIMEOUT_S)
            for case in work:
                _run(report, f"{folder}/methods", size, stage, case, client, addresses, memories)
    finally:
        for left in sorted(memories.rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() else left.unlink()
        memories.rmdir()


def _run(
    report: Report,
    url: str,
    size: str,
    stage: Callable[[], Staged],
    case: Case,
    client: Client,
    addresses: dict[str, str],
    memories: Path,
) -> None:
    storage = open_storage(url)
    last = latest_published(storage)
    version = 1 if last is None else last.version + 1
    holder = None
    if case.method != "checkpoint":
        address = RendezvousServer(storage, HOST).address if case.method == "nccl" else addresses["trainer"]
        holder = InMemoryPublisher(storage, address)
    publisher = Publisher(storage, "main", holder=holder)
    peers = [address for name, address in addresses.items() if name != "trainer"][: case.engines]
    waiting = []
    for number in range(case.engines):
        name = f"machine-{number % case.machines}" if case.machines else "trainer"
        (memories / name).mkdir(exist_ok=True)
        serve = partial(_serve, url, version, case.method, str(memories / name), peers)
        waiting.append(client.submit(serve, workers=[f"engine-{number}"], pure=False))
    time.sleep(1.0)  # all poll the pointer
    peak, before = Peak(), _moved()
    began = time.time()
    staged = stage()
    began += staged.floor_s
    num_bytes = sum(map(len, staged.files.values()))
    published = publisher.publish(version, staged.files)
    visible_s = time.time() - began
    trainer_peak = peak.stop()
    assert (published.held is not None) == (case.method != "checkpoint")
    engines: list[Served] = [future.result(timeout=TIMEOUT_S) for future in waiting]
    served_s = max(engine.end_s for engine in engines) - began
    moved = _moved() - before + sum(engine.moved_bytes for engine in engines)
    remove_folder(storage, weights_folder(version))
    if holder is not None:
        holder.release(version)
    what = f"{size}, {case}"
    # Floor of the same round: write the same bytes once to the place where the method puts them.
    ((_, data),) = staged.files.items()
    place = Path(url).parent / "plain" if holder is None else memories / "trainer" / "plain"
    write_s = _write_plainly(place, memoryview(data))
    copied = {"against": "copy floor", "other": staged.floor_s}
    report.add(f"{what}: blocking", staged.blocking_s, "s", less_is_better=True, **copied)
    written = {"against": "write floor", "other": write_s}
    report.add(f"{what}: visible", visible_s, "s", less_is_better=True, **written)
    report.add(f"{what}: all engines have read it", served_s, "s", less_is_better=True)
    report.add(f"{what}: bytes moved", moved / num_bytes, "times the version", less_is_better=True)
    engine_peak = max(engine.peak_bytes for engine in engines)
    report.add(f"{what}: host peak of an engine's process", engine_peak / 1e9, "GB", less_is_better=True)
    report.add(f"{what}: host peak of the trainer's process", trainer_peak / 1e9, "GB", less_is_better=True)


def _write_plainly(path: Path, data: memoryview) -> float:
    """Return the seconds of a sequential write with an fsync at its end."""
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])
        os.fsync(file.fileno())
    took = time.monotonic() - began
    path.unlink()
    return took


def _give(memory: str) -> None:
    os.environ[SHARED_MEMORY] = memory
    serve_blocks(get_worker())


def _serve(url: str, version: int, method: str, memory: str, peers: list[str]) -> Served:
    os.environ[SHARED_MEMORY] = memory
    storage, fetched = open_storage(url), [0]
    transport: Transport | None = None
    if method == "memory":
        serve_blocks(get_worker())
        transport = _counted(dask_transport(storage, get_worker(), peers), fetched)
    elif method == "nccl":
        transport = _counted(group_transport(HOST), fetched)
    peak, moved = Peak(), _moved()
    copy = _copy(storage, version, transport)
    piece = bytearray(_PIECE)
    for path in copy.files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for start in range(0, len(mapped), _PIECE):
                part = memoryview(mapped)[start : start + _PIECE]
                piece[: len(part)] = part
                part.release()
    end_s = time.time()
    copy.close()
    return Served(end_s, _moved() - moved + fetched[0], peak.stop())


def _copy(storage: Storage, version: int, transport: Transport | None) -> NodeCache:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        published = latest_published(storage)
        if published is not None and published.version >= version:
            return NodeCache(storage, published, TIMEOUT_S, transport)
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {version} was not published")
        time.sleep(0.05)


def _counted(transport: Transport, fetched: list[int]) -> Transport:
    def counting(published: Published, name: str, entry: FileEntry) -> Callable[[int], Data]:
        take = transport(published, name, entry)

        def block(number: int) -> Data:
            data = take(number)
            fetched[0] += len(data)
            return data

        return block

    return counting


def _moved() -> int:
    told: dict[str, Any] = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]) + int(told["wchar"])


class Peak:
    """Peak of this process's anonymous memory above its current level, sampled every 5 ms."""

    def __init__(self) -> None:
        self._before = self._most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

    def stop(self) -> int:
        """Stop sampling and return the peak in bytes."""
        self._ended.set()
        self._thread.join()
        return self._most - self._before
