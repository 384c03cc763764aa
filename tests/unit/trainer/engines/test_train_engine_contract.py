"""Every train engine fulfills the contract of rftdask.testing.train_engine; engines that break it fail."""

from pathlib import Path
from typing import Any

import pytest

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.testing.train_engine import TrainEngineContract
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.unit.trainer.trainer_cases import engine_config


class TestFake(TrainEngineContract):
    def engine(self) -> TrainEngine:
        return FakeTrainEngine()


class TestTorch(TrainEngineContract):
    algorithm = "grpo"
    measures = False

    @pytest.fixture(autouse=True)
    def on_the_toy(self, model: Path) -> None:
        self.config = engine_config(model, deterministic=True)

    def engine(self) -> TrainEngine:
        return TorchEngine(self.config, make_algorithm(self.algorithm))


class TestTorchOnADataset(TestTorch):
    algorithm = "sft"
    measures = True


class Forgets(FakeTrainEngine):
    """Its checkpoints lack what it has learned."""

    def load_state_files(self, files: Any) -> None:
        pass


class Counts(FakeTrainEngine):
    """Two of them are not the same."""

    number = 0

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        Counts.number += 1
        return super().train_step(batch, step + Counts.number)


class Measures(FakeTrainEngine):
    def evaluate(self, batches: Any) -> dict[str, float]:
        return self.train_step(batches[0], 1)


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Forgets, "test_a_checkpoint_continues_with_the_same_bits"),
        (Counts, "test_the_same_batches_give_the_same_bytes"),
        (Measures, "test_measuring_trains_nothing"),
    ],
)
def test_an_engine_that_breaks_a_promise_fails(broken: type[TrainEngine], promise: str) -> None:
    suite = type("Suite", (TrainEngineContract,), {"engine": lambda self: broken()})()
    with pytest.raises(AssertionError):
        getattr(suite, promise)()
