"""Promises of staging: processes of a node read one whole copy, which follows its source and is removed if unused."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rftdask.config import load_config
from rftdask.data.datasets import open_dataset
from rftdask.errors import ConfigError, StorageError, UserError, WaitTimeout
from rftdask.storage import staging
from rftdask.storage.staging import FOLDER, KEEP, source_of, staged, sweep


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "node"))
    monkeypatch.setenv(KEEP, "0")
    return tmp_path / "node" / f"rftdask-stage-{os.getuid()}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "model"
    (folder / "extra").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "extra" / "config.json").write_text("{}")
    return folder


def use_in_another(path: Path, then: str = "input()") -> subprocess.Popen[str]:
    code = f"import os, signal\nfrom rftdask.storage.staging import staged\nprint(staged({str(path)!r}), flush=True)\n"
    code += then
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_folder_is_copied_once_and_removed_with_its_last_user(node: Path, model: Path) -> None:
    copy = staged(str(model))
    assert Path(copy).is_relative_to(node) and Path(copy).name == "model" and source_of(copy) == str(model)
    assert (Path(copy) / "model.safetensors").read_bytes() == b"weights" * 1000
    assert (Path(copy) / "extra" / "config.json").read_text() == "{}"
    before = (Path(copy) / "model.safetensors").stat()
    with use_in_another(model) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == copy
        assert (Path(copy) / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
        sweep()
        assert Path(copy).exists(), "another process uses it"
        other.communicate("\n")
    assert list(node.iterdir()) == []


def test_the_remains_of_a_killed_process_are_replaced(node: Path, model: Path) -> None:
    with use_in_another(model, "os.kill(os.getpid(), signal.SIGKILL)") as other:
        other.wait()
    [place] = [each for each in node.iterdir() if each.is_dir()]
    (place / "model" / "model.safetensors").write_bytes(b"half")  # also as a site that cleans its disks leaves it
    (place.with_suffix(".partial")).mkdir()
    copy = staged(str(model))
    assert (Path(copy) / "model.safetensors").read_bytes() == b"weights" * 1000
    sweep()
    assert not place.exists() and not any(node.glob("*.lock"))


def test_a_model_that_has_changed_is_another_copy(node: Path, model: Path) -> None:
    first = staged(str(model))
    (model / "model.safetensors").write_bytes(b"other weights")
    second = staged(str(model))
    assert first != second and (Path(second) / "model.safetensors").read_bytes() == b"other weights"


def test_a_source_that_changes_while_it_is_copied_is_an_error(node: Path) -> None:
    source = Path("/proc/self/status")  # its size is 0, and more can be read
    with pytest.raises(StorageError, match="/proc/self/status changed while it was staged; start again when"):
        staged(str(source))
    assert staging.source_of(str(source)) == str(source) and not [*node.rglob("status")]


def test_waiting_for_another_process_times_out(node: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = "from rftdask.storage import staging\nstaging._fill = lambda *_: (print('begun', flush=True), input())\n"
    code = f"{stuck}staging.staged({str(model)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "begun\n"
        with pytest.raises(WaitTimeout, match=r"did not finish staging .* cluster.local_cache_dir names the folder"):
            staged(str(model), deadline_s=0.2)
        other.send_signal(signal.SIGKILL)
    assert staged(str(model)) != str(model)


def test_copies_are_kept_on_request(node: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP, "1")
    copy = staged(str(model))
    sweep()
    assert Path(copy).exists() and staged(str(model)) == copy


def test_nothing_is_staged_without_space_folder_or_source(
    node: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert staged("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    assert staged(str(model)) == str(model)
    assert "is not staged: it has 7002 bytes" in caplog.text and "has room for 10" in caplog.text
    monkeypatch.setenv(FOLDER, "")
    assert staged(str(model)) == str(model)


def test_a_filled_disk_is_tolerated_and_a_broken_one_raises(
    node: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(staging.os, "fsync", lambda _: fail(errno.ENOSPC))
    assert staged(str(model)) == str(model) and "No space left on device" in caplog.text
    monkeypatch.setattr(staging.os, "fsync", lambda _: fail(errno.EIO))
    with pytest.raises(StorageError, match=r"cannot be staged to .*Input/output error"):
        staged(str(model))
    assert not list(node.glob("*.partial"))


def test_the_folder_of_another_is_refused(node: Path, model: Path, tmp_path: Path) -> None:
    node.parent.mkdir()
    (tmp_path / "theirs").mkdir()
    node.symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="belongs to another user"):
        staged(str(model))


def test_a_dataset_is_the_same_from_its_copy(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    copied = open_dataset(str(rows))
    assert any(node.rglob("rows.jsonl"))
    monkeypatch.setenv(FOLDER, "")
    there = open_dataset(str(rows))
    assert copied.fingerprint == there.fingerprint and copied[0] == there[0]


def test_local_cache_dir_is_refused_for_an_existing_cluster() -> None:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "cluster": {"type": "existing", "options": {"address": "tcp://x"}, "local_cache_dir": "$TMPDIR"},
    }
    with pytest.raises(
        ConfigError, match=r"cluster.local_cache_dir: the workers of an existing cluster are started elsewhere"
    ):
        load_config(tree)
