"""A private run is only accessible to its owner: folders 0700, files 0600, for every umask and every later writer."""

import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.config import Config, load_config
from rftdask.errors import ConfigError, UserError
from rftdask.run.run_folder import open_run, private_files, record_config
from rftdask.storage import open_storage
from rftdask.storage.local import LocalStorage

STRANGER = """
import os, sys
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path in sys.argv[1:]:
    for ask in (os.listdir, lambda path: open(path, "rb").read()):
        try:
            ask(path)
            print("READ", path)
        except PermissionError:
            pass
        except (NotADirectoryError, IsADirectoryError):
            pass
"""


def ask_stranger(*paths: Path) -> list[str]:
    """Paths that a process of another user can read, if the tests run as root."""
    ended = subprocess.run([sys.executable, "-c", STRANGER, *map(str, paths)], capture_output=True, text=True)
    assert ended.returncode == 0, ended
    return ended.stdout.splitlines()


def modes_below(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder that everybody may use, in a process with an open umask."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for path in itertools.takewhile(lambda path: not path.stat().st_mode & stat.S_ISVTX, (folder, *folder.parents)):
        path.chmod(0o777)  # up to /tmp or its like, which is everybody's
    before = os.umask(0)
    yield folder
    os.umask(before)


def config(shared: Path, *, private: bool) -> Config:
    tasks = {"taskset": {"path": "tasks.jsonl"}}
    tree = {"model": {"model_path": "m", "max_model_len": 8}, "buffer": {"batch_size": 2, "explorer_input": tasks}}
    return load_config({**tree, "checkpoint_root_dir": str(shared), "private": private})


def test_only_the_owner_can_read_a_private_run(shared: Path) -> None:
    private = config(shared, private=True)
    run = Path(private.checkpoint_job_dir)
    with private_files(open_storage(run), private):
        open_run(open_storage(run), private)
        (run / "log").mkdir()
        (run / "log" / "driver.log").write_text("not written by a storage")
    assert stat.S_IMODE((run / "log" / "driver.log").stat().st_mode) == 0o600
    # Another process or machine knows no setting, and follows the mode of the folder.
    record_config(open_storage(run), private)
    LocalStorage(run).put("deep/er/file", b"x")
    LocalStorage(run / "deep").put_new("more/file", b"x")
    assert modes_below(run) == {0o700, 0o600}
    assert os.umask(0) == 0, "the umask of the process is as it was"
    paths = [run, *run.rglob("*")]
    assert ask_stranger(*paths) == []
    if os.getuid() == 0:
        other = config(shared, private=False).model_copy(update={"name": "open"})
        open_run(open_storage(other.checkpoint_job_dir), other)
        assert ask_stranger(Path(other.checkpoint_job_dir)) != [], "what is above it is everybody's"


def test_a_run_that_is_not_private_has_the_modes_of_the_umask(shared: Path) -> None:
    usual = config(shared, private=False)
    with private_files(open_storage(usual.checkpoint_job_dir), usual):
        open_run(open_storage(usual.checkpoint_job_dir), usual)
    assert modes_below(Path(usual.checkpoint_job_dir)) == {0o777, 0o666}


def test_a_run_becomes_private_at_a_later_start(shared: Path) -> None:
    usual = config(shared, private=False)
    run = Path(usual.checkpoint_job_dir)
    open_run(open_storage(run), usual)
    private = config(shared, private=True)
    with private_files(open_storage(run), private):
        assert open_run(open_storage(run), private).private
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    if os.getuid() == 0:
        assert ask_stranger(run, run / "run.json") == []


def test_storage_without_modes_is_refused() -> None:
    with pytest.raises(ConfigError, match="private: s3://bucket is not a local folder"):
        load_config(config(Path("/x"), private=True).to_dict() | {"checkpoint_root_dir": "s3://bucket"})
    with pytest.raises(UserError, match="private"):
        open_storage("memory://private").make_private()
