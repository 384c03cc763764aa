"""Promises of a model behind an API in whole commands: mode bench measures it, nothing is trained on it, it can be the
judge of a run, and its key stays in the environment.
"""

from pathlib import Path

import pytest

from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from tests.integration.run_cases import NUM_EVAL_TASKS, call_cli, run_folder, write_config
from tests.unit.rollouts.policy.api_server import KEY, api_server

pytest.importorskip("openai")
EXTERNAL = ("model.external_model.enable=true", "model.external_model.model_name=m")


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


@pytest.mark.parametrize("mode", ["both", "explore", "train"])
def test_nothing_is_trained_on_a_model_behind_an_api(tmp_path: Path, mode: str) -> None:
    ended = call_cli("validate", str(write_config(tmp_path)), *EXTERNAL, f"mode={mode}")
    assert ended.code == 2
    assert "model.external_model.enable: a model behind an API returns no tokens or logprobs to train" in ended.err


@pytest.mark.slow
def test_a_wrong_key_is_an_error_of_the_user(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server("1") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        ended = call_cli("run", str(config), *EXTERNAL, "mode=bench")
    assert ended.code == 2 and "refuses all requests: AuthenticationError" in ended.err, ended
