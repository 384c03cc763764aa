"""Contract of train engines as a test suite, for engines of this package and of plug-ins.

    class TestMine(TrainEngineContract):
        def engine(self) -> TrainEngine:
            return MyEngine.from_config(config, algorithm, total_steps=None, ranks=Ranks())

Run it with `pytest`. On one rank the trainer requires nothing else of an engine that is named by its dotted path
(`trainer.trainer_type: my_package.MyEngine`). Agreement of several ranks is up to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.storage.base import Data, check_path
from rftdask.trainer.engines.base import TrainEngine


class TrainEngineContract:
    """Test base class. Subclass it and define `engine`, which returns the same initial engine every time."""

    measures: ClassVar[bool] = True
    """False: the algorithm learns from rollouts, which are never passed to `evaluate`."""

    def engine(self) -> TrainEngine:
        """New engine, deterministic on a CPU."""
        raise NotImplementedError

    def batch(self, number: int) -> TrainingBatch:
        """Batch `number`, the same every time: three groups of four rollouts, with token ids below 100."""
        random = np.random.default_rng(number)
        rows = [(random.integers(2, 100, 5 + row % 3).tolist(), 2, None) for row in range(12)]
        made = supervised_batch(rows, [f"t/{number}/{row // 4}/{row % 4}/0" for row in range(12)], 4)
        made.rewards[:] = random.random(12)
        made.rollout_logprobs[:] = -4.0 - random.random(len(made.rollout_logprobs))
        made.experts[:] = False
        return made

    def trained(self, *numbers: int) -> TrainEngine:
        """Engine after one step on each of these batches."""
        made = self.engine()
        for step, number in enumerate(numbers, start=1):
            made.train_step(self.batch(number), step)
        return made

    def test_a_step_returns_finite_metrics_and_changes_weights(self) -> None:
        """Metrics are finite floats, and the weights change."""
        made = self.engine()
        before = _copy(made.weights())
        metrics = made.train_step(self.batch(0), 1)
        assert metrics and all(math.isfinite(value) for value in metrics.values()), metrics
        assert _copy(made.weights()) != before

    def test_the_same_batches_give_the_same_bytes(self) -> None:
        """Weights and state depend only on the batches."""
        first, second = self.trained(0, 1), self.trained(0, 1)
        assert _copy(first.weights()) == _copy(second.weights())
        assert _copy(first.state_files()) == _copy(second.state_files())

    def test_a_checkpoint_continues_with_the_same_bits(self) -> None:
        """A new engine that loads the state continues with the same bits, as after a kill."""
        whole, stopped = self.trained(0, 1), self.trained(0)
        resumed = self.engine()
        resumed.load_state_files(_copy(stopped.state_files()))
        assert _copy(resumed.state_files()) == _copy(stopped.state_files())
        resumed.train_step(self.batch(1), 2)
        assert _copy(resumed.weights()) == _copy(whole.weights())
        assert _copy(resumed.state_files()) == _copy(whole.state_files())

    def test_returned_weights_stay_during_the_next_step(self) -> None:
        """Weights and checkpoints are written while the next step trains."""
        made = self.trained(0)
        weights, state = made.weights(), made.state_files()
        before = _copy(weights), _copy(state)
        made.train_step(self.batch(1), 2)
        assert (_copy(weights), _copy(state)) == before

    def test_measuring_trains_nothing(self) -> None:
        """`evaluate` changes neither weights nor state."""
        if not self.measures:
            return
        made = self.trained(0)
        before = _copy(made.weights()), _copy(made.state_files())
        assert all(math.isfinite(value) for value in made.evaluate([self.batch(2)]).values())
        assert (_copy(made.weights()), _copy(made.state_files())) == before

    def test_a_device_may_be_left_between_steps(self) -> None:
        """Releasing the device between steps changes nothing."""
        made = self.trained(0)
        made.leave_device()
        made.return_to_device()
        made.train_step(self.batch(1), 2)
        assert _copy(made.weights()) == _copy(self.trained(0, 1).weights())

    def test_file_names_are_valid_on_any_storage(self) -> None:
        """Paths are relative, and exported files exist."""
        made = self.trained(0)
        for files in (made.weights(), made.state_files(), made.export_files()):
            assert files
            for name in files:
                check_path(name)


def _copy(files: Mapping[str, Data]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in files.items()}
