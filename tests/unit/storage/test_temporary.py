"""Promises of temporary folders: none outlives its owner for long, and none is removed before."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rftdask.errors import StorageError
from rftdask.storage import temporary
from rftdask.storage.temporary import TemporaryFolder, remove_abandoned

OWNER = """
import sys
from rftdask.storage.temporary import TemporaryFolder
folder = TemporaryFolder("test", sys.argv[1])
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_folder_is_removed_once_its_owner_has_ended(tmp_path: Path, is_killed: bool) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / "file").touch()
        remove_abandoned(str(tmp_path))
        assert (folder / "file").exists(), "its owner lives"
        if is_killed:
            owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert folder.exists() == is_killed
    with TemporaryFolder("next", str(tmp_path)) as name:
        assert [*tmp_path.iterdir()] == [Path(name)]
    assert not [*tmp_path.iterdir()]


def test_other_folders_and_links_are_not_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / f"{temporary._prefix()}link").symlink_to(elsewhere)
    (tmp_path / f"{temporary._prefix()}file").touch()
    (tmp_path / "rftdask-log-abc").mkdir()
    (tmp_path / "rftdask-0-test-of-another-host").mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fork_does_not_remove_the_folder_of_its_parent(tmp_path: Path) -> None:
    script = "import os, sys\nfrom rftdask.storage.temporary import TemporaryFolder\n"
    script += "folder = TemporaryFolder('test', sys.argv[1])\npid = os.fork()\n"
    script += "if pid:\n    os.waitpid(pid, 0)\n    assert os.path.exists(folder.name)\n"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert not [*tmp_path.iterdir()]


def test_a_folder_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes abandoned folders while this one makes its own."""
    names, make = [], tempfile.mkdtemp

    def removed_at_first(**options: str) -> str:
        names.append(make(**options))
        if len(names) == 1:
            remove_abandoned(str(tmp_path))
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_first)
    with TemporaryFolder("test", tmp_path) as name:
        assert [Path(name)] == [*tmp_path.iterdir()] and name == names[1]


def test_an_error_is_raised_if_every_new_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def removed(**options: str) -> str:
        assert len(names) < 1000, "the attempts are bounded"
        names.append(f"{options['dir']}/{options['prefix']}{len(names)}")
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed)
    with pytest.raises(StorageError, match="TMPDIR"):
        TemporaryFolder("test", tmp_path)
