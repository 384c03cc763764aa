"""Published weights: versions that the trainer publishes and explorers load, and the pointer to the newest.

`weights/<N>/` holds the state dict of policy version N. `latest_state_dict_iteration.txt` holds N and moves after the
manifest is written. A version may be stored as a delta from an earlier version (delta.py); its manifest still lists the
hashes of the complete files. With an in-memory transport only the manifest is stored (transports/memory.py).

Invariants: the pointer names only complete versions and never goes back within a lineage; an unreadable pointer counts
as no change; the versions that a kept delta needs are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import numbers_in
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import FileEntry, Manifest, is_valid, read_manifest, remove_folder

WEIGHTS_POINTER = "latest_state_dict_iteration.txt"
CHECKPOINT_POINTER = "latest_checkpointed_iteration.txt"
REQUEST_FILE = "control/requested_version.txt"
"""Request of weights of this version or newer (explorer_driven)."""
WHOLE_FILE = "control/whole_version.txt"
"""Request of the complete files of this version, whose base or in-memory copies are out of reach."""
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Index from tensor to file, for Hugging Face readers, if several ranks wrote. Engines do not need it."""
CHECKPOINT_FOLDER = "actor"
"""Folder of the policy and its optimizer in a checkpoint."""
CHECKPOINT_MODEL_FILE = f"{CHECKPOINT_FOLDER}/{MODEL_FILE}"
"""Weights in a checkpoint written by one rank; several ranks use the names of `model_file`."""
CHECKPOINT_ADAPTER_FOLDER = "actor/lora_adapter"
"""Replaces the model's files in a checkpoint if only adapters are trained."""
_MODEL_FILES = re.compile(rf"{CHECKPOINT_FOLDER}/model(-\d+-of-\d+)?\.safetensors")
DELTA = "delta"
"""Manifest key of a version stored as a delta: `Delta` and the entries of the complete files."""
HELD = "held"
"""Manifest key of a version in memory: {"addresses": `Published.held`}."""
WEIGHTS_HASH = "weights_hash"
"""Manifest key of a checkpoint: content hash of the same weights as published."""
_FINGERPRINT = TypeAdapter(Fingerprint)
"""Made once: it takes milliseconds, and waiting roles read a manifest in every poll."""


@dataclass(frozen=True)
class Delta:
    """Difference between a version and an earlier one, its base."""

    base: int
    """Version that the delta applies to."""
    base_hash: str
    """Content hash of the base."""
    whole: int
    """Version at the end of the chain of bases, stored completely."""
    files: tuple[tuple[str, FileEntry], ...]
    """Stored delta files, `a.delta` for file `a`, in the order of the complete files."""


@dataclass(frozen=True)
class Published:
    """A version that explorers can load. Version 0, the initial weights, is the model folder and is never published."""

    version: int
    lineage: str
    content_hash: str
    folder: str = ""
    """Folder of the files, below the run's."""
    files: tuple[tuple[str, FileEntry], ...] = ()
    """(name below the folder, entry); together they hold the complete state dict. For a delta they must be rebuilt."""
    fingerprint: Fingerprint | None = None
    """Logprobs that an engine must reproduce. None: the trainer has no model to compute them."""
    delta: Delta | None = field(default=None, compare=False)
    """How to rebuild the files from another version. None: stored completely. Ignored in comparisons."""
    held: Mapping[str, str] | None = field(default=None, compare=False)
    """File -> address, if the files are in the memory of the ranks that published them: tcp://host:port or
    tls://host:port of a Dask worker (dask_broadcast.py), or host:port of the rank's rendezvous server
    (group_broadcast.py). {}: all engines run on the trainer's machine. None: the files are on storage. Ignored in
    comparisons."""

    def holder(self, name: str) -> str:
        """Return the address of a file in memory. Raises: NotFoundError: other machines cannot fetch it."""
        if name not in (held := self.held or {}):
            raise NotFoundError(f"no process serves {self.folder}/{name}")
        return held[name]

    @property
    def changes(self) -> Published:
        """Delta files, as a version that can be fetched."""
        assert self.delta is not None
        content_hash = Manifest("", 0, dict(self.delta.files)).content_hash
        return replace(self, content_hash=content_hash, files=self.delta.files, delta=None)

    def part(self, name: str) -> Published:
        """A single file, as a version that can be fetched."""
        files = tuple((file, entry) for file, entry in self.files if file == name)
        return replace(self, content_hash=Manifest("", 0, dict(files)).content_hash, files=files)


