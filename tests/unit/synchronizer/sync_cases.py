"""Storages in memory, and published weights without a trainer."""

import itertools
from collections.abc import Mapping

from rftdask.storage import Storage, open_storage
from rftdask.storage.base import Data
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.published import MODEL_FILE, Published
from rftdask.synchronizer.publisher import Publisher

_numbers = itertools.count()


def new_storage() -> Storage:
    return open_storage(f"memory://sync-{next(_numbers)}")


def publish_weights(
    storage: Storage, version: int, data: Data | Mapping[str, Data], fingerprint: Fingerprint | None = None
) -> Published:
    """Publish files by name, or the only file, as a new process of lineage main."""
    files = data if isinstance(data, Mapping) else {MODEL_FILE: data}
    return Publisher(storage, "main").publish(version, files, fingerprint)
