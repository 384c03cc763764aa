"""A storage that records requests, and a clock set by the test."""

from pathlib import Path

import pytest

from rftdask.errors import StorageError
from rftdask.storage.memory import MemoryStorage


class CountingStorage(MemoryStorage):
    """`puts` and `gets` are the requested paths, in order; while `is_down` is True, every put fails."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.puts: list[str] = []
        self.gets: list[str] = []
        self.is_down = False

    def put(self, path: str, data: bytes) -> None:
        self._count_put(path)
        super().put(path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        self._count_put(path)
        return super().put_new(path, data)

    def get(self, path: str) -> bytes:
        self.gets.append(path)
        return super().get(path)

    def _count_put(self, path: str) -> None:
        if self.is_down:
            raise StorageError(f"{path}: the storage is down")
        self.puts.append(path)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def storage(tmp_path: Path) -> CountingStorage:
    return CountingStorage(f"memory://{tmp_path}")  # the path gives each test its own tree


@pytest.fixture
def clock() -> Clock:
    return Clock()
