"""SharedLoop: one event loop on a thread of its own, on which the rollouts of several work units run side by side.

One loop and not one for each unit: what the units share (slots, fork servers) then needs no locks, and their workflows
share a thread as the rollouts of one unit do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rftdask.rollouts.loop_watchdog import BlockedLoopTimeout

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class SharedLoop:
    """Example: SharedLoop().submit(run_work_unit(...)).result()"""

    def __init__(self) -> None:
        """Starts the thread, which ends with the process."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="rollouts", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run it beside the others. From any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs on it, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it cancels what is left
            runner.get_loop()
            asyncio.set_event_loop(self._loop)
            while True:
                try:
                    return self._loop.run_forever()
                # The watchdog's, which came after the code that it was for had returned: the others go on.
                except BlockedLoopTimeout:
                    log.warning("a workflow blocked the event loop and went on by itself")
