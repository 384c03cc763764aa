"""Weights: what the trainer publishes and the explorers load, and the pointer that names the newest.

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

from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import Data, numbers_in
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import FileEntry, Manifest, is_valid, read_manifest, remove_folder, write_folder

WEIGHTS_POINTER = "latest_state_dict_iteration.txt"
CHECKPOINT_POINTER = "latest_checkpointed_iteration.txt"
REQUEST_FILE = "control/requested_version.txt"
WHOLE_FILE = "control/whole_version.txt"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Where several ranks wrote: the file of each tensor, as Hugging Face's readers want it. Engines need none."""
CHECKPOINT_FOLDER = "actor"
"""In a checkpoint, of the policy and its optimizer."""
CHECKPOINT_MODEL_FILE = f"{CHECKPOINT_FOLDER}/{MODEL_FILE}"
"""Where one rank wrote; several wrote files with the names of `model_file`."""
CHECKPOINT_ADAPTER_FOLDER = "actor/lora_adapter"
"""In the place of the model's files, where adapters alone are trained."""
_ADAPTERS = f"{CHECKPOINT_ADAPTER_FOLDER}/"
_MODEL_FILES = re.compile(rf"{CHECKPOINT_FOLDER}/model(-\d+-of-\d+)?\.safetensors")
_DELTA = "delta"
"""In the manifest of a version that is there as what has changed: `Delta` and the files of the whole."""
_HELD = "held"
"""In the manifest of a version whose files are not there: `Held`."""
WEIGHTS_HASH = "weights_hash"
"""In the manifest of a checkpoint: the content hash of the same weights as they were published."""


@dataclass(frozen=True)
class Delta:
    """How a version is made of another one."""

    base: int
    """The version of which it is made,"""
    base_hash: str
    """and the content hash of that."""
    whole: int
    """The version at the end of the chain, which is there as a whole."""
    files: tuple[tuple[str, FileEntry], ...]
    """What is there in place of the files of the whole, and in their order: for `a`, `a.delta`."""


@dataclass(frozen=True)
class Held:
    """Location of a version's files that are not on storage: in the memory of the ranks that published it.

    The version exists as long as these ranks do, unless it is written to storage before (transports/memory.py).
    """

    addresses: tuple[tuple[str, str], ...] = ()
    """For each file where other machines get it: tcp://host:port or tls://host:port, a Dask worker on the machine of
    its rank (dask_tree.py), or host:port, where that takes who wants it into a process group (process_group.py). None:
    nowhere, since all engines are on the machine of the trainer."""


@dataclass(frozen=True)
class Published:
    """A version that explorers can load. Version 0, the initial weights, is never published: it is the model folder."""

    version: int
    lineage: str
    content_hash: str
    folder: str = ""
    """Where its files are."""
    files: tuple[tuple[str, FileEntry], ...] = ()
    """Name below the folder, and what it must be; their union is the whole state dict. Of a delta they are not there,
    but have to be made."""
    fingerprint: Fingerprint | None = None
    """What an engine that loaded it must compute; None: the trainer has no model to say so."""
    delta: Delta | None = field(default=None, compare=False)
    """None: it is there as a whole. The same weights either way."""
    held: Held | None = field(default=None, compare=False)
    """None: its files are on storage. The same weights either way."""

    @property
    def changes(self) -> Published:
        """The files of the delta, as if they were a version of their own."""
        assert self.delta is not None
        content_hash = Manifest("", 0, dict(self.delta.files)).content_hash
        return replace(self, content_hash=content_hash, files=self.delta.files, delta=None)

    def part(self, name: str) -> Published:
        """One of the files, as if it were a version of its own."""
        files = tuple((each, entry) for each, entry in self.files if each == name)
        return replace(self, content_hash=Manifest("", 0, dict(files)).content_hash, files=files)


def model_file(rank: int, num_ranks: int) -> str:
    """The name of the file that a rank publishes, as Hugging Face's readers know it."""
    return MODEL_FILE if num_ranks == 1 else f"model-{rank + 1:05}-of-{num_ranks:05}.safetensors"


def model_files(names: Iterable[str]) -> list[str]:
    """Of the names of a checkpoint's files those of the policy's weights, whoever wrote them; their union is all."""
    return [name for name in names if _MODEL_FILES.fullmatch(name)]


def weights_folder(version: int) -> str:
    """The folder of a policy version, below the run's."""
    return f"weights/{version}"


def read_pointer(storage: Storage, pointer: str) -> int | None:
    """The number a pointer file holds; None if it is missing, empty or not a number, all of which mean "no news"."""
    try:
        numbers = numbers_in([storage.get(pointer).decode(errors="replace").strip()])
    except NotFoundError:
        return None
    return numbers[0] if numbers else None


