"""Hooks of FaultyStorage that end a writer at one place, as a kill would, or fail every call."""

from collections.abc import Sequence

from rftdask.errors import StorageError
from rftdask.testing.storage_faults import Hook

WRITES = ("put", "put_new", "remove")


class Killed(BaseException):
    """Simulates the end of the process."""


def killed_at(number: int, moment: str = "before", verbs: Sequence[str] = WRITES) -> Hook:
    """Raises Killed before or after the call of this number, from 0, among those of `verbs`, and at each later one."""
    left = number

    def hook(verb: str, path: str, stage: str) -> None:
        nonlocal left
        if verb in verbs and stage == moment:
            if left <= 0:
                raise Killed
            left -= 1

    return hook


def killed_at_put(number: int, puts: list[str]) -> Hook:
    """Fails before the put of this number, from 0; `puts` collects the paths up to it."""

    def hook(verb: str, path: str, stage: str) -> None:
        if verb == "put" and stage == "before":
            puts.append(path)
            if len(puts) == number + 1:
                raise StorageError("killed")

    return hook


def killed_before(verb: str, path: str | None = None) -> Hook:
    """Fails before every call of `verb` with this path; None: any path."""

    def hook(called: str, at: str, stage: str) -> None:
        if (called, stage) == (verb, "before") and path in (None, at):
            raise StorageError("killed")

    return hook
