"""What a Dask task can know of itself, and others of its worker. Dask cannot stop a running thread, so a task that
waits has to look.
"""

from __future__ import annotations

from collections.abc import Callable

from distributed import get_worker

LEAVING_TOPIC = "rftdask-leaving"
"""Where it is said of a worker, by its address, that it was told to end by who gave it, and not for what it runs."""


def make_called_off() -> Callable[[], bool]:
    """To be called in a task: a function that tells whether the task was cancelled since, or its worker is closing."""
    worker = get_worker()
    key = worker.get_current_task()

    def called_off() -> bool:
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return called_off
