"""What every train engine promises, as a suite of tests: for engines of this package and for those of others.

    class TestMine(TrainEngineContract):
        def engine(self) -> TrainEngine:
            return MyEngine.from_config(config, algorithm, total_steps=None, ranks=Ranks())

`pytest` runs it. An engine that is named by its dotted path (`trainer.trainer_type: my_package.MyEngine`) is asked for
nothing else by the trainer, on one rank; that several agree is a matter of the engine.
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
    """Subclass it, and say how an engine is made: the same one each time, as at the beginning of a run."""

    measures: ClassVar[bool] = True
    """False: its algorithm learns from rollouts, which are never given to `evaluate`."""

    def engine(self) -> TrainEngine:
        """A new engine, deterministic on a CPU."""
        raise NotImplementedError

    def batch(self, number: int) -> TrainingBatch:
        """Batch `number`, the same each time: three groups of four rollouts, of tokens below 100 unless overridden."""
        random = np.random.default_rng(number)
        rows = [(random.integers(2, 100, 5 + row % 3).tolist(), 2, None) for row in range(12)]
        made = supervised_batch(rows, [f"t/{number}/{row // 4}/{row % 4}/0" for row in range(12)], 4)
        made.rewards[:] = random.random(12)
        made.rollout_logprobs[:] = -4.0 - random.random(len(made.rollout_logprobs))
        made.experts[:] = False
        return made

    def trained(self, *numbers: int) -> TrainEngine:
        """An engine after steps on these batches."""
        made = self.engine()
        for step, number in enumerate(numbers, start=1):
            made.train_step(self.batch(number), step)
        return made

    def test_a_step_tells_finite_numbers_and_changes_the_weights(self) -> None:
        """Metrics are floats by name, and something was learned."""
        made = self.engine()
        before = _copy(made.weights())
        metrics = made.train_step(self.batch(0), 1)
        assert metrics and all(math.isfinite(value) for value in metrics.values()), metrics
        assert _copy(made.weights()) != before

    def test_the_same_batches_give_the_same_bytes(self) -> None:
        """Weights and state follow from the batches."""
        first, second = self.trained(0, 1), self.trained(0, 1)
        assert _copy(first.weights()) == _copy(second.weights())
        assert _copy(first.state_files()) == _copy(second.state_files())

    def test_a_checkpoint_goes_on_as_if_nothing_had_happened(self) -> None:
        """A new engine that loads the state is the old one, so a run that was killed gives the same weights."""
        whole, stopped = self.trained(0, 1), self.trained(0)
        resumed = self.engine()
        resumed.load_state_files(_copy(stopped.state_files()))
        assert _copy(resumed.state_files()) == _copy(stopped.state_files())
        resumed.train_step(self.batch(1), 2)
        assert _copy(resumed.weights()) == _copy(whole.weights())
        assert _copy(resumed.state_files()) == _copy(whole.state_files())

    def test_what_was_handed_out_stays_while_the_next_step_is_trained(self) -> None:
        """Weights are written beside the next step, and so are checkpoints."""
        made = self.trained(0)
        weights, state = made.weights(), made.state_files()
        before = _copy(weights), _copy(state)
        made.train_step(self.batch(1), 2)
        assert (_copy(weights), _copy(state)) == before

    def test_measuring_trains_nothing(self) -> None:
        """`evaluate` leaves weights and state as they are."""
        if not self.measures:
            return
        made = self.trained(0)
        before = _copy(made.weights()), _copy(made.state_files())
        assert all(math.isfinite(value) for value in made.evaluate([self.batch(2)]).values())
        assert (_copy(made.weights()), _copy(made.state_files())) == before

    def test_a_device_may_be_left_between_steps(self) -> None:
        """Engines may have the memory meanwhile; nothing changes."""
        made = self.trained(0)
        made.leave_device()
        made.return_to_device()
        made.train_step(self.batch(1), 2)
        assert _copy(made.weights()) == _copy(self.trained(0, 1).weights())

    def test_files_have_names_that_any_storage_takes(self) -> None:
        """Relative paths; what is exported is there."""
        made = self.trained(0)
        for files in (made.weights(), made.state_files(), made.export_files()):
            assert files
            for name in files:
                check_path(name)


def _copy(files: Mapping[str, Data]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in files.items()}
