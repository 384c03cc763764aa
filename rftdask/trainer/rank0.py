"""Lead: how rank 0 takes the other ranks along. Rank 0 runs the trainer's loop, with an engine, a source and a saver
that tell the others what is called before they do it; the others follow. A gang of one is told nothing.

Only rank 0 decides (what a batch is, whether to publish, to save, to end), so ranks cannot disagree. While it waits for
data it says so every few seconds; a rank that hears nothing for the deadline of the process group gives up. Invariant:
what rank 0 tells and what the others do is the same list of calls, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.buffer.batches.source import BatchSource
from rftdask.errors import DamagedError
from rftdask.trainer.background_checkpoints import Saver
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.gather import Read, read_together
from rftdask.trainer.ranks import Ranks
from rftdask.weights.fingerprint import Fingerprint


class LeadEngine(TrainEngine):
    """Rank 0's engine: each call is made by all ranks."""

    def __init__(self, engine: TrainEngine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        self._ranks.tell({"call": "train_step", "step": step})
        return self._engine.train_step(batch, step)

    def weights(self) -> Mapping[str, bytes]:
        self._ranks.tell({"call": "weights"})
        return self._engine.weights()

    def fingerprint(self) -> Fingerprint | None:
        self._ranks.tell({"call": "fingerprint"})
        return self._engine.fingerprint()

    def state_files(self) -> dict[str, bytes]:
        self._ranks.tell({"call": "state_files"})
        return self._engine.state_files()

    def load_state_files(self, files: Mapping[str, bytes]) -> None:
        self._engine.load_state_files(files)  # the others were told by `LeadSaver.load_newest`

    def export_files(self) -> Mapping[str, bytes]:
        self._ranks.tell({"call": "export_files"})
        return self._engine.export_files()


class LeadSource(BatchSource):
    """Rank 0's source: it forms the entry, and all ranks read it."""

    def __init__(self, source: BatchSource, ranks: Ranks) -> None:
        self._source = source
        self._ranks = ranks

    def entry(self, step: int) -> LedgerEntry | None:
        return self._source.entry(step)

    def read(self, entry: LedgerEntry, places: object = None) -> TrainingBatch:
        self._ranks.tell({"call": "read", "entry": entry.to_json().decode()})
        return read_together(entry, self._ranks, self._source.read)

    def state_dict(self) -> dict[str, object]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._source.load_state_dict(state)


class LeadSaver(Saver):
    """Rank 0's saver: the others write what they hold at the same time."""

    def load_newest(self) -> tuple[int, dict[str, Any], Mapping[str, bytes]] | None:
        found = super().load_newest()
        if found is not None:
            self.ranks.tell({"call": "load", "step": found[0]})
        return found

    def save(self, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> None:
        if self.is_there(step):
            return  # its files are what the manifest says, and must stay so
        self.ranks.tell({"call": "save", "step": step})
        super().save(step, files, state)

    def flush(self) -> None:
        self.ranks.tell({"call": "flush"})
        super().flush()


def say_waiting(ranks: Ranks) -> None:
    """Rank 0 is alive and waits for data."""
    ranks.tell({"call": "wait"})


def say_end(ranks: Ranks) -> None:
    """Rank 0 has ended its loop."""
    ranks.tell({"call": "end"})


class Follower:
    """Every other rank: it makes the calls that rank 0 makes, until that one ends."""

    def __init__(self, ranks: Ranks, engine: TrainEngine, read: Read, saver: Saver, heard: Callable[[], None]) -> None:
        """heard: called for everything that rank 0 says."""
        self._ranks = ranks
        self._engine = engine
        self._read_rows = read
        self._saver = saver
        self._heard = heard
        self._batch: TrainingBatch | None = None
        self._files: dict[str, bytes] = {}

    def run(self) -> None:
        calls: dict[str, Callable[..., object]] = {
            "wait": lambda: None,
            "read": self._read,
            "train_step": self._train_step,
            "weights": self._engine.weights,
            "fingerprint": self._engine.fingerprint,
            "state_files": self._state_files,
            "export_files": self._engine.export_files,
            "load": self._load,
            "save": self._save,
            "flush": self._saver.flush,
        }
        while (told := self._ranks.tell(None))["call"] != "end":
            self._heard()
            calls[told.pop("call")](**told)

    def _read(self, entry: str) -> None:
        self._batch = read_together(LedgerEntry.from_json(entry.encode()), self._ranks, self._read_rows)

    def _train_step(self, step: int) -> None:
        assert self._batch is not None, "rank 0 trains what it has read"
        self._engine.train_step(self._batch, step)

    def _state_files(self) -> None:
        self._files = self._engine.state_files()

    def _load(self, step: int) -> None:
        files = self._saver.files(step)
        if files is None:
            raise DamagedError(f"checkpoint {step}, which rank 0 has read, is not there for this rank")
        self._engine.load_state_files(files)

    def _save(self, step: int) -> None:
        self._saver.save(step, self._files, {})
        self._files = {}
