"""Secrets directory of a run: address of the scheduler and TLS keys, on a file system that all of its machines see.

Only its owner may read it (directory 0700, files 0600), because the keys allow running code on every worker.
Invariant: the address is written last, in one step, and is removed with the scheduler.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rftdask.errors import UserError

if TYPE_CHECKING:  # slow imports that the first process of a job does not need
    from distributed.security import Security

    from rftdask.config import Config
    from rftdask.storage import Storage

SCHEDULER_FILE = "scheduler.json"
_FILES = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
_RENEW_S = 100 * 86400
"""Age of keys that a start replaces; later starts keep younger ones, so that workers can join across starts."""
_VALID = timedelta(days=365)
"""Validity of a certificate, before and after its creation."""


def new_security() -> Security:
    """Return new TLS keys for a Dask cluster, which exist only in memory."""
    return _security(_new_keys())


def _security(keys: Mapping[str, str]) -> Security:
    """keys: path or content of each of _FILES."""
    from distributed.security import Security  # late: see TYPE_CHECKING

    roles, parts = ("scheduler", "worker", "client"), ("cert", "key")
    both = {f"tls_{role}_{part}": keys[part] for role in roles for part in parts}
    return Security(tls_ca_file=keys["ca"], require_encryption=True, **both)


def _new_keys() -> dict[str, str]:
    """Return the content of each of _FILES.

    Like `Security.temporary`, but valid also before now: a clock may be set back, and clocks of machines differ. A
    certificate from the future would keep workers from joining until the clock has caught up.
    """
    from cryptography import x509  # late: see TYPE_CHECKING
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dask-internal")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - _VALID, now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("dask-internal")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    public = certificate.public_bytes(pem).decode()
    return {"ca": public, "cert": public, "key": private}


class SecretsDir:
    """Example: folder = SecretsDir.of(config, storage); folder.make_keys(); folder.write_address("tls://10.0.0.1:8786")"""

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """base: parent directory that is also private."""
        self.path = path
        self.base = base or path

    @classmethod
    def of(cls, config: Config, storage: Storage) -> SecretsDir:
        """Directory of the cluster of `config`, which may not exist. Commands of mode explore and train have clusters
        and directories of their own.
        """
        base = cls.base_of(config, storage).path
        return cls(base / config.command_name if config.mode in ("explore", "train") else base, base)

    @classmethod
    def base_of(cls, config: Config, storage: Storage) -> SecretsDir:
        """Directory of a run in any mode, with its submitted files."""
        # Named by a hash, so that runs never share keys and names stay short.
        digest = hashlib.sha256(storage.url.encode()).hexdigest()[:16]
        if config.cluster.private_folder is not None:
            return cls(Path(config.cluster.private_folder).expanduser().absolute() / digest)
        if "://" in storage.url:
            return cls(Path.home() / ".rftdask" / digest)
        return cls(Path(storage.url).absolute() / "control" / "private")

    @property
    def scheduler_file(self) -> Path:
        """File with the address, which joining workers wait for."""
        return self.path / SCHEDULER_FILE

    def make(self) -> None:
        """Create the directory. Raises: UserError: not possible, or other users may read it."""
        try:
            for path in dict.fromkeys((self.base, self.path)):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.chmod(0o700)
        except OSError as error:
            raise UserError(f"cluster.private_folder: cannot create the private folder {self.path}: {error}") from error
        # Some file systems accept a chmod and ignore it.
        if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
            raise UserError(
                f"cluster.private_folder: other users may read {self.path}, whose file system ignores modes"
            )

    def make_keys(self) -> Security:
        """Keys of the run for scheduler, workers and clients, created at the first start."""
        self.make()
        newest = self.path / _FILES["key"]
        if not newest.exists() or time.time() - newest.stat().st_mtime > _RENEW_S:
            for part, content in _new_keys().items():  # the key last, since its age is checked above
                self.write(_FILES[part], content)
        return self.security()

    def security(self) -> Security:
        """Existing keys. Raises: UserError: there are none."""
        paths = self._key_paths()
        if not all(map(os.path.exists, paths.values())):
            raise UserError(f"{self.path} has no TLS keys: the run has no cluster, or it belongs to another user")
        return _security(paths)

    def worker_options(self, tls: bool, interface: str | None) -> list[str]:
        """Options of `dask worker` with the scheduler and the keys; not quoted."""
        options = ["--scheduler-file", str(self.scheduler_file)]
        if tls:
            paths = self._key_paths()
            options += ["--tls-ca-file", paths["ca"], "--tls-cert", paths["cert"], "--tls-key", paths["key"]]
        return [*options, *(("--interface", interface) if interface is not None else ())]

    def _key_paths(self) -> dict[str, str]:
        return {name: str(self.path / file) for name, file in _FILES.items()}

    def write_address(self, address: str) -> None:
        """Write the file for `dask worker --scheduler-file`."""
        self.make()
        self.write(SCHEDULER_FILE, json.dumps({"address": address, "type": "Scheduler", "pid": os.getpid()}))

    def read_address(self) -> str | None:
        """Address of the scheduler. None: not running."""
        try:
            return str(json.loads(self.scheduler_file.read_text())["address"])
        except (OSError, ValueError, KeyError):
            return None

    def remove_address(self, address: str) -> None:
        """Remove the address, unless another start has replaced it."""
        if self.read_address() == address:
            with contextlib.suppress(FileNotFoundError):
                self.scheduler_file.unlink()

    def write(self, name: str, content: str) -> Path:
        """Write a file atomically, never readable by other users. Returns: its path."""
        temporary = self.path / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(content)
        return temporary.replace(self.path / name)
