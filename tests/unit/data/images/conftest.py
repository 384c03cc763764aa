"""A toy model that reads images, and its processor."""

from pathlib import Path

import pytest

from rftdask.data.images import ImageFolder, ImageProcessor
from rftdask.models.toy import build_toy_image_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image-model")
    build_toy_image_model(path)
    return path


@pytest.fixture
def images(tmp_path: Path, folder: Path) -> ImageProcessor:
    return ImageProcessor(str(folder), folder=ImageFolder(tmp_path))
