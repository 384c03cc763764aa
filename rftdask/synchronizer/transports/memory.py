"""In-memory transport: a rank publishes into the memory of its machine instead of storage.

The manifest is still written to storage before any engine can load the version, so hash, fingerprint, pointer, sync
styles and removal of old versions work as usual. The files lie in the node cache below /dev/shm (node_cache.py), locked
by the rank: engines of its machine map them, and files of a killed rank are removed by the next process that looks.

Invariant (kept by trainer/trainer.py): every version that an engine may still load is on storage, or in memory, or is
published again by the resuming trainer.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from functools import partial

from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import BLOCK_BYTES, FileEntry
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import Published, weights_folder

_TIMEOUT_S = 600.0
"""Seconds to wait for another process that writes the same file, such as a rank wrongly considered lost."""


class InMemoryPublisher:
    """Versions in the memory of one rank: its files of each version.

    Example:
        holder = InMemoryPublisher(storage)
        entries = holder.hold(7, {"model.safetensors": data}, fingerprint)   # `data` may change afterwards
        holder.files(7)["model.safetensors"]
        holder.keep({7, 8})                                                 # releases all others
    """

    def __init__(self, storage: Storage, address: str = "") -> None:
        """address: where other machines fetch the files (dask_broadcast.py, group_broadcast.py). "": nowhere."""
        self._storage, self.address = storage, address
        self._held: dict[int, tuple[dict[str, NodeCache], Fingerprint | None]] = {}

    @property
    def versions(self) -> list[int]:
        """Versions in memory, in the order of publication."""
        return list(self._held)

    def hold(
        self, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None = None
    ) -> dict[str, FileEntry]:
        """Copy files into memory and return their entries. Raises: StorageError: not enough memory."""
        self.release(version)
        copies: dict[str, NodeCache] = {}
        self._held[version] = copies, fingerprint
        entries = {name: FileEntry.of(data) for name, data in files.items()}
        whole = Published(version, "", "", weights_folder(version), tuple(entries.items()), held={})
        try:
            for name, data in files.items():
                give = partial(_block, memoryview(data))
                copies[name] = NodeCache(self._storage, whole.part(name), _TIMEOUT_S, lambda *_, give=give: give)
        except BaseException:
            self.release(version)
            raise
        return entries

    def fingerprint(self, version: int) -> Fingerprint | None:
        return self._held[version][1]

    def files(self, version: int) -> dict[str, Data]:
        """Files of a version, memory-mapped."""
        mapped: dict[str, Data] = {}
        for name, copy in self._held[version][0].items():
            with copy.files[0].open("rb") as file:
                mapped[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return mapped

    def keep(self, versions: Collection[int]) -> None:
        for version in self._held.keys() - set(versions):
            self.release(version)

    def release(self, version: int) -> None:
        """Release a version. Idempotent."""
        for copy in self._held.pop(version, ({}, None))[0].values():
            copy.close()


def _block(data: memoryview, number: int) -> memoryview:
    return data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
