"""Power loss at every system call of a short run: all roles die at once, and the disk keeps only synced data.

One run on a simulated disk yields a copy of the disk before each call. Each copy loses its power with several seeds,
and a new run continues from the remainder. Everything that a commit confirmed before the loss must exist after it.
"""

from __future__ import annotations

import re
import zlib
from functools import partial

from rftdask.buffer.log.shard import ShardName
from rftdask.errors import NotFoundError
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.disk import SimulatedDisk
from rftdask.testing.crashtest.ending import Ending, go_on, num_rows
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all

_ROOT = "/run"


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
    """Lose power before every `every`-th call that matches `where`, with each seed.

    where: pattern for calls such as "link /run/ledger/main/00000001.json". The arguments after it disable a protection.
    """
    order = "in their order" if plan.ordered else "as they come"
    figures = Figures("power", f"power losses: {len(seeds)} at each system call, batches taken {order}")
    disk, witness = SimulatedDisk(sync_files=sync_files, sync_folders=sync_folders), Witness()
    moments: list[tuple[str, SimulatedDisk, Witness]] = []  # the state before each system call
    disk.before_change = lambda call, path: moments.append((f"{call} {path}", disk.copy(), witness.copy()))
    run_all(lambda: LocalStorage(_ROOT, disk), plan, parts or Parts(), witness, seeds.start)
    figures.num_operations = len(moments)
    chosen = [number for number, (call, _, _) in enumerate(moments) if re.fullmatch(where, call)]
    for number in chosen[::every]:
        call, before, seen = moments[number]
        for seed in seeds:
            # An independent draw for each call.
            left = before.after_power_loss(seed * len(moments) + number)
            own = seen.copy()
            # Checked before the run continues: a writer would commit the same unit again and hide the loss.
            gone = [path for path in own.shards_acknowledged() if not _is_whole(LocalStorage(_ROOT, left), path)]
            if gone:
                problems = [f"{path} was committed and is now missing or torn" for path in gone]
                ending = Ending(problems, sum(map(num_rows, gone)))
            else:
                ending = go_on(partial(LocalStorage, _ROOT, left), plan, own, seed + 1000, parts)
            figures.add(f"power lost before call {number} ({call}), seed {seed}", ending, own)
    return figures


def _is_whole(storage: LocalStorage, path: str) -> bool:
    name = ShardName.try_parse(path.rpartition("/")[2])
    try:
        # By the checksum in its name, as readers do.
        return name is not None and zlib.crc32(storage.get(path)) == name.crc32
    except NotFoundError:
        return False
