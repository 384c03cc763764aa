"""Promises of every storage (rftdask/storage/base.py), tested on each backend; S3 is a local moto server.

Data is prepared without the method under test where the backend allows it: a second handle of the same URL stands for
another process.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rftdask
from rftdask.errors import NotFoundError, UserError
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import TMP_PREFIX, check_path
from rftdask.storage.fsspec_store import FsspecStorage
from rftdask.storage.local import LocalStorage
from rftdask.storage.memory import MemoryStorage
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.storage.s3_proxy import mark_folder

RACE = """
import sys
from rftdask.storage import open_storage
url, me, num_names = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_storage(url)
store.list()                      # connect before the start
print("ready", flush=True)
sys.stdin.readline()
won = [str(k) for k in range(num_names) if store.put_new(f"race/{k}", me.encode())]
print(" ".join(won), flush=True)
"""


def race_processes(url: str, num_processes: int, num_names: int) -> dict[str, list[str]]:
    """Names won by each of `num_processes` new processes that start on one signal."""
    env = {**os.environ, "PYTHONPATH": str(Path(rftdask.__file__).parents[1])}
    command = [sys.executable, "-c", RACE, url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    racers = {str(k): subprocess.Popen([*command, str(k), str(num_names)], **pipes) for k in range(num_processes)}
    try:
        for racer in racers.values():
            assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
        for racer in racers.values():
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return {me: racer.communicate(timeout=60)[0].split() for me, racer in racers.items()}
    finally:
        for racer in racers.values():
            racer.kill()
            racer.communicate()


def check_one_winner_each(store: Storage, wins: dict[str, list[str]], num_names: int) -> None:
    assert sorted(int(k) for names in wins.values() for k in names) == list(range(num_names))
    assert all(store.get(f"race/{k}") == me.encode() for me, names in wins.items() for k in names)


class StorageContract:
    """Subclasses provide `store`: an empty storage of their backend."""

    @pytest.fixture
    def store(self) -> Storage:
        raise NotImplementedError

    def another_handle(self, store: Storage) -> Storage:
        return open_storage(store.url)

    def test_get_returns_the_bytes_of_put(self, store: Storage) -> None:
        for data in (b"", b"x", bytes(range(256)) * 1024):
            store.put("a/b/c.bin", data)
            assert store.get("a/b/c.bin") == data

    def test_get_part_returns_a_range_of_bytes(self, store: Storage) -> None:
        store.put("a/b.bin", bytes(range(100)))
        for start, stop in ((0, 8), (8, 100), (99, 100), (90, 200)):
            assert store.get_part("a/b.bin", start, stop) == bytes(range(100))[start:stop]
        with pytest.raises(NotFoundError):
            store.get_part("a/c.bin", 0, 1)

    def test_put_replaces(self, store: Storage) -> None:
        store.put("a", b"a long first text")
        store.put("a", b"short")
        assert store.get("a") == b"short"

    def test_put_new_creates_once_and_never_replaces(self, store: Storage) -> None:
        assert store.put_new("ledger/0.json", b"first") is True
        assert store.put_new("ledger/0.json", b"second") is False
        assert store.get("ledger/0.json") == b"first"

    def test_put_new_of_the_same_bytes_also_has_one_winner(self, store: Storage) -> None:
        assert [store.put_new("same", b"bytes") for _ in range(3)] == [True, False, False]

    def test_put_new_may_come_back_after_remove(self, store: Storage) -> None:
        assert store.put_new("a/lease", b"1")
        store.remove("a/lease")
        assert store.put_new("a/lease", b"2")

    def test_threads_racing_for_a_name_have_one_winner(self, store: Storage) -> None:
        if not store.has_create_only:
            assert isinstance(store, FsspecStorage)  # documents the race
            return
        start, wins = threading.Barrier(4), []

        def race(me: bytes) -> None:
            start.wait(timeout=30)
            wins.extend((k, me) for k in range(10) if store.put_new(f"race/{k}", me))

        threads = [threading.Thread(target=race, args=(b"%d" % k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(k for k, _ in wins) == list(range(10))
        assert all(store.get(f"race/{k}") == me for k, me in wins)

    def test_get_of_nothing_is_not_found(self, store: Storage) -> None:
        store.put("folder/file", b"x")
        for path in ("nothing", "folder", "folder/nothing", "folder/file/below"):
            with pytest.raises(NotFoundError):
                store.get(path)

    def test_list_gives_names_sorted_with_folders_marked(self, store: Storage) -> None:
        for path in ("top", "f/b", "f/a", "f/a.d/x", "f/sub/deep/x", "fx/other"):
            store.put(path, b"x")
        assert store.list() == ["f/", "fx/", "top"]
        assert store.list("f") == ["a", "a.d/", "b", "sub/"]
        assert store.list("f/sub") == ["deep/"]

    def test_a_missing_folder_and_a_file_list_as_empty(self, store: Storage) -> None:
        store.put("file", b"x")
        assert store.list("nothing") == [] and store.list("nothing/below") == [] and store.list("file") == []

    def test_a_new_storage_lists_as_empty(self, store: Storage) -> None:
        assert store.list() == []

    def test_list_sees_files_of_another_handle_at_once(self, store: Storage) -> None:
        other = self.another_handle(store)
        for k in range(5):
            assert store.list("bucket") == [f"{i}" for i in range(k)]  # would fill a cache
            assert not store.exists(f"bucket/{k}")
            other.put(f"bucket/{k}", b"x")
            assert store.exists(f"bucket/{k}") and store.get(f"bucket/{k}") == b"x"

    def test_exists_is_about_files(self, store: Storage) -> None:
        store.put("folder/file", b"x")
        found = [store.exists(path) for path in ("folder/file", "folder", "nothing", "folder/fil")]
        assert found == [True, False, False, False]

    def test_remove_deletes_only_the_file_or_folder(self, store: Storage) -> None:
        for path in ("run/1/a", "run/1/sub/b", "run/10/a", "run/2"):
            store.put(path, b"x")
        store.remove("run/1")
        assert store.list("run") == ["10/", "2"]
        store.remove("run/2")
        assert store.list("run") == ["10/"]

    def test_removing_a_missing_path_is_not_an_error(self, store: Storage) -> None:
        store.remove("nothing")
        store.remove("nothing/below")

    def test_local_copy_of_a_file(self, store: Storage) -> None:
        store.put("weights/3/model.bin", b"weights")
        with store.local_copy("weights/3/model.bin") as local:
            assert local.name == "model.bin" and local.read_bytes() == b"weights"

    def test_local_copy_of_a_folder(self, store: Storage) -> None:
        store.put("weights/3/model.bin", b"weights")
        store.put("weights/3/sub/config.json", b"{}")
        store.put("weights/30/model.bin", b"other")
        with store.local_copy("weights/3") as local:
            files = {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}
        assert files == {"model.bin": b"weights", "sub/config.json": b"{}"}

    def test_local_copy_of_nothing_is_not_found(self, store: Storage) -> None:
        with pytest.raises(NotFoundError), store.local_copy("nothing"):
            pass

    def test_a_pickle_opens_the_same_tree(self, store: Storage) -> None:
        store.put("a", b"x")
        copy = pickle.loads(pickle.dumps(store))
        assert type(copy) is type(store) and copy.url == store.url and copy.get("a") == b"x"

    def test_readers_see_whole_values_during_replacement(self, store: Storage) -> None:
        values = [bytes([k]) * 50_000 for k in range(8)]
        store.put("pointer", values[0])
        enough = threading.Event()
        num_puts = 0

        def write() -> None:
            nonlocal num_puts
            while not enough.is_set():
                store.put("pointer", values[num_puts % 8])
                num_puts += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            seen = [store.get("pointer") for _ in range(50)]
        finally:
            enough.set()
            writer.join(timeout=60)
        assert num_puts > 0 and set(seen) <= set(values)

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", ".", "a/./b", "..", "a/../b", "a*", "a\\b", TMP_PREFIX])
    def test_paths_outside_the_root_or_of_two_meanings_are_refused(self, store: Storage, path: str) -> None:
        for call in (store.get, store.remove, store.exists, *[store.list] * bool(path)):
            with pytest.raises(ValueError):
                call(path)
        for write in (store.put, store.put_new):
            with pytest.raises(ValueError):
                write(path, b"x")
        with pytest.raises(ValueError), store.local_copy(path):
            pass


class TestMemory(StorageContract):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Storage:
        return open_storage(f"memory://{request.node.name}")


class TestLocal(StorageContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "runs")

    def test_processes_racing_for_a_name_have_one_winner(self, store: Storage) -> None:
        check_one_winner_each(store, race_processes(store.url, num_processes=4, num_names=60), 60)

    def test_put_new_has_one_winner_even_with_fast_writes(self) -> None:
        """Racers collide much more often in memory (tmpfs), where fsync is free."""
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            store = open_storage(folder)
            check_one_winner_each(store, race_processes(store.url, num_processes=4, num_names=1500), 1500)


class TestFaulty(StorageContract):
    """Fault injection whose hook does nothing keeps the contract of the wrapped storage."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Storage:
        return FaultyStorage(open_storage(tmp_path / "runs"), no_fault)


