from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a complete small model."""
    from rftdask.models.toy import build_toy_model

    folder = tmp_path_factory.mktemp("toy") / "model"
    build_toy_model(folder)
    return folder
