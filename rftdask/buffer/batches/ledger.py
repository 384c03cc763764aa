"""The ledger: which experiences were trained at which step, written before they are trained, one file a step.

`ledger/<lineage>/<step>.json` is created only once. If it exists, that is the batch of the step, for ever: a resumed
trainer replays it, and a second trainer on the same lineage loses the race for it and stops. Everything else that one
may ask (what is used, what is waiting) is derived from these files and the log.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from rftdask.buffer.lineage import MAIN_LINEAGE
from rftdask.errors import DamagedError, FencedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked


@dataclass(frozen=True)
class Rows:
    """Some rows of one source. `reason` is empty for rows that are trained, else why they were dropped."""

    source: str
    """A shard's name, or "dataset:<fingerprint>" for rows of a dataset."""
    rows: tuple[int, ...]
    reason: str = ""

    @property
    def of_dataset(self) -> bool:
        """Whether they are rows of a dataset, which may be trained again and again, and not of the log."""
        return self.source.startswith("dataset:")


@dataclass(frozen=True)
class LedgerEntry:
    """The batch of one optimizer step.

    Example: LedgerEntry(step=7, lineage="main", use=(Rows("00000007-...parquet", (0, 1, 2)),), drop=(Rows("...", (3,),
    "failed"),))
    """

    step: int
    lineage: str
    use: tuple[Rows, ...]
    """Trained at this step, in this order."""
    drop: tuple[Rows, ...] = ()
    """Set aside for good when this batch was formed, with the reason."""
    positions: tuple[tuple[int, int], ...] = ()
    """(explore step, slot) of every group this entry settles, trained or dropped."""
    notes: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return dump_checked(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> LedgerEntry:
        tree = load_checked(data)
        rows = {
            key: tuple(Rows(r["source"], tuple(r["rows"]), r["reason"]) for r in tree[key]) for key in ("use", "drop")
        }
        positions = tuple((int(step), int(slot)) for step, slot in tree["positions"])
        return cls(tree["step"], tree["lineage"], rows["use"], rows["drop"], positions, tree["notes"])


class Ledger:
    """The entries of one lineage."""

    def __init__(self, storage: Storage, lineage: str = MAIN_LINEAGE) -> None:
        self._storage = storage
        self.lineage = lineage

    def path(self, step: int) -> str:
        return f"ledger/{self.lineage}/{step:08d}.json"

    def last_step(self) -> int:
        """The newest step written down; 0 if none. Lists them all."""
        names = self._storage.list(f"ledger/{self.lineage}")
        return max((int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdigit()), default=0)

    def last_of_run(self, first: int) -> int:
        """The last of the steps written down without a gap from `first` on; first - 1 if that is not there.

        For whoever resumes: some twenty reads at most, where `last_step` lists every entry there is.
        """
        last, stride = first - 1, 1
        while self._has(last + stride):
            last, stride = last + stride, stride * 2
        while stride := stride // 2:
            if self._has(last + stride):
                last += stride
        return last

    def _has(self, step: int) -> bool:
        try:
            self._storage.get(self.path(step))
        except NotFoundError:
            return False
        return True

    def read(self, step: int) -> LedgerEntry | None:
        """The batch of `step`, or None if it is not written yet.

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
        if (entry.step, entry.lineage) != (step, self.lineage):
            raise DamagedError(f"{self.path(step)} says step {entry.step} of lineage {entry.lineage}: files were moved")
        return entry

    def write(self, entry: LedgerEntry) -> None:
        """Settle the batch of a step. Raises: FencedError: it is written already: another trainer is at work."""
        if not self._storage.put_new(self.path(entry.step), entry.to_json()):
            raise FencedError(
                f"{self.path(entry.step)} was written by somebody else: another trainer works on lineage "
                f"{self.lineage}; "
                "stop it, or fork a lineage of your own"
            )
