"""Held versions: what a rank publishes into the memory of its machine, in place of files on storage.

The manifest is on storage all the same, before anybody can serve the version: who asks for its hash or its fingerprint
gets them, and the pointer, the sync styles and the collection of old versions know no difference. The files lie below
/dev/shm, as a node's copy does (node_copy.py), with the lease of the rank: the engines of its machine map them, and
what a rank that was killed has left goes with the next process who looks.

Invariant of those who hold (trainer/trainer.py): what somebody may still load is a file, or held, or is published again
by the trainer that resumes.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from functools import partial

from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import BLOCK_BYTES, FileEntry
from rftdask.synchronizer.node_cache import NodeCopy
from rftdask.synchronizer.published import Held, Published, weights_folder

_TIMEOUT_S = 600.0
"""For another process that puts the same file in its place: one that lives after it was given up for lost."""


class Holder:
    """The versions that one rank holds, of each its own files.

    Example:
        holder = Holder(storage)
        entries = holder.hold(7, {"model.safetensors": data}, fingerprint)   # `data` may change from here on
        holder.files(7)["model.safetensors"]
        holder.keep({7, 8})                                                 # all others go
    """

    def __init__(self, storage: Storage, address: str = "") -> None:
        """address: of who gives what is held here to other machines (dask_tree.py, process_group.py); "": nobody."""
        self._storage, self.address = storage, address
        self._held: dict[int, dict[str, NodeCopy]] = {}
        self._fingerprints: dict[int, Fingerprint | None] = {}

    @property
    def versions(self) -> list[int]:
        """What is held, in the order in which it was published."""
        return list(self._held)

    def hold(
        self, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None = None
    ) -> dict[str, FileEntry]:
        """Copy files into memory; what they are. Raises: StorageError: there is no room for them."""
        self.release(version)
        copies = self._held[version] = {}
        self._fingerprints[version] = fingerprint
        entries = {name: FileEntry.of(data) for name, data in files.items()}
        whole = Published(version, "", "", weights_folder(version), tuple(entries.items()), held=Held())
        try:
            for name, data in files.items():
                give = partial(_block, memoryview(data))
                copies[name] = NodeCopy(self._storage, whole.part(name), _TIMEOUT_S, lambda *_, give=give: give)
        except BaseException:
            self.release(version)
            raise
        return entries

    def fingerprint(self, version: int) -> Fingerprint | None:
        """What was given to `hold`."""
        return self._fingerprints[version]

    def files(self, version: int) -> dict[str, Data]:
        """The files of a version, mapped."""
        mapped: dict[str, Data] = {}
        for name, copy in self._held[version].items():
            with copy.files[0].open("rb") as file:
                mapped[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return mapped

    def keep(self, versions: Collection[int]) -> None:
        """Let go of all others."""
        for version in self._held.keys() - set(versions):
            self.release(version)

    def release(self, version: int) -> None:
        """Let go of a version. Idempotent."""
        self._fingerprints.pop(version, None)
        for copy in self._held.pop(version, {}).values():
            copy.close()


def _block(data: memoryview, number: int) -> memoryview:
    return data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
