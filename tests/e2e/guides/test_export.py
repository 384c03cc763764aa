"""Promises of the exported model: transformers loads it as the policy of the last checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rftdask import Experiment
from tests.e2e.fake_hub import fake_hub
from tests.e2e.toy_runs import write_grpo_config
from tests.integration.run_cases import RunProcess, final_weights, finish
from tests.numerics import assert_same_logprobs


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    config = write_grpo_config(tmp_path_factory.mktemp("export"), trainer={"total_steps": 3, "save_interval": 0})
    finish(config)
    return Experiment.from_yaml(config)


def test_the_exported_weights_are_those_of_the_checkpoint(experiment: Experiment) -> None:
    exported = AutoModelForCausalLM.from_pretrained(experiment.model_path()).state_dict()
    trained = safetensors.torch.load(final_weights(Path(experiment.url)))
    assert exported.keys() >= trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(exported[name], tensor), name


def test_the_exported_model_reproduces_the_recorded_logprobs(tmp_path: Path, experiment: Experiment) -> None:
    """Benching the last checkpoint samples with it; plain transformers must agree on every sampled token."""
    held_out = Path(experiment.config.model.model_path).parent / "toy" / "eval.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(held_out.read_text().splitlines(keepends=True)[:4]))
    columns = "format: {prompt_type: raw, prompt_key: question, response_key: answer}"
    taskset = f"buffer.explorer_input.eval_tasksets=[{{name: few, path: {few}, {columns}}}]"
    config = held_out.parents[1] / "config.yaml"
    settings = ("trainer.total_steps=3", "trainer.save_interval=0", "explorer.bench_on_latest_checkpoint=true")
    finish(config, taskset, *settings, "mode=bench")

    model = AutoModelForCausalLM.from_pretrained(experiment.model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(experiment.model_path())
    (shard,) = (Path(experiment.url) / "eval" / "few").glob("0*/00000003-*.parquet")
    import pandas as pd

    for row in pd.read_parquet(shard).itertuples():
        tokens = torch.tensor(np.array(row.tokens)[None])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens).logits[0].float(), -1)
        at = torch.arange(row.prompt_length, tokens.shape[1])
        expected = logprobs[at - 1, tokens[0, at]]
        assert_same_logprobs(torch.tensor(np.array(row.rollout_logprobs)), expected)
        assert tokenizer.decode(tokens[0, : row.prompt_length]) == row.prompt_text


def test_a_model_is_pushed_with_its_card(experiment: Experiment) -> None:
    with fake_hub() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0"}
        with RunProcess("push", experiment.url, "me/sums", env=env) as push:
            ended = push.end(code=0)
        assert "me/sums" in ended.out, ended
        assert (hub.private, hub.commits) == ({"me/sums": True}, ["step 3 of tiny"])
        files = hub.models["me/sums"]
        exported = Path(experiment.model_path())
        assert files["model.safetensors"] == (exported / "model.safetensors").read_bytes()
        assert {"config.json", "tokenizer.json", "README.md"} <= files.keys()
        card = files["README.md"].decode()
        assert "library_name: transformers" in card and "- grpo" in card and "pipeline_tag: text-generation" in card
        assert "| grpo | grpo | 3 | 0.001 |" in card and "`train.jsonl`" in card and "4 tasks x 4 rollouts" in card
        assert "repeat_times: 4" in card and "enable_prefix_caching" not in card, "its settings, without defaults"
        assert str(Path(experiment.url).parents[2]) not in card and "cluster:" not in card, "no path, no machine"
        assert 'pipeline("text-generation", model="me/sums")' in card
        with RunProcess("push", experiment.url, "me/sums", env={**env, "HF_TOKEN": "hf_wrong"}) as push:
            ended = push.end(code=2)
        assert "rejects me/sums" in ended.err and "Traceback" not in ended.err, ended
    with RunProcess("push", experiment.url, "me/sums", env=env) as push:
        ended = push.end(code=2)
    assert ended.err.count("\n") == 1 and f"{hub.url} cannot be reached: " in ended.err, ended
