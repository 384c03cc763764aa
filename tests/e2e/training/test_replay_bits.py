"""Promise: online equals offline. An asynchronous run of conversations on the CPU, trained again from its ledger after
its end, gives the same bits, from the initial model and from a checkpoint. Another learning rate gives other bits.
"""

from pathlib import Path

import pytest

from rftdask.cli.replay import replay_run
from rftdask.reports.lineage.tables import RunTables
from tests.e2e.toy_runs import run_folder, write_grpo_config
from tests.integration.run_cases import final_weights, finish

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    taskset = {
        "path": str(folder / "toy" / "train.jsonl"),
        "format": {"prompt_key": "question", "response_key": "answer"},
    }
    config = write_grpo_config(
        folder,
        buffer={
            "batch_size": 4,
            "explorer_input": {"taskset": {**taskset, "default_workflow_type": "tests.e2e.toy_reward.two_turns"}},
        },
        model={"model_path": str(folder / "model"), "max_prompt_tokens": 40, "max_response_tokens": 4},
        synchronizer={"sync_style": "fully_async", "max_staleness": 3},
        algorithm={"optimizer": {"lr": 1.0e-3, "lr_scheduler_type": "cosine"}},
    )
    finish(config)
    return run_folder(config)


@pytest.mark.parametrize("step", [0, 4])
def test_the_finished_log_gives_the_weights_that_the_run_gave(run: Path, step: int) -> None:
    folder, comparison = replay_run(str(run), step, progress="none")
    assert comparison.render() == f"bit-equal with lineage main at step {STEPS}"
    assert final_weights(Path(folder)) == final_weights(run)


def test_two_turns_are_one_row_if_the_template_continues(run: Path) -> None:
    table = RunTables(run).table("experiences")
    num_turns = [1 if turns is None else len(turns) for turns in table.column("turns").to_pylist()]
    rollouts = len(
        set(zip(*(table.column(name).to_pylist() for name in ("epoch", "task_index", "rollout")), strict=True))
    )
    assert sum(num_turns) >= 2 * rollouts and num_turns.count(2) > rollouts / 2
    # The toy's template omits the token that ends an answer; if it was sampled, a new row begins and records it.
    reasons = [dict(metrics) for metrics in table.column("metrics").to_pylist()]
    assert num_turns.count(1) == 2 * sum("branches/answer" in metrics for metrics in reasons)


def test_another_learning_rate_creates_another_lineage(run: Path) -> None:
    before = final_weights(run)
    folder, comparison = replay_run(str(run), 4, "slower", ["algorithm.optimizer.lr=5e-4"], progress="none")
    assert comparison.step == STEPS and "actor/model.safetensors" in comparison.differing
    assert final_weights(Path(folder)) != final_weights(run) == before
