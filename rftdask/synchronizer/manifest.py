"""Manifest: the file that makes a published folder exist. It is written last and lists every file with size and hash.

Invariant: a folder without a valid manifest does not exist for readers, whatever files it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rftdask.errors import DamagedError, NotFoundError, RftError, StorageError, StorageRefusedError
from rftdask.storage import Storage
from rftdask.storage.base import Data, in_order
from rftdask.storage.checked_json import dump_checked, load_checked
from rftdask.synchronizer.tensor_heads import head_bytes

NAME = "MANIFEST.json"
BLOCK_BYTES = 64 * 2**20
"""Block size in bytes. Each block of a larger file has its own hash, so that several readers can verify a file together
without holding all of it. Part of the stored format: must not change."""
PIECE_BYTES = 2 * 2**20
"""Bytes per read when a local block is only verified: fits the cache of a core, and the buffer is reused."""
_NUM_THREADS = 4
"""Threads that hash or read blocks of one file. One thread hashes 1.5 GB/s, which is slower than a disk."""


@dataclass(frozen=True)
class FileEntry:
    """Expected size and hashes of a file."""

    size_bytes: int
    sha256: str
    """Hash of the bytes. With blocks: hash of the block hashes, so that no byte is hashed twice. Manifests of older
    versions always hash the bytes."""
    blocks: tuple[str, ...] = ()
    """sha256 of each block of BLOCK_BYTES. Empty for a file of one block and in manifests of older versions."""

    @classmethod
    def of(cls, data: Data) -> FileEntry:
        """Entry of a file with these bytes. Blocks are hashed in parallel."""
        view = memoryview(data)
        blocks = [view[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
        hashes = list(in_order(_sha256, blocks or [view], _NUM_THREADS))
        if len(hashes) == 1:
            return cls(len(data), hashes[0])
        return cls(len(data), hashlib.sha256("".join(hashes).encode()).hexdigest(), tuple(hashes))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> FileEntry:
        """Inverse of `to_json`. Raises: TypeError: unknown keys."""
        return cls(**{**tree, "blocks": tuple(tree.get("blocks", ()))})

    def to_json(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"size_bytes": self.size_bytes, "sha256": self.sha256}
        # Omitted when empty: older versions treat the key as damage.
        return {**tree, "blocks": list(self.blocks)} if self.blocks else tree


def entries_to_json(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Return the JSON form of the entries of several files."""
    return {name: entry.to_json() for name, entry in entries.items()}


def entries_from_json(*trees: Mapping[str, Any]) -> dict[str, FileEntry]:
    """Return the entries in several results of `entries_to_json`, such as one of each rank."""
    return {name: FileEntry.from_json(entry) for tree in trees for name, entry in tree.items()}


