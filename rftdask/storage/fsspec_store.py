"""Storage on object stores and everything else that fsspec supports: s3, gs, abfs and others.

Not for local disks: fsspec's local "create" has a race, and syncs nothing (see local.py).
Invariant: a write is one request, which the service applies as a whole. Listings are never cached. Only `_call` repeats
requests: hidden retries of the client would make a lost reply look like a lost race.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from rftdask.errors import NotFoundError, StorageError, StorageRefusedError, UserError
from rftdask.storage.base import Data, Patience, Storage, check_path, temporary_copy

T = TypeVar("T")

PACKAGES = dict.fromkeys(("s3", "s3a"), "s3fs") | dict.fromkeys(("gs", "gcs"), "gcsfs")
PACKAGES |= dict.fromkeys(("abfs", "abfss", "az"), "adlfs")
"""Protocol -> pip package. Only these protocols have a conditional create that the service decides: S3 If-None-Match
(s3fs), GCS ifGenerationMatch=0 (gcsfs), Azure If-None-Match (adlfs); all three as mode="create"."""

_S3 = ("s3", "s3a")
_TOKEN = "rftdask-token"
"""Key of the S3 object metadata that identifies the call of `put_new` that created the object."""

_SETTINGS = ("AWS_", "FSSPEC_", "AZURE_", "GOOGLE_", "GCSFS_")
"""Prefixes of the environment variables that determine service and account of a client."""
_FILESYSTEMS: dict[tuple[Any, ...], Any] = {}
_LOCK = threading.Lock()

_CLIENTS = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
"""Packages whose own errors (not OSError) may indicate a fault of the network or the service."""

_FINAL = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_FINAL_ERRNO = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG, errno.EMSGSIZE, errno.ENOSPC)
_REPEAT_STATUS = (408, 409, 429)
"""HTTP status of retryable requests: timeout, conflicting conditional write, slow down. Also 500 and above."""


class FsspecStorage(Storage):
    """`FsspecStorage("s3://bucket/runs")`; the bucket must exist.

    Start processes by spawn: the event loop of fsspec does not survive a fork.
    `has_create_only` trusts the protocol; `check_storage` detects an S3 server that ignores If-None-Match.
    """

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """sleep: called between tries; tests pass their own."""
        self._sleep = sleep
        self.url = url.rstrip("/")
        self._protocol = url.partition("://")[0]
        self._fs = _open_filesystem(url, self._protocol)
        self._root = self._fs._strip_protocol(self.url).rstrip("/")
        self.has_create_only = self._protocol in PACKAGES

    def __reduce__(self) -> tuple[type[FsspecStorage], tuple[str]]:
        return FsspecStorage, (self.url,)

    def put(self, path: str, data: Data) -> None:
        """Send one request; the service shows the new object as a whole."""
        target = self._at(path)
        content = bytes(data)  # the only type that clients accept; no copy if it is bytes
        self._call("put", target, lambda: self._fs.pipe_file(target, content))

    def put_new(self, path: str, data: bytes) -> bool:
        """See Storage. Without `has_create_only`, a check and then a put, which two callers may win.

        If a reply is lost inside gcsfs or adlfs, whose retries are hidden, the result is False, which is safe.
        """
        target = self._at(path)
        # Stored as metadata, so that a caller that gets "exists" can find out whether the object is its own.
        token = uuid.uuid4().hex
        options: dict[str, Any] = {"Metadata": {_TOKEN: token}} if self._protocol in _S3 else {}
        in_doubt = False  # an earlier try may have created the object although it seemed to fail

        def create() -> bool:
            nonlocal in_doubt
            try:
                self._fs.pipe_file(target, data, mode="create", **options)
                return True
            except Exception as error:  # every client has its own error classes; all but "exists" are raised
                if _is_existing(error):
                    # True if an earlier try of this call created it, and its reply was lost.
                    if self._protocol in _S3:
                        return bool(self._fs.metadata(target).get(_TOKEN) == token)
                    # Without metadata, compare the content, but only after a fault: otherwise equal bytes of another
                    # writer would pass for ours.
                    return in_doubt and bool(self._fs.cat_file(target) == data)
                # Perhaps only the reply was lost, and the next try gets "exists".
                in_doubt = in_doubt or _is_transient(error)
                raise

        return self._call("put_new", target, create)

    def get(self, path: str) -> bytes:
        """See Storage. One request on S3, so that the bytes are of one version of the object."""
        target = self._at(path)
        # s3fs splits requests above 50 MiB, which could mix two versions of an object.
        options = {"max_concurrency": 1} if self._protocol in _S3 else {}
        data: bytes = self._call("get", target, lambda: self._fs.cat_file(target, **options))
        return data

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        """See Storage. One range request, which must begin before the end of the object."""
        target = self._at(path)
        data: bytes = self._call("get", target, lambda: self._fs.cat_file(target, start=start, end=stop))
        return data

    def list(self, folder: str = "") -> list[str]:
        """See Storage. The services guarantee that a write is listed once it has returned."""
        target = self._at(folder) if folder else self._root
        try:
            entries = self._call("list", target, lambda: self._fs.ls(target, detail=True, refresh=True))
        except NotFoundError:
            return []
        names = set()
        for entry in entries:
            # Clients differ: names with or without a slash, and some list the folder itself.
            full = entry["name"].rstrip("/")
            if full != target:  # equal for the marker of an empty folder, or if `target` is a file
                names.add(full.rpartition("/")[2] + ("/" if entry["type"] == "directory" else ""))
        return sorted(names)

    def remove(self, path: str) -> None:
        """Remove object by object: a reader may see half a folder. Raises: StorageError: some objects remain."""
        target = self._at(path)

        def remove() -> None:
            try:
                self._fs.rm(target, recursive=True)
            except FileNotFoundError:
                return
            if remaining := self._files(target):  # s3fs ignores the errors of single objects
                raise OSError(errno.EBUSY, f"{len(remaining)} objects remain, first {remaining[0]}")

        self._call("remove", target, remove)

    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        """Download to a temporary folder, which is removed with the context."""
        target = self._at(path)
        files = self._call("local_copy", target, lambda: self._files(target))
        if not files:
            raise NotFoundError(f"{target} does not exist")

        def fetch(file: str, to: Path) -> None:
            self._call("local_copy", file, lambda: self._fs.get_file(file, str(to)))

        return temporary_copy(target, {file: partial(fetch, file) for file in files})

    def _files(self, target: str) -> Sequence[str]:
        # Without the empty objects by which other programs mark folders.
        return [file for file in self._fs.find(target) if not file.endswith("/")]

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _call(self, verb: str, target: str, operation: Callable[[], T]) -> T:
        patience = Patience(f"{verb} {target}", _is_transient, self._sleep)
        try:
            return patience.call(operation)
        except (FileNotFoundError, IsADirectoryError) as error:
            # Writes create folders, so only the bucket can be missing.
            if verb.startswith("put"):
                raise StorageError(f"{verb} {target} failed: {error}; check that the bucket exists") from error
            raise NotFoundError(f"{target} does not exist") from error
        except Exception as error:  # errors of clients become StorageError; our own bugs are raised as they are
            if not (isinstance(error, OSError) or _is_from_client(error)):
                raise
            kind = StorageError if _is_transient(error) else StorageRefusedError
            raise kind(
                f"{verb} {target} failed (tries: {patience.tries}): {type(error).__name__}: {error}; "
                "check the network, the credentials and the permissions on the bucket"
            ) from error


def _open_filesystem(url: str, protocol: str) -> Any:
    """Return the client for `url`, which all storages of this process on the same service and account share.

    Making one takes 0.1 s and opens connections. An s3fs client that is garbage collected while another event loop
    runs, such as Dask's, fails when it closes itself in that loop. The shared instance of fsspec is not used: other
    code may use it, with a cache of listings and hidden retries.
    """
    if "::" in url:
        raise UserError(f"{url}: chained URLs add caches and lose atomic writes; give the plain URL")
    if any(character in url for character in "*?[]"):
        raise UserError(f"{url}: a storage URL cannot have wildcards; choose another folder name")
    if not url.partition("://")[2].strip("/"):
        raise UserError(f"{url} names no bucket; write {protocol}://bucket/folder")
    try:
        options = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url)
        settings = [(name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS)]
        key = (protocol, repr(sorted(options.items())), tuple(sorted(settings)))
        with _LOCK:
            if key not in _FILESYSTEMS:
                filesystem, _ = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
                if protocol in _S3:  # hidden retries of s3fs and botocore would hide a lost reply from put_new
                    filesystem.retries = 1
                    filesystem.config_kwargs = {**filesystem.config_kwargs, "retries": {"max_attempts": 0}}
                _FILESYSTEMS[key] = filesystem
            return _FILESYSTEMS[key]
    except ImportError as error:
        package = PACKAGES.get(protocol)
        advice = f"run `pip install {package}`" if package else str(error)
        raise UserError(f"{url}: the package for {protocol}:// is not installed; {advice}") from error
    except ValueError as error:
        known = "a path, file://, memory://, s3://, gs://, abfs://"
        raise UserError(f"{url}: {error}; use {known} or another protocol of fsspec") from error


def _is_existing(error: Exception) -> bool:
    """Return True if a create failed because the object exists (HTTP 412). Not every S3 server names the condition."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(error, FileExistsError) or (
        isinstance(response, dict) and response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")
    )


def _is_from_client(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _CLIENTS


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, _FINAL):
        return False
    if isinstance(error, OSError):
        return error.errno not in _FINAL_ERRNO
    if not _is_from_client(error) or "Credential" in type(error).__name__:
        return False
    # A client error with a status is a reply: retried only if the service requests it, or if the service failed.
    status = getattr(error, "status_code", None) or getattr(error, "code", None)  # azure, gcsfs; None: no reply
    return not isinstance(status, int) or status >= 500 or status in _REPEAT_STATUS
