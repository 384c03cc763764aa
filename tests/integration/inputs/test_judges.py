"""Auxiliary models on workers of their own, and models behind an API, in real runs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rftdask import Experiment
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from tests.e2e.toy_runs import run_folder as toy_folder
from tests.e2e.toy_runs import write_grpo_config
from tests.integration import run_cases as runs
from tests.integration.run_cases import NUM_EVAL_TASKS, call_cli, run_folder, write_config
from tests.unit.rollouts.policy.api_server import KEY, api_server

STEPS = 4
WORKFLOW = "tests.integration.inputs.judged_workflow.judged"
CALLS = 2
"""Calls of the judge per attempt of that workflow."""


def write(folder: Path, engine_num: int, **judge: Any) -> Path:
    """Write a run with a fake policy and a fake judge."""
    path = runs.write_config(folder)
    tree = yaml.safe_load(path.read_text())
    source = tree["buffer"]["explorer_input"]
    source.pop("eval_tasksets")
    source |= {"default_workflow_type": WORKFLOW, "default_reward_fn_type": None}
    item = {"name": "judge", "model_path": "none", "engine_type": "fake", "engine_num": engine_num, **judge}
    tree["explorer"] |= {"auxiliary_models": [item]}
    tree["trainer"]["total_steps"] = STEPS
    path.write_text(yaml.safe_dump(tree))
    return path


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    """Return the answer and the judgment of each rollout, by uid."""
    table = pa.concat_tables(pq.read_table(file) for file in sorted(folder.glob("experiences/0*/*.parquet")))
    names = ("taskset", "epoch", "task_index", "rollout", "status", "response_text", "reward", "metrics")
    return sorted(tuple(map(str, (row[name] for name in names))) for row in table.to_pylist())


def test_two_explorers_share_a_judge_and_its_calls_are_counted(tmp_path: Path) -> None:
    config = write(tmp_path, 1, prompt_price=3.0, response_price=15.0)
    overrides = ("explorer.rollout_model.engine_num=2", "cluster.num_cpus=4", "synchronizer.sync_style=fully_async")
    ended = runs.finish(config, *overrides)
    folder = runs.run_folder(config)
    assert ended.out.count("auxiliary model 'judge' is served by worker auxiliary-0") == 1
    # The output of its engine is in one log, from one process.
    assert (folder / "log" / "auxiliary-0.log").read_text().count("has served a request and is ready") == 1
    use = runs.status_of(folder)["auxiliary"]["judge"]
    assert use["calls"] >= CALLS * STEPS * runs.BATCH_SIZE * runs.REPEAT_TIMES and use["failures"] == 0
    assert (
        use["cost"] == pytest.approx((3 * use["prompt_tokens"] + 15 * use["response_tokens"]) / 1e6) and use["cost"] > 0
    )
    assert f"auxiliary model judge: {use['calls']:,.0f} calls, " in ended.out
    steps = Experiment.open(folder).metrics("explorer")
    assert steps["auxiliary/judge/calls"].sum() == use["calls"]
    assert {row[4] for row in rows_of(folder)} == {"ok"}


@pytest.mark.slow
def test_killing_a_judge_does_not_change_its_verdicts(tmp_path: Path) -> None:
    beside = write(tmp_path / "beside", 0)
    runs.finish(beside, "cluster.num_cpus=2")
    config = write(tmp_path / "apart", 1)
    folder = runs.run_folder(config)
    with runs.RunProcess("run", str(config), "cluster.num_cpus=3", "--progress", "plain") as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 1)
        [judge] = [engine for engine in run.children(runs.ENGINE) if "auxiliary-0.log" in str(engine.open_files())]
        runs.worker_of(judge).kill()
        ended = run.end(code=0)
        assert "an engine of auxiliary model 'judge' ended: its worker was lost; it is replaced" in ended.out
    runs.assert_sound(folder)
    assert rows_of(folder) == rows_of(runs.run_folder(beside))


@pytest.mark.slow
def test_a_model_on_a_worker_of_its_own_scores_answers(tmp_path: Path) -> None:
    config = write_grpo_config(tmp_path, cluster={"num_cpus": 3}, trainer={"total_steps": 2})
    tree = yaml.safe_load(config.read_text())
    tree["buffer"]["explorer_input"] |= {"default_workflow_type": "math_rm_workflow", "default_reward_fn_type": None}
    judge = {"model_path": tree["model"]["model_path"], "engine_num": 1, "max_prompt_tokens": 256}
    tree["explorer"] = {"auxiliary_models": [judge]}
    config.write_text(yaml.safe_dump(tree))
    runs.finish(config)
    table = pa.concat_tables(pq.read_table(file) for file in toy_folder(config).glob("experiences/0*/*.parquet"))
    rewards = table["reward"].to_pylist()
    assert all(0 < reward < 1 for reward in rewards) and len(set(rewards)) > 1


needs_openai = pytest.mark.skipif(find_spec("openai") is None, reason="needs the package openai")
EXTERNAL = ("model.external_model.enable=true", "model.external_model.model_name=m")


@needs_openai
def test_bench_measures_a_model_behind_an_api(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (*EXTERNAL, "mode=bench", "explorer.rollout_model.engine_type=transformers")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    refused = call_cli("run", str(config), *settings)
    assert refused.code == 2 and "environment variable OPENAI_BASE_URL is not set" in refused.err, refused
    assert not (run_folder(config) / "run.json").exists()
    with api_server("1", 429) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        openai = ("explorer.rollout_model.engine_type=openai", "model.external_model.model_name=m")
        ended = call_cli("run", str(config), "mode=bench", *openai)
        assert ended.code == 0, ended
        assert "explorer.rollout_model.engine_type: openai is taken as external" in ended.err
        assert len(server.requests) == NUM_EVAL_TASKS + 1
    evals = read_metrics(open_storage(run_folder(config)), "eval")
    # The tasks are 0+1=, 1+1= and 2+1=, so one of the three answers is right.
    assert evals["step"].tolist() == [0] and evals["bench/accuracy"].tolist() == [pytest.approx(1 / 3)]
    assert evals["bench/reward/mean@1"].tolist() == [pytest.approx(1 / 3)]
    written = [file.read_bytes() for file in run_folder(config).rglob("*") if file.is_file()]
    assert written and not any(KEY.encode() in content for content in written)


@needs_openai
@pytest.mark.parametrize("mode", ["both", "explore", "train"])
def test_nothing_is_trained_on_a_model_behind_an_api(tmp_path: Path, mode: str) -> None:
    ended = call_cli("validate", str(write_config(tmp_path)), *EXTERNAL, f"mode={mode}")
    assert ended.code == 2
    assert "model.external_model.enable: a model behind an API returns no tokens or logprobs to train" in ended.err


@needs_openai
def test_a_wrong_key_is_an_error_of_the_user(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server("1") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        ended = call_cli("run", str(config), *EXTERNAL, "mode=bench")
    assert ended.code == 2 and "refuses all requests: AuthenticationError" in ended.err, ended
