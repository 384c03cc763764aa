"""Hooks of FaultyStorage that end a writer at one place, as a kill would."""

from __future__ import annotations

from rftdask.errors import StorageError
from rftdask.testing.storage_faults import Hook


def killed_at_put(number: int, puts: list[str]) -> Hook:
    """Before the put of this number, from 0; `puts` takes the paths up to it."""

    def hook(verb: str, path: str, stage: str) -> None:
        if verb == "put" and stage == "before":
            puts.append(path)
            if len(puts) == number + 1:
                raise StorageError("killed")

    return hook


def killed_before(verb: str, path: str) -> Hook:
    """Before every such call."""

    def hook(called: str, at: str, stage: str) -> None:
        if (called, at, stage) == (verb, path, "before"):
            raise StorageError("killed")

    return hook
