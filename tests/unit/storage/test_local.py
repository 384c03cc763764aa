"""Faults of POSIX file systems: kills between two system calls, full disks, files in the way."""

import itertools
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rftdask
from rftdask.config import Config, load_config
from rftdask.errors import ConfigError, StorageError, UserError
from rftdask.run.run_folder import open_run, private_files, record_config
from rftdask.storage import local, open_storage
from rftdask.storage.base import TMP_PREFIX
from rftdask.storage.local import LocalStorage, read_whole

WRITER = """
import sys
from rftdask.storage import open_storage
store, size = open_storage(sys.argv[1]), int(sys.argv[2])
for k in range(1_000_000):
    store.put("pointer", bytes([k % 251]) * size)
    store.put_new(f"log/{sys.argv[3]}-{k}", bytes([k % 251]) * size)
"""
REMOVER = """
import sys
from rftdask.storage import open_storage
open_storage(sys.argv[1]).remove("run")
"""


def start_python(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(Path(rftdask.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=env)


def start_writer(store: LocalStorage, size_bytes: int, life: int) -> subprocess.Popen[bytes]:
    return start_python(WRITER, store.url, str(size_bytes), str(life))


def kill_when(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """SIGKILL at the first moment `condition` holds; fails when it does not within a minute."""
    try:
        deadline = time.monotonic() + 60
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def all_names(root: str) -> list[str]:
    return [name for _, folders, files in os.walk(root) for name in (*folders, *files)]


def leftovers(root: str) -> list[str]:
    return [name for name in all_names(root) if name.startswith(TMP_PREFIX)]


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "runs")


@pytest.mark.slow
def test_killed_writers_lose_no_confirmed_file(store: LocalStorage) -> None:
    size = 200_000
    seen_before: set[str] = set()
    for life in range(6):
        writer = start_writer(store, size, life)
        kill_when(lambda life=life: f"{life}-{3 + life}" in store.list("log"), writer)
        names = set(store.list("log"))
        assert seen_before < names
        for path in ("pointer", *(f"log/{name}" for name in names)):
            data = store.get(path)
            assert len(data) == size and data == data[:1] * size
        seen_before = names


def test_a_writer_killed_in_the_middle_leaves_no_visible_name(store: LocalStorage) -> None:
    size = 64_000_000
    writer = start_writer(store, size, 0)
    kill_when(lambda: bool(leftovers(store.url)), writer)
    assert len(leftovers(store.url)) == 1
    assert store.list() == [] and not store.exists("pointer")


def test_writes_leave_nothing_but_their_file(store: LocalStorage) -> None:
    store.put("a/b", b"x")
    assert store.put_new("a/c", b"x") and not store.put_new("a/c", b"y")
    store.remove("a/b")
    assert sorted(all_names(store.url)) == ["a", "c"]
    assert os.stat(f"{store.url}/a/c").st_nlink == 1


@pytest.mark.parametrize("first", [0, 1])
def test_large_aligned_files_bypass_the_page_cache(store: LocalStorage, first: int) -> None:
    data = memoryview(mmap.mmap(-1, 64 * 2**20 + 8192))
    for place in range(0, len(data), 4096):
        data[place : place + 8] = place.to_bytes(8, "little")
    given = data[first:-5]  # it ends within a page
    store.put("weights", given)
    path = Path(store.url, "weights")
    assert path.read_bytes() == given
    descriptor = os.open(store.url + "/other", os.O_WRONLY | os.O_CREAT)
    written = local._write_direct(descriptor, given)
    os.close(descriptor)
    # A file system may refuse direct writes; unaligned memory never uses them.
    assert written in ((0,) if first else (0, len(given) // 4096 * 4096))
    assert Path(store.url, "other").stat().st_size == written
    path.unlink()


@pytest.mark.parametrize("write", [LocalStorage.put, LocalStorage.put_new])
def test_a_file_in_the_way_is_named(store: LocalStorage, write: Callable[[LocalStorage, str, bytes], object]) -> None:
    store.put("file", b"x")
    with pytest.raises(StorageError, match=r"file/below/name failed: .*something above it is a file"):
        write(store, "file/below/name", b"x")
    assert all_names(store.url) == ["file"] and store.get("file") == b"x"


def test_a_folder_in_the_way_is_reported_and_kept(store: LocalStorage) -> None:
    store.put("folder/file", b"x")
    with pytest.raises(StorageError, match="a folder has that name"):
        store.put("folder", b"x")
    assert sorted(all_names(store.url)) == ["file", "folder"]


@pytest.mark.parametrize("write", [LocalStorage.put, LocalStorage.put_new])
def test_a_full_disk_raises_and_leaves_no_part(
    small_disk: LocalStorage, write: Callable[[LocalStorage, str, bytes], object]
) -> None:
    small_disk.put("old", b"x" * 100_000)
    with pytest.raises(StorageError, match=r"new failed: No space left on device; free some space"):
        write(small_disk, "new", b"x" * 2_000_000)
    assert all_names(small_disk.url) == ["old"] and small_disk.get("old") == b"x" * 100_000
    small_disk.put("old", b"room again")


def test_a_read_only_disk_raises(small_disk: LocalStorage) -> None:
    small_disk.put("old", b"x")
    subprocess.run(["mount", "-o", "remount,ro", small_disk.url], check=True)
    for write in (lambda: small_disk.put("old", b"y"), lambda: small_disk.remove("old")):
        with pytest.raises(StorageError, match="read-only"):
            write()
    assert small_disk.get("old") == b"x"


def test_a_folder_collected_under_a_writer_is_made_again(store: LocalStorage) -> None:
    def collect() -> None:
        for _ in range(4):  # each can break one of the writer's five tries
            store.remove("bucket")

    for k in range(30):
        collector = threading.Thread(target=collect)
        collector.start()
        store.put(f"bucket/{k}", b"x")
        collector.join(timeout=60)
    assert leftovers(store.url) == []


def test_a_remover_killed_in_the_middle_leaves_no_half_folder(store: LocalStorage) -> None:
    folder = Path(store.url, "run")
    folder.mkdir(parents=True)
    for k in range(5_000):
        (folder / f"{k}").touch()
    remover = start_python(REMOVER, store.url)
    kill_when(lambda: bool(os.listdir(store.url)) and os.listdir(store.url) != ["run"], remover)
    assert store.list() == []


@pytest.mark.parametrize("size", [None, 8])
def test_a_file_that_is_not_ready_is_not_taken_as_ended(size: int | None) -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    with open(read_end, "rb", buffering=0) as file, open(write_end, "wb", buffering=0) as writer:
        writer.write(b"half")
        with pytest.raises(BlockingIOError):
            read_whole(file, size)
        writer.write(b"all")
        writer.close()
        assert read_whole(file, size) == b"all"


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
