"""The doctor reports "ok" for storage that keeps its promises, and "BROKEN" with the promise for other storage.

fsspec's own local file system is the broken one: it writes in place, and its "create" is a check and then a write.
"""

import time
from pathlib import Path

import pytest

from rftdask.errors import UserError
from rftdask.storage import doctor
from rftdask.storage.doctor import Check, Cost, DoctorReport, check_race, check_replace, check_storage
from rftdask.storage.fsspec_store import FsspecStorage
from rftdask.storage.local import LocalStorage, Posix


def words(report: DoctorReport) -> dict[str, bool | None]:
    return {check.name: check.ok for check in report.checks}


def test_a_local_disk_keeps_every_promise_and_is_left_clean(tmp_path: Path) -> None:
    report = check_storage(tmp_path)
    promises = ["write and read", "create-only", "atomic replace", "list after write", "remove"]
    assert words(report) == dict.fromkeys(promises, True)
    assert report.is_safe and list(tmp_path.iterdir()) == []
    assert [cost.verb for cost in report.costs] == [
        "put 1 KiB", "put_new 1 KiB", "get 1 KiB", "put 256 KiB", "get 256 KiB", "list",
    ]  # fmt: skip
    assert all(cost.num_calls > 0 and 0 < cost.p50_ms <= cost.p99_ms for cost in report.costs)


@pytest.mark.slow
def test_a_missing_folder_is_reported_and_not_left_behind(tmp_path: Path) -> None:
    report = check_storage(tmp_path / "a" / "mistyped")
    assert report.is_safe and "the folder did not exist before" in report.render()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("kept")
    assert not check_storage(tmp_path / "file" / "below").is_safe
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "there").mkdir()
    assert "the folder did not exist before" not in check_storage(tmp_path / "there").render()
    assert (tmp_path / "there").exists()


@pytest.mark.slow
def test_torn_reads_are_found(tmp_path: Path) -> None:
    storage = FsspecStorage(f"file://{tmp_path}")
    checks = (check_replace(storage) for _ in range(20))  # on a busy machine one may read only between the writes
    found = next(check for check in checks if check.ok is False)
    assert " 0 torn" not in found.detail


@pytest.mark.slow
def test_a_protocol_without_create_only_is_never_called_safe(tmp_path: Path) -> None:
    check = check_race(FsspecStorage(f"file://{tmp_path}"))
    assert check.ok is False and "use one writer only" in check.detail


def test_an_unchecked_promise_is_not_reported_ok() -> None:
    report = check_storage("memory://doctor")
    unknown = {name for name, ok in words(report).items() if ok is None}
    assert unknown == {"create-only", "atomic replace", "list after write"}


class HangingDisk(Posix):
    def link(self, source: str, target: str) -> None:
        time.sleep(3600)  # longer than the time limit of a test
        super().link(source, target)


@pytest.mark.slow
def test_a_hanging_process_fails_its_check_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DEADLINE_S", 1.0)
    with pytest.raises(TimeoutError):
        check_race(LocalStorage(tmp_path, HangingDisk()))


def test_unwritable_storage_is_reported_without_an_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    report = check_storage(tmp_path / "file" / "runs")
    assert not report.is_safe and words(report)["write and read"] is False and report.costs == ()
    assert "something above it is a file" in report.render()


def test_a_url_that_cannot_be_opened_is_the_users_error() -> None:
    with pytest.raises(UserError):
        check_storage("nosuch://bucket")


def test_the_report_reads_like_this() -> None:
    told = [("create-only", False, "3 of 50"), ("list after write", None, "no files"), ("remove", True, "gone")]
    checks = tuple(Check(*check) for check in told)
    assert DoctorReport("s3://b/x", checks, (Cost("put 1 KiB", 100, 1.25, 30.5),)).render().splitlines() == [
        "storage s3://b/x: BROKEN: create-only",
        "  create-only       BROKEN       3 of 50",
        "  list after write  not checked  no files",
        "  remove            ok           gone",
        "  cost (ms)               p50      p99   calls",
        "  put 1 KiB              1.25    30.50     100",
    ]
