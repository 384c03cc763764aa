"""Parent: the lineage whose batches another lineage trains again.

Such a lineage is a run folder of its own, `<run>/lineages/<name>/`, with its own ledger, checkpoints and metrics. It
reads the experiences of the run that contains it. Invariant: it never changes anything of that run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object

MAIN_LINEAGE = "main"
"""Name of the lineage of a run without a parent."""
LINEAGES = "lineages"
"""Folder of a run that holds its other lineages."""
_FILE = "parent.json"


@dataclass(frozen=True)
class Parent:
    """Example: Parent(name="half-lr", lineage="main", step=20)   # trains what main trained after step 20"""

    name: str
    """Name of the lineage that has this parent."""
    lineage: str
    """Lineage whose batches are trained again."""
    step: int
    """Last optimizer step that both share; 0: they begin with the same model."""
    schedule_steps: int | None = None
    """Total steps of the parent's learning rate schedule; None: unknown, and not needed."""


def read_parent(storage: Storage) -> Parent | None:
    """Return the parent of the lineage in this run folder; None if the folder is a run. Raises: DamagedError."""
    # By the path, without a read: most folders are runs, and this is called often.
    if f"/{LINEAGES}/" not in storage.url:
        return None
    try:
        return Parent(**parse_object(storage.get(_FILE)))
    except NotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{storage.url}/{_FILE} is damaged: {error}") from error


def record_parent(storage: Storage, parent: Parent) -> bool:
    """Record the parent permanently; False if the folder already has one."""
    return storage.put_new(_FILE, json.dumps(asdict(parent), indent=1).encode())


def parent_storage(storage: Storage) -> Storage:
    """Return the run folder that contains this lineage."""
    return open_storage(storage.url.rpartition(f"/{LINEAGES}/")[0])


def lineage_of(storage: Storage) -> str:
    """Return the name of the lineage whose ledger is in this run folder."""
    parent = read_parent(storage)
    return MAIN_LINEAGE if parent is None else parent.name