def model_file(rank: int, num_ranks: int) -> str:
    """Name of the file that a rank publishes, in the Hugging Face convention."""
    return MODEL_FILE if num_ranks == 1 else f"model-{rank + 1:05}-of-{num_ranks:05}.safetensors"


def model_files(names: Iterable[str]) -> list[str]:
    """Names of the policy's weight files among the files of a checkpoint; together they hold all tensors."""
    return [name for name in names if _MODEL_FILES.fullmatch(name)]


def weights_folder(version: int) -> str:
    return f"weights/{version}"


def read_pointer(storage: Storage, pointer: str) -> int | None:
    """Number in a pointer file. None: missing, empty or not a number, all of which mean "unchanged"."""
    try:
        numbers = numbers_in([storage.get(pointer).decode(errors="replace").strip()])
    except NotFoundError:
        return None
    return numbers[0] if numbers else None


def move_pointer(storage: Storage, pointer: str, number: int) -> bool:
    """Move the pointer forward to `number`; True if it moved. Only the lineage's trainer may call this.

    A larger pointer whose target does not exist is damaged and is overwritten: one flipped bit turns 10 into 90.
    """
    now = read_pointer(storage, pointer)
    if now == number:
        return False
    if now is not None and now > number:
        folder = weights_folder(now) if pointer == WEIGHTS_POINTER else f"global_step_{now}"
        # The target exists: a resumed trainer repeats steps that were published before.
        if _try_manifest(storage, folder) is not None:
            return False
    storage.put(pointer, f"{number}\n".encode())
    return True


def bases_of(storage: Storage, published: Published) -> Iterator[Published]:
    """Chain of bases of a delta, nearest first, ending with a completely stored version; empty if `published` is one.

    Raises: DamagedError: a base is missing or was replaced.
    """
    while published.delta is not None:
        base = read_published(storage, published.delta.base)
        if base is None or base.content_hash != published.delta.base_hash:
            raise DamagedError(
                f"{published.folder} is a delta from version {published.delta.base}, which was removed or replaced"
            )
        yield base
        published = base


def is_loadable(storage: Storage, version: int) -> bool:
    """True if the files of a version and of all its bases are on storage and intact. Reads every byte."""
    try:
        published = read_published(storage, version)
        # Some files of a version in memory may already be written.
        if published is None or published.held is not None:
            return False
        return all(is_valid(storage, p.folder, p.version) for p in (published, *bases_of(storage, published)))
    except DamagedError:
        return False


def read_published(storage: Storage, version: int) -> Published | None:
    """Read the publication of `version`. None: missing or not readable (yet)."""
    folder = weights_folder(version)
    manifest = _try_manifest(storage, folder)
    # A folder copied or renamed by hand does not hold the version in its name.
    return None if manifest is None or manifest.version != version else published_as(manifest, folder)


def read_checkpoint_weights(storage: Storage, folder: str) -> Published | None:
    """Read `checkpoint_weights`. None: the checkpoint is not valid (yet)."""
    manifest = _try_manifest(storage, folder)
    return None if manifest is None else checkpoint_weights(manifest, folder)


def checkpoint_weights(manifest: Manifest, folder: str) -> Published | None:
    """Policy weights in the checkpoint of `folder`, in the form of a publication. None: it has no known weight files.

    The content hash is that of the publication: experiences record it, wherever the engine loaded from.
    """
    adapters = [name for name in manifest.files if name.startswith(f"{CHECKPOINT_ADAPTER_FOLDER}/")]
    files = {name: manifest.files[name] for name in sorted(adapters or model_files(manifest.files))}
    if not files:
        return None
    # The hash covers names, so the folders of a checkpoint are removed from them. Weights published in another data
    # type are other bytes, so the trainer records their hash.
    bare = replace(manifest, files={name.rpartition("/")[2]: entry for name, entry in files.items()})
    content_hash = str(manifest.extra.get(WEIGHTS_HASH) or bare.content_hash)
    fingerprint = fingerprint_of(manifest)
    return Published(manifest.version, manifest.lineage, content_hash, folder, tuple(files.items()), fingerprint)


