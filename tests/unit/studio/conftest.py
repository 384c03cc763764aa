import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rftdask.studio.server import StudioServer
from tests.unit.reports.lineage.lineage_cases import Case, make_run


@contextmanager
def studio_of(case: Case, **options: Any) -> Iterator[StudioServer]:
    """Serve the folder that contains the run of `case` as p/run."""
    with StudioServer(case.config.checkpoint_root_dir, **options) as running:
        thread = threading.Thread(target=running.run)
        thread.start()
        yield running
        running.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    """A run shared by read-only tests."""
    return make_run(str(tmp_path_factory.mktemp("studio") / "runs"))


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[StudioServer]:
    with studio_of(case) as running:
        yield running


@pytest.fixture
def own_case(tmp_path) -> Case:
    """A run for tests that write to it."""
    return make_run(str(tmp_path / "runs"))


@pytest.fixture
def own_server(own_case: Case) -> Iterator[StudioServer]:
    with studio_of(own_case) as running:
        yield running
