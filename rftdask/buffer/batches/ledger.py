"""The ledger: which experiences each optimizer step trains, one file per step, written before the step is trained.

`ledger/<lineage>/<step>.json` is created once (`put_new`) and never changed. Invariant: if the file exists, it is the
batch of that step permanently. Only the user can decide, equally durably, that nobody trains it
(`skipped/<step>.json` in the same folder, which every reader of the entry follows). Everything else follows from that:

- a trainer that resumes reads the files and trains exactly the same batches again;
- two trainers on one lineage both try to create the next file; one succeeds, the other stops (`FencedError`);
- shards carry no marks: whether rows are trained, dropped or waiting follows from these files and the log (audit.py).

A file holds one entry, here of step 7, with a checksum over the rest (storage/checked_json.py):

    {"step": 7, "lineage": "main",
     "use":  [{"source": "00000007-0000-9f3a61c2b07d-n8-v6-6-1c291ca3.parquet", "rows": [0, 1, 2, 4], "reason": ""}],
     "drop": [{"source": "00000007-0000-9f3a61c2b07d-n8-v6-6-1c291ca3.parquet", "rows": [3], "reason": "failed"}],
     "positions": [[7, 0]], "notes": {}, "crc32": "5a3c0b12"}

The ledger knows neither how a batch is chosen (selection.py) nor the content of its rows.

A lineage that trains the batches of another one again, its parent, is a run folder of its own,
`<run>/lineages/<name>/`, with its own ledger, checkpoints and metrics. It reads the experiences of the run that
contains it, and never changes anything of that run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from rftdask.errors import DamagedError, FencedError, NotFoundError
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import numbers_in
from rftdask.storage.checked_json import dump_checked, load_checked, parse_object

MAIN_LINEAGE = "main"
"""Name of the lineage of a run without a parent."""
LINEAGES = "lineages"
"""Folder of a run that holds its other lineages."""
_PARENT = "parent.json"
SKIPPED = "skipped: "
"""Prefix of the drop reason of rows whose step the user has skipped; the user's own reason follows."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one source. Example: Rows("00000007-0000-9f3a61c2b07d-n8-v6-6-1c291ca3.parquet", (3,), "failed")"""

    source: str
    """Name of a shard, or "dataset:<fingerprint>" for rows of a dataset."""
    rows: tuple[int, ...]
    """Row numbers from 0."""
    reason: str = ""
    """Drop reason: a status, "stale", or the reason of an operator or filter. Empty: the rows are trained."""

    @property
    def of_dataset(self) -> bool:
        """True for rows of a dataset, which may be trained repeatedly; False for rows of the log."""
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
    """Dropped permanently when this batch was formed, with the reason."""
    positions: tuple[tuple[int, int], ...] = ()
    """(explore step, slot) of every group that this entry settles, trained or dropped."""
    notes: dict[str, float] = field(default_factory=dict)
    """Numbers for later readers, such as "num_missing_groups"; other batches depend on few of them."""

    def to_json(self) -> bytes:
        return dump_checked(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> LedgerEntry:
        """Inverse of `to_json`. Raises: ValueError, KeyError, TypeError: not an entry, or the checksum is wrong."""
        # The checksum first: nothing else detects damage that is still valid JSON.
        tree = load_checked(data)
        # Tuples, so that the entry equals the one written.
        use, drop = (tuple(Rows(r["source"], tuple(r["rows"]), r["reason"]) for r in tree[k]) for k in ("use", "drop"))
        positions = tuple((int(step), int(slot)) for step, slot in tree["positions"])
        return cls(tree["step"], tree["lineage"], use, drop, positions, tree["notes"])

    def skipped(self, because: str) -> LedgerEntry:
        """Return the entry as one that trains nothing: used rows are dropped, and settled groups stay settled."""
        return replace(self, use=(), drop=(*self.drop, *(replace(r, reason=f"{SKIPPED}{because}") for r in self.use)))


def skipped_sources(entries: Iterable[LedgerEntry]) -> set[str]:
    """Return the sources whose rows a skipped step names; the log may have lost them."""
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
        """Return the path of the entry of `step`, relative to the run folder."""
        return f"ledger/{self.lineage}/{step:08d}.json"

    def read(self, step: int) -> LedgerEntry | None:
        """Return the entry of `step`; None if it is not written yet.

        Raises: DamagedError: the file exists but cannot be read. A batch is never guessed: its rows may be trained.
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
            raise DamagedError(
                f"{self.path(step)} holds step {entry.step} of lineage {entry.lineage}: files were moved; restore the "
                "ledger from a backup"
            )
        # Applied for every reader, so that nobody trains the rows of a skipped step, replays included.
        return entry.skipped(self.skips[step]) if step in self.skips else entry

    @cached_property
    def skips(self) -> dict[int, str]:
        """Step -> reason of the skipped steps, as of the first access. Raises: DamagedError: a file of them."""
        reasons = {}
        for step in numbers_in(self._storage.list(f"ledger/{self.lineage}/skipped"), suffix=".json"):
            try:
                reasons[step] = str(load_checked(self._storage.get(self._skip_path(step)))["because"])
            except (ValueError, KeyError) as error:
                raise DamagedError(f"{self._skip_path(step)} is damaged ({error}); restore it from a backup") from error
        return reasons

    def skip(self, step: int, because: str) -> bool:
        """Record durably that nobody trains the batch of `step`; False if it was skipped before.

        Only the owner of the trainer role may call this, while no checkpoint has trained the step.
        Killed before: the batch is trained. Killed after: it is skipped by every resume and replay.
        """
        record = {"step": step, "lineage": self.lineage, "because": because, "time_s": time.time()}
        # Create-only like the entry: the first reason stays.
        return self._storage.put_new(self._skip_path(step), dump_checked(record))

    def _skip_path(self, step: int) -> str:
        return f"ledger/{self.lineage}/skipped/{step:08d}.json"

    def write(self, entry: LedgerEntry) -> None:
        """Record the batch of a step durably. Raises: FencedError: the entry exists: another trainer wrote it.

        Killed before: the step has no batch, and the next trainer forms one. Killed after: the next trainer replays it.
        """
        # Create-only, which fences two trainers: of two that form the same step, one is refused.
        if not self._storage.put_new(self.path(entry.step), entry.to_json()):
            raise FencedError(
                f"{self.path(entry.step)} was written by another trainer on lineage {self.lineage}; stop it, or fork "
                "a lineage of your own"
            )

    def last_step(self) -> int:
        """Return the newest recorded step; 0 if there is none. Lists all entries."""
        return max(self.steps(), default=0)

    def steps(self) -> list[int]:
        return numbers_in(self._storage.list(f"ledger/{self.lineage}"), suffix=".json")

    def last_of_run(self, first: int) -> int:
        """Return the last step recorded without a gap from `first` on; first - 1 if `first` is not recorded.

        Takes about twenty reads at most, where `last_step` lists every entry.
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
    """The ledger as its only trainer reads it, step by step.

    Entries that existed when the trainer began are replayed; after that only its own entries may appear.

    Example: Fence(ledger).read(7) is None   # this trainer forms and writes it
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._replay_until: int | None = None
        """The last step recorded before this trainer began; None until the first `read`."""

    def read(self, step: int) -> LedgerEntry | None:
        """Return the entry of `step`; None if this trainer must form it.

        Raises: FencedError: the entry appeared since this trainer began: another one is running; DamagedError: the
        entry is damaged, or it is missing although later ones exist.
        """
        ledger = self._ledger
        if self._replay_until is None:
            # Fixed at the first read: what another process writes later is a race, not history.
            self._replay_until = ledger.last_of_run(step)
        entry, until = ledger.read(step), self._replay_until
        if entry is not None:
            if step > until:
                raise FencedError(
                    f"{ledger.path(step)} appeared while this trainer was at step {step - 1}: another trainer is "
                    "running on this lineage; stop one of them"
                )
            return entry
        # A gap before the first new entry of this trainer is a lost file. Read again: another trainer may have written
        # both entries between our two reads, which is a race and not damage.
        gap = step == until + 1 and ledger.read(step + 1) is not None and ledger.read(step) is None
        if step <= until or gap:
            raise DamagedError(
                f"{ledger.path(step)} is missing, and the ledger goes on to step {max(until, step + 1)}; restore it "
                "from a backup: its rows may be trained, and a new batch could take them again"
            )
        return None


# ---- lineages with a parent


@dataclass(frozen=True)
class Parent:
    """Example: Parent(name="half-lr", lineage="main", step=20)   # trains what main trained after step 20"""

    name: str
    """Name of the lineage that has this parent."""
    lineage: str
    """Lineage whose batches are trained again."""
    step: int
    """Last optimizer step that both share; 0: they begin with the same model."""
    schedule_steps: int | None = None
    """Total steps of the parent's learning rate schedule; None: unknown, and not needed."""


def read_parent(storage: Storage) -> Parent | None:
    """Return the parent of the lineage in this run folder; None if the folder is a run. Raises: DamagedError."""
    # By the path, without a read: most folders are runs, and this is called often.
    if f"/{LINEAGES}/" not in storage.url:
        return None
    try:
        return Parent(**parse_object(storage.get(_PARENT)))
    except NotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{storage.url}/{_PARENT} is damaged: {error}") from error


def record_parent(storage: Storage, parent: Parent) -> bool:
    """Record the parent permanently; False if the folder already has one."""
    return storage.put_new(_PARENT, json.dumps(asdict(parent), indent=1).encode())


def parent_storage(storage: Storage) -> Storage:
    """Return the run folder that contains this lineage."""
    return open_storage(storage.url.rpartition(f"/{LINEAGES}/")[0])


def lineage_of(storage: Storage) -> str:
    """Return the name of the lineage whose ledger is in this run folder."""
    parent = read_parent(storage)
    return MAIN_LINEAGE if parent is None else parent.name
