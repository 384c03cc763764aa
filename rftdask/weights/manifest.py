"""Manifest: the one file that makes a folder of files exist. Written last, it names every file with its size and hash.

Invariant: a folder without a valid manifest is not there, whatever lies in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

NAME = "MANIFEST.json"


@dataclass(frozen=True)
class FileEntry:
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a published folder.

    Example: Manifest(lineage="main", version=12, files={"model.safetensors": FileEntry(4021, "9f3a...")})
    """

    lineage: str
    version: int
    """Optimizer step whose weights these are."""
    files: Mapping[str, FileEntry]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """Names the content: 16 hex digits over the hashes of the files."""
        lines = "".join(f"{name} {entry.sha256}\n" for name, entry in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


def write_folder(
    storage: Storage,
    folder: str,
    files: Mapping[str, bytes],
    *,
    lineage: str,
    version: int,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write `files` below `folder`, the manifest last. Until the manifest is there, the folder does not exist."""
    return extend_folder(storage, folder, Manifest(lineage, version, {}, dict(extra or {})), files)


def extend_folder(storage: Storage, folder: str, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """Add `files` to a folder whose manifest is `manifest`; readers see the old manifest or the new one."""
    return commit_folder(
        storage, folder, replace(manifest, files={**manifest.files, **put_files(storage, folder, files)})
    )


def put_files(storage: Storage, folder: str, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Write files that are not there yet for anybody: no manifest names them."""
    entries = {}
    for name, data in files.items():
        storage.put(f"{folder}/{name}", data)
        entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    return entries


def commit_folder(storage: Storage, folder: str, manifest: Manifest) -> Manifest:
    """Make the folder what `manifest` says; its files are written."""
    storage.put(f"{folder}/{NAME}", dump_checked(asdict(manifest), indent=1))
    return manifest


def read_manifest(storage: Storage, folder: str) -> Manifest | None:
    """The manifest of `folder`, None if there is none. Raises: DamagedError: it is there but cannot be read."""
    try:
        data = storage.get(f"{folder}/{NAME}")
    except NotFoundError:
        return None
    try:
        tree = load_checked(data)
        # Keys that this version does not know are damage here, unlike in `extra`, which is for additions.
        files = {name: FileEntry(**entry) for name, entry in tree["files"].items()}
        return Manifest(tree["lineage"], int(tree["version"]), files, tree["extra"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder}/{NAME} is damaged: {error}") from error


def read_file(storage: Storage, folder: str, manifest: Manifest, name: str) -> bytes:
    """One file of the folder, verified. Raises: NotFoundError; DamagedError: size or hash differ from the manifest."""
    data = storage.get(f"{folder}/{name}")
    check_file(f"{folder}/{name}", data, manifest.files[name])
    return data


def check_file(path: str, data: bytes, entry: FileEntry) -> None:
    """Raises: DamagedError: `data` is not what `entry` says."""
    if len(data) != entry.size_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise DamagedError(
            f"{path}: {len(data)} bytes do not match the manifest ({entry.size_bytes} bytes, sha256 "
            f"{entry.sha256[:12]})"
        )


def remove_folder(storage: Storage, folder: str) -> None:
    """Remove the folder, its manifest first: an object store removes file by file, and half a folder must not exist."""
    storage.remove(f"{folder}/{NAME}")  # from here on the folder is not there, whatever lies in it
    storage.remove(folder)


def is_valid(storage: Storage, folder: str, version: int | None = None) -> bool:
    """True if the folder exists, is of `version` if one is given, and every file of it is what its manifest says. Reads
    all of it.
    """
    try:
        manifest = read_manifest(storage, folder)
        if manifest is None or version not in (None, manifest.version):
            return False
        # Every byte: a size alone does not show a block that a disk gave back wrong.
        for name in manifest.files:
            read_file(storage, folder, manifest, name)
    except (NotFoundError, DamagedError):
        return False
    return True
