"""Staging: copies of models and datasets on a node's own disk, for sites that want them read from there. One process of
the node copies, and the others wait for it; copies of other users are not trusted.

The name of a copy is a hash of the path, and of size and modification time of every file. A copy is written under
another name, hashed while it is written, read back and renamed, so that it is complete under its name. A process that
uses a copy holds a kernel lock on it until it ends. The last process on the node removes unlocked copies, unless KEEP
is set. Staging knows no cluster: environment variables of the job configure it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from rftdask.errors import StorageError
from rftdask.storage.shared_folder import SharedFolder, private_folder, remove_unused

FOLDER = "RFTDASK_STAGE_TO"
"""Environment variable: the folder of this node. Unset or empty: nothing is staged."""
KEEP = "RFTDASK_STAGE_KEEP"
"""Environment variable: 1 keeps copies that nobody uses any more."""
DEADLINE_S = 3600.0
"""Seconds to wait for another process of the node to make a copy."""
_CHUNK_BYTES = 8 << 20

_used: dict[Path, SharedFolder] = {}
"""Copies that this process uses."""

log = logging.getLogger(__name__)


def stage_here(folder: str, keep: bool) -> None:
    """Let this process and its children stage to `folder`, in which environment variables are expanded."""
    os.environ.update({FOLDER: os.path.expandvars(folder), KEEP: str(int(keep))})


def staged(path: str, deadline_s: float = DEADLINE_S) -> str:
    """Return the copy of a file or folder on this node, making it if necessary.

    Returns `path` itself if nothing is staged, if it does not exist (such as a name on the Hub), or if the node has no
    room for it, which is logged.
    Raises: WaitTimeout: another process did not make the copy in time; StorageError: copying failed, or the copy read
    back differs; UserError: the folder belongs to another user.
    """
    root, source = os.environ.get(FOLDER), Path(path)
    if not root or not source.exists():
        return path
    source = source.absolute()
    base = _base(root)
    if source.is_relative_to(base):
        return path
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else [source]
    stats = {str(file.relative_to(source.parent)): file.stat() for file in files}
    identity = [f"{source}", *(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in stats.items())]
    private_folder(base, "name another folder as cluster.local_cache_dir")
    place = base / hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    copy = place / source.name
    advice = "cluster.local_cache_dir names the folder"
    late = f"another process of this node did not finish staging {path} to {base}; {advice}"
    try:
        _used.setdefault(place, SharedFolder(place)).use(
            lambda: _is_whole(copy, stats), lambda: _fill(place, source, files, stats), deadline_s, late
        )
    except _NoRoom as error:
        log.warning("%s is not staged: %s", source, error)
        return path
    return str(copy)


def _base(root: str) -> Path:
    return Path(root).expanduser() / f"rftdask-stage-{os.getuid()}"


def source_of(path: str) -> str:
    """Return the original of a copy made by `staged`; any other path unchanged."""
    note = Path(path).parent / "source"
    return note.read_text() if note.is_file() and f"rftdask-stage-{os.getuid()}" in path else path


def sweep() -> None:
    """Release all copies, and remove those of this node that nobody uses unless KEEP is set. Idempotent."""
    while _used:
        _used.popitem()[1].close()
    root = os.environ.get(FOLDER)
    if root and os.environ.get(KEEP) != "1":
        remove_unused(_base(root))


atexit.register(sweep)


class _NoRoom(Exception):
    """The disk of this node is full."""


def _is_whole(copy: Path, stats: dict[str, os.stat_result]) -> bool:
    # It was read back before it got its name, but a site that cleans its disks may have removed parts since.
    with suppress(OSError):
        return all((copy.parent / name).stat().st_size == status.st_size for name, status in stats.items())
    return False


def _fill(place: Path, source: Path, files: list[Path], stats: dict[str, os.stat_result]) -> None:
    partial = place.with_suffix(".partial")
    for remains in (partial, place):
        shutil.rmtree(remains, ignore_errors=True)
    needed, free = sum(status.st_size for status in stats.values()), shutil.disk_usage(place.parent).free
    if needed > free:
        raise _NoRoom(f"it has {needed} bytes, and {place.parent} has room for {free}")
    began = time.monotonic()
    partial.mkdir(mode=0o700)
    try:
        _copy(partial, source, files)
        if not _is_whole(partial / source.name, stats):  # it would be copied again without end
            raise StorageError(f"{source} changed while it was staged; start again when no process writes to it")
        (partial / "source").write_text(str(source))
        partial.rename(place)
    except OSError as error:  # other processes may fill the disk, or remove the source
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _NoRoom(error) from error
        raise StorageError(f"{source} cannot be staged to {place.parent}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("staged %s: %d bytes in %.1f s", source, needed, time.monotonic() - began)


def _copy(partial: Path, source: Path, files: list[Path]) -> None:
    for file in files:
        target = partial / file.relative_to(source.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        read = hashlib.sha256()
        with file.open("rb") as opened, target.open("wb") as copied:
            while block := opened.read(_CHUNK_BYTES):
                read.update(block)
                copied.write(block)
            copied.flush()
            os.fsync(copied.fileno())
        with target.open("rb") as copied:
            if hashlib.file_digest(copied, "sha256").digest() != read.digest():
                raise StorageError(f"{target} reads back differently than written; the disk of this node is damaged")
