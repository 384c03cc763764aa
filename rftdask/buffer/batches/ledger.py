"""The ledger: which experiences each optimizer step trains, one file a step, written before the step is trained.

`ledger/<lineage>/<step>.json` is created once (`put_new`) and never changed. Invariant: if the file is there, it is the
batch of that step, for ever; only the user may say, as durably, that nobody trains it (`skipped/<step>.json` beside it,
which every reader of the entry follows). Everything else follows from that:

- a trainer that resumes finds the files and trains the very same batches again;
- two trainers on one lineage both try to create the next file; one wins, the other stops (`FencedError`);
- shards carry no marks: what is trained, dropped or still waiting is derived from these files and the log (audit.py).

A file holds one entry, here step 7, with a checksum over the rest (storage/checked_json.py):

    {"step": 7, "lineage": "main",
     "use":  [{"source": "00000007-0000-9f3a61c2b07d-n8-v6-6-1c291ca3.parquet", "rows": [0, 1, 2, 4], "reason": ""}],
     "drop": [{"source": "00000007-0000-9f3a61c2b07d-n8-v6-6-1c291ca3.parquet", "rows": [3], "reason": "failed"}],
     "positions": [[7, 0]], "notes": {}, "crc32": "5a3c0b12"}

The ledger knows neither how a batch is chosen (selection.py) nor what its rows hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from rftdask.buffer.batches.lineage import MAIN_LINEAGE
from rftdask.errors import DamagedError, FencedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import numbers_in
from rftdask.storage.checked_json import dump_checked, load_checked

SKIPPED = "skipped: "
"""First characters of the reason of rows whose step the user has skipped; the user's own reason follows."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one source.

    Example: Rows("00000007-0000-9f3a61c2b07d-n8-v6-6-1c291ca3.parquet", (3,), "failed")
    """

    source: str
    """A shard's name, or "dataset:<fingerprint>" for rows of a dataset."""
    rows: tuple[int, ...]
    """Row numbers from 0."""
    reason: str = ""
    """Why the rows were dropped: a status, "stale", an operator's or filter's reason. Empty: they are trained."""

    @property
    def of_dataset(self) -> bool:
        """True for rows of a dataset, which may be trained again and again; False for rows of the log."""
        return self.source.startswith("dataset:")