def move_pointer(storage: Storage, pointer: str, number: int) -> bool:
    """Point to `number`, unless the pointer is there or beyond already; whether it moved. Only the lineage's trainer
    may.

    A pointer beyond to what is not there is damaged, and is not believed: one flipped bit makes 90 of 10.
    """
    now = read_pointer(storage, pointer)
    if now == number:
        return False
    if now is not None and now > number:
        folder = weights_folder(now) if pointer == WEIGHTS_POINTER else f"global_step_{now}"
        # It names what is there, so it is no damage: a resumed trainer repeats steps that were published before.
        if _try_manifest(storage, folder) is not None:
            return False
    storage.put(pointer, f"{number}\n".encode())
    return True


def restore_pointer(storage: Storage, version: int) -> bool:
    """Point to `version`, which was published, if the pointer is lost or behind. False: its weights are not there any
    more, or damaged. Reads all of them.
    """
    if not is_loadable(storage, version):
        return False
    move_pointer(storage, WEIGHTS_POINTER, version)
    return True


def publish_weights(
    storage: Storage,
    version: int,
    data: Data | Mapping[str, Data],
    lineage: str,
    fingerprint: Fingerprint | None = None,
) -> Published:
    """Make `data` the weights of `version`, then move the pointer.

    Args:
        data: the state dict in safetensors format, or files by name.
        fingerprint: of these weights; it goes into the manifest, which is checked as a whole.

    A version that is there already stays as it is: explorers may be reading it, and a resumed trainer that repeats the
    step has made the same weights again.
    """
    published = read_published(storage, version)
    # Written again if a file of it is damaged: the same step gives the same bytes.
    if published is None or not is_loadable(storage, version):
        files = data if isinstance(data, Mapping) else {MODEL_FILE: data}
        extra = fingerprint_extra(fingerprint)
        manifest = write_folder(storage, weights_folder(version), files, lineage=lineage, version=version, extra=extra)
        published = published_as(manifest, weights_folder(version))
    # Last: a kill before it leaves a folder that nobody names, which the resumed trainer finds valid and keeps.
    move_pointer(storage, WEIGHTS_POINTER, version)
    return published


def delta_extra(delta: Delta, whole: Mapping[str, FileEntry]) -> dict[str, Any]:
    """The `extra` of the manifest of a version that is there as a delta. whole: the files that it makes."""
    told = {"base": delta.base, "base_hash": delta.base_hash, "whole": delta.whole}
    return {_DELTA: {**told, "files": {name: entry.to_json() for name, entry in whole.items()}}}


def held_extra(held: Held) -> dict[str, Any]:
    """The `extra` of the manifest of a version whose files are not there."""
    return {_HELD: {"addresses": dict(held.addresses)}}


def bases_of(storage: Storage, published: Published) -> Iterator[Published]:
    """The version that this one is made of, the one that that is made of, and so on to the one that is there as a
    whole; nothing if this one is. Raises: DamagedError: one of them is not there, or is another one by now.
    """
    while published.delta is not None:
        base = read_published(storage, published.delta.base)
        if base is None or base.content_hash != published.delta.base_hash:
            raise DamagedError(
                f"{published.folder} says what has changed since version {published.delta.base}, which is not there "
                "any more as it was"
            )
        yield base
        published = base


def is_loadable(storage: Storage, version: int) -> bool:
    """True if the files of a version are there, and all that it is made of; reads every byte."""
    try:
        published = read_published(storage, version)
        # Of one that is held some files may have been written already.
        return (
            published is not None
            and published.held is None
            and all(is_valid(storage, each.folder, each.version) for each in (published, *bases_of(storage, published)))
        )
    except DamagedError:
        return False


def read_published(storage: Storage, version: int) -> Published | None:
    """Read what is published as `version`; None if it is not there or not readable (yet)."""
    folder = weights_folder(version)
    manifest = _try_manifest(storage, folder)
    # A folder that was copied or renamed by hand is not the version that its name says.
    return None if manifest is None or manifest.version != version else published_as(manifest, folder)


def read_checkpoint_weights(storage: Storage, folder: str) -> Published | None:
    """The policy's weights in a checkpoint folder, to be loaded as if they were published; None if it is not valid
    (yet).
    """
    manifest = _try_manifest(storage, folder)
    if manifest is None:
        return None
    files = tuple(sorted(_weight_files(manifest).items()))
    if not files:
        return None
    content_hash = hash_as_published(manifest)
    return Published(manifest.version, manifest.lineage, content_hash, folder, files, fingerprint_of(manifest))


def hash_as_published(checkpoint: Manifest) -> str:
    """The content hash of a checkpoint's policy as it is published, by which experiences name the weights wherever an
    engine took them from.
    """
    # Published in another data type, they are other bytes: only who published them knows their hash.
    return str(checkpoint.extra.get(WEIGHTS_HASH) or as_published(checkpoint).content_hash)


def as_published(checkpoint: Manifest) -> Manifest:
    """The manifest of a checkpoint with only its policy, under the names that publishing gives it."""
    # The content hash is over names and hashes, so the folders of a checkpoint must not be in the names.
    files = {name.rpartition("/")[2]: entry for name, entry in _weight_files(checkpoint).items()}
    return replace(checkpoint, files=files)


