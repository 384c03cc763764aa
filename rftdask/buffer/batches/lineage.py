"""Parent: where a lineage that trains another one's batches again has them from.

Such a lineage is a run folder of its own, `<run>/lineages/<name>/`, with its own ledger, checkpoints and metrics. Its
experiences are those of the run that it is in, and are read there. Invariant: nothing of the run is ever changed by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object

MAIN_LINEAGE = "main"
"""Name of the lineage of a run that is no other's."""
LINEAGES = "lineages"
"""Folder of a run that holds its other lineages."""
_FILE = "parent.json"


@dataclass(frozen=True)
class Parent:
    """Example: Parent(name="half-lr", lineage="main", step=20)   # trains what main trained after step 20"""

    name: str
    """Of the lineage that has this parent."""
    lineage: str
    """The one whose batches are trained again."""
    step: int
    """Up to it both are the same; 0: they begin with the same model."""
    schedule_steps: int | None = None
    """Total steps that the parent's learning rate was planned with; None: unknown, and not needed."""


def read_parent(storage: Storage) -> Parent | None:
    """The parent of the lineage in this run folder; None if the folder is a run itself. Raises: DamagedError."""
    # By the place alone, without a read: most folders are runs, and are asked often.
    if f"/{LINEAGES}/" not in storage.url:
        return None
    try:
        return Parent(**parse_object(storage.get(_FILE)))
    except NotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{storage.url}/{_FILE} is damaged: {error}") from error


def record_parent(storage: Storage, parent: Parent) -> bool:
    """Say so, once and for all; False if the folder has a parent already."""
    return storage.put_new(_FILE, json.dumps(asdict(parent), indent=1).encode())


def parent_storage(storage: Storage) -> Storage:
    """The run folder that this lineage is in."""
    return open_storage(storage.url.rpartition(f"/{LINEAGES}/")[0])


def lineage_of(storage: Storage) -> str:
    """The name of the lineage whose ledger is in this run folder."""
    parent = read_parent(storage)
    return MAIN_LINEAGE if parent is None else parent.name
