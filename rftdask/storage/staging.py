"""Staging: models and datasets on a node's own disk, where a site wants them read from. One process of the node copies,
the others wait for it; nobody else's copy is trusted.

A copy is named by what it is of: the path, and size and time of change of every file. It is made under another name,
hashed while it is written, read back, and renamed, so that what has its name is whole. Who uses one holds a lock of the
kernel on it as long as it lives; those that nobody holds are removed by who ends last on the node, unless they are to
stay. It knows no cluster: a job says where by the environment.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rftdask.errors import StorageError, UserError, WaitTimeout

FOLDER = "RFTDASK_STAGE_TO"
"""Environment: the folder of this node; unset or empty: nothing is staged."""
KEEP = "RFTDASK_STAGE_KEEP"
"""Environment: 1 where copies stay when nobody uses them any more."""
DEADLINE_S = 3600.0
"""For another process of the node to make a copy."""
_LOOK_S = 0.1
_CHUNK_BYTES = 8 << 20

_held: dict[Path, int] = {}
"""Locks of the copies that this process uses; the kernel ends them with it."""

log = logging.getLogger(__name__)


def stage_here(folder: str, keep: bool) -> None:
    """Have this process and those that it starts stage to a folder, whose variables are filled in."""
    os.environ.update({FOLDER: os.path.expandvars(folder), KEEP: str(int(keep))})


def staged(path: str, deadline_s: float = DEADLINE_S) -> str:
    """The copy on this node of a file or folder; `path` itself where nothing is staged, it is not there (such as a
    name on the Hub), or the node has no room for it, which is logged.

    Raises: WaitTimeout: another process did not make the copy in time; StorageError: it cannot be copied, or what was
    written is not what was read; UserError: the folder is another user's.
    """
    root, source = os.environ.get(FOLDER), Path(path)
    if not root or not source.exists():
        return path
    source = source.absolute()
    base = Path(root).expanduser() / f"rftdask-stage-{os.getuid()}"
    if source.is_relative_to(base):
        return path
    files = sorted(each for each in source.rglob("*") if each.is_file()) if source.is_dir() else [source]
    sizes = {str(file.relative_to(source.parent)): file.stat() for file in files}
    told = [f"{source}", *(f"{name} {found.st_size} {found.st_mtime_ns}" for name, found in sizes.items())]
    _make_private(base)
    place = base / hashlib.sha256("\n".join(told).encode()).hexdigest()[:24]
    copy, deadline = place / source.name, time.monotonic() + deadline_s
    while not (_lock(place, fcntl.LOCK_SH) and _is_whole(copy, sizes)):
        if _lock(place, fcntl.LOCK_EX):
            if not _is_whole(copy, sizes) and not _fill(place, source, files):
                _unlock(place)
                return path
        elif time.monotonic() > deadline:
            raise WaitTimeout(
                f"{path} was not staged to {base} in {deadline_s:.0f} s by the process of this node that does it; "
                "cluster.local_cache_dir names the folder"
            )
        else:
            time.sleep(_LOOK_S)
    return str(copy)


def source_of(path: str) -> str:
    """What a path that `staged` gave is a copy of; any other path is its own."""
    note = Path(path).parent / "source"
    return note.read_text() if note.is_file() and f"rftdask-stage-{os.getuid()}" in path else path


def sweep() -> None:
    """Let go of all copies, and remove those of this node that nobody uses, unless they are to stay. Idempotent."""
    for place in list(_held):
        _unlock(place)
    root = os.environ.get(FOLDER)
    if not root or os.environ.get(KEEP) == "1":
        return
    for place in _places(Path(root).expanduser() / f"rftdask-stage-{os.getuid()}"):
        if _lock(place, fcntl.LOCK_EX):  # nobody has it, and nobody gets it while it goes
            shutil.rmtree(place, ignore_errors=True)
            place.with_suffix(".lock").unlink(missing_ok=True)
            _unlock(place)


atexit.register(sweep)


def _places(base: Path) -> Iterator[Path]:
    if base.is_dir():
        yield from (lock.with_suffix("") for lock in base.glob("*.lock"))


def _make_private(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    # Where all users share a disk, anybody may have put a folder or a link of this name there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"{base} belongs to somebody else; name another folder as cluster.local_cache_dir")


def _lock(place: Path, kind: int) -> bool:
    """Whether this process has the lock of a copy as `kind` now, without waiting; if not, it has none."""
    lock = place.with_suffix(".lock")
    while True:
        if place not in _held:
            _held[place] = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(_held[place], kind | fcntl.LOCK_NB)
        except BlockingIOError:
            _unlock(place)
            return False
        with suppress(FileNotFoundError):
            # Who removed the copy removed its lock, too; then this one is of a file that nobody else will look at.
            if os.path.samestat(os.fstat(_held[place]), lock.stat()):
                return True
        _unlock(place)


def _unlock(place: Path) -> None:
    if (held := _held.pop(place, None)) is not None:
        os.close(held)


def _is_whole(copy: Path, files: dict[str, os.stat_result]) -> bool:
    # It got its name when it had been read back; a site that cleans its disks may have taken parts of it since.
    with suppress(OSError):
        return all((copy.parent / name).stat().st_size == found.st_size for name, found in files.items())
    return False


def _fill(place: Path, source: Path, files: list[Path]) -> bool:
    """Copy; False: there is no room."""
    partial = place.with_suffix(".partial")
    for left in (partial, place):
        shutil.rmtree(left, ignore_errors=True)
    needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(place.parent).free
    if needed > free:
        log.warning("%s is not staged: it has %d bytes, and %s has room for %d", source, needed, place.parent, free)
        return False
    began = time.monotonic()
    partial.mkdir(mode=0o700)
    try:
        _copy(partial, source, files)
    except OSError as error:  # others use the disk, too, and what is copied may go meanwhile
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{source} cannot be staged to {place.parent}: {error}") from error
        log.warning("%s is not staged: %s", source, error)
        return False
    (partial / "source").write_text(str(source))
    partial.rename(place)
    log.info("staged %s: %d bytes in %.1f s", source, needed, time.monotonic() - began)
    return True


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
                raise StorageError(f"{target} is not what was written to it; the disk of this node is damaged")
