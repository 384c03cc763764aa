"""An unreachable file server is waited for with growing pauses, then an error is raised; only the time is simulated."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftdask.errors import StorageError
from rftdask.storage.local import LocalStorage, Posix

VERBS: dict[str, Callable[[LocalStorage], object]] = {
    "put": lambda store: store.put("a", b"new"),
    "put_new": lambda store: store.put_new("b", b"new"),
    "get": lambda store: store.get("a"),
    "list": lambda store: store.list(),
    "remove": lambda store: store.remove("a"),
}


class AwayPosix(Posix):
    """A server that goes away at a call, and returns after some seconds."""

    def __init__(self, away_s: float, goes_at: str = "", code: int = errno.EIO) -> None:
        """goes_at: name of the call in whose middle it goes, so that its work is done and its reply lost."""
        self.left_s, self.goes_at, self.code = away_s, goes_at, code
        self.is_away = not goes_at
        self.pauses_s: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.left_s -= seconds
        self.is_away = self.is_away and self.left_s > 0

    def _reach(self) -> None:
        if self.is_away:
            raise OSError(self.code, "the server does not answer")

    def _reply(self, call: str) -> None:
        if call == self.goes_at:
            self.goes_at, self.is_away = "", True
        self._reach()

    @staticmethod
    def _reached(call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(self: AwayPosix, *arguments: Any) -> Any:
            self._reach()
            result = call(self, *arguments)
            self._reply(call.__name__)
            return result

        return reached

    create, sync, rename = _reached(Posix.create), _reached(Posix.sync), _reached(Posix.rename)
    link, unlink, sync_folder = _reached(Posix.link), _reached(Posix.unlink), _reached(Posix.sync_folder)
    read, scan = _reached(Posix.read), _reached(Posix.scan)

    def is_same_file(self, path: str, other: str) -> bool:
        return not self.is_away and super().is_same_file(path, other)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LocalStorage(tmp_path).put("a", b"old")
    return tmp_path


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESTALE])
def test_every_method_waits_a_minute_for_a_server(folder: Path, verb: str, code: int) -> None:
    system = AwayPosix(45.0, code=code)
    done = VERBS[verb](LocalStorage(folder, system))
    assert done == {"put_new": True, "get": b"old", "list": ["a"]}.get(verb)
    assert 45 <= sum(system.pauses_s) < 51
    there = {"put": {"a": b"new"}, "put_new": {"a": b"old", "b": b"new"}, "remove": {}}.get(verb, {"a": b"old"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == there


@pytest.mark.parametrize("verb", VERBS)
def test_an_absent_server_raises_after_a_minute(folder: Path, verb: str) -> None:
    system = AwayPosix(1000.0)
    with pytest.raises(StorageError, match=rf"^{verb} .* failed \(tries: 17\): the server does not answer; the disk"):
        VERBS[verb](LocalStorage(folder, system))
    assert 50 < sum(system.pauses_s) < 60
    pauses = system.pauses_s
    assert pauses[0] < 0.3 and 5 <= max(pauses) < 5.2 and len(pauses) == 16
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize("lost", ["link", "sync_folder", "sync"])
def test_a_create_whose_reply_was_lost_has_won(folder: Path, lost: str) -> None:
    assert LocalStorage(folder, AwayPosix(10.0, goes_at=lost)).put_new("b", b"mine") is True
    assert (folder / "b").read_bytes() == b"mine"


def test_a_create_that_a_rival_was_faster_with_has_lost(folder: Path) -> None:
    (folder / "b").write_bytes(b"theirs")
    assert LocalStorage(folder, AwayPosix(10.0)).put_new("b", b"mine") is False
    assert LocalStorage(folder, AwayPosix(10.0, goes_at="sync")).put_new("b", b"mine") is False
    assert (folder / "b").read_bytes() == b"theirs"


@pytest.mark.parametrize("verb", ["put", "remove"])
def test_completed_writes_survive_a_server_outage(folder: Path, verb: str) -> None:
    for lost in ("rename", "sync_folder"):
        LocalStorage(folder).put("a", b"old")
        VERBS[verb](LocalStorage(folder, AwayPosix(10.0, goes_at=lost)))
        shown = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}
        assert shown == ({"a": b"new"} if verb == "put" else {})