class TestFsspecWithoutCreateOnly(StorageContract):
    """Any other fsspec backend; fsspec's own memory file system stands for it."""

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[Storage]:
        store = FsspecStorage(f"memory://contract/{abs(hash(request.node.name))}")
        assert store.has_create_only is False
        yield store
        for name in store.list():
            store.remove(name.rstrip("/"))

    def another_handle(self, store: Storage) -> Storage:
        return FsspecStorage(store.url)


class TestS3(StorageContract):
    @pytest.fixture
    def store(self, s3_url: str) -> Storage:
        return open_storage(s3_url)

    @pytest.mark.slow
    def test_processes_racing_for_a_name_have_one_winner(self, store: Storage) -> None:
        check_one_winner_each(store, race_processes(store.url, num_processes=2, num_names=30), 30)

    def test_empty_objects_that_mark_folders_are_no_files(self, store: Storage) -> None:
        store.put("log/a/driver.log", b"text")
        for folder in ("log", "log/a", "empty"):  # as consoles and other programs make them
            mark_folder(f"{store.url}/{folder}")
        with store.local_copy("log") as copy:
            assert [path.relative_to(copy) for path in copy.rglob("*") if path.is_file()] == [Path("a/driver.log")]
        assert store.list("log") == ["a/"] and store.list("log/a") == ["driver.log"]
        with pytest.raises(NotFoundError), store.local_copy("empty"):
            pass
        store.remove("log")
        assert not store.exists("log/a/driver.log") and store.list("log") == []


