"""A user's workflow, reward and judge from a plugin folder; failures are typed rows that are not trained."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from rftdask import Experiment
from tests.integration.run_cases import BATCH_SIZE, call_cli, run_folder, write_config

STEPS = 2
PLUGIN = """
import os
import signal

from rftdask.rollouts.workflows.base import Reward, Step
from rftdask.rollouts.workflows.registry import workflow


@workflow("two_turns")
async def two_turns(task, model):
    try:
        open(__file__ + ".stopped", "x").close()
        os.kill(os.getppid(), signal.SIGSTOP)  # once: what starts the sandboxes; its work unit runs again
    except FileExistsError:
        pass
    if task.index % 4 == 3:
        os._exit(1)
    first = await model.generate(task.prompt)
    with model.timer("tool"):
        verdict = await model.auxiliary("judge").generate(first.text or "?")
    scores = await model.logprobs(task.prompt, "2")
    await model.generate(task.prompt + "again ")
    metrics = {"judged": float(len(verdict.tokens)), "score": scores[0]}
    return Reward(float(task.index % 2), metrics, (Step("a"), Step("b")))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_config(tmp_path)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/judged_turns.py").write_text(PLUGIN)
    tree = yaml.safe_load(path.read_text())
    source = tree["buffer"]["explorer_input"]
    source.pop("eval_tasksets")
    source |= {"default_workflow_type": "two_turns", "default_reward_fn_type": None}
    tree["explorer"] |= {
        "plugin_dirs": [str(tmp_path / "plugins")],
        "auxiliary_models": [{"name": "judge", "model_path": "none", "engine_type": "fake"}],
        "max_retry_times": 0,
        "over_rollout": {"ratio": 0.5, "wait_after_min": 60},
        "dynamic_timeout": {"enable": True, "ratio": 1000},
    }
    tree["synchronizer"] = {"sync_style": "fully_async"}
    tree["trainer"]["total_steps"] = STEPS
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_users_workflow_is_run_judged_and_trained(config: Path) -> None:
    ended = call_cli("run", str(config))
    assert ended.code == 0, ended.err
    rows = _experiences(config)
    good = rows.filter(pc.equal(rows["status"], "ok"))
    bad = rows.filter(pc.equal(rows["status"], "failed"))
    assert {index % 4 for index in bad["task_index"].to_pylist()} == {3}
    assert set(bad["error"].to_pylist()) == {"the workflow's process exited with code 1"}
    assert bad["reward"].null_count == len(bad) >= BATCH_SIZE // 2
    assert set(good["env_state"].to_pylist()) == {"a", "b"}
    assert all(dict(metrics)["judged"] == 4.0 for metrics in good["metrics"].to_pylist())
    step = Experiment.open(run_folder(config)).metrics("explorer").iloc[0]
    assert step["rollout/total_s"] >= step["rollout/tool_s"] > 0 and 0 <= step["pass@1"] <= step["pass@2"] <= 1


def test_a_few_bad_rows_fail_as_tasks_and_do_not_end_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(
        '{"question": "0+1=", "answer": "1"}\n{"question": "1+1=", "answer": null}\n' * BATCH_SIZE
    )
    steps = "buffer.explorer_input.eval_tasksets=[]", f"trainer.total_steps={STEPS}", "buffer.batch_size=4"
    assert "row 1: column 'answer' (format.response_key) is empty" in call_cli("run", str(config), *steps).err
    ended = call_cli("run", str(config), *steps, f"buffer.max_bad_rows={BATCH_SIZE}")
    assert ended.code == 0, ended.err
    rows = _experiences(config).to_pylist()
    assert {row["status"] for row in rows if row["task_index"] % 2} == {"failed"}
    assert {row["status"] for row in rows if row["task_index"] % 2 == 0} <= {"ok", "truncated"}
    assert all("is empty" in row["error"] for row in rows if row["task_index"] % 2)


def _experiences(config: Path) -> pa.Table:
    files = sorted((run_folder(config) / "experiences").rglob("*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])
