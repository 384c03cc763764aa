"""Suite: runs the parts of the crash test in order, in a folder of the user's file system. Then it disables one
protection at a time, and the same tests must find a broken promise: a test that finds nothing proves nothing.

A protection is disabled by a replacement at a seam: another disk, storage, log or ledger. Invariant: in an undisturbed
run the replacement changes nothing; otherwise the test would find its own change.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, UserError
from rftdask.storage import open_storage
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.damage import damage_files
from rftdask.testing.crashtest.figures import CrashReport, Figures, ProtectionFigures
from rftdask.testing.crashtest.kills import kill_at_random, stop_everywhere
from rftdask.testing.crashtest.power import lose_power
from rftdask.testing.crashtest.rivals import meet_rivals
from rftdask.testing.crashtest.workload import Parts, Plan
from rftdask.testing.storage_faults import FaultyStorage

PARTS = ("stops", "kills", "power", "rivals", "damage", "protections")

_WITHOUT = Plan(6, ordered=False)
_SHORT = (Plan(3), Plan(3, ordered=False))
_LONG = Plan(30, save_interval=4)
"""40 optimizer steps; a killed trainer repeats up to 3 of them."""
_NUM_POWER_SEEDS = 3


class CheckThenWrite(FaultyStorage):
    """`put_new` without create-only writes: check that the file is missing, then write."""

    def put_new(self, path: str, data: bytes) -> bool:
        if self.inner.exists(path):
            return False
        self.inner.put(path, data)
        return True


class TrustingLog(ParquetLog):
    """Reads shards without checking their checksums."""

    def _decode(self, name: ShardName, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        try:
            chosen = None if columns is None else list(columns)
            return pq.read_table(pa.BufferReader(data), columns=chosen, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(f"shard {name.text}: {error}") from error


class LateLedger(Ledger):
    """Writes the entry of a step after it was trained instead of before."""

    _late: LedgerEntry | None = None

    def write(self, entry: LedgerEntry) -> None:
        self._late = entry
        if not entry.use:
            self.write_late()  # nothing will be trained

    def write_late(self) -> None:
        """Write the entries of finished steps. Called after every optimizer step."""
        if self._late is not None:
            super().write(self._late)
            self._late = None


PROTECTIONS: dict[str, Callable[[int], Figures]] = {
    "fsync of files": lambda every: lose_power(_WITHOUT, range(1), every=every, sync_files=False),
    "fsync of folders": lambda every: lose_power(_WITHOUT, range(1), every=every, sync_folders=False),
    "create-only": lambda every: meet_rivals(
        _WITHOUT,
        range(3),
        every=max(1, every // 6),
        where="before put.* ledger/.*",
        wrap=lambda storage: CheckThenWrite(storage, lambda *call: None),
    ),
    "checksums of shards": lambda every: damage_files(
        Plan(6), 0, num_flips=32, kinds="shard", parts=Parts(log=TrustingLog), every=max(1, every // 6)
    ),
    "the ledger before training": lambda every: lose_power(
        _WITHOUT, range(3), where="create .*/ledger/.*", parts=Parts(ledger=LateLedger)
    ),
}
"""Protection -> test without it, at every n-th place, or at all places if only few matter."""


def run_crash_test(
    url: str | None,
    parts: Sequence[str] = PARTS,
    num_kills: int = 100,
    seed: int = 1,
    every: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> CrashReport:
    """Run the parts and report failures. Forks, so call it from a process without threads.

    Args:
        url: folder on the file system to test, in which a folder is created and removed. None: a temporary folder.
        num_kills: minimum number of kills in part "kills".
        every: try only every n-th place, in parts that have places.
    Raises: UserError: `url` is not a folder of a file system, a part does not exist, or a number is below 1.
    """
    if unknown := sorted({*parts} - {*PARTS}):
        raise UserError(f"crash test parts {unknown} do not exist; they are {', '.join(PARTS)}")
    if every < 1 or num_kills < 1:
        raise UserError(f"every ({every}) and kills ({num_kills}) must be at least 1")
    with _work_folder(url) as folder:
        say(f"crash test below {folder}")
        seeds = range(seed, seed + _NUM_POWER_SEEDS)
        tests: list[tuple[str, Callable[[], Figures]]] = [
            ("stops", lambda: stop_everywhere(folder / "stops", _SHORT[0], seed, every=every)),
            ("kills", lambda: kill_at_random(folder / "kills", _LONG, num_kills, seed)),
            ("power", lambda: lose_power(_SHORT[0], seeds, every=every)),
            ("power", lambda: lose_power(_SHORT[1], seeds, every=every)),
            ("rivals", lambda: meet_rivals(_SHORT[0], seeds[:1], every=every)),
            ("rivals", lambda: meet_rivals(_SHORT[1], seeds[:1], every=every)),
            ("damage", lambda: damage_files(Plan(6), seed, every=every)),
        ]
        done = []
        for part, test in tests:
            if part in parts:
                began = time.monotonic()
                done.append(figures := test())
                figures.duration_s = time.monotonic() - began
                say(f"  {part}: {figures.num_tried} tried, {len(figures.problems)} broken, {figures.duration_s:.0f} s")
        without = []
        for name in PROTECTIONS if "protections" in parts else ():
            # Few places: one broken place shows that the test can find it.
            found = PROTECTIONS[name](max(6, every))
            num_broken, example = len(found.problems), next(iter(found.problems), "")
            without.append(ProtectionFigures(name, found.num_tried, num_broken, example))
            say(f"  without {name}: {num_broken} of {found.num_tried} broken, as it must be")
        return CrashReport(seed, done, without)


@contextmanager
def _work_folder(url: str | None) -> Iterator[Path]:
    if url is None:
        with TemporaryDirectory(prefix="rftdask-crashtest-") as temporary:
            yield Path(temporary)
        return
    storage = open_storage(url)
    if not isinstance(storage, LocalStorage):
        raise UserError(
            f"{url}: the crash test kills processes that share a file system; give a folder. "
            "What another storage keeps, `rftdask doctor` checks"
        )
    name = f"rftdask-crashtest-{uuid.uuid4().hex[:8]}"
    folder = Path(storage.url) / name
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        storage.remove(name)
