"""Promises of open_storage: the backend of each kind of URL, and the errors for URLs that cannot be opened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rftdask
from rftdask.errors import UserError
from rftdask.storage import open_storage
from rftdask.storage.fsspec_store import FsspecStorage
from rftdask.storage.local import LocalStorage
from rftdask.storage.memory import MemoryStorage


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
