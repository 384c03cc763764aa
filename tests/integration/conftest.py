from pathlib import Path

import pytest

from tests.integration.run_cases import run_folder, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The `config.yaml` of a small run with fakes."""
    return write_config(tmp_path)


@pytest.fixture
def folder(config: Path) -> Path:
    """The run folder of `config`."""
    return run_folder(config)
