"""Private folder: how the machines of one run find and trust each other: the scheduler's address and the TLS keys.

Every machine of the run sees it; only its owner may read it (folder 0700, files 0600), for who has the keys may run
code on every worker. Invariant: the address is written last and whole, and goes when the scheduler does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rftdask.errors import UserError

if TYPE_CHECKING:  # a job's first process has a folder, and no time for a configuration, a storage and Dask
    from distributed.security import Security

    from rftdask.config import Config
    from rftdask.storage import Storage

SCHEDULER_FILE = "scheduler.json"
_FILES = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
_RENEW_S = 100 * 86400
"""Dask's certificates hold for 365 days. An earlier start's are kept, so that a worker may join across starts."""


class PrivateFolder:
    """Example: folder = PrivateFolder.of(config, storage); folder.make_keys(); folder.write_address("tls://10.0.0.1:8786")"""

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """base: the folder above it that is private, too."""
        self.path = path
        self.base = base or path

    @classmethod
    def of(cls, config: Config, storage: Storage) -> PrivateFolder:
        """The folder of the cluster that works for `config`; not made yet. Exploring and training as commands of
        their own are clusters of their own, and have one each.
        """
        base = cls.base_of(config, storage).path
        return cls(base / config.command_name if config.mode in ("explore", "train") else base, base)

    @classmethod
    def base_of(cls, config: Config, storage: Storage) -> PrivateFolder:
        """The folder of a run, whatever the mode; what is submitted is there."""
        # By the URL, so that two runs never share keys, and a name is no longer than a file system takes.
        digest = hashlib.sha256(storage.url.encode()).hexdigest()[:16]
        if config.cluster.private_folder is not None:
            return cls(Path(config.cluster.private_folder).expanduser().absolute() / digest)
        if "://" in storage.url:
            return cls(Path.home() / ".rftdask" / digest)
        return cls(Path(storage.url).absolute() / "control" / "private")

    @property
    def scheduler_file(self) -> Path:
        """With the address, which joining workers wait for."""
        return self.path / SCHEDULER_FILE

    def make(self) -> None:
        """Raises: UserError: it cannot be made, or others may read it."""
        try:
            for path in dict.fromkeys((self.base, self.path)):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.chmod(0o700)
        except OSError as error:
            raise UserError(f"cluster.private_folder: {self.path} cannot be made private: {error}") from error
        # Looked at, since some file systems take a chmod and keep no modes.
        if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
            raise UserError(
                f"cluster.private_folder: others may read {self.path}, whose file system keeps no modes; name another"
            )

    def make_keys(self) -> Security:
        """The keys of the run, made at the first start; for the scheduler, the workers and the clients alike."""
        from distributed.security import Security  # late: as above

        self.make()
        newest = self.path / _FILES["key"]
        if not newest.exists() or time.time() - newest.stat().st_mtime > _RENEW_S:
            made = Security.temporary()
            # The key last: its age is what says that all of them are there.
            for part, content in (
                ("ca", made.tls_ca_file),
                ("cert", made.tls_worker_cert),
                ("key", made.tls_worker_key),
            ):
                self.write(_FILES[part], content)
        return self.security()

    def security(self) -> Security:
        """From the keys that are there. Raises: UserError: there are none."""
        from distributed.security import Security  # late: as above

        paths = self._key_paths()
        if not all(map(os.path.exists, paths.values())):
            raise UserError(f"{self.path} has no TLS keys: the run has no cluster, or it is another user's")
        roles, parts = ("scheduler", "worker", "client"), ("cert", "key")
        both = {f"tls_{role}_{part}": paths[part] for role in roles for part in parts}
        return Security(tls_ca_file=paths["ca"], require_encryption=True, **both)

    def worker_options(self, tls: bool, interface: str | None) -> list[str]:
        """Options of `dask worker` by which it finds the scheduler and its keys; not quoted."""
        options = ["--scheduler-file", str(self.scheduler_file)]
        if tls:
            paths = self._key_paths()
            options += ["--tls-ca-file", paths["ca"], "--tls-cert", paths["cert"], "--tls-key", paths["key"]]
        return [*options, *(("--interface", interface) if interface is not None else ())]

    def _key_paths(self) -> dict[str, str]:
        return {name: str(self.path / file) for name, file in _FILES.items()}

    def write_address(self, address: str) -> None:
        """As `dask worker --scheduler-file` reads it."""
        self.make()
        self.write(SCHEDULER_FILE, json.dumps({"address": address, "type": "Scheduler", "pid": os.getpid()}))

    def read_address(self) -> str | None:
        """The scheduler's, None while there is none."""
        try:
            return str(json.loads(self.scheduler_file.read_text())["address"])
        except (OSError, ValueError, KeyError):
            return None

    def remove_address(self, address: str) -> None:
        """Unless another start has written its own."""
        if self.read_address() == address:
            with contextlib.suppress(FileNotFoundError):
                self.scheduler_file.unlink()

    def write(self, name: str, content: str) -> Path:
        """Write a file of the folder, whole or not at all; its path."""
        # Under another name until it is whole, and never readable by others, not even for a moment.
        temporary = self.path / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(content)
        return temporary.replace(self.path / name)
