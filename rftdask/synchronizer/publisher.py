"""Publisher: publishes the versions of one trainer, completely or as deltas from the previous version.

Invariants: files are written first, then the manifest, then the pointer; the content hash covers the complete files,
however a version is stored; the base of a delta is the version that these same processes wrote before, bit by bit. It
knows neither how weights are trained nor which engines load them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftdask.errors import RftError, StorageError
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer import manifest as manifests
from rftdask.synchronizer import published as publications
from rftdask.synchronizer.delta import ENDING, compute_delta
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import FileEntry, Manifest, put_files
from rftdask.synchronizer.published import WEIGHTS_POINTER, Published
from rftdask.synchronizer.tensor_heads import read_head
from rftdask.synchronizer.transports.memory import InMemoryPublisher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Written:
    """Version that was written last, with its bytes."""

    published: Published
    files: Mapping[str, Data]
    """Files of this rank."""
    num_deltas: int
    """Deltas since the last complete version. 0: this version is complete."""


class Publisher:
    """Example, on each rank:

    publisher = Publisher(storage, "main", full_publish_interval=10)
    publisher.publish(1, engine.weights(), engine.fingerprint())   # complete
    publisher.publish(2, engine.weights(), engine.fingerprint())   # as a delta from version 1
    """

    def __init__(
        self,
        storage: Storage,
        lineage: str,
        full_publish_interval: int = 1,
        writers: Ranks | None = None,
        holder: InMemoryPublisher | None = None,
    ) -> None:
        """
        Args:
            full_publish_interval: publish every n-th version completely. 1: every version; larger: the bytes of the
                last version stay in memory.
            writers: all ranks, which make every call together. None: a single rank.
            holder: keeps the files of this rank in memory until `write_held`. None: write them at once.
        """
        self._storage, self._lineage, self._interval = storage, lineage, full_publish_interval
        self._writers = writers or Ranks()
        self._holder = holder
        self._last: _Written | None = None
        # The version before the last one, until its files are reused.
        self._before: _Written | None = None
        self._spare: Mapping[str, Data] = {}

    def take_spare(self) -> Mapping[str, Data]:
        """Buffers passed to `publish` that are free for reuse; returned once. Not during a `publish`."""
        spare, self._spare, self._before = self._spare, {}, None
        return spare

    def publish(self, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None = None) -> Published:
        """Make the `files` of all ranks the weights of `version`, then move the pointer.

        The caller must not change `files` afterwards. A file that several ranks pass is written by the lowest one.
        An existing loadable version is kept, and the next version is then published completely.
        Raises: StorageError: on all ranks, if one rank cannot write.
        """
        last, self._last = self._last, None
        exists = self._writers.rank == 0 and publications.is_loadable(self._storage, version)
        if self._writers.broadcast(exists):
            # Its bytes may differ from `files` if steps are not bit-repeatable, so it cannot be the base of a delta.
            existing = publications.read_published(self._storage, version)
            if existing is None:
                raise StorageError(f"the manifest of {publications.weights_folder(version)} vanished while it was read")
            if self._writers.rank == 0:
                publications.move_pointer(self._storage, WEIGHTS_POINTER, version)
            self._spare = files
            return existing
        names = self._writers.all_gather(list(files))
        lower_names = {name for lower in names[: self._writers.rank] for name in lower}
        part = {name: data for name, data in files.items() if name not in lower_names}
        if self._holder is not None:
            held = self._hold(self._holder, version, part, fingerprint)
            self._spare = files
            return held or self._write(version, part, {}, fingerprint, None)
        deltas: dict[str, bytes] | None = None
        if last is not None and last.num_deltas + 1 < self._interval:
            deltas = _compute_deltas(last.files, part)
        # All ranks or none: a version has one base, or none.
        if last is None or not all(self._writers.all_gather(deltas is not None)):
            published = self._write(version, part, {}, fingerprint, None)
        else:
            published = self._write(version, part, deltas or {}, fingerprint, last.published)
        self._spare = files
        if self._interval > 1:
            self._spare = {} if last is None else last.files
            self._before = last
            self._last = _Written(
                published, part, 0 if published.delta is None or last is None else last.num_deltas + 1
            )
        return published

    def write_whole(self, version: int) -> None:
        """Write the complete files of a version that was published as a delta, if their bytes are still in memory:
        those of the last version and, until `take_spare`, of the version before. Raises: as `publish`.
        """
        for written in (self._last, self._before):
            if written is None or not written.num_deltas or written.published.version != version:
                continue
            # The manifest is replaced atomically, and the delta files stay readable.
            self._write(version, written.files, {}, written.published.fingerprint, None)
            if written is self._last:
                self._last = replace(written, published=replace(written.published, delta=None), num_deltas=0)

    def write_held(self) -> None:
        """Write all in-memory versions that are still listed to storage, then release them. Raises: as `publish`."""
        if self._holder is None:
            return
        self._holder.keep(self._writers.broadcast(publications.published_versions(self._storage)))
        for version in self._holder.versions:
            self._write(version, self._holder.files(version), {}, self._holder.fingerprint(version), None)
            self._holder.release(version)

    def _hold(
        self, holder: InMemoryPublisher, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None
    ) -> Published | None:
        """Keep the files of this rank in memory; rank 0 writes the manifest. None: a rank lacks memory."""
        try:
            entries = holder.hold(version, files, fingerprint)
            report = {"stored": manifests.entries_to_json(entries), "address": holder.address}
        except StorageError as error:
            log.warning("version %d is written to storage instead of memory: %s", version, error)
            report = manifests.failure(error)
        reports = self._writers.all_gather(report)
        if any("error" in report for report in reports):
            holder.release(version)
            return None
        addresses = {name: report["address"] for report in reports for name in report["stored"] if report["address"]}
        stored = manifests.entries_from_json(*(report["stored"] for report in reports))
        extra = publications.fingerprint_extra(fingerprint) | {publications.HELD: {"addresses": addresses}}
        # Hash and fingerprint go to storage before any engine loads the version, and outlive the ranks.
        published = self._commit(Manifest(self._lineage, version, stored, extra))
        # Versions that the explorer has removed meanwhile are no longer needed.
        holder.keep(self._writers.broadcast(publications.published_versions(self._storage)))
        return published

    def _write(
        self,
        version: int,
        files: Mapping[str, Data],
        deltas: Mapping[str, bytes],
        fingerprint: Fingerprint | None,
        base: Published | None,
    ) -> Published:
        """Write the files of this rank, or `deltas` if there is a base; rank 0 writes the manifest after all ranks."""
        folder = publications.weights_folder(version)
        report: dict[str, Any] = {}
        try:
            stored = put_files(self._storage, folder, files if base is None else deltas)
            whole = stored if base is None else {name: FileEntry.of(data) for name, data in files.items()}
            report = {"stored": manifests.entries_to_json(stored), "whole": manifests.entries_to_json(whole)}
            if self._writers.size > 1:
                report["tensors"] = {name: _tensors_in(data) for name, data in files.items()}
        except RftError as error:
            if self._writers.size == 1:
                raise
            report = manifests.failure(error)
        # Also a barrier: the manifest below lists files of every rank.
        reports = self._writers.all_gather(report)
        manifests.check_reports(reports, f"version {version}")
        entries, complete = (
            manifests.entries_from_json(*(report[key] for report in reports)) for key in ("stored", "whole")
        )
        extra = publications.fingerprint_extra(fingerprint)
        if base is not None:
            end = base.version if base.delta is None else base.delta.whole
            origin = {"base": base.version, "base_hash": base.content_hash, "whole": end}
            extra[publications.DELTA] = {**origin, "files": manifests.entries_to_json(complete)}
        elif sum(bool(report["whole"]) for report in reports) > 1:  # files of one rank, such as adapters, need no index
            index = _index(reports, complete)
            # All ranks compute the same bytes, and rank 0 writes them.
            entries[publications.INDEX_FILE] = FileEntry.of(index)
            if self._writers.rank == 0:
                put_files(self._storage, folder, {publications.INDEX_FILE: index})
        return self._commit(Manifest(self._lineage, version, entries, extra))

    def _commit(self, manifest: Manifest) -> Published:
        """Write the manifest of a version on rank 0, whose files are written or in memory, then move the pointer."""
        folder = publications.weights_folder(manifest.version)
        if self._writers.rank == 0:
            manifests.commit_folder(self._storage, folder, manifest)
            # Last: a kill before this line leaves a valid folder without a pointer, which the resumed trainer keeps.
            publications.move_pointer(self._storage, WEIGHTS_POINTER, manifest.version)
        return publications.published_as(manifest, folder)


def _compute_deltas(old: Mapping[str, Data], new: Mapping[str, Data]) -> dict[str, bytes] | None:
    """Deltas of all files. None: the files differ in name, or a delta is not worth it."""
    if old.keys() != new.keys():
        return None
    deltas = {}
    for name, data in new.items():
        delta = compute_delta(old[name], data)
        if delta is None:
            return None
        deltas[name + ENDING] = delta
    return deltas


def _tensors_in(file: Data) -> list[str]:
    """Tensor names of a safetensors file; empty for any other file."""
    try:
        head, _ = read_head(lambda begin, end: file[begin:end])
    except ValueError:
        return []
    return [name for name in head if name != "__metadata__"]


def _index(reports: Sequence[Mapping[str, Any]], files: Mapping[str, FileEntry]) -> bytes:
    """Index from tensor to file in the Hugging Face format."""
    places = {tensor: name for report in reports for name, names in report["tensors"].items() for tensor in names}
    total = sum(entry.size_bytes for entry in files.values())
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(tree, indent=1).encode()
