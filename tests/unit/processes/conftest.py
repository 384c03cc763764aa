"""A zygote for the tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.processes.zygote import start_zygote

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Address of a zygote that can import the targets of these tests."""
    sys.path.insert(0, HERE)
    yield start_zygote()
    sys.path.remove(HERE)
