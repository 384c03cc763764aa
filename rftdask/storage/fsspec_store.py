"""Storage on anything fsspec can reach: s3, gs, abfs and the rest.

It does not know local disks (fsspec's local "create" is a race and nothing there is synced; see local.py).
Invariant: one object is one request that the service applies whole, listings are never cached, and a request is only
repeated by `_call` here: the client's own hidden repeats would make a lost reply look like a lost race.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable
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
"""Protocol -> pip package. These, and only these, have a conditional create that the service itself decides:
S3 If-None-Match (s3fs), GCS ifGenerationMatch=0 (gcsfs), Azure If-None-Match (adlfs); all three are mode="create"."""

_S3 = ("s3", "s3a")
_TOKEN = "rftdask-token"  # Key of the S3 object metadata that tells which call of `put_new` made the object.

_SETTINGS = ("AWS_", "FSSPEC_", "AZURE_", "GOOGLE_", "GCSFS_")
"""Environment variables that decide to which service a client connects, and as whom."""
_FILESYSTEMS: dict[tuple[Any, ...], Any] = {}
_LOCK = threading.Lock()

_CLIENTS = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
"""Packages whose own errors (not OSError) may mean a fault of the network or the service."""

_FINAL = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_FINAL_ERRNO = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG, errno.EMSGSIZE, errno.ENOSPC)
_REPEAT_STATUS = (408, 409, 429)
"""HTTP: timeout; a conflicting conditional write is under way; slow down. 500 and above are repeated too."""


class FsspecStorage(Storage):
    """`FsspecStorage("s3://bucket/runs")`; the bucket must exist. Start processes by spawn: its loop dies in a fork.

    `has_create_only` trusts the protocol; a server that speaks S3 but ignores If-None-Match is
    found by `check_storage`.
    """

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """sleep: between tries; tests give their own."""
        self._sleep = sleep
        self.url = url.rstrip("/")
        self._protocol = url.partition("://")[0]
        self._fs = _open_filesystem(url, self._protocol)
        self._root = self._fs._strip_protocol(self.url).rstrip("/")
        self.has_create_only = self._protocol in PACKAGES

    def __reduce__(self) -> tuple[type[FsspecStorage], tuple[str]]:
        return FsspecStorage, (self.url,)

    def put(self, path: str, data: Data) -> None:
        """One request; a service shows the new object whole or not yet."""
        target = self._at(path)
        whole = bytes(data)  # clients take nothing else; of bytes it is no copy
        self._call("put", target, lambda: self._fs.pipe_file(target, whole))

    def put_new(self, path: str, data: bytes) -> bool:
        """Create as the interface says where `has_create_only`; elsewhere a look and then a put, which two may win.

        A reply lost inside gcsfs or adlfs, which repeat by themselves, reads as False: the safe side.
        """
        target = self._at(path)
        # It goes with the object as metadata: whoever reads "exists" sees by it whether the object is its own.
        token = uuid.uuid4().hex
        options: dict[str, Any] = {"Metadata": {_TOKEN: token}} if self._protocol in _S3 else {}
        in_doubt = False  # an earlier try may have made the object although it seemed to fail

        def create() -> bool:
            nonlocal in_doubt
            try:
                self._fs.pipe_file(target, data, mode="create", **options)
                return True
            except Exception as error:  # every client has its own tree; all but "exists" rise again
                if _says_exists(error):
                    # True all the same if it was made by this very call, whose reply was lost.
                    if self._protocol in _S3:
                        return bool(self._fs.metadata(target).get(_TOKEN) == token)
                    # By content, where there is no metadata to ask for; and only after a fault, so that another's equal
                    # bytes pass for ours in that case alone.
                    return in_doubt and bool(self._fs.cat_file(target) == data)
                # A fault that may have hit the reply only: the object may be there, and the next try would hear
                # "exists".
                in_doubt = in_doubt or _is_transient(error)
                raise

        return self._call("put_new", target, create)

    def get(self, path: str) -> bytes:
        """One request on S3, so that the bytes are of one version of the object."""
        target = self._at(path)
        # More than one request would mix two versions of an object that is replaced meanwhile (s3fs, above 50 MiB).
        options = {"max_concurrency": 1} if self._protocol in _S3 else {}
        data: bytes = self._call("get", target, lambda: self._fs.cat_file(target, **options))
        return data

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        """See Storage; by one request of a range, which must begin before the end of the object."""
        target = self._at(path)
        data: bytes = self._call("get", target, lambda: self._fs.cat_file(target, start=start, end=stop))
        return data

    def list(self, folder: str = "") -> list[str]:
        """Asked of the service each time; the services promise that a write is listed once it has returned."""
        target = self._at(folder) if folder else self._root
        try:
            entries = self._call("list", target, lambda: self._fs.ls(target, detail=True, refresh=True))
        except NotFoundError:
            return []
        names = set()
        for entry in entries:
            # Clients differ in what they list: with a slash or without, and some list the folder itself.
            full = entry["name"].rstrip("/")
            if full != target:  # the marker of an empty folder, or `target` is a file
                names.add(full.rpartition("/")[2] + ("/" if entry["type"] == "directory" else ""))
        return sorted(names)

    def remove(self, path: str) -> None:
        """Object by object: unlike on a disk, a reader may see a folder half gone. Raises: StorageError: some stay."""
        target = self._at(path)

        def remove() -> None:
            try:
                # Tried again it removes what is left: objects that are gone are no error.
                self._fs.rm(target, recursive=True)
            except FileNotFoundError:
                return
            if left := self._fs.find(target):  # s3fs drops the errors of single objects
                raise OSError(errno.EBUSY, f"{len(left)} objects are still there, first {left[0]}")

        self._call("remove", target, remove)

    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        """Fetched to a temporary folder, which goes with the context."""
        target = self._at(path)
        files: list[str] = self._call("local_copy", target, lambda: self._fs.find(target))
        if not files:
            raise NotFoundError(f"{target} does not exist")

        def fetch(file: str, to: Path) -> None:
            self._call("local_copy", file, lambda: self._fs.get_file(file, str(to)))

        return temporary_copy(target, {file: partial(fetch, file) for file in files})

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _call(self, verb: str, target: str, operation: Callable[[], T]) -> T:
        patience = Patience(f"{verb} {target}", _is_transient, self._sleep)
        try:
            return patience.call(operation)
        except (FileNotFoundError, IsADirectoryError) as error:
            # A write makes its folders, so nothing can be missing for it but the bucket.
            if verb.startswith("put"):
                raise StorageError(f"{verb} {target} failed: {error}; check that the bucket exists") from error
            raise NotFoundError(f"{target} does not exist") from error
        except Exception as error:  # a decision: what a client raises becomes our error, what we broke stays
            if not (isinstance(error, OSError) or _is_from_client(error)):
                raise
            kind = StorageError if _is_transient(error) else StorageRefusedError
            raise kind(
                f"{verb} {target} failed (tries: {patience.tries}): {type(error).__name__}: {error}; "
                "check the network, the credentials and the permissions on the bucket"
            ) from error


def _open_filesystem(url: str, protocol: str) -> Any:
    """The client for `url`, one for all storages of this process that differ by their folders alone.

    Making one costs a tenth of a second and connections of its own; and one of s3fs that is collected while another
    event loop runs, such as Dask's, closes itself in that loop, and fails. It is not fsspec's own shared instance,
    which other code may have, with its cache of listings and its hidden repeats.
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
                if protocol in _S3:  # both repeat requests by themselves, which would hide a lost reply from put_new
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


def _says_exists(error: Exception) -> bool:
    """HTTP 412 on a create: something is there. Not every S3 server says which condition failed."""
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
    # A client error with a status is an answer: repeated only if the service asks for it, or failed itself.
    status = getattr(error, "status_code", None) or getattr(error, "code", None)  # azure, gcsfs; None: no reply
    return not isinstance(status, int) or status >= 500 or status in _REPEAT_STATUS
