"""Promise: training does not wait for an evaluation, however long it takes."""

import json
from pathlib import Path

import pytest

from tests.integration.run_cases import RunProcess, assert_sound, num_shards, num_steps, run_folder


@pytest.mark.slow
def test_training_goes_on_while_an_evaluation_is_under_way(config: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(4000)]  # many minutes of evaluation
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = run_folder(config)
    settings = (
        "trainer.total_steps=500",
        "explorer.eval_interval=500",
        "explorer.sandbox.mode=never",
        "buffer.explorer_input.default_eval_workflow_type=tests.integration.roles.slow_workflow.slow",
    )
    with RunProcess("run", str(config), *settings) as run:
        run.wait_until(lambda: num_eval_shards(folder) >= 2)
        steps = num_steps(folder)
        run.wait_until(lambda: num_steps(folder) >= steps + 5)
        evaluated = num_eval_shards(folder)
        run.wait_until(lambda: num_eval_shards(folder) > evaluated)
        assert not list(folder.glob("metrics/eval/*")), "the evaluation is not over"
        run.interrupt()
        assert run.end().code == 130
    assert_sound(folder)
    assert num_shards(folder) > 0


def num_eval_shards(folder: Path) -> int:
    return len(list((folder / "eval").rglob("*.parquet")))
