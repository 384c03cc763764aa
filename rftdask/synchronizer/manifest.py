"""Manifest: the one file that makes a folder of files exist. Written last, it names every file with its size and hash.

Invariant: a folder without a valid manifest is not there, whatever lies in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from rftdask.errors import DamagedError, NotFoundError, RftError, StorageError, StorageRefusedError
from rftdask.storage import Storage
from rftdask.storage.base import Data, in_order
from rftdask.storage.checked_json import dump_checked, load_checked

Result = TypeVar("Result")

NAME = "MANIFEST.json"
BLOCK_BYTES = 64 * 2**20
"""Of larger files every block has a hash of its own, so that several readers can verify a file together, and none has
to hold it. A part of the format: it must not change."""
PIECE_BYTES = 2 * 2**20
"""In which a block of a local file is read that nobody holds: it fits a core's cache, and memory is used again."""
_NUM_THREADS = 4
"""That hash or read blocks of one file at once: one thread hashes 1.5 GB/s, and disks are faster than that."""


@dataclass(frozen=True)
class FileEntry:
    """What a file must be."""

    size_bytes: int
    sha256: str
    """Of its bytes; of a file with blocks that of their hashes, so that no byte is hashed twice. In manifests of older
    versions it is always that of the bytes."""
    blocks: tuple[str, ...] = ()
    """sha256 of each BLOCK_BYTES of it; none for a file of one block, and in manifests of versions that knew none."""

    @classmethod
    def of(cls, data: Data) -> FileEntry:
        """The entry of a file with these bytes; blocks are hashed several at once."""
        view = memoryview(data)
        blocks = [view[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
        hashes = list(in_order(_sha256, blocks or [view], _NUM_THREADS))
        if len(hashes) == 1:
            return cls(len(data), hashes[0])
        return cls(len(data), hashlib.sha256("".join(hashes).encode()).hexdigest(), tuple(hashes))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> FileEntry:
        """The entry that `to_json` was of. Raises: TypeError: keys that this version does not know."""
        return cls(**{**tree, "blocks": tuple(tree.get("blocks", ()))})

    def to_json(self) -> dict[str, Any]:
        """As a manifest has it."""
        tree: dict[str, Any] = {"size_bytes": self.size_bytes, "sha256": self.sha256}
        # Left out where there is none: a version that knows no blocks takes the key for damage.
        return {**tree, "blocks": list(self.blocks)} if self.blocks else tree


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
    files: Mapping[str, Data],
    *,
    lineage: str,
    version: int,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write `files` below `folder`, the manifest last. Until the manifest is there, the folder does not exist."""
    return extend_folder(storage, folder, Manifest(lineage, version, {}, dict(extra or {})), files)


def extend_folder(storage: Storage, folder: str, manifest: Manifest, files: Mapping[str, Data]) -> Manifest:
    """Add `files` to a folder whose manifest is `manifest`; readers see the old manifest or the new one."""
    # Old files stay as they are; only the manifest is replaced, and that in one piece.
    return commit_folder(
        storage, folder, replace(manifest, files={**manifest.files, **put_files(storage, folder, files)})
    )


def put_files(storage: Storage, folder: str, files: Mapping[str, Data]) -> dict[str, FileEntry]:
    """Write files that are not there yet for anybody: no manifest names them. Each is hashed while it is written."""
    entries = {}
    with ThreadPoolExecutor(1, "hashes") as beside:
        for name, data in files.items():
            entry = beside.submit(FileEntry.of, data)
            storage.put(f"{folder}/{name}", data)
            entries[name] = entry.result()
    return entries


def commit_folder(storage: Storage, folder: str, manifest: Manifest) -> Manifest:
    """Make the folder what `manifest` says; its files are written."""
    files = {name: entry.to_json() for name, entry in manifest.files.items()}
    # With a checksum of its own: every other file has its hash here, and nothing has that of this one.
    storage.put(f"{folder}/{NAME}", dump_checked({**asdict(manifest), "files": files}, indent=1))
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
        files = {name: FileEntry.from_json(entry) for name, entry in tree["files"].items()}
        return Manifest(tree["lineage"], int(tree["version"]), files, tree["extra"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder}/{NAME} is damaged: {error}") from error


def read_file(storage: Storage, folder: str, manifest: Manifest, name: str) -> bytes:
    """One file of the folder, verified. Raises: NotFoundError; DamagedError: size or hash differ from the manifest."""
    data = storage.get(f"{folder}/{name}")
    check_file(f"{folder}/{name}", data, manifest.files[name])
    return data


def check_file(path: str, data: Data, entry: FileEntry) -> None:
    """Raises: DamagedError: `data` is not what `entry` says."""
    # By the blocks where there are some: they cover every byte, and mean the same in manifests of all versions.
    same = FileEntry.of(data).blocks == entry.blocks if entry.blocks else _sha256(data) == entry.sha256
    if len(data) != entry.size_bytes or not same:
        raise _damaged(path, len(data), entry.size_bytes, entry.sha256)


def _damaged(path: str, size: int, expected: int, sha256: str) -> DamagedError:
    return DamagedError(f"{path}: {size} bytes do not match the manifest ({expected} bytes, sha256 {sha256[:12]})")


def block_numbers(entry: FileEntry) -> range:
    """Of the parts in which a file is read by `read_block`."""
    return range(max(1, len(entry.blocks)))


def block_span(entry: FileEntry, number: int) -> tuple[int, int]:
    """First byte of a block in its file, and the byte after its last."""
    start = number * BLOCK_BYTES
    return (start, min(start + BLOCK_BYTES, entry.size_bytes)) if entry.blocks else (0, entry.size_bytes)


def read_block(storage: Storage, path: str, entry: FileEntry, number: int) -> bytes:
    """One block of the file at `path`, verified; a file without blocks is one. Raises: as `read_file`."""
    if not entry.blocks:
        data = storage.get(path)
        check_block(path, data, entry, 0)
        return data
    start = number * BLOCK_BYTES
    # Of the last block one byte more than there should be, which shows a file that is too long.
    is_last = number == len(entry.blocks) - 1
    data = storage.get_part(path, start, entry.size_bytes + 1 if is_last else start + BLOCK_BYTES)
    check_block(path, data, entry, number)
    return data


def verify_block(storage: Storage, path: str, entry: FileEntry, number: int) -> None:
    """As `read_block`, whose bytes nobody wants; of a file on this machine no more than a piece is held."""
    for _ in stream_block(storage, path, entry, number):
        pass


def stream_block(storage: Storage, path: str, entry: FileEntry, number: int) -> Iterator[Data]:
    """As `read_block`, in pieces of PIECE_BYTES; what is wrong is raised in place of the last one at the latest. Of a
    file on this machine no more than a piece is held.
    """
    start, stop = block_span(entry, number)
    if storage.local_file(path) is None:
        # By one request, whose answer takes longer to come than its bytes.
        block = memoryview(read_block(storage, path, entry, number))
        yield from (block[place : place + PIECE_BYTES] for place in range(0, len(block), PIECE_BYTES))
        return
    name, expected = (f"{path} from byte {start}", entry.blocks[number]) if entry.blocks else (path, entry.sha256)
    digest = hashlib.sha256()
    for place in range(start, max(stop, start + 1), PIECE_BYTES):
        end = min(place + PIECE_BYTES, stop)
        # As of `read_block`: one byte more than there should be.
        piece = storage.get_part(path, place, end + 1 if end == entry.size_bytes else end)
        digest.update(piece)
        if len(piece) != end - place or (end == stop and digest.hexdigest() != expected):
            raise _damaged(name, place + len(piece) - start, stop - start, expected)
        yield piece


def stream_blocks(
    storage: Storage, folder: str, manifest: Manifest, blocks: Sequence[tuple[str, int]]
) -> Iterator[Data]:
    """Pieces of these (file, number), as `stream_block`, one block after the other; on no disk of this machine they
    are read some blocks ahead.
    """

    def begin(block: tuple[str, int]) -> Iterator[Data]:
        name, number = block
        pieces = stream_block(storage, f"{folder}/{name}", manifest.files[name], number)
        # The whole block is there with its first piece, where it comes by one request.
        return pieces if is_local else iter(list(pieces))

    is_local = storage.local_file(folder) is not None
    for pieces in in_order(begin, blocks, 1 if is_local else _NUM_THREADS):
        yield from pieces


def check_block(path: str, data: Data, entry: FileEntry, number: int) -> None:
    """Raises: DamagedError: `data` is not that block of the file at `path`."""
    if entry.blocks:
        start = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, entry.size_bytes - start)
        path, entry = f"{path} from byte {start}", FileEntry(size, entry.blocks[number])
    check_file(path, data, entry)


def failure(error: RftError) -> dict[str, Any]:
    """What a rank that could not write its part tells the others, who wait for its report."""
    return {"error": str(error), "refused": isinstance(error, StorageRefusedError)}


def check_reports(reports: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raises: StorageError: a rank, by its place in `reports`, told its `failure` to write its part of `what`."""
    for rank, told in enumerate(reports):
        if "error" in told:
            kind = StorageRefusedError if told["refused"] else StorageError
            raise kind(f"rank {rank} could not write its part of {what}: {told['error']}")


def _sha256(data: Data) -> str:
    return hashlib.sha256(data).hexdigest()


def remove_folder(storage: Storage, folder: str) -> None:
    """Remove the folder, its manifest first: an object store removes file by file, and half a folder must not exist."""
    storage.remove(f"{folder}/{NAME}")  # from here on the folder is not there, whatever lies in it
    storage.remove(folder)


ReadBlock = Callable[[Storage, str, FileEntry, int], Result]
"""`read_block` or `verify_block`."""


def read_blocks(
    read: ReadBlock[Result], storage: Storage, folder: str, manifest: Manifest, place: int = 0, num_readers: int = 1
) -> Iterator[tuple[tuple[str, int], Result]]:
    """((file, number), what `read` gives) of the blocks of all files, several at once; of `num_readers` that call it
    together each reads every n-th. Raises: as `read`.
    """

    def read_one(block: tuple[str, int]) -> Result:
        name, number = block
        return read(storage, f"{folder}/{name}", manifest.files[name], number)

    own = blocks_of(manifest)[place::num_readers]
    yield from zip(own, in_order(read_one, own, _NUM_THREADS), strict=True)


def blocks_of(manifest: Manifest) -> list[tuple[str, int]]:
    """(file, number) of all blocks of all files, in the order of their names."""
    return [(name, number) for name, entry in sorted(manifest.files.items()) for number in block_numbers(entry)]


def is_valid(
    storage: Storage, folder: str, version: int | None = None, *, place: int = 0, num_readers: int = 1
) -> bool:
    """True if the folder exists, is of `version` if one is given, and every file of it is what its manifest says.

    Reads all of it, some blocks at a time; of `num_readers` that call it together each reads a share, and what each
    says of its own must be true.
    """
    try:
        manifest = read_manifest(storage, folder)
        if manifest is None or version not in (None, manifest.version):
            return False
        # Every byte: a size alone does not show a block that a disk gave back wrong.
        for _ in read_blocks(verify_block, storage, folder, manifest, place, num_readers):
            pass
    except (NotFoundError, DamagedError):
        return False
    return True
