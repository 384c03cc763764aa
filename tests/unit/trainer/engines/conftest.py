"""Toy models, built once for the tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rftdask.models.toy import build_toy_model
from tests.unit.trainer.trainer_cases import SIZES


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "teacher", "other")):
        build_toy_model(folder / name, seed=seed, **SIZES)
    yield folder
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return models / "policy"
