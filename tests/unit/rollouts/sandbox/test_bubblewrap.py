"""Promises of `explorer.sandbox.bubblewrap`: files and network that a rollout can access, and clear errors if it does
not work. Runs with the real bwrap if it is installed, and with a stand-in that only runs its command.
"""

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.explorer import SandboxConfig
from rftdask.errors import NotInstalledError, UserError
from rftdask.rollouts.sandbox.bubblewrap import bwrap_command, check_bubblewrap
from tests.living import wait_until
from tests.unit.rollouts.rollout_cases import replies, run, task

ON = SandboxConfig(bubblewrap=True, max_processes=2)
STAND_IN = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = STAND_IN) -> str:
    program = folder / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return str(program)


def look_around(folder: Path, sandbox: SandboxConfig) -> list[Experience]:
    outside = Path.home() / ".rftdask-test-of-bubblewrap"
    with socket.create_server(("127.0.0.1", 0)) as server:
        row = {
            "outside": str(outside),
            "in_tmp": str(folder),
            "port": server.getsockname()[1],
            "pid": os.getpid(),
            "does": "looks_around",
        }
        tasks = [task(index, "sandbox_workflows.whatever_the_row_says", row=row) for index in range(4)]
        try:
            return run(tasks, replies("4"), sandbox=sandbox)
        finally:
            outside.unlink(missing_ok=True)


def test_the_command_is_read_only_except_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = stand_in(tmp_path, monkeypatch)
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, "/usr")
    (tmp_path / "code").mkdir()
    code = str(tmp_path / "code")
    shown = ["--ro-bind", code, code] if code.startswith("/tmp/") else []
    command = bwrap_command(["/usr/lib", code, "/tmp/none-such"], network=False)
    assert command == [
        *(program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *("--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL", "--unshare-net", *shown, "--"),
    ]
    assert set(command) - set(bwrap_command([code], network=True)) == {"--unshare-net"}


def test_an_unusable_bubblewrap_is_an_error_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bubblewrap(SandboxConfig(mode="never"))
    with pytest.raises(
        UserError, match=r"explorer\.sandbox\.bubblewrap has no effect with explorer\.sandbox\.mode never"
    ):
        check_bubblewrap(SandboxConfig(mode="never", bubblewrap=True))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        for needs_it in (lambda: check_bubblewrap(ON), lambda: look_around(tmp_path, ON)):
            with pytest.raises(
                NotInstalledError, match=r"explorer\.sandbox\.bubblewrap: .* install the package bubblewrap"
            ):
                needs_it()
    stand_in(tmp_path, monkeypatch, "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    with pytest.raises(UserError, match="cannot create a sandbox on this machine: bwrap: No permissions"):
        check_bubblewrap(ON)


def test_each_rollout_has_its_own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    check_bubblewrap(ON)
    experiences = look_around(tmp_path, ON.model_copy(update={"max_memory_gb": 3.0}))  # a new fork server
    assert [(e.status, e.metrics["own_folder"]) for e in experiences] == [(Status.OK, 1.0)] * 4
    folders = [Path(f"/tmp/rollout-{e.metrics['pid']:.0f}") for e in experiences]
    wait_until(lambda: not any(map(Path.exists, folders)))  # they end a moment after the reward arrives


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed here")
def test_a_rollout_can_read_but_not_change_the_machine(tmp_path: Path) -> None:
    check_bubblewrap(ON)
    abilities = {"own_folder", "files", "tmp", "network", "processes"}
    experiences = look_around(tmp_path, ON)
    assert [{name for name in abilities if not e.metrics[name]} for e in experiences] == [set()] * 4
    connected = look_around(tmp_path, ON.model_copy(update={"bubblewrap_network": True}))
    assert [{name for name in abilities if not e.metrics[name]} for e in connected] == [{"network"}] * 4
