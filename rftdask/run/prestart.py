"""Ahead: while a stage trains, workers start the processes of the next stage's roles, which do their imports then.

It does not know what a role does. Invariant: a head start is only time won; without it, or where it fails, a role
starts its process itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client

from rftdask.cluster.base import EXPLORER_RESOURCE, TRAINER_RESOURCE, Layout
from rftdask.config import Config
from rftdask.engines.server import TARGET as ENGINE
from rftdask.monitor.events import Event, Step
from rftdask.processes.child import end_ahead, start_ahead
from rftdask.processes.dask_task import workers_of
from rftdask.run.run_folder import roles_of
from rftdask.trainer.gang import RANK

_MODELS = "transformers.models.auto.modeling_auto"
"""What loading any model imports; a second or several."""
_CLOSE_S = 10.0

_Call = tuple[str | None, Callable[..., object], tuple[Any, ...]]
"""Resource of the workers, None for all of them; function; its arguments."""

log = logging.getLogger(__name__)


class HeadStart:
    """Of each stage but the first, at the first step of the one before it.

    Example: with HeadStart(client, layout, stages) as ahead: ...; ahead.after(0, Step("trainer", 1, {}))
    """

    def __init__(self, client: Client, layout: Layout, stages: Sequence[Config]) -> None:
        self._client = client
        self._layout = layout
        self._stages = stages
        self._given: dict[int, threading.Thread] = {}

    @property
    def num_stages(self) -> int:
        """Stages of the run, the first included."""
        return len(self._stages)

    def after(self, number: int, event: Event) -> None:
        """What stage `number` (from 0) says; returns at once. What goes wrong is logged."""
        following = number + 1
        if not isinstance(event, Step) or following >= self.num_stages or following in self._given:
            return
        stage, threads_of = self._stages[following], self._layout.threads_of
        roles, modules = roles_of(stage), stage.explorer.rollout_model.traits.imports_ahead
        calls: list[_Call] = []
        # An engine's environment may matter to its imports, so that one with its own starts in it.
        if "explorer" in roles and modules and not stage.explorer.env_vars:
            calls.append((EXPLORER_RESOURCE, start_ahead, (ENGINE, threads_of(EXPLORER_RESOURCE), modules)))
        if "trainer" in roles and stage.trainer.has_model:
            calls.append((TRAINER_RESOURCE, start_ahead, (RANK, threads_of(TRAINER_RESOURCE), (_MODELS,))))
        self._given[following] = self._start(calls)

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, *exc: object) -> None:
        """What no role took ends now: workers may outlive this run."""
        for thread in self._given.values():
            thread.join(_CLOSE_S)  # so that nothing starts after the end
        if self._given:
            self._start([(None, end_ahead, ())]).join(_CLOSE_S)

    def _start(self, calls: Sequence[_Call]) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(calls,), name="ahead", daemon=True)
        thread.start()
        return thread

    def _run(self, calls: Sequence[_Call]) -> None:
        try:
            workers = workers_of(self._client)
            for resource, function, args in calls:
                able = [a for a, info in workers.items() if resource is None or info["resources"].get(resource)]
                if able:
                    self._client.run(function, *args, workers=able, on_error="ignore")
        except Exception:
            # The decision: whatever ails a worker or the client, the stage finds out by itself.
            log.warning("the next stage got no head start", exc_info=True)
