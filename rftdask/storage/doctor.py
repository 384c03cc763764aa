"""Doctor: checks whether a user's storage keeps the promises of `Storage`, and measures the time of each method.

It knows only the interface. It runs on one machine: on another one, the attribute cache of an NFS client may show a new
name up to a minute late.
Invariant: it writes only in a new folder below the URL, removes it at the end, and every wait has a deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rftdask.errors import NotFoundError, StorageError
from rftdask.storage import open_storage
from rftdask.storage.base import Storage
from rftdask.storage.memory import MemoryStorage

_SPAWN = multiprocessing.get_context("spawn")  # fsspec's event loop does not survive a fork
_DEADLINE_S = 120.0  # seconds until a process without an answer has failed its check
_BUDGET_S = 1.0  # seconds to measure one method, not counting its first call
_WORDS = {True: "ok", False: "BROKEN", None: "not checked"}
_NUM_RACERS, _NUM_NAMES, _NUM_CALLS, _VALUE_BYTES = 4, 50, 100, 100_000


class Check(NamedTuple):
    """Result for one promise, e.g. Check("create-only", True, "50 of 50 names had one winner among 4 processes")."""

    name: str
    ok: bool | None  # None: not checked, for the reason in `detail`
    detail: str


class Cost(NamedTuple):
    """Time of one method over `num_calls` calls, milliseconds."""

    verb: str
    num_calls: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class DoctorReport:
    url: str
    checks: tuple[Check, ...]
    costs: tuple[Cost, ...]
    was_missing: bool = False
    """True if the folder did not exist before the check."""

    @property
    def is_safe(self) -> bool:
        """True if no promise was seen broken. This is evidence, not proof: a rare race may remain undetected."""
        return all(check.ok is not False for check in self.checks)

    def render(self) -> str:
        """Format the report for a terminal: the verdict, then one line per check and per method."""
        broken = ", ".join(check.name for check in self.checks if check.ok is False)
        lines = [f"storage {self.url}: {f'BROKEN: {broken}' if broken else 'nothing broken, seen from this machine'}"]
        lines += ["  the folder did not exist before; check that the URL is right"] * self.was_missing
        lines += [f"  {check.name:<18}{_WORDS[check.ok]:<13}{check.detail}" for check in self.checks]
        lines += [f"  {'cost (ms)':<18}{'p50':>9}{'p99':>9}{'calls':>8}"] * bool(self.costs)
        lines += [f"  {c.verb:<18}{c.p50_ms:>9.2f}{c.p99_ms:>9.2f}{c.num_calls:>8}" for c in self.costs]
        return "\n".join(lines)


def check_storage(url: str | Path) -> DoctorReport:
    """Check `url` in a probe folder below it, in about 15 s. Failures are in the report.

    Starts processes by spawn, so a script that calls it needs `if __name__ == "__main__":`.
    Raises: UserError: the URL cannot be opened at all.
    """
    home = open_storage(url)
    name = f"rftdask-doctor-{uuid.uuid4().hex[:8]}"
    store = open_storage(f"{home.url.rstrip('/')}/{name}")
    probe = home.local_file(name)
    # Not `Path.exists`, which raises if a parent is not accessible; the checks report that.
    missing = [] if probe is None else [folder for folder in probe.parents if not os.path.exists(folder)]
    one_process = "memory lives in one process: for tests and notebooks only" * isinstance(store, MemoryStorage)
    costs: list[Cost] = []
    plan: list[tuple[str, str, Callable[[], Check]]] = [
        ("write and read", "", lambda: _measure(store, costs)),
        ("create-only", one_process, lambda: check_race(store)),
        ("atomic replace", one_process, lambda: check_replace(store)),
        ("list after write", one_process, lambda: check_list(store)),
    ]
    checks: list[Check] = []
    try:
        for check_name, why_not, check in plan:
            if not checks or checks[0].ok:  # if nothing can be written, the other checks are pointless
                checks.append(Check(check_name, None, why_not) if why_not else _run(check_name, check))
    finally:

        def remove() -> Check:
            home.remove(name)
            for folder in missing:  # created by this check
                with suppress(OSError):  # another process uses it now
                    folder.rmdir()
            return Check("remove", f"{name}/" not in home.list(), f"the probe folder was {name}")

        checks.append(_run("remove", remove))
    return DoctorReport(home.url, tuple(checks), tuple(costs), was_missing=bool(missing))


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Provide spawned processes, which are killed if the block raises."""
    with ProcessPoolExecutor(count, _SPAWN) as pool:
        try:
            yield pool
        except BaseException:
            # The pool would wait for its processes, and a call to a lost share may hang.
            for process in list(pool._processes.values()):
                process.kill()
            raise


