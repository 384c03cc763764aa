"""The command line, whose processes record the functions of the package through which they hand over work.

Work changes its thread or process in `submit` of an executor, in `submit` of a Dask client, and in a fork. These record
the path to them and then do their normal work. Workers import this module as one of their preloads.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import distributed
from distributed.threadpoolexecutor import ThreadPoolExecutor

from rftdask.cli import app as cli
from rftdask.cluster import local
from rftdask.processes.zygote import ForkedProcess
from tests.e2e.own_stack import write_own_calls


def record(owner: type, method: str, place: Callable[..., str | None]) -> None:
    """Make a method record the path to it, under the name that `place` returns for its arguments; None: no record."""
    original = getattr(owner, method)

    @wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = place(*args, **kwargs)
        if name is not None:
            write_own_calls(name)
        return original(self, *args, **kwargs)

    setattr(owner, method, recorded)


def _function(function: Callable[..., object], *_: Any, **__: Any) -> str | None:
    return getattr(function, "__qualname__", None)


def _rank_process(address: str, entry: str, args: Any, *_: Any, **__: Any) -> str | None:
    return "process of a rank" if "rftdask.trainer.rank:serve" in args else None


record(ThreadPoolExecutor, "submit", _function)
record(distributed.Client, "submit", _function)
record(ForkedProcess, "__init__", _rank_process)


def preload_in_workers() -> None:
    original = local.worker_spec

    def recorded(*args: Any, **kwargs: Any) -> dict[str, Any]:
        spec = original(*args, **kwargs)
        spec["options"]["preload"].append("tests.e2e.recorded_run")
        return spec

    local.worker_spec = recorded


if __name__ == "__main__":
    preload_in_workers()
    cli.main()