@dataclass(frozen=True)
class LedgerEntry:
    """The batch of one optimizer step.

    Example: LedgerEntry(7, "main", use=(Rows("00000007-...", (0, 1, 2, 4)),), positions=((7, 0),))
    """

    step: int
    """Optimizer step, from 1."""
    lineage: str
    use: tuple[Rows, ...]
    """Trained at this step, in this order."""
    drop: tuple[Rows, ...] = ()
    """Set aside for good when this batch was formed, with the reason."""
    positions: tuple[tuple[int, int], ...] = ()
    """(explore step, slot) of every group this entry settles, trained or dropped."""
    notes: dict[str, float] = field(default_factory=dict)
    """Numbers for who reads it later, such as "num_missing_groups"; no other batch depends on most of them."""

    def to_json(self) -> bytes:
        """The content of the file."""
        return dump_checked(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> LedgerEntry:
        """Inverse of `to_json`. Raises: ValueError, KeyError, TypeError: it is no entry, or not what was written."""
        # The checksum first: of damage that is still JSON nothing else would tell.
        tree = load_checked(data)
        # JSON has lists where the entry has tuples; as tuples they compare equal to what was written.
        use, drop = (tuple(Rows(r["source"], tuple(r["rows"]), r["reason"]) for r in tree[k]) for k in ("use", "drop"))
        positions = tuple((int(step), int(slot)) for step, slot in tree["positions"])
        return cls(tree["step"], tree["lineage"], use, drop, positions, tree["notes"])

    def skipped(self, because: str) -> LedgerEntry:
        """The entry of a step that trains nothing: what it used is dropped, and what it settled stays settled."""
        return replace(self, use=(), drop=(*self.drop, *(replace(r, reason=f"{SKIPPED}{because}") for r in self.use)))


def skipped_sources(entries: Iterable[LedgerEntry]) -> set[str]:
    """Sources of which a step that was skipped names rows; the log may have lost them."""
    return {rows.source for entry in entries for rows in entry.drop if rows.reason.startswith(SKIPPED)}


class Ledger:
    """The entries of one lineage.

    Example:
        ledger = Ledger(storage)
        if (entry := ledger.read(7)) is None:
            ledger.write(entry := form_entry(7))  # only now may anybody train it
    """

    def __init__(self, storage: Storage, lineage: str = MAIN_LINEAGE) -> None:
        self._storage = storage
        self.lineage = lineage

    def path(self, step: int) -> str:
        """Where the entry of `step` is, below the run folder."""
        return f"ledger/{self.lineage}/{step:08d}.json"

    def read(self, step: int) -> LedgerEntry | None:
        """Read the batch of `step`; None if it is not written yet.

        Raises: DamagedError: the file is there but cannot be read. It is never guessed: the rows it names may be
        trained.
        """
        try:
            data = self._storage.get(self.path(step))
        except NotFoundError:
            return None
        try:
            entry = LedgerEntry.from_json(data)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(
                f"{self.path(step)} is damaged ({error}); restore it from a backup or fork before it"
            ) from error
        # A checksum proves the content and not the name: a copied file would be another step's batch.
        if (entry.step, entry.lineage) != (step, self.lineage):
            raise DamagedError(f"{self.path(step)} says step {entry.step} of lineage {entry.lineage}: files were moved")
        # Applied to what every reader gets, so that the rows of a skipped step are trained by nobody, replays included.
        return entry.skipped(self.skips[step]) if step in self.skips else entry

    @cached_property
    def skips(self) -> dict[int, str]:
        """Why steps were skipped, by step, as it was when it was first asked. Raises: DamagedError: a file of them."""
        found = {}
        for step in numbers_in(self._storage.list(f"ledger/{self.lineage}/skipped"), suffix=".json"):
            try:
                found[step] = str(load_checked(self._storage.get(self._skip_path(step)))["because"])
            except (ValueError, KeyError) as error:
                raise DamagedError(f"{self._skip_path(step)} is damaged ({error}); restore it from a backup") from error
        return found

    def skip(self, step: int, because: str) -> bool:
        """Settle durably that nobody trains the batch of `step`; False if that was said before. For who owns the role
        of the trainer, while no checkpoint has trained it.

        Killed before: the batch is to be trained. Killed after: it is not, on every resume and replay.
        """
        said = {"step": step, "lineage": self.lineage, "because": because, "time_s": time.time()}
        # Create-only, as the entry: the first reason stands.
        return self._storage.put_new(self._skip_path(step), dump_checked(said))

    def _skip_path(self, step: int) -> str:
        return f"ledger/{self.lineage}/skipped/{step:08d}.json"

    def write(self, entry: LedgerEntry) -> None:
        """Settle the batch of a step, durably. Raises: FencedError: it is written already: another trainer is at work.

        Killed before: the step has no batch, and the next life forms one. Killed after: the next life replays it.
        """
        # Create-only, which is what fences two trainers: of two that form the same step one is refused.
        if not self._storage.put_new(self.path(entry.step), entry.to_json()):
            raise FencedError(
                f"{self.path(entry.step)} was written by somebody else: another trainer works on lineage "
                f"{self.lineage}; stop it, or fork a lineage of your own"
            )

    def last_step(self) -> int:
        """The newest step written down; 0 if none. Lists them all."""
        return max(self.steps(), default=0)

    def steps(self) -> list[int]:
        """The steps written down, ascending."""
        return numbers_in(self._storage.list(f"ledger/{self.lineage}"), suffix=".json")

    def last_of_run(self, first: int) -> int:
        """The last of the steps written down without a gap from `first` on; first - 1 if that is not there.

        For who resumes: some twenty reads at most, where `last_step` lists every entry there is.
        """

        # Strides double until one lands beyond the end, then halve back to it.
        last, stride, is_beyond = first - 1, 1, False
        while stride:
            try:
                self._storage.get(self.path(last + stride))
                last += stride
            except NotFoundError:
                is_beyond = True
            # At 0 the halving has reached the end exactly.
            stride = stride // 2 if is_beyond else stride * 2
        return last


class Fence:
    """The ledger as its one trainer reads it, step after step: what was there when it began is replayed, and nothing
    that it has not written itself may appear after that.

    Example: Fence(ledger).read(7) is None   # mine to form and write
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._replay_until: int | None = None
        """The last step that was written down before this trainer came; None until it asks for its first."""

    def read(self, step: int) -> LedgerEntry | None:
        """Read the batch of `step`; None: it is this trainer's to form.

        Raises: FencedError: it appeared since this trainer began: another one is at work; DamagedError: it is damaged,
        or it is missing and was there, for later ones are.
        """
        ledger = self._ledger
        if self._replay_until is None:
            # Fixed at the first question: what is written later by anybody else is a race, not a history.
            self._replay_until = ledger.last_of_run(step)
        entry, until = ledger.read(step), self._replay_until
        if entry is not None:
            if step > until:
                raise FencedError(
                    f"{ledger.path(step)} appeared while this trainer was at step {step - 1}: another one is at work"
                )
            return entry
        # A gap before the first new entry of this life is a lost file. Read again: another trainer may have written
        # both entries between our two looks, which is its race to win or lose, and no damage.
        gap = step == until + 1 and ledger.read(step + 1) is not None and ledger.read(step) is None
        if step <= until or gap:
            raise DamagedError(
                f"{ledger.path(step)} is missing, and the ledger goes on to step {max(until, step + 1)}; restore it "
                "from a backup: its rows may be trained, and a new batch could take them again"
            )
        return None
