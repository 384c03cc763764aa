"""Saver: writes checkpoints beside the training, each rank what it holds, rank 0 the manifest when all have written.

`save` returns when the state is copied; a thread writes it. The next `save` waits for the last, and `flush` for all. A
write that failed on any rank is the error of the next call, on every rank, and no checkpoint: it has no manifest.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rftdask.errors import RftError, StorageError
from rftdask.storage import Storage
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.ranks import Ranks
from rftdask.weights.manifest import FileEntry

STRATEGIES = ("single_thread", "single_process", "single_node", "unrestricted")


def turns_of(strategy: str, hosts: Sequence[str]) -> list[int]:
    """When each rank writes; those of one turn write at once. hosts: of each rank.

    unrestricted: all at once. single_node: the ranks of one host at once. single_process, single_thread: one by one.
    """
    if strategy == "unrestricted":
        return [0] * len(hosts)
    if strategy == "single_node":
        order = list(dict.fromkeys(hosts))
        return [order.index(host) for host in hosts]
    return list(range(len(hosts)))


class Saver(Checkpoints):
    """Checkpoints of a gang, written in the background."""

    def __init__(
        self,
        storage: Storage,
        lineage: str,
        max_to_keep: int = 0,
        *,
        ranks: Ranks,
        writers: Ranks,
        strategy: str = "unrestricted",
    ) -> None:
        """writers: the same ranks over a process group of their own, since its calls are made from a thread.

        strategy: one of STRATEGIES; single_thread writes in the caller's.
        """
        super().__init__(storage, lineage, max_to_keep)
        self.ranks = ranks
        self._writers = writers
        self._turns = turns_of(strategy, ranks.all_gather(socket.gethostname()))
        self._in_background = strategy != "single_thread"
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def load_newest(self) -> tuple[int, dict[str, Any], Mapping[str, bytes]] | None:
        """As of `Checkpoints`, on all ranks the one that rank 0 found valid."""
        found = super().load_newest() if self.ranks.is_rank0 else None
        step = self.ranks.broadcast(None if found is None else found[0])
        return self.load(step) if found is None and step is not None else found

    def save(self, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> None:
        """Each rank writes its `files` in the background, rank 0 the manifest with `state`. Called by all ranks.

        Raises: RftError: this checkpoint or the one before could not be written.
        """
        self._wait()
        if self.ranks.broadcast(self.ranks.is_rank0 and self.is_there(step)):
            return  # its files are what the manifest says, and must stay so
        self._thread = threading.Thread(target=self._guarded, args=(step, files, state), name="saver", daemon=True)
        self._thread.start()
        if not self._in_background:
            self._wait()

    def check(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._wait()

    def flush(self) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()  # it ends: storage has its retries, the process group its deadline
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _guarded(self, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> None:
        try:
            self._write(step, files, state)
        except BaseException as error:  # carried to the thread that trains, and raised there
            self._failure = error

    def _write(self, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> None:
        written: dict[str, Any] = {}
        for turn in range(max(self._turns) + 1):
            if turn:
                self._writers.all_gather(None)  # all of the turn before have written
            if turn == self._turns[self._writers.rank]:
                written = self._written(step, files)
        reports = self._writers.all_gather(written)
        for rank, report in enumerate(reports):
            if "error" in report:
                raise StorageError(f"rank {rank} could not write its part of checkpoint {step}: {report['error']}")
        if self.ranks.is_rank0:
            entries = {name: FileEntry(**entry) for report in reports for name, entry in report["files"].items()}
            self.commit(step, entries, state)

    def _written(self, step: int, files: Mapping[str, bytes]) -> dict[str, Any]:
        try:
            entries = self.put_files(step, files)
        except RftError as error:
            if self.ranks.size == 1:
                raise
            return {"error": f"{type(error).__name__}: {error}"}
        return {"files": {name: {"size_bytes": e.size_bytes, "sha256": e.sha256} for name, e in entries.items()}}
