from pathlib import Path

import pytest

from tests.unit.engines.tiny_models import save_tiny_qwen2


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="session")
def model_folder(tied: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"), seed=0, tied=tied)


@pytest.fixture(scope="session")
def other_folder(tied: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen2(tmp_path_factory.mktemp("other-qwen2"), seed=1, tied=tied)
