"""The path to a line of code: the package's own functions on the stack, written to a file that a test reads."""

import json
import os
import traceback
from pathlib import Path
from typing import Any

import rftdask

STACKS = "RFTDASK_TEST_STACKS"
"""Environment variable with the file."""
_PACKAGE = Path(rftdask.__file__).parent
_NO_CALLS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Names of frames that are not calls: modules, and comprehensions, which have no frame since Python 3.12."""

Call = tuple[str, str]
"""A function as docs/tour.md links to it: file below the package's parent, and name or Class.name."""
_FORKS: Call = ("rftdask/processes/zygote.py", "Zygote._fork")


def own_calls() -> list[Call]:
    """Return the package's functions on the stack of this thread, outermost first."""
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    package_codes = [code for code in reversed(codes) if Path(code.co_filename).is_relative_to(_PACKAGE)]
    names = [(str(Path(code.co_filename).relative_to(_PACKAGE.parent)), code.co_qualname) for code in package_codes]
    calls = [(file, name) for file, name in names if not name.endswith(_NO_CALLS)]
    # The stack of a fork starts with that of the fork server, which is not part of its path.
    return calls[calls.index(_FORKS) + 1 :] if _FORKS in calls else calls


def write_own_calls(place: str) -> None:
    """Append a line with the place and the path to it."""
    with open(os.environ[STACKS], "a") as file:
        file.write(json.dumps([place, own_calls()]) + "\n")


def read_own_calls(path: Path) -> list[tuple[str, list[Call]]]:
    lines: list[Any] = [json.loads(line) for line in path.read_text().splitlines()]
    return [(place, [(file, name) for file, name in calls]) for place, calls in lines]