@dataclass(frozen=True)
class Manifest:
    """The files of a published folder.

    Example: Manifest(lineage="main", version=12, files={"model.safetensors": FileEntry(4021, "9f3a...")})
    """

    lineage: str
    version: int
    """Optimizer step that produced these weights."""
    files: Mapping[str, FileEntry]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """Identity of the content: 16 hex digits, computed from names and hashes of the files."""
        lines = "".join(f"{name} {entry.sha256}\n" for name, entry in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


def write_folder(storage: Storage, folder: str, manifest: Manifest, files: Mapping[str, Data]) -> Manifest:
    """Write `files`, then the manifest with them. Readers see the old manifest (or no folder), or the new one."""
    entries = {**manifest.files, **put_files(storage, folder, files)}
    return commit_folder(storage, folder, replace(manifest, files=entries))


def put_files(storage: Storage, folder: str, files: Mapping[str, Data]) -> dict[str, FileEntry]:
    """Write files that no manifest lists yet. Each file is hashed while it is written."""
    entries = {}
    with ThreadPoolExecutor(1, "hashes") as hashing:
        for name, data in files.items():
            entry = hashing.submit(FileEntry.of, data)
            storage.put(f"{folder}/{name}", data)
            entries[name] = entry.result()
    return entries


def commit_folder(storage: Storage, folder: str, manifest: Manifest) -> Manifest:
    """Write the manifest of a folder whose files are already written."""
    tree = {**asdict(manifest), "files": entries_to_json(manifest.files)}
    # The manifest carries its own checksum, since no other file lists its hash.
    storage.put(f"{folder}/{NAME}", dump_checked(tree, indent=1))
    return manifest


def read_manifest(storage: Storage, folder: str) -> Manifest | None:
    """Manifest of `folder`, or None if there is none. Raises: DamagedError: it cannot be read."""
    try:
        data = storage.get(f"{folder}/{NAME}")
    except NotFoundError:
        return None
    try:
        tree = load_checked(data)
        # Unknown keys count as damage here; additions go into `extra`.
        files = entries_from_json(tree["files"])
        return Manifest(tree["lineage"], int(tree["version"]), files, tree["extra"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder}/{NAME} is damaged: {error}") from error


def read_file(storage: Storage, folder: str, manifest: Manifest, name: str) -> bytes:
    """Read and verify one file. Raises: NotFoundError; DamagedError: size or hash differ from the manifest."""
    data = storage.get(f"{folder}/{name}")
    check_file(f"{folder}/{name}", data, manifest.files[name])
    return data


def check_file(path: str, data: Data, entry: FileEntry) -> None:
    """Raises: DamagedError: `data` does not match `entry`."""
    # Block hashes, if present, cover every byte and mean the same in all manifest versions.
    same = FileEntry.of(data).blocks == entry.blocks if entry.blocks else _sha256(data) == entry.sha256
    if len(data) != entry.size_bytes or not same:
        raise _damaged(path, len(data), entry.size_bytes, entry.sha256)


def _damaged(path: str, size: int, expected: int, sha256: str) -> DamagedError:
    return DamagedError(f"{path}: {size} bytes do not match the manifest ({expected} bytes, sha256 {sha256[:12]})")


def block_numbers(entry: FileEntry) -> range:
    """Block numbers of a file, for `read_block`."""
    return range(max(1, len(entry.blocks)))


def block_span(entry: FileEntry, number: int) -> tuple[int, int]:
    """(start, stop) of a block in its file, in bytes."""
    start = number * BLOCK_BYTES
    return (start, min(start + BLOCK_BYTES, entry.size_bytes)) if entry.blocks else (0, entry.size_bytes)


def read_block(storage: Storage, path: str, entry: FileEntry, number: int) -> bytes:
    """Read and verify one block of the file at `path`. A file without blocks is one block. Raises: as `read_file`."""
    start, stop = block_span(entry, number)
    # One byte more than expected for the last block, to detect a file that is too long.
    end = stop + 1 if stop == entry.size_bytes else stop
    data = storage.get_part(path, start, end) if entry.blocks else storage.get(path)
    check_block(path, data, entry, number)
    return data


def verify_block(storage: Storage, path: str, entry: FileEntry, number: int) -> bytes:
    """Verify a block, holding at most PIECE_BYTES of a local file. Raises: as `read_file`.

    Returns: the head of the file if this is the first block of a tensor file, else b"".
    """
    head, size = bytearray(), BLOCK_BYTES if number == 0 and path.endswith(".safetensors") else 0
    for piece in stream_block(storage, path, entry, number):
        if len(head) < size:
            head += piece
            size = min(size, head_bytes(bytes(head[:8])))
            del head[size:]
    return bytes(head)


def verify_blocks(
    storage: Storage, folder: str, manifest: Manifest, blocks: Sequence[tuple[str, int]]
) -> Iterator[bytes]:
    """Yield the results of `verify_block` for these (file, number) blocks, which are read in parallel."""

    def verify(block: tuple[str, int]) -> bytes:
        name, number = block
        return verify_block(storage, f"{folder}/{name}", manifest.files[name], number)

    return in_order(verify, blocks, _NUM_THREADS)


def stream_block(storage: Storage, path: str, entry: FileEntry, number: int) -> Iterator[Data]:
    """Like `read_block`, in pieces of PIECE_BYTES. Damage is raised before the last piece is yielded.

    Holds at most one piece of a local file.
    """
    start, stop = block_span(entry, number)
    if storage.local_file(path) is None:
        # One request, since latency dominates.
        block = memoryview(read_block(storage, path, entry, number))
        yield from (block[place : place + PIECE_BYTES] for place in range(0, len(block), PIECE_BYTES))
        return
    name, expected = (f"{path} from byte {start}", entry.blocks[number]) if entry.blocks else (path, entry.sha256)
    digest = hashlib.sha256()
    for place in range(start, max(stop, start + 1), PIECE_BYTES):
        end = min(place + PIECE_BYTES, stop)
        # One byte more than expected at the end, as in `read_block`.
        piece = storage.get_part(path, place, end + 1 if end == entry.size_bytes else end)
        digest.update(piece)
        if len(piece) != end - place or (end == stop and digest.hexdigest() != expected):
            raise _damaged(name, place + len(piece) - start, stop - start, expected)
        yield piece


def stream_blocks(
    storage: Storage, folder: str, manifest: Manifest, blocks: Sequence[tuple[str, int]]
) -> Iterator[Data]:
    """Pieces of these (file, number) blocks, one block after the other, as `stream_block`.

    Reads some blocks ahead if the storage is not local.
    """

    def begin(block: tuple[str, int]) -> Iterator[Data]:
        name, number = block
        pieces = stream_block(storage, f"{folder}/{name}", manifest.files[name], number)
        # A remote block arrives complete with its first piece.
        return pieces if is_local else iter(list(pieces))

    is_local = storage.local_file(folder) is not None
    for pieces in in_order(begin, blocks, 1 if is_local else _NUM_THREADS):
        yield from pieces


def check_block(path: str, data: Data, entry: FileEntry, number: int) -> None:
    """Raises: DamagedError: `data` does not match block `number` of the file at `path`."""
    if entry.blocks:
        start, stop = block_span(entry, number)
        path, entry = f"{path} from byte {start}", FileEntry(stop - start, entry.blocks[number])
    check_file(path, data, entry)


def failure(error: RftError) -> dict[str, Any]:
    """Report that a rank sends to the others if it could not write its part."""
    return {"error": str(error), "refused": isinstance(error, StorageRefusedError)}


def check_reports(reports: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raises: StorageError: a rank reported its `failure` to write its part of `what`. reports: one per rank."""
    for rank, report in enumerate(reports):
        if "error" in report:
            kind = StorageRefusedError if report["refused"] else StorageError
            raise kind(f"rank {rank} could not write its part of {what}: {report['error']}")


def _sha256(data: Data) -> str:
    return hashlib.sha256(data).hexdigest()


def remove_folder(storage: Storage, folder: str) -> None:
    """Remove a folder, manifest first: an object store removes file by file, and half a folder must not be readable."""
    storage.remove(f"{folder}/{NAME}")  # from here on the folder does not exist for readers
    storage.remove(folder)


def blocks_of(manifest: Manifest) -> list[tuple[str, int]]:
    """(file, number) of all blocks, ordered by file name."""
    return [(name, number) for name, entry in sorted(manifest.files.items()) for number in block_numbers(entry)]


def is_valid(storage: Storage, folder: str, version: int | None = None) -> bool:
    """True if the folder exists, holds `version` (None: any), and every file matches its manifest. Reads every byte."""
    try:
        manifest = read_manifest(storage, folder)
        if manifest is None or version not in (None, manifest.version):
            return False
        # Every byte, since a size does not reveal a block that the disk returned wrong.
        for _ in verify_blocks(storage, folder, manifest, blocks_of(manifest)):
            pass
    except (NotFoundError, DamagedError):
        return False
    return True
