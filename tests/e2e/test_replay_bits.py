"""Online equals offline: an asynchronous run on the CPU, trained again from its ledger after it has ended, gives the
very bits that it gave; from the initial model and from a checkpoint. With another learning rate it gives others.
"""

from pathlib import Path

import pytest

from rftdask.commands.replay import replay
from tests.e2e.toy_runs import finish, run_folder, write_grpo_config
from tests.integration.run_cases import final_weights

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_grpo_config(
        tmp_path_factory.mktemp("online"),
        synchronizer={"sync_style": "fully_async", "max_staleness": 3},
        algorithm={"optimizer": {"lr": 1.0e-3, "lr_scheduler_type": "cosine"}},
    )
    finish(str(config))
    return run_folder(config)


@pytest.mark.parametrize("step", [0, 4])
def test_the_finished_log_gives_the_weights_that_the_run_gave(run: Path, step: int) -> None:
    folder, found = replay(str(run), step, progress="none")
    assert found.render() == f"bit-equal with lineage main at step {STEPS}"
    assert final_weights(Path(folder)) == final_weights(run)


def test_another_learning_rate_gives_other_weights_in_a_lineage_of_its_own(run: Path) -> None:
    before = final_weights(run)
    folder, found = replay(str(run), 4, "slower", ["algorithm.optimizer.lr=5e-4"], progress="none")
    assert found.step == STEPS and "actor/model.safetensors" in found.differing
    assert final_weights(Path(folder)) != final_weights(run) == before