def published_as(manifest: Manifest, folder: str) -> Published:
    """Publication described by the manifest of `folder`. Raises: DamagedError: its `extra` cannot be read."""
    files, delta = tuple((name, entry) for name, entry in sorted(manifest.files.items()) if name != INDEX_FILE), None
    held = None
    try:
        if DELTA in manifest.extra:
            tree = manifest.extra[DELTA]
            delta = Delta(int(tree["base"]), str(tree["base_hash"]), int(tree["whole"]), files)
            files = tuple((name, FileEntry.from_json(entry)) for name, entry in sorted(tree["files"].items()))
        if HELD in manifest.extra:
            held = dict(manifest.extra[HELD]["addresses"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the manifest of version {manifest.version} is damaged: {error!r}") from error
    content_hash = replace(manifest, files=dict(files)).content_hash
    fingerprint = fingerprint_of(manifest)
    return Published(manifest.version, manifest.lineage, content_hash, folder, files, fingerprint, delta, held)


def fingerprint_extra(fingerprint: Fingerprint | None) -> dict[str, Any]:
    return {} if fingerprint is None else {"fingerprint": asdict(fingerprint)}


def fingerprint_of(manifest: Manifest) -> Fingerprint | None:
    """Fingerprint in a manifest, or None. Raises: DamagedError: it cannot be read."""
    if "fingerprint" not in manifest.extra:
        return None
    try:
        return _FINGERPRINT.validate_python(manifest.extra["fingerprint"])
    except ValueError as error:
        raise DamagedError(f"the fingerprint of version {manifest.version} is damaged: {error!r}") from error


def latest_published(storage: Storage) -> Published | None:
    """Version that the pointer names. None: nothing is published."""
    version = read_pointer(storage, WEIGHTS_POINTER)
    return None if version is None else read_published(storage, version)


def request_version(storage: Storage, version: int, file: str = REQUEST_FILE) -> None:
    """Request a version from the trainer, by one of the files above."""
    storage.put(file, f"{version}\n".encode())


def read_requested_version(storage: Storage, file: str = REQUEST_FILE) -> int:
    """Requested version. 0: no request."""
    # A damaged request is ignored; the next request replaces it.
    return read_pointer(storage, file) or 0


def published_versions(storage: Storage) -> list[int]:
    """Versions with a folder below `weights/`, ascending. A folder may still be incomplete."""
    return numbers_in(storage.list("weights"), suffix="/")


def held_versions(storage: Storage, after: int) -> list[int]:
    """Versions newer than `after` whose files are, or were, only in the memory of ranks."""
    versions = []
    for version in published_versions(storage):
        with suppress(DamagedError):
            published = read_published(storage, version) if version > after else None
            if published is not None and published.held is not None:
                versions.append(version)
    return versions


def latest_written(storage: Storage) -> Published | None:
    """Newest version whose files are on storage, or None."""
    newest = latest_published(storage)
    if newest is None or newest.held is None:
        return newest
    older = (read_published(storage, version) for version in reversed(published_versions(storage)))
    return next((version for version in older if version is not None and version.held is None), None)


def remove_weights_below(storage: Storage, version: int) -> None:
    """Remove published weights older than `version`, except bases of kept deltas and the newest version.

    Does nothing if there is no pointer.
    """
    newest = read_pointer(storage, WEIGHTS_POINTER)
    if newest is None:
        return
    versions = published_versions(storage)
    # An explorer that starts now reads the pointer first, so the version it names must exist.
    first = min(version, newest)
    if not versions or versions[0] >= first:
        return
    for number in [number for number in versions if number >= first]:
        with suppress(DamagedError):  # an unreadable version has no base to keep
            kept = read_published(storage, number)
            if kept is not None and kept.delta is not None:
                first = min(first, kept.delta.whole)
    # Newest first, so that a delta is removed before its base.
    for number in reversed(versions):
        if number < first:
            remove_folder(storage, weights_folder(number))


def _try_manifest(storage: Storage, folder: str) -> Manifest | None:
    try:
        return read_manifest(storage, folder)
    except DamagedError:
        return None
