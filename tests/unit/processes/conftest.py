"""A nursery for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.processes.zygote import start_nursery

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The socket of a nursery that finds the targets of these tests."""
    sys.path.insert(0, HERE)
    yield start_nursery()
    sys.path.remove(HERE)
