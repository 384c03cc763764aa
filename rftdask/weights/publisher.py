"""Publisher: the versions that one trainer publishes in its life, most of them as what has changed since the one
before.

Invariants: files, then the manifest, then the pointer; a version is named by its whole, so whoever asks for its hash
gets the same however it was published; a delta is of nothing but the version that this process wrote before, bit by
bit. It knows neither how weights are trained nor who loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.weights.delta import ENDING, compute_delta
from rftdask.weights.fingerprint import Fingerprint
from rftdask.weights.manifest import FileEntry, Manifest, commit_folder, put_files, read_manifest
from rftdask.weights.published import (
    WEIGHTS_POINTER,
    Delta,
    Published,
    delta_extra,
    fingerprint_extra,
    is_loadable,
    move_pointer,
    publish_weights,
    read_published,
    weights_folder,
)


@dataclass(frozen=True)
class _Written:
    """The version that was written last, whose bytes are still here."""

    published: Published
    files: Mapping[str, Data]
    num_deltas: int
    """From the whole that it is made of; 0: it is one."""


class Publisher:
    """Example:

    publisher = Publisher(storage, "main", whole_interval=10)
    publisher.publish(1, engine.weights(), engine.fingerprint())   # as a whole
    publisher.publish(2, engine.weights(), engine.fingerprint())   # as what has changed since 1
    """

    def __init__(self, storage: Storage, lineage: str, whole_interval: int = 1) -> None:
        """whole_interval: versions from one that is published as a whole to the next; 1: each is. If more, the bytes of
        the last one are kept.
        """
        self._storage, self._lineage, self._interval = storage, lineage, whole_interval
        self._last: _Written | None = None

    def publish(self, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None = None) -> Published:
        """Make `files`, which nobody changes any more, the weights of `version`, then move the pointer.

        A version that is there already, with all that it is made of, stays as it is; what follows is a whole.
        Raises: StorageError.
        """
        last, self._last = self._last, None
        there = read_published(self._storage, version)
        if there is not None and is_loadable(self._storage, version):
            # Perhaps not the bytes that are here: where steps do not repeat their bits, they are another life's.
            move_pointer(self._storage, WEIGHTS_POINTER, version)
            return there
        deltas = {}
        if last is not None and last.num_deltas + 1 < self._interval:
            deltas = _compute_deltas(last.files, files)
        if deltas and last is not None:
            published = self._write_deltas(version, files, deltas, last.published, fingerprint)
        else:
            published = publish_weights(self._storage, version, files, self._lineage, fingerprint)
        if self._interval > 1:
            self._last = _Written(published, files, last.num_deltas + 1 if deltas and last is not None else 0)
        return published

    def write_whole(self, version: int) -> None:
        """Write a version as a whole, too, if it is the last one and is not there as one. Raises: StorageError."""
        last = self._last
        if last is None or not last.num_deltas or last.published.version != version:
            return
        folder = last.published.folder
        manifest = read_manifest(self._storage, folder)
        if manifest is not None:
            extra = fingerprint_extra(last.published.fingerprint)
            entries = put_files(self._storage, folder, last.files)
            # In one step from the one to the other; who reads the delta meanwhile finds it still.
            commit_folder(self._storage, folder, Manifest(manifest.lineage, manifest.version, entries, extra))
            self._last = _Written(replace(last.published, delta=None), last.files, 0)

    def _write_deltas(
        self,
        version: int,
        files: Mapping[str, Data],
        deltas: Mapping[str, bytes],
        base: Published,
        fingerprint: Fingerprint | None,
    ) -> Published:
        folder = weights_folder(version)
        entries = put_files(self._storage, folder, deltas)
        end = base.version if base.delta is None else base.delta.whole
        delta = Delta(base.version, base.content_hash, end, tuple(sorted(entries.items())))
        whole = {name: FileEntry.of(data) for name, data in files.items()}
        extra = fingerprint_extra(fingerprint) | delta_extra(delta, whole)
        commit_folder(self._storage, folder, Manifest(self._lineage, version, entries, extra))
        move_pointer(self._storage, WEIGHTS_POINTER, version)
        published = read_published(self._storage, version)
        assert published is not None
        return published


def _compute_deltas(old: Mapping[str, Data], new: Mapping[str, Data]) -> dict[str, bytes]:
    """A delta of each file; {}: they are not the same files, or it would save too little."""
    deltas = {}
    for name, data in new.items() if old.keys() == new.keys() else ():
        delta = compute_delta(old[name], data)
        if delta is None:
            return {}
        deltas[name + ENDING] = delta
    return deltas
