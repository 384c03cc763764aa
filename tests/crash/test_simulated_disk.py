"""The simulated disk loses unsynced data at a power loss, and otherwise behaves like any other disk."""

from contextlib import suppress

import pytest

from rftdask.errors import NotFoundError, StorageError
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.power import SimulatedDisk

SEEDS = range(40)
DATA = bytes(range(1, 101))


class PowerLoss(BaseException):
    """The simulated power loss, after which nothing is written."""


def content(disk: SimulatedDisk, path: str) -> bytes | None:
    try:
        return LocalStorage("/run", disk).get(path)
    except NotFoundError:
        return None


def found_after_loss(disk: SimulatedDisk, path: str) -> set[bytes | None]:
    return {content(disk.after_power_loss(seed), path) for seed in SEEDS}


def cut_before(call: str, disk: SimulatedDisk) -> SimulatedDisk:
    """Return a disk that loses its power before the first such call."""

    def watch(name: str, path: str) -> None:
        if name == call:
            raise PowerLoss

    disk.before_change = watch
    return disk


def test_a_confirmed_put_survives_a_power_loss() -> None:
    disk = SimulatedDisk()
    LocalStorage("/run", disk).put("a/b", DATA)
    assert LocalStorage("/run", disk).put_new("a/c", DATA)
    assert found_after_loss(disk, "a/b") == found_after_loss(disk, "a/c") == {DATA}


@pytest.mark.parametrize("verb", ["put", "put_new"])
@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "link", "unlink", "sync folder"])
def test_a_write_cut_off_at_any_call_leaves_all_or_nothing(verb: str, call: str) -> None:
    disk = SimulatedDisk()
    LocalStorage("/run", disk).put("a/other", b"x")
    cut_before(call, disk)
    with suppress(PowerLoss):
        getattr(LocalStorage("/run", disk), verb)("a/b", DATA)
    disk.before_change = lambda call, path: None
    assert found_after_loss(disk, "a/b") <= {None, DATA}
    assert found_after_loss(disk, "a/other") == {b"x"}


def test_a_replaced_file_holds_the_old_bytes_or_the_new() -> None:
    disk = SimulatedDisk()
    LocalStorage("/run", disk).put("a", b"old")
    cut_before("sync folder", disk)
    with pytest.raises(PowerLoss):
        LocalStorage("/run", disk).put("a", b"new")
    assert found_after_loss(disk, "a") == {b"old", b"new"}


def test_a_removed_folder_is_whole_or_gone() -> None:
    disk = SimulatedDisk()
    store = LocalStorage("/run", disk)
    for name in ("w/1", "w/2"):
        store.put(name, DATA)
    cut_before("remove tree", disk)
    with pytest.raises(PowerLoss):
        store.remove("w")
    for seed in SEEDS:
        assert LocalStorage("/run", disk.after_power_loss(seed)).list("w") in ([], ["1", "2"])
    disk = SimulatedDisk()
    store = LocalStorage("/run", disk)
    for name in ("w/1", "w/2"):
        store.put(name, DATA)
    calls = []

    def second_tree(call: str, path: str) -> None:
        calls.append(call)
        if calls.count("remove tree") == 2:
            raise PowerLoss

    disk.before_change = second_tree
    with pytest.raises(PowerLoss):
        store.remove("w")
    assert {tuple(LocalStorage("/run", disk.after_power_loss(seed)).list("w")) for seed in SEEDS} == {()}


def test_without_fsync_of_files_bytes_are_torn() -> None:
    disk = SimulatedDisk(sync_files=False)
    LocalStorage("/run", disk).put("a", DATA)
    contents = found_after_loss(disk, "a")
    assert {DATA, b""} < contents and any(data and data != DATA and data[0] == 1 for data in contents if data)


def test_without_fsync_of_folders_names_are_lost() -> None:
    disk = SimulatedDisk(sync_folders=False)
    LocalStorage("/run", disk).put("a", DATA)
    assert found_after_loss(disk, "a") == {None, DATA}


def test_errors_are_those_of_a_real_disk() -> None:
    store = LocalStorage("/run", SimulatedDisk())
    store.put("folder/file", DATA)
    assert not store.put_new("folder/file", b"x")
    with pytest.raises(StorageError, match="a folder has that name"):
        store.put("folder", b"x")
    with pytest.raises(StorageError, match="something above it is a file"):
        store.put("folder/file/below", b"x")
    with pytest.raises(NotFoundError):
        store.get("folder")
    store.remove("nothing")
    assert (store.list(), store.list("folder"), store.list("no")) == (["folder/"], ["file"], [])


def test_a_copy_goes_its_own_way() -> None:
    disk = SimulatedDisk()
    LocalStorage("/run", disk).put("a", b"1")
    copy = disk.copy()
    LocalStorage("/run", disk).put("a", b"2")
    LocalStorage("/run", copy).put("b", b"3")
    assert (content(disk, "a"), content(copy, "a"), content(disk, "b"), content(copy, "b")) == (b"2", b"1", None, b"3")
