"""Publisher: the versions that one trainer publishes in its life, most of them as what has changed since the one
before.

Invariants: files, then the manifest, then the pointer; a version is named by its whole, so whoever asks for its hash
gets the same however it was published; a delta is of nothing but the version that these processes wrote before, bit by
bit. It knows neither how weights are trained nor who loads them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rftdask.errors import RftError, StorageError
from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer.delta import ENDING, compute_delta
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import FileEntry, Manifest, check_reports, commit_folder, failure, put_files
from rftdask.synchronizer.published import (
    INDEX_FILE,
    WEIGHTS_POINTER,
    Delta,
    Held,
    Published,
    delta_extra,
    fingerprint_extra,
    held_extra,
    is_loadable,
    move_pointer,
    published_as,
    published_versions,
    read_published,
    weights_folder,
)
from rftdask.synchronizer.tensor_heads import read_head
from rftdask.synchronizer.transports.memory import Holder

log = logging.getLogger(__name__)


class Writers(Protocol):
    """Those who publish together, as `trainer.ranks.Ranks`."""

    rank: int
    size: int

    def broadcast(self, message: Any) -> Any:
        """The message of rank 0. JSON types."""

    def all_gather(self, message: Any) -> list[Any]:
        """What every rank gives, in their order. JSON types."""


class _Alone:
    rank, size = 0, 1

    def broadcast(self, message: Any) -> Any:
        return message

    def all_gather(self, message: Any) -> list[Any]:
        return [message]


@dataclass(frozen=True)
class _Written:
    """The version that was written last, whose bytes are still here."""

    published: Published
    files: Mapping[str, Data]
    """Those of this rank."""
    num_deltas: int
    """From the whole that it is made of; 0: it is one."""


class Publisher:
    """Example, on each rank:

    publisher = Publisher(storage, "main", full_publish_interval=10)
    publisher.publish(1, engine.weights(), engine.fingerprint())   # as a whole
    publisher.publish(2, engine.weights(), engine.fingerprint())   # as what has changed since 1
    """

    def __init__(
        self,
        storage: Storage,
        lineage: str,
        full_publish_interval: int = 1,
        writers: Writers | None = None,
        holder: Holder | None = None,
    ) -> None:
        """
        Args:
            full_publish_interval: versions from one that is published as a whole to the next; 1: each is. If more, the
                bytes of the last one are kept.
            writers: all ranks, which make every call together; None: this one is alone.
            holder: takes the files of this rank, which are written no sooner than `write_held`; None: they are written.
        """
        self._storage, self._lineage, self._interval = storage, lineage, full_publish_interval
        self._writers: Writers = writers or _Alone()
        self._holder = holder
        self._last: _Written | None = None
        self._spare: Mapping[str, Data] = {}

    def take_spare(self) -> Mapping[str, Data]:
        """What was given to `publish` and is needed no more; once. No `publish` is under way."""
        spare, self._spare = self._spare, {}
        return spare

    def publish(self, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None = None) -> Published:
        """Make the `files` of all ranks, which nobody changes any more, the weights of `version`, then move the
        pointer. A file that several have is written by the lowest of them.

        A version that is there already, with all that it is made of, stays as it is; what follows is a whole.
        Raises: StorageError: on all ranks, if one of them cannot write.
        """
        last, self._last = self._last, None
        is_there = self._writers.rank == 0 and is_loadable(self._storage, version)
        if self._writers.broadcast(is_there):
            # Perhaps not the bytes that are here: where steps do not repeat their bits, they are another life's.
            there = read_published(self._storage, version)
            if there is None:
                raise StorageError(f"{weights_folder(version)} lost its manifest while it was read")
            if self._writers.rank == 0:
                move_pointer(self._storage, WEIGHTS_POINTER, version)
            self._spare = files
            return there
        names = self._writers.all_gather(list(files))
        taken = {name for lower in names[: self._writers.rank] for name in lower}
        own = {name: data for name, data in files.items() if name not in taken}
        if self._holder is not None:
            held = self._hold(self._holder, version, own, fingerprint)
            self._spare = files
            return held or self._write(version, own, {}, fingerprint, None)
        deltas: dict[str, bytes] | None = None
        if last is not None and last.num_deltas + 1 < self._interval:
            deltas = _compute_deltas(last.files, own)
        # All or none: a version is made of one other, or of none.
        if last is None or not all(self._writers.all_gather(deltas is not None)):
            published = self._write(version, own, {}, fingerprint, None)
        else:
            published = self._write(version, own, deltas or {}, fingerprint, last.published)
        self._spare = files
        if self._interval > 1:
            self._spare = {} if last is None else last.files
            self._last = _Written(published, own, 0 if published.delta is None or last is None else last.num_deltas + 1)
        return published

    def write_whole(self, version: int) -> None:
        """Write a version as a whole, too, if it is the last one and is not there as one. Raises: as `publish`."""
        last = self._last
        if last is None or not last.num_deltas or last.published.version != version:
            return
        # In one step from the one to the other; who reads the delta meanwhile finds it still.
        self._write(version, last.files, {}, last.published.fingerprint, None)
        self._last = replace(last, published=replace(last.published, delta=None), num_deltas=0)

    def write_held(self) -> None:
        """Write what is held, and what somebody may still load, as files; it is held no more. Raises: as `publish`."""
        if self._holder is None:
            return
        self._holder.keep(self._writers.broadcast(published_versions(self._storage)))
        for version in self._holder.versions:
            self._write(version, self._holder.files(version), {}, self._holder.fingerprint(version), None)
            self._holder.release(version)

    def _hold(
        self, holder: Holder, version: int, files: Mapping[str, Data], fingerprint: Fingerprint | None
    ) -> Published | None:
        """Hold what this rank has, and on rank 0 write the manifest, which says so; None: a rank has no room for it."""
        try:
            entries = holder.hold(version, files, fingerprint)
            report = {"stored": _to_json(entries), "address": holder.address}
        except StorageError as error:
            log.warning("version %d goes through files: %s", version, error)
            report = failure(error)
        reports = self._writers.all_gather(report)
        if any("error" in told for told in reports):
            holder.release(version)
            return None
        addresses = {name: told["address"] for told in reports for name in told["stored"] if told["address"]}
        manifest = Manifest(
            self._lineage,
            version,
            _from_json([told["stored"] for told in reports]),
            fingerprint_extra(fingerprint) | held_extra(Held(tuple(addresses.items()))),
        )
        if self._writers.rank == 0:
            # Before anybody can load it: what its hash and its fingerprint are outlives those who hold it.
            commit_folder(self._storage, weights_folder(version), manifest)
            move_pointer(self._storage, WEIGHTS_POINTER, version)
        # What the explorer has collected meanwhile nobody asks for.
        holder.keep(self._writers.broadcast(published_versions(self._storage)))
        return published_as(manifest, weights_folder(version))

    def _write(
        self,
        version: int,
        files: Mapping[str, Data],
        deltas: Mapping[str, bytes],
        fingerprint: Fingerprint | None,
        base: Published | None,
    ) -> Published:
        """Write what this rank has, and on rank 0 the manifest when all have written; the deltas if there is a base."""
        folder = weights_folder(version)
        report: dict[str, Any] = {}
        try:
            # Without a manifest they are not there yet for anybody.
            stored = put_files(self._storage, folder, files if base is None else deltas)
            whole = stored if base is None else {name: FileEntry.of(data) for name, data in files.items()}
            report = {"stored": _to_json(stored), "whole": _to_json(whole)}
            if self._writers.size > 1:
                report["tensors"] = {name: _tensors_in(data) for name, data in files.items()}
        except RftError as error:
            if self._writers.size == 1:
                raise
            report = failure(error)
        # Also the sign that all have written: the manifest below names files of every rank.
        reports = self._writers.all_gather(report)
        check_reports(reports, f"version {version}")
        entries, made = (_from_json([told[key] for told in reports]) for key in ("stored", "whole"))
        extra = fingerprint_extra(fingerprint)
        if base is not None:
            end = base.version if base.delta is None else base.delta.whole
            extra |= delta_extra(Delta(base.version, base.content_hash, end, ()), made)
        elif sum(bool(told["whole"]) for told in reports) > 1:  # of one rank's files, such as adapters, none is a part
            index = _index(reports, made)
            # The same bytes on all ranks, of which rank 0 writes them.
            entries[INDEX_FILE] = FileEntry.of(index)
            if self._writers.rank == 0:
                put_files(self._storage, folder, {INDEX_FILE: index})
        manifest = Manifest(self._lineage, version, entries, extra)
        if self._writers.rank == 0:
            commit_folder(self._storage, folder, manifest)
            # Last: a kill before it leaves a folder that nobody names, which the resumed trainer finds and keeps.
            move_pointer(self._storage, WEIGHTS_POINTER, version)
        return published_as(manifest, folder)


def _compute_deltas(old: Mapping[str, Data], new: Mapping[str, Data]) -> dict[str, bytes] | None:
    """A delta of each file; None: they are not the same files, or it would save too little."""
    if old.keys() != new.keys():
        return None
    deltas = {}
    for name, data in new.items():
        delta = compute_delta(old[name], data)
        if delta is None:
            return None
        deltas[name + ENDING] = delta
    return deltas


def _to_json(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    return {name: entry.to_json() for name, entry in entries.items()}


def _from_json(parts: Sequence[Mapping[str, Any]]) -> dict[str, FileEntry]:
    return {name: FileEntry.from_json(entry) for part in parts for name, entry in part.items()}


def _tensors_in(file: Data) -> list[str]:
    """Names of the tensors of a safetensors file; [] if it is none."""
    try:
        head, _ = read_head(lambda begin, end: file[begin:end])
    except ValueError:
        return []
    return [name for name in head if name != "__metadata__"]


def _index(reports: Sequence[Mapping[str, Any]], files: Mapping[str, FileEntry]) -> bytes:
    """The index of the tensors of all files, in the form of Hugging Face."""
    places = {tensor: name for told in reports for name, names in told["tensors"].items() for tensor in names}
    total = sum(entry.size_bytes for entry in files.values())
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(tree, indent=1).encode()
