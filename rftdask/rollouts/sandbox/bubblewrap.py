"""Bubblewrap: the command line under which sandboxes see a machine that they cannot change, and whether it works here.

`bwrap` runs the fork server, so all its forks are in one sandbox of their worker: they share /tmp and a process table,
which nothing outside is part of. It knows neither messages nor attempts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

from rftdask.config.schema.explorer import SandboxConfig
from rftdask.errors import NotInstalledError, UserError

_TRIAL_TIMEOUT_S = 30.0
_KEY = "explorer.sandbox.bubblewrap"


def bwrap_command(read: Iterable[str], *, network: bool) -> list[str]:
    """The words before a command that make it see the machine read-only, an empty /tmp and processes of its own.

    read: files and folders that it needs, which it then sees also in /tmp; network: leave it the machine's network.
    Raises: NotInstalledError: there is no bwrap.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise NotInstalledError(
            f"{_KEY}: there is no bwrap here; install the package bubblewrap (apt, dnf), or leave the key out"
        )
    # As named and as resolved: an environment is mostly full of links.
    needed = {
        path
        for each in (*read, sys.prefix, sys.base_prefix)
        for path in (os.path.abspath(each), os.path.realpath(each))
    }
    # /tmp is replaced by an empty one, so what is needed of the machine's is bound into it again.
    hidden = sorted(path for path in needed if path.startswith("/tmp/") and os.path.exists(path))
    return [
        program,
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *("--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"),
        *(() if network else ("--unshare-net",)),
        *(word for path in hidden for word in ("--ro-bind", path, path)),
        "--",
    ]


def check_bubblewrap(section: SandboxConfig) -> None:
    """Raises: NotInstalledError: `bubblewrap` is set, and there is none that works here; UserError: it has no use."""
    if not section.bubblewrap:
        return
    if section.mode == "never":
        raise UserError(f"{_KEY}: explorer.sandbox.mode never runs nothing in a sandbox; use auto or always")
    # Tried out, since whether namespaces are allowed is told by no setting one could read.
    command = [*bwrap_command((), network=section.bubblewrap_network), "true"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{_KEY}: bwrap did not run `true` within {_TRIAL_TIMEOUT_S:g} s") from None
    if ended.returncode:
        raise NotInstalledError(
            f"{_KEY}: bwrap cannot make a sandbox on this machine: {ended.stderr.strip()[-300:]}; containers and some "
            "systems allow users no namespaces; ask who runs it, or leave the key out"
        )
