"""Folder: the runs below a URL, and what was read of them lately.

It starts nothing and writes nothing. Invariants: a run is named by its path below the folder, and only a name that
`runs` has found is ever opened, so no name leads out of the folder; what is kept is read again when it is older than
a look is worth, therefore a page that asks every few seconds costs a slow storage a fifth of its time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rftdask.config import Config
from rftdask.config.plan import make_plan
from rftdask.driver.jobs import RunJobs, read_logs, read_run_jobs
from rftdask.errors import DataError, NotFoundError, RftError
from rftdask.reports.lineage.browse import Browser
from rftdask.reports.run_reader import Stage, open_stages
from rftdask.reports.status import StageStatus, read_status
from rftdask.reports.summary import RunSummary, summarize
from rftdask.run.lease import lease_holders
from rftdask.run.run_folder import END_FILE, RUN_FILE, read_driver, read_end, read_run, read_run_config
from rftdask.storage import open_storage
from rftdask.storage.base import in_order

HERE = "."
"""Name of a folder that is itself a run."""
_DEEPEST = 4
"""<project>/<group>/<name>, and one more for who keeps runs by year or user."""
_NUM_READERS = 8  # Small files read at once: on object stores a read is mostly waiting.
_FRESH_S = 2.0
_FRESH_TIMES = 5.0
"""What took t seconds to read is read again after so many t."""
_LOOK_S = 3.0
"""A list of runs takes about so long at most, however many have not been read yet: a config alone takes 50 ms."""
_UNREAD = "not read yet"
_MOST = {"browser": 4, "stages": 32, "lines": 1}
"""How many of a kind are held in memory: all tokens of a run, all its numbers. Of others there is no end."""

_Read = TypeVar("_Read")
_Key: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True)
class RunLine:
    """What the list of runs says of one."""

    name: str
    """Path below the folder."""
    state: str
    """running, finished, failed, stopped, not begun, or killed: it said nothing of its end."""
    why: str = ""
    """Of a failure."""
    algorithms: tuple[str, ...] = ()
    """Of its stages."""
    stage: str = ""
    """The one that it is in, or ended in; empty for a run without stages."""
    step: int = 0
    total: int | None = None
    """Optimizer steps of that stage; None: nothing here tells."""
    progress: float | None = None
    """Of all stages, 0 to 1, each of them as long as the others."""
    reward: float | None = None
    """Of the last step with one."""
    first_accuracy: float | None = None
    accuracy: float | None = None
    accuracy_error: float = math.nan
    """Standard error; nan where it is not known."""
    eval_loss: float | None = None
    seconds: float = 0.0
    """From the first number of each stage to its last, pauses included."""
    began_s: float = 0.0
    """Unix seconds of the first number; 0: there is none."""
    last_number_s: float = 0.0
    """Unix seconds of the last number; 0: there is none."""
    warnings: tuple[str, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Whether somebody works on it now."""
        return self.state == "running"