def no_fault(verb: str, path: str, stage: str) -> None:
    pass


segment = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=5) | st.sampled_from(["", ".", ".."])


@given(st.lists(segment, min_size=1, max_size=5).map("/".join))
def test_accepted_paths_are_below_the_root_and_unambiguous(path: str) -> None:
    try:
        assert check_path(path) == path
    except ValueError:
        return
    assert os.path.normpath(f"/root/{path}") == f"/root/{path}"
    assert not any(character in path for character in "*?[]\\\0\n")


@given(st.lists(segment, min_size=1, max_size=4), st.sampled_from(["", ".", "..", ".tmp-1"]), st.integers(0, 4))
def test_one_bad_segment_anywhere_refuses_the_path(segments: list[str], bad: str, position: int) -> None:
    segments.insert(min(position, len(segments)), bad)
    with pytest.raises(ValueError):
        check_path("/".join(segments))


def test_usual_paths_pass() -> None:
    for path in ("run.json", "ledger/main/00000004.json", "global_step_3/a-b_c.safetensors", "a/...", "x/.hidden"):
        assert check_path(path) == path


def test_paths_and_file_urls_open_the_same_local_tree(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}", f"{tmp_path}/", f"{tmp_path}/./"):
        store = open_storage(url)
        assert isinstance(store, LocalStorage) and store.url == str(tmp_path)


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("runs/a").url == str(tmp_path / "runs" / "a")


def test_opening_makes_nothing(tmp_path: Path) -> None:
    open_storage(tmp_path / "runs").list()
    assert list(tmp_path.iterdir()) == []


def test_memory_trees_are_shared_by_url_and_apart_otherwise() -> None:
    one, same, other = (
        open_storage("memory://open-a"),
        open_storage("memory://open-a/"),
        open_storage("memory://open-b"),
    )
    assert isinstance(one, MemoryStorage)
    one.put("x", b"1")
    assert same.get("x") == b"1" and other.list() == []


def test_object_stores_are_create_only(s3_url: str) -> None:
    store = open_storage(s3_url + "/")
    assert isinstance(store, FsspecStorage) and store.has_create_only and store.url == s3_url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nosuch://bucket/a", "use a path, file://, memory://, s3://"),
        ("s3://", "names no bucket"),
        ("simplecache::s3://bucket/a", "give the plain URL"),
        ("s3://bucket/a*", "wildcards"),
        (Path("s3://bucket/a"), "two slashes"),
    ],
)
def test_a_bad_url_raises(url: str | Path, told: str) -> None:
    with pytest.raises(UserError, match=told):
        open_storage(url)


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("s3fs", "gcsfs", "adlfs"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from rftdask.errors import UserError
from rftdask.storage import open_storage
for url in ("s3://b/x", "gs://b/x", "abfs://b/x"):
    try:
        open_storage(url)
    except UserError as error:
        print(error)
"""
LIGHT = """
import sys
from rftdask.storage import open_storage
open_storage(sys.argv[1]).put("a", b"x")
open_storage("memory://a").put("a", b"x")
print([name for name in ("fsspec", "torch", "transformers") if name in sys.modules])
"""


def run_script(script: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(rftdask.__file__).parents[1])}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_missing_package_is_named_as_on_pypi() -> None:
    told = run_script(WITHOUT).splitlines()
    assert [line.rpartition("; ")[2] for line in told] == [
        f"run `pip install {name}`" for name in ("s3fs", "gcsfs", "adlfs")
    ]


def test_local_and_memory_storage_import_nothing_heavy(tmp_path: Path) -> None:
    assert run_script(LIGHT, str(tmp_path)) == "[]\n"
