"""The environment of Data-Juicer: where it is, what is in it, and how it is made.

Its pins exclude ours (dill, multiprocess), so it has a virtual environment beside ours, made once on each machine or
shared file system by `rftdask data setup`. Invariant: an environment with a mark is whole; one without is taken up.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftdask.errors import NotInstalledError, UserError

VERSION = "1.6.1"
REQUIREMENTS = (
    f"py-data-juicer=={VERSION}",
    "aiohttp",  # it imports this, and does not declare it
    "ray",  # its core imports this as it begins; nothing of Ray is ever started
)
"""All that is installed. Operators may need more (`--with`); torch only those that have a model."""
PLACE = "RFTDASK_DATA_JUICER"
"""Environment variable: the folder of the environment, in place of one in the user's cache."""
_MARK = "rftdask.json"
_INSTALL_S = 3600.0
"""For an installation of some 900 MB; a minute where the packages are near."""
_START_S = 300.0
"""For a Python that imports it, the first time from a slow disk."""


@dataclass(frozen=True)
class Environment:
    """One that is whole."""

    python: Path
    packages: Mapping[str, str]
    """Version by the name of each package in it."""


def environment_folder() -> Path:
    """Where the environment is or would be."""
    if given := os.environ.get(PLACE):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rftdask" / f"data-juicer-{VERSION}"


def find_environment(what: str) -> Environment:
    """The environment, for `what` needs it. Raises: NotInstalledError: there is none."""
    folder = environment_folder()
    try:
        mark = json.loads((folder / _MARK).read_bytes())
    except (OSError, ValueError):
        raise NotInstalledError(
            f"{what} needs Data-Juicer, which has an environment of its own, and there is none in {folder}: run "
            f"`rftdask data setup` once ({PLACE} names another folder)"
        ) from None
    return Environment(_python(folder), mark["packages"])


def set_up(extra: Sequence[str] = ()) -> str:
    """Make the environment, or add packages to it; one that was begun is finished. Returns: what was done.

    extra: requirements as pip takes them, for operators that need more. What pip says goes to the terminal.
    Raises: UserError: an installation failed, or another one is under way in the folder.
    """
    folder = environment_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another `rftdask data setup` is at work in {folder}; wait for it") from None
        mark = folder / _MARK
        was = json.loads(mark.read_bytes())["requirements"] if mark.is_file() else []
        wanted = list(dict.fromkeys([*REQUIREMENTS, *was, *extra]))
        if set(wanted) == set(was):
            return f"Data-Juicer {VERSION} is in {folder} already"
        # From here on until all is there it is not whole, whatever ends this process.
        mark.unlink(missing_ok=True)
        python = str(_python(folder))
        _do([sys.executable, "-m", "venv", str(folder)], _START_S)
        _do([python, "-I", "-m", "pip", "install", *wanted], _INSTALL_S)
        _do([python, "-I", "-c", "import data_juicer.core"], _START_S)
        listed = _do([python, "-I", "-m", "pip", "list", "--format=json"], _START_S, read=True)
        packages = {each["name"]: each["version"] for each in json.loads(listed)}
        part = mark.with_suffix(".part")
        part.write_text(json.dumps({"requirements": wanted, "packages": packages}, indent=1))
        part.replace(mark)
    return f"Data-Juicer {VERSION} is in {folder}, with {', '.join(wanted[1:])}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _do(command: list[str], timeout_s: float, *, read: bool = False) -> str:
    told = f"{' '.join(command)}: "
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE if read else None, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{told}not done after {timeout_s:.0f} s; the same command goes on") from None
    except OSError as error:
        raise UserError(f"{told}{error}") from error
    if ended.returncode:
        raise UserError(f"{told}it ended with code {ended.returncode}, see above; the same command goes on")
    return ended.stdout.decode() if read else ""
