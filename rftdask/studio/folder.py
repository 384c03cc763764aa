"""Folder: the runs below a URL, with a cache of their contents.

It starts nothing and writes nothing. Invariants: a run is named by its path below the folder, and only names that
`runs` lists are opened, so no name leads out of the folder; the cache expires after a multiple of the time that a read
took, so a page that refreshes every few seconds keeps a slow storage busy for a fifth of the time at most.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rftdask.config import Config
from rftdask.driver.jobs import read_logs
from rftdask.errors import DataError, NotFoundError, RftError
from rftdask.reports.jobs import RunJobs, read_run_jobs
from rftdask.reports.lineage.browse import Browser
from rftdask.reports.run_reader import StageReader, open_stages
from rftdask.reports.status import RunLine, StageStatus, read_line, read_status
from rftdask.reports.summary import RunSummary, summarize
from rftdask.run.run_folder import END_FILE, RUN_FILE, read_run, read_run_config
from rftdask.storage import open_storage
from rftdask.storage.base import in_order

HERE = "."
"""Name of a folder that is itself a run."""
_MAX_DEPTH = 4
"""<project>/<group>/<name>, and one level more for runs sorted by year or user."""
_NUM_READERS = 8  # small files read concurrently: on object stores a read is mostly latency
_MIN_FRESH_S = 2.0
_FRESH_FACTOR = 5.0
"""A value that took t seconds to read expires after this many times t."""
_LIST_DEADLINE_S = 3.0
"""Approximate limit on the time to list runs, however many are unread: reading one config takes 50 ms."""
_UNREAD = "not read yet"
_MAX_CACHED = {"browser": 4, "stages": 32, "lines": 1}
"""Limits by kind: a browser holds all tokens of a run, stages hold all its metrics. Other kinds have no limit."""

_Read = TypeVar("_Read")
_Key: TypeAlias = tuple[Hashable, ...]


class Folder:
    """Runs below a URL. Methods that take the name of a run raise DataError if the folder has no such run."""

    def __init__(self, url: str | Path) -> None:
        """Raises: StorageError: no storage supports the URL."""
        self._storage = open_storage(url)
        self.url = self._storage.url
        self._cache: OrderedDict[_Key, tuple[float, Any]] = OrderedDict()
        """(kind, name) -> (expiry time, value), the least recently used first."""
        self._locks: dict[_Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[str]:
        """Names of the runs, sorted; [HERE] if the folder itself is a run."""
        return self._cached(("runs",), self._find_runs)

    def url_of(self, name: str) -> str:
        if name not in self.runs():
            raise DataError(f"{self.url} has no run {name!r:.200}")
        return self.url if name == HERE else f"{self.url.rstrip('/')}/{name}"

    def stages(self, name: str) -> list[StageReader]:
        """Stages of a run, including the values that they have already read."""

        def read(url: str) -> list[StageReader]:
            stages = open_stages(url)
            for stage in stages:
                _ = stage.metric_rows  # read now, so that the time it takes is measured
            return stages

        return self._of_run("stages", name, read)

    def config(self, name: str) -> Config:
        return self._of_run("config", name, lambda url: read_run_config(open_storage(url)))

    def fingerprints(self, name: str) -> Mapping[str, Any]:
        """Recorded input fingerprints and package versions of a run, over all its stages."""

        def read(url: str) -> dict[str, Any]:
            records = [read_run(stage.storage) for stage in self.stages(name) if stage.has_begun]
            records = records or [read_run(open_storage(url))]
            merged: dict[str, Any] = {"versions": records[0].get("versions", {})}
            for kind in ("sources", "tasksets", "models"):
                parts = [(record.get("fingerprints") or {}).get(kind) or {} for record in records]
                merged[kind] = {key: value for part in parts for key, value in part.items()}
            return merged

        return self._of_run("fingerprints", name, read)

    def line(self, name: str) -> RunLine:
        def read(url: str) -> tuple[RunLine, object]:
            _, (before, last_mark) = self._cache.get(("line", name), (0.0, (None, None)))
            mark = _mark(url)
            # Starting a run changes its mark, so an ended run with an unchanged mark is still the same.
            if before is not None and not before.is_alive and mark == last_mark:
                return before, mark
            line = read_line(name, url, self.stages(name))
            if before is not None and before.is_alive and not line.is_alive:
                # The run has ended since: stages read while it was alive may lack its last metrics.
                self._cache.pop(("stages", name), None)
                line = read_line(name, url, self.stages(name))
            return line, mark

        return self._of_run("line", name, read)[0]

    def summary(self, name: str) -> RunSummary:
        """Summary of a run. Raises: DamagedError: its experiences cannot be counted."""
        line = self.line(name)

        def read(url: str) -> RunSummary:
            return summarize(self.config(name), url, self.stages(name), status=line.state, error=line.why)

        return self._of_run("summary", name, read)

    def lines(self) -> list[RunLine]:
        """Status of all runs: live runs first, then the newest first. An unreadable run contains its error; runs beyond
        the deadline have the state "not read yet" until a later call.
        """
        deadline = time.monotonic() + _LIST_DEADLINE_S

        def line(name: str) -> RunLine:
            if time.monotonic() > deadline and ("line", name) not in self._cache:
                return RunLine(name, _UNREAD)
            try:
                return self.line(name)
            except RftError as error:
                return RunLine(name, "not read", str(error))

        # The list is cached as a whole as well: with many runs the first line would expire before the last one is read.
        # A new run changes the key.
        names = self.runs()
        key = ("lines", *names)
        lines = self._cached(key, lambda: list(in_order(line, names, _NUM_READERS)))
        if any(line.state == _UNREAD for line in lines):
            self._cache.pop(key, None)
        return sorted(lines, key=lambda line: (not line.is_alive, -line.began_s, line.name))

    def status(self, name: str) -> list[StageStatus]:
        return self._of_run("status", name, read_status)

    def jobs(self, name: str) -> RunJobs:
        return self._of_run("jobs", name, read_run_jobs)

    def logs(self, name: str, num_lines: int) -> dict[str, list[str]]:
        """Last lines of each log that is not empty."""

        def read(url: str) -> dict[str, list[str]]:
            with contextlib.suppress(DataError):  # the run has no logs
                return {log: lines for log, lines in read_logs(url, "", num_lines) if lines}
            return {}

        return self._of_run("logs", name, read)

    def browser(self, name: str, *, evals: bool = False) -> Browser:
        return self._of_run("browser", name, lambda url: Browser(url, evals=evals), evals)

    def clear(self) -> None:
        with self._lock:
            self._cache.clear()

    def _of_run(self, kind: str, name: str, read: Callable[[str], _Read], *more: Hashable) -> _Read:
        """Value of a run, read from its URL unless it is cached. more: further parts of the key of the cache."""
        url = self.url_of(name)
        return self._cached((kind, name, *more), lambda: read(url))

    def _cached(self, key: _Key, read: Callable[[], _Read]) -> _Read:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # concurrent requests for one key share one read
            expiry, value = self._cache.get(key, (0.0, None))
            began = time.monotonic()
            if began >= expiry:
                value = read()
                seconds = time.monotonic() - began
                expiry = began + seconds + max(_MIN_FRESH_S, _FRESH_FACTOR * seconds)
            with self._lock:
                self._cache[key] = expiry, value
                self._cache.move_to_end(key)
                same_kind = [other for other in self._cache if other[0] == key[0]]
                for oldest in same_kind[: len(same_kind) - _MAX_CACHED.get(str(key[0]), len(same_kind))]:
                    del self._cache[oldest]
            result: _Read = value
            return result

    def _find_runs(self) -> list[str]:
        if self._storage.exists(RUN_FILE):
            return [HERE]
        runs, level = list[str](), [""]
        for _ in range(_MAX_DEPTH):
            names = in_order(self._entries, level, _NUM_READERS)
            listed = [(path, entries) for path, entries in zip(level, names, strict=True)]
            # Folders below a run belong to it: its stages look like runs, but are not listed.
            runs += [path for path, entries in listed if path and RUN_FILE in entries]
            level = [
                f"{path}/{name.rstrip('/')}".lstrip("/")
                for path, entries in listed
                if not (path and RUN_FILE in entries)
                for name in entries
                if name.endswith("/") and not name.startswith(".")
            ]
        return sorted(runs)

    def _entries(self, path: str) -> list[str]:
        with contextlib.suppress(NotFoundError, ValueError):  # ValueError: a folder whose name no run can have
            return self._storage.list(path)
        return []


def _mark(url: str) -> object:
    """Return a value that changes when a run is started or ends."""
    storage = open_storage(url)
    with contextlib.suppress(NotFoundError):
        return storage.list("control"), storage.get(END_FILE)
    return None
