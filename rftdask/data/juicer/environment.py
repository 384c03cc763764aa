"""The Python environment of Data-Juicer: its location, its packages, and how it is made.

Its requirements conflict with ours (dill, multiprocess), so it has a separate virtual environment, made once per
machine or shared file system by `rftdask data setup`. Invariant: an environment with a mark file is complete; setup
continues one without.
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
    "aiohttp",  # an undeclared dependency
    "ray",  # imported by its core; Ray is never started
)
"""Packages to install. Operators may need more (`--with`); only those with a model need torch."""
PLACE = "RFTDASK_DATA_JUICER"
"""Environment variable: folder of the environment. Unset: a folder in the user's cache."""
_MARK = "rftdask.json"
_INSTALL_S = 3600.0
"""Timeout of the installation, about 900 MB; it takes a minute with a fast network."""
_START_S = 300.0
"""Timeout of a Python process that imports Data-Juicer, the first time from a slow disk."""


@dataclass(frozen=True)
class Environment:
    """A complete environment."""

    python: Path
    packages: Mapping[str, str]
    """Package name -> version."""


def environment_folder() -> Path:
    """Return the folder of the environment, which need not exist."""
    if folder := os.environ.get(PLACE):
        return Path(folder).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rftdask" / f"data-juicer-{VERSION}"


def find_environment(what: str) -> Environment:
    """Return the environment. what: the key that needs it. Raises: NotInstalledError: there is none."""
    folder = environment_folder()
    try:
        mark = json.loads((folder / _MARK).read_bytes())
    except (OSError, ValueError):
        raise NotInstalledError(
            f"{what} needs Data-Juicer, which has an environment of its own, and none exists in {folder}: run "
            f"`rftdask data setup` once ({PLACE} names another folder)"
        ) from None
    return Environment(_python(folder), mark["packages"])


def set_up(extra: Sequence[str] = ()) -> str:
    """Make the environment, complete a partial one, or add packages. Returns: a sentence on the result.

    extra: requirements for pip, for operators that need more packages. The output of pip goes to the terminal.
    Raises: UserError: an installation failed, or another one is running in the folder.
    """
    folder = environment_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another `rftdask data setup` is running in {folder}; wait for it") from None
        mark = folder / _MARK
        installed = json.loads(mark.read_bytes())["requirements"] if mark.is_file() else []
        wanted = list(dict.fromkeys([*REQUIREMENTS, *installed, *extra]))
        if set(wanted) == set(installed):
            return f"Data-Juicer {VERSION} is in {folder} already"
        # The environment is incomplete until the mark is written again, even if this process is killed.
        mark.unlink(missing_ok=True)
        python = str(_python(folder))
        _run([sys.executable, "-m", "venv", str(folder)], _START_S)
        _run([python, "-I", "-m", "pip", "install", *wanted], _INSTALL_S)
        _run([python, "-I", "-c", "import data_juicer.core"], _START_S)
        listing = _run([python, "-I", "-m", "pip", "list", "--format=json"], _START_S, read=True)
        packages = {package["name"]: package["version"] for package in json.loads(listing)}
        part = mark.with_suffix(".part")
        part.write_text(json.dumps({"requirements": wanted, "packages": packages}, indent=1))
        part.replace(mark)
    return f"Data-Juicer {VERSION} is in {folder}, with {', '.join(wanted[1:])}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _run(command: list[str], timeout_s: float, *, read: bool = False) -> str:
    text = " ".join(command)
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE if read else None, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{text}: not done after {timeout_s:.0f} s; run setup again to continue") from None
    except OSError as error:
        raise UserError(f"{text}: {error}") from error
    if ended.returncode:
        raise UserError(f"{text}: exit code {ended.returncode}, see above; run setup again to continue")
    return ended.stdout.decode() if read else ""