class Folder:
    """Example: folder = Folder("runs"); [line.state for line in folder.lines()]; folder.stages("project/name")"""

    def __init__(self, url: str | Path) -> None:
        """Raises: StorageError: the URL is of no storage."""
        self._storage = open_storage(url)
        self.url = self._storage.url
        self._kept: OrderedDict[_Key, tuple[float, Any]] = OrderedDict()
        """By kind and name: when it is to be read again, and what was read; the last one used at the end."""
        self._locks: dict[_Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[str]:
        """Names of the runs, sorted; the folder itself is `HERE` where it is one, and then the only one."""
        return self._keep(("runs",), self._find)

    def url_of(self, name: str) -> str:
        """Raises: DataError: the folder has no such run."""
        if name not in self.runs():
            raise DataError(f"{self.url} has no run {name!r:.200}")
        return self.url if name == HERE else f"{self.url.rstrip('/')}/{name}"

    def stages(self, name: str) -> list[Stage]:
        """The stages of a run, each with what was read of it lately. Raises: DataError: there is no such run."""
        url = self.url_of(name)

        def read() -> list[Stage]:
            stages = open_stages(url)
            for stage in stages:
                _ = stage.metrics  # here, so that the time it takes is known
            return stages

        return self._keep(("stages", name), read)

    def config(self, name: str) -> Config:
        """The config with which a run began, its stages within. Raises: DataError: there is no such run."""
        url = self.url_of(name)
        return self._keep(("config", name), lambda: read_run_config(open_storage(url)))

    def made_of(self, name: str) -> Mapping[str, Any]:
        """What a run wrote down of what it is made of, of all its stages. Raises: DataError: there is no such run."""
        url = self.url_of(name)

        def read() -> dict[str, Any]:
            told = [read_run(stage.storage) for stage in self.stages(name) if stage.has_begun] or [
                read_run(open_storage(url))
            ]
            found: dict[str, Any] = {"versions": told[0].get("versions", {})}
            for kind in ("sources", "tasksets", "models"):
                found[kind] = {k: v for each in told for k, v in ((each.get("made_of") or {}).get(kind) or {}).items()}
            return found

        return self._keep(("made_of", name), read)

    def line(self, name: str) -> RunLine:
        """What there is to say of a run in one line. Raises: DataError: there is no such run."""
        url = self.url_of(name)

        def read() -> tuple[RunLine, object]:
            _, (before, last_mark) = self._kept.get(("line", name), (0.0, (None, None)))
            mark = _mark(url)
            # Who starts a run leaves a mark. Until then one that has ended is as it was.
            if before is not None and not before.is_alive and mark == last_mark:
                return before, mark
            line = read_line(name, url, self.stages(name))
            if before is not None and before.is_alive and not line.is_alive:
                # It has ended since: what was read while it lived may lack its last numbers.
                self._kept.pop(("stages", name), None)
                line = read_line(name, url, self.stages(name))
            return line, mark

        return self._keep(("line", name), read)[0]

    def summary(self, name: str) -> RunSummary:
        """What its report says. Raises: DataError: there is no such run; DamagedError: it cannot be counted."""
        line, url = self.line(name), self.url_of(name)

        def read() -> RunSummary:
            return summarize(self.config(name), url, self.stages(name), status=line.state, error=line.why)

        return self._keep(("summary", name), read)

    def lines(self) -> list[RunLine]:
        """Of all runs, those that run first, then the newest first. One that cannot be read says so, and of many those
        that took too long are said to be unread, until a later call.
        """
        until = time.monotonic() + _LOOK_S

        def line(name: str) -> RunLine:
            if time.monotonic() > until and ("line", name) not in self._kept:
                return RunLine(name, _UNREAD)
            try:
                return self.line(name)
            except RftError as error:
                return RunLine(name, "not read", str(error))

        # Kept as a whole, too: of many runs the first would be due again before the last is read. A new run is news.
        names = self.runs()
        key = ("lines", *names)
        found = self._keep(key, lambda: list(in_order(line, names, _NUM_READERS)))
        if any(line.state == _UNREAD for line in found):
            self._kept.pop(key, None)
        return sorted(found, key=lambda line: (not line.is_alive, -line.began_s, line.name))

    def status(self, name: str) -> list[StageStatus]:
        """What `rftdask status` says of its stages; empty before it began. Raises: DataError: there is no such run."""
        url = self.url_of(name)
        return self._keep(("status", name), lambda: read_status(url))

    def jobs(self, name: str) -> RunJobs:
        """Its jobs on a batch system, and why it does not run. Raises: DataError: there is no such run."""
        url = self.url_of(name)
        return self._keep(("jobs", name), lambda: read_run_jobs(url))

    def logs(self, name: str, num_lines: int) -> dict[str, list[str]]:
        """The last lines of each log that has some. Raises: DataError: there is no such run."""
        url = self.url_of(name)

        def read() -> dict[str, list[str]]:
            with contextlib.suppress(DataError):  # it has not logged
                return {log: lines for log, lines in read_logs(url, "", num_lines) if lines}
            return {}

        return self._keep(("logs", name), read)

    def browser(self, name: str, *, evals: bool = False) -> Browser:
        """The experiences of a run, or its answers to evaluations. Raises: DataError: there is no such run."""
        url = self.url_of(name)
        return self._keep(("browser", name, evals), lambda: Browser(url, evals=evals))

    def forget(self) -> None:
        """Read all of it again when it is next asked for."""
        with self._lock:
            self._kept.clear()

    def _keep(self, key: _Key, read: Callable[[], _Read]) -> _Read:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # of two that ask at once, one reads
            until, value = self._kept.get(key, (0.0, None))
            began = time.monotonic()
            if began >= until:
                value = read()
                took = time.monotonic() - began
                until = began + took + max(_FRESH_S, _FRESH_TIMES * took)
            with self._lock:
                self._kept[key] = until, value
                self._kept.move_to_end(key)
                alike = [other for other in self._kept if other[0] == key[0]]
                for oldest in alike[: len(alike) - _MOST.get(str(key[0]), len(alike))]:
                    del self._kept[oldest]
            found: _Read = value
            return found

    def _find(self) -> list[str]:
        if self._storage.exists(RUN_FILE):
            return [HERE]
        found, level = list[str](), [""]
        for _ in range(_DEEPEST):
            names = in_order(self._entries, level, _NUM_READERS)
            listed = [(path, entries) for path, entries in zip(level, names, strict=True)]
            # What is below a run is its own: its stages are runs to themselves, and no others.
            found += [path for path, entries in listed if path and RUN_FILE in entries]
            level = [
                f"{path}/{name.rstrip('/')}".lstrip("/")
                for path, entries in listed
                if not (path and RUN_FILE in entries)
                for name in entries
                if name.endswith("/") and not name.startswith(".")
            ]
        return sorted(found)

    def _entries(self, path: str) -> list[str]:
        with contextlib.suppress(NotFoundError, ValueError):  # ValueError: a folder with a name that no run has
            return self._storage.list(path)
        return []


def read_line(name: str, url: str, stages: list[Stage]) -> RunLine:
    """What the files of a run say of it in one line. Raises: DamagedError: one of them."""
    storage = open_storage(url)
    begun = [stage for stage in stages if stage.has_begun]
    folders = [storage, *(stage.storage for stage in begun)]
    alive = read_driver(storage) is not None or any(map(lease_holders, folders))
    end, _, why = (read_end(storage) or "").partition(": ")
    state = "running" if alive else end or ("killed" if begun else "not begun")
    steps = [int(stage.rows("trainer")["step"].max()) if len(stage.rows("trainer")) else 0 for stage in begun]
    last = begun[-1] if begun else stages[0]
    totals = {} if state == "finished" else {stage.name: _total_of(stage) for stage in begun}
    shares = [min(1.0, step / total) for step, total in zip(steps, totals.values(), strict=False) if total]
    # Earlier stages have ended, whatever their plan was.
    done = len(begun) - 1 + shares[-1] if shares and totals[last.name] else None
    rewards = [value for stage in begun for value in (stage.values("trainer", "reward")[-1:])]
    accuracies = [accuracy for stage in begun for accuracy in stage.accuracies]
    spans = [stage.span for stage in begun if len(stage.metrics)]
    return RunLine(
        name,
        state,
        why=why,
        algorithms=tuple(stage.config.algorithm.algorithm_type for stage in stages),
        stage=last.name if len(stages) > 1 else "",
        step=steps[-1] if steps else 0,
        total=steps[-1] if state == "finished" and steps else totals.get(last.name),
        progress=1.0 if state == "finished" else None if done is None else done / len(stages),
        reward=rewards[-1] if rewards else None,
        first_accuracy=accuracies[0].value if accuracies else None,
        accuracy=accuracies[-1].value if accuracies else None,
        accuracy_error=accuracies[-1].error if accuracies else math.nan,
        eval_loss=next((v for stage in reversed(begun) for v in stage.values("eval", "eval_loss")[-1:]), None),
        seconds=sum(end - start for start, end in spans),
        began_s=min((start for start, _ in spans), default=0.0),
        last_number_s=max((end for _, end in spans), default=0.0),
        warnings=tuple(
            f"{stage.name}: {warning}" if len(stages) > 1 else warning for stage in begun for warning in stage.warnings
        ),
    )


def _mark(url: str) -> object:
    """What changes when somebody starts a run, or when it ends."""
    storage = open_storage(url)
    with contextlib.suppress(NotFoundError):
        return storage.list("control"), storage.get(END_FILE)
    return None


def _total_of(stage: Stage) -> int | None:
    # Its dataset may be elsewhere, or nowhere any more.
    with contextlib.suppress(RftError, OSError, ValueError):
        if (steps := make_plan(stage.config).stages[0].train_steps) is not None:
            return steps
    return stage.config.trainer.total_steps
