"""Monitors of user code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from rftdask.compat.trinity.registry import Registry
from rftdask.config.plugins import read_parts
from rftdask.monitor.trackers import TrackedRun, Tracker

MONITOR = Registry("monitor", partial(read_parts, "rftdask.monitor.trackers", "monitor_type"))


class Monitor(ABC):
    """Base of monitors. Each role has its own."""

    def __init__(self, project: str, name: str, role: str, config: Any = None) -> None:
        self.project = project
        self.name = name
        self.role = role
        self.config = config

    def log_table(  # noqa: B027 -- few monitors have tables
        self, table_name: str, experiences_table: Any, step: int
    ) -> None:
        """Not called: experiences are in the log of the run."""

    @abstractmethod
    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Log metrics."""

    @abstractmethod
    def close(self) -> None:
        """Finish logging."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the default arguments."""
        return {}

    @classmethod
    def __rftdask_part__(cls) -> type[Tracker]:
        own = cls

        class Adapted(Tracker):
            def __init__(self, run: TrackedRun, **arguments: Any) -> None:
                self._run = run
                monitor = SimpleNamespace(cache_dir=str(run.folder), monitor_args={**own.default_args(), **arguments})
                self._config = SimpleNamespace(**{**run.config, "monitor": monitor})
                self._monitors: dict[str, Monitor] = {}

            def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
                """Log to the monitor of the role, created at its first row."""
                if role not in self._monitors:
                    given = {"project": self._run.project, "group": "", "name": self._run.name, "role": role}
                    self._monitors[role] = own(**given, config=self._config)
                self._monitors[role].log(dict(metrics), step, commit=True)

            def close(self) -> None:
                """Close all monitors."""
                while self._monitors:
                    self._monitors.popitem()[1].close()

        Adapted.__name__ = Adapted.__qualname__ = own.__name__
        Adapted.__module__ = own.__module__
        return Adapted
