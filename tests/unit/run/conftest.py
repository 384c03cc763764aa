"""A storage in memory for the tests of run folders."""

import itertools

import pytest

from rftdask.storage import Storage, open_storage

_numbers = itertools.count()


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://run-folder-{next(_numbers)}")
