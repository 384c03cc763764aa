from pathlib import Path

import pytest

from tests.integration.conftest import config, folder  # noqa: F401


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rftdask.models.toy import build_toy_model

    model = tmp_path_factory.mktemp("toy") / "model"
    build_toy_model(model)
    return model
