"""Real ranks: processes that connect over gloo, each with a part of a test, and their results.

The processes are forked from one that has loaded torch and transformers, so four cost little more than one.
"""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from rftdask.processes.ranks import Ranks
from rftdask.trainer.process_ranks import ProcessRanks

DEADLINE_S = 900.0


def run_ranks(size: int, folder: Path, target: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `target(gangs, *arguments)` in each of `size` processes, in the order of their ranks.

    gangs: the ranks of a process by size of the gang: 1, 2, 4 and so on up to `size`. Targets and results are pickled,
    so they must be importable and plain.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rftdask.trainer.engines.torch_engine"])
    results = context.Queue()
    meeting = folder / f"meeting-{target.__name__}"
    processes = [
        context.Process(target=_serve, args=(rank, size, str(meeting), results, target, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        values = dict(results.get(timeout=DEADLINE_S) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    failed = [value for value in values.values() if isinstance(value, str)]
    assert not failed, "\n".join(failed)
    return [values[rank][0] for rank in range(size)]


def _serve(rank: int, size: int, meeting: str, results: Any, target: Callable[..., Any], arguments: Any) -> None:
    try:
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE_S)
        )
        results.put((rank, (target(_gangs(rank, size), *arguments),)))
        dist.barrier()
    except BaseException:  # reported to the process that runs the test
        import traceback

        results.put((rank, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        results.close()
        results.join_thread()


def _gangs(rank: int, size: int) -> dict[int, Ranks]:
    """Return the gangs of a process by size; all processes create all groups, in the same order."""
    gangs: dict[int, Ranks] = {}
    part = 1
    while part <= size:
        for first in range(0, size, part):
            group = dist.new_group(list(range(first, first + part)))
            if first <= rank < first + part:
                gangs[part] = ProcessRanks(group)
        part *= 2
    return gangs