def _weight_files(checkpoint: Manifest) -> dict[str, FileEntry]:
    adapters = {name: entry for name, entry in checkpoint.files.items() if name.startswith(_ADAPTERS)}
    return adapters or {name: checkpoint.files[name] for name in model_files(checkpoint.files)}


def hash_of_weights(manifest: Manifest) -> str:
    """The content hash of published weights: of the whole, however they are there. Raises: DamagedError."""
    return published_as(manifest, "").content_hash


def published_as(manifest: Manifest, folder: str) -> Published:
    """What a folder with this manifest is to who loads weights. Raises: DamagedError: it cannot be read."""
    files, delta = tuple((name, entry) for name, entry in sorted(manifest.files.items()) if name != INDEX_FILE), None
    if _DELTA in manifest.extra:
        try:
            told = manifest.extra[_DELTA]
            delta = Delta(int(told["base"]), str(told["base_hash"]), int(told["whole"]), files)
            files = tuple((name, FileEntry.from_json(entry)) for name, entry in sorted(told["files"].items()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"the delta of version {manifest.version} is damaged: {error!r}") from error
    held = None
    if _HELD in manifest.extra:
        try:
            held = Held(tuple(sorted(manifest.extra[_HELD]["addresses"].items())))
        except (AttributeError, KeyError, TypeError) as error:
            raise DamagedError(f"who holds version {manifest.version} cannot be read: {error!r}") from error
    content_hash = replace(manifest, files=dict(files)).content_hash
    fingerprint = fingerprint_of(manifest)
    return Published(manifest.version, manifest.lineage, content_hash, folder, files, fingerprint, delta, held)


def fingerprint_extra(fingerprint: Fingerprint | None) -> dict[str, Any]:
    """The `extra` of a manifest that carries the fingerprint."""
    return {} if fingerprint is None else {"fingerprint": asdict(fingerprint)}


def fingerprint_of(manifest: Manifest) -> Fingerprint | None:
    """The fingerprint that a manifest carries; None: it carries none. Raises: DamagedError: it cannot be read."""
    if "fingerprint" not in manifest.extra:
        return None
    try:
        return Fingerprint.from_plain(manifest.extra["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the fingerprint of version {manifest.version} is damaged: {error!r}") from error


def latest_published(storage: Storage) -> Published | None:
    """The version the pointer names; None while nothing was published."""
    version = read_pointer(storage, WEIGHTS_POINTER)
    return None if version is None else read_published(storage, version)


def request_version(storage: Storage, version: int) -> None:
    """Ask the trainer for weights of `version` or newer (explorer_driven)."""
    storage.put(REQUEST_FILE, f"{version}\n".encode())


def read_requested_version(storage: Storage) -> int:
    """The version asked for; 0 if none."""
    # Damaged or half written it is no request; the explorer's next one replaces it.
    return read_pointer(storage, REQUEST_FILE) or 0


def request_whole(storage: Storage, version: int) -> None:
    """Ask the trainer to write `version` as a whole: what it is made of is not there any more, or damaged, or who
    asks cannot get it from those who hold it.
    """
    storage.put(WHOLE_FILE, f"{version}\n".encode())


def read_requested_whole(storage: Storage) -> int:
    """The version that somebody wants as a whole; 0 if none."""
    return read_pointer(storage, WHOLE_FILE) or 0


def published_versions(storage: Storage) -> list[int]:
    """Numbers of the folders below `weights/`, sorted; a folder may still be incomplete."""
    return numbers_in(storage.list("weights"), suffix="/")


def held_versions(storage: Storage, after: int) -> list[int]:
    """Versions beyond `after` that are not there but in the memory of ranks, or were."""
    found = []
    for version in published_versions(storage):
        with suppress(DamagedError):
            published = read_published(storage, version) if version > after else None
            if published is not None and published.held is not None:
                found.append(version)
    return found


def latest_written(storage: Storage) -> Published | None:
    """The newest version whose files are on storage; None: there is none."""
    newest = latest_published(storage)
    if newest is None or newest.held is None:
        return newest
    older = (read_published(storage, version) for version in reversed(published_versions(storage)))
    return next((each for each in older if each is not None and each.held is None), None)


def remove_weights_below(storage: Storage, version: int) -> None:
    """Remove published weights older than `version`, unless newer ones are made of them; the newest always stays.
    Without a pointer nothing is removed.
    """
    newest = read_pointer(storage, WEIGHTS_POINTER)
    if newest is None:
        return
    versions = published_versions(storage)
    # An explorer that starts now reads the pointer first, so the version it names must be there.
    first = min(version, newest)
    if not versions or versions[0] >= first:
        return
    for number in [number for number in versions if number >= first]:
        with suppress(DamagedError):  # what nobody can load is made of nothing
            kept = read_published(storage, number)
            if kept is not None and kept.delta is not None:
                first = min(first, kept.delta.whole)
    # The newest first: what is made of another one goes before it.
    for number in reversed(versions):
        if number < first:
            remove_folder(storage, weights_folder(number))


def _try_manifest(storage: Storage, folder: str) -> Manifest | None:
    try:
        return read_manifest(storage, folder)
    except DamagedError:
        return None
