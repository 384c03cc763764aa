"""Command line of bubblewrap, under which sandboxes cannot change the machine, and a check whether it works.

`bwrap` runs the fork server, so all forks of a worker share one sandbox with a separate /tmp and process table.
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
    """Prefix of a command that runs it with a read-only file system, an empty /tmp and a separate process table.

    read: files and folders that it needs, which are kept if they are in /tmp; network: keep the machine's network.
    Raises: NotInstalledError: bwrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        advice = "install the package bubblewrap (apt, dnf), or remove the key"
        raise NotInstalledError(f"{_KEY}: bwrap is not installed; {advice}")
    # Both the given and the resolved path, because environments contain many links.
    names = (*read, sys.prefix, sys.base_prefix)
    needed = {*map(os.path.abspath, names), *map(os.path.realpath, names)}
    # Bind the needed paths of /tmp again, which is replaced by an empty one.
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
    """Check `bubblewrap` if set. Raises: NotInstalledError: it does not work here; UserError: it has no effect."""
    if not section.bubblewrap:
        return
    if section.mode == "never":
        raise UserError(f"{_KEY} has no effect with explorer.sandbox.mode never; use auto or always")
    # Run it, because no readable setting shows whether namespaces are allowed.
    command = [*bwrap_command((), network=section.bubblewrap_network), "true"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{_KEY}: bwrap did not run `true` within {_TRIAL_TIMEOUT_S:g} s") from None
    if ended.returncode:
        raise NotInstalledError(
            f"{_KEY}: bwrap cannot create a sandbox on this machine: {ended.stderr.strip()[-300:]}; containers and "
            "some systems do not allow user namespaces; ask the administrator, or remove the key"
        )