def check_race(store: Storage) -> Check:
    """Let processes create the same names concurrently. Each name must have exactly one winner, and its bytes."""
    with _processes(_NUM_RACERS) as pool:
        start_s = time.time() + 3.0  # when all of them are connected
        racers = [pool.submit(_race, store, k, start_s) for k in range(_NUM_RACERS)]
        wins = [racer.result(timeout=_DEADLINE_S) for racer in racers]
    winners = [[str(me).encode() for me, won in enumerate(wins) if k in won] for k in range(_NUM_NAMES)]
    num_good = sum(winner == [store.get(f"race-{k}")] for k, winner in enumerate(winners))
    detail = f"{num_good} of {_NUM_NAMES} names had one winner among {_NUM_RACERS} processes"
    detail += "" if store.has_create_only else ", but the protocol does not promise it: use one writer only"
    return Check("create-only", store.has_create_only and num_good == _NUM_NAMES, detail)


def check_replace(store: Storage) -> Check:
    """Read a file while another process replaces it. Every read must return one whole value."""
    store.put("replace", bytes(_VALUE_BYTES))
    num_reads = num_torn = num_absent = 0
    with _processes(1) as pool:
        writer = pool.submit(_replace, store, 2.0)
        end = time.monotonic() + _DEADLINE_S
        while not writer.done() and time.monotonic() < end:
            num_reads += 1
            try:
                data = store.get("replace")
                # Every value is one byte repeated, so a mixture of two values is detected.
                num_torn += data != data[:1] * _VALUE_BYTES
            except NotFoundError:
                num_absent += 1
        num_puts = writer.result(timeout=1.0)
    detail = f"{num_reads} reads during {num_puts} writes: {num_torn} torn, {num_absent} absent"
    return Check("atomic replace", num_torn + num_absent == 0 < num_reads, detail)


def check_list(store: Storage) -> Check:
    """Check that a listing shows a name as soon as `put` has returned in another process."""
    lags_s = []
    with _processes(1) as pool:
        for name in (f"listed-{k}" for k in range(10)):
            store.list()  # fills a cache, if there is one
            pool.submit(store.put, name, b"x").result(timeout=_DEADLINE_S)
            start, lag_s = time.monotonic(), 0.0
            while name not in store.list() and lag_s < _DEADLINE_S:
                lag_s = time.monotonic() - start
            lags_s.append(lag_s)
    detail = f"of {len(lags_s)} new names the slowest was listed {max(lags_s):.1f} s late"
    return Check("list after write", max(lags_s) == 0, detail)


def _measure(store: Storage, costs: list[Cost]) -> Check:
    # Random, so that the data cannot be compressed.
    small, large = os.urandom(1024), os.urandom(256 * 1024)
    calls: dict[str, Callable[[int], object]] = {
        "put 1 KiB": lambda k: store.put(f"small/{k}", small),
        "put_new 1 KiB": lambda k: store.put_new(f"new/{k}", small),
        "get 1 KiB": lambda k: store.get("small/0"),
        "put 256 KiB": lambda k: store.put(f"large/{k}", large),
        "get 256 KiB": lambda k: store.get("large/0"),
        "list": lambda k: store.list("small"),
    }
    for verb, call in calls.items():
        times_ms: list[float] = []
        end = time.monotonic() + _BUDGET_S
        while len(times_ms) < _NUM_CALLS and (not times_ms or time.monotonic() < end):
            start = time.perf_counter()
            call(len(times_ms))
            times_ms.append((time.perf_counter() - start) * 1e3)
        times_ms.sort()
        p50_ms, p99_ms = times_ms[len(times_ms) // 2], times_ms[int((len(times_ms) - 1) * 0.99)]
        # With few calls, rounding may put the 99th percentile below the median.
        costs.append(Cost(verb, len(times_ms), p50_ms, max(p50_ms, p99_ms)))
    same = [store.get("small/0"), store.get("new/0"), store.get("large/0")] == [small, small, large]
    return Check("write and read", same, "what was read is " + ("what was written" if same else "not what was written"))


def _run(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (StorageError, TimeoutError, BrokenExecutor) as error:
        return Check(name, False, str(error) or f"a process did not answer within {_DEADLINE_S:.0f} s")


def _race(store: Storage, me: int, start_s: float) -> set[int]:
    # Connect first, so that requests race and not connections.
    store.list()
    time.sleep(max(0.0, start_s - time.time()))
    return {k for k in range(_NUM_NAMES) if store.put_new(f"race-{k}", str(me).encode())}


def _replace(store: Storage, duration_s: float) -> int:
    num_puts, end = 0, time.monotonic() + duration_s
    while not num_puts or time.monotonic() < end:
        num_puts += 1
        store.put("replace", bytes([num_puts % 251]) * _VALUE_BYTES)
    return num_puts
