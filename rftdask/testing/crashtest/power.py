"""Power loss at every system call of a short run: all roles die at once, and the disk keeps only what was synced.

One run on a simulated disk gives the disk before each call; each of them loses its power with several seeds, and a new
run goes on from what is left. What a commit had confirmed before the loss must be there after it.
"""

from __future__ import annotations

import re
import time
import zlib
from dataclasses import dataclass

from rftdask.buffer.log.shard import ShardName
from rftdask.errors import NotFoundError
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.disk import SimulatedDisk
from rftdask.testing.crashtest.ending import Ending, Undisturbed, check_ending, num_rows, run_undisturbed, try_to_end
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all

_ROOT = "/run"


@dataclass(frozen=True)
class _Moment:
    """The world before one system call."""

    call: str
    disk: SimulatedDisk
    witness: Witness


def lose_power(
    plan: Plan,
    seeds: range,
    *,
    every: int = 1,
    where: str = ".*",
    sync_files: bool = True,
    sync_folders: bool = True,
    parts: Parts | None = None,
) -> Figures:
    """Lose the power before every `every`-th call among those like `where`, with each seed.

    where: a pattern for "link /run/ledger/main/00000001.json". The arguments after it take a protection away.
    """
    began = time.monotonic()
    parts = parts or Parts()
    undisturbed = run_undisturbed(plan)
    moments = _moments(SimulatedDisk(sync_files=sync_files, sync_folders=sync_folders), plan, parts, seeds.start)
    order = "in their order" if plan.ordered else "as they come"
    figures = Figures("power", f"power losses: {len(seeds)} at each system call, batches taken {order}")
    figures.num_operations = len(moments)
    chosen = [number for number, moment in enumerate(moments) if re.fullmatch(where, moment.call)]
    for number in chosen[::every]:
        for seed in seeds:
            witness = moments[number].witness.copy()
            # Another draw for each moment: what is kept at one call says nothing of the next.
            disk = moments[number].disk.after_power_loss(seed * len(moments) + number)
            ending = _go_on(disk, plan, parts, witness, undisturbed, seed)
            figures.num_tried += 1
            figures.num_trained_again += witness.num_trained_again()
            figures.add(f"power lost before call {number} ({moments[number].call}), seed {seed}", ending)
    figures.duration_s = time.monotonic() - began
    return figures


def _moments(disk: SimulatedDisk, plan: Plan, parts: Parts, seed: int) -> list[_Moment]:
    moments: list[_Moment] = []
    witness = Witness()
    disk.before_change = lambda call, path: moments.append(_Moment(f"{call} {path}", disk.copy(), witness.copy()))
    run_all(lambda: LocalStorage(_ROOT, disk), plan, parts, witness, seed)
    return moments


def _go_on(
    disk: SimulatedDisk, plan: Plan, parts: Parts, witness: Witness, undisturbed: Undisturbed, seed: int
) -> Ending:
    """Go on from what the power loss has left, to the end of the run."""

    def storage() -> LocalStorage:
        return LocalStorage(_ROOT, disk)

    # Before the run goes on: a writer would commit the same unit again, and the loss would not be seen.
    lost = _lost_by_now(storage(), witness)
    if lost.problems:
        return lost
    failed = try_to_end(lambda: run_all(storage, plan, parts, witness, seed + 1000))
    return failed or check_ending(storage(), plan, witness, undisturbed)


def _lost_by_now(storage: LocalStorage, witness: Witness) -> Ending:
    """Shards whose commit had returned and that are gone or torn: found before a new run can make them again."""
    problems, num_lost = [], 0
    for path in witness.shards_acknowledged():
        name = ShardName.try_parse(path.rpartition("/")[2])
        try:
            is_whole = name is not None and zlib.crc32(storage.get(path)) == name.crc32
        except NotFoundError:
            is_whole = False
        if not is_whole:
            problems.append(f"{path} was committed, and is gone or torn")
            num_lost += num_rows(path)
    return Ending(problems, num_lost)
