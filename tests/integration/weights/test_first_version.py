"""Promise: before the first publication every role samples from the policy that the trainer begins with, here a model
with an adapter. If an engine does not, the run ends before its first update.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.log import EXPERIENCES
from rftdask.config.schema.model import LoraConfig
from rftdask.models.lora import begin
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from rftdask.synchronizer.published import published_versions
from rftdask.trainer.checkpoint import checkpoint_steps
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.e2e.toy_runs import run_folder, write_grpo_config, write_rows
from tests.integration.roles.test_served_runs import Served, serve
from tests.integration.run_cases import call_cli, finish
from tests.numerics import assert_same_logprobs

ENGINE = "explorer.rollout_model.engine_type=tests.integration.weights.bare_engine.BareEngine"
INTERVAL = 2


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    taskset = {
        "path": str(write_rows(tmp_path / "tasks.jsonl", rows)),
        "format": {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"},
    }
    path = write_grpo_config(
        tmp_path,
        model={
            "max_response_tokens": 8,
            "min_response_tokens": 4,
            "lora_configs": [{"path": str(tmp_path / "adapter")}],
        },
        buffer={
            "explorer_input": {
                "taskset": taskset,
                "eval_tasksets": [{"name": "held_out", **taskset}],
                "default_reward_fn_type": "tests.e2e.toy_reward.varied_reward",
            }
        },
        trainer={"total_steps": INTERVAL + 1},
        synchronizer={"sync_offset": 0, "sync_interval": INTERVAL},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    # Far from the uniform policy of a random model, as its adapter is from the model.
    model.get_output_embeddings().weight.data *= 50
    model.save_pretrained(tmp_path / "model")
    settings = peft.LoraConfig(r=20, lora_alpha=400, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    return path


def both(config: Path, folder: Path) -> None:
    finish(config)


def explore(config: Path, folder: Path) -> None:
    finish(config, "mode=explore", "buffer.total_steps=1")


def bench(config: Path, folder: Path) -> None:
    finish(config, "mode=bench")


def debug(config: Path, folder: Path) -> None:
    assert call_cli("debug", str(config), "--once", "--rollouts", "4", "--folder", str(folder)).code == 0


def served(config: Path, folder: Path) -> None:
    with serve(config) as run:
        server = Served(run)
        for session in ("a", "b", "c", "d"):
            server.ask(session, "1+1=")
            assert server.post("/feedback", session_id=session, reward=1.0, task_id="t")[0] == 200
        run.process.terminate()
        assert run.process.wait(60) == 0


@pytest.mark.parametrize(
    ("command", "folders"),
    [
        (both, {EXPERIENCES, "eval/held_out"}),
        (explore, {EXPERIENCES, "eval/held_out"}),
        (bench, {"eval/held_out"}),
        (debug, {EXPERIENCES}),
        (served, {EXPERIENCES}),
    ],
)
def test_the_first_version_is_the_model_with_its_adapter(
    config: Path, tmp_path: Path, command: Callable[[Path, Path], None], folders: set[str]
) -> None:
    folder = run_folder(config)
    command(config, folder)
    model, _ = load_policy(str(tmp_path / "model"), "float32", "cpu")
    begin(model, LoraConfig(path=str(tmp_path / "adapter")))
    model.eval()
    for name in folders:
        log = ParquetLog(open_storage(folder), name)
        rows = [row for shard in log.shards(0) for row in log.read(shard).to_pylist()]
        first = [row for row in rows if row["max_policy_version"] == 0]
        assert len(first) >= 4, name
        if command is both and name == EXPERIENCES:
            assert {row["explore_step"] for row in first} == {*range(1, INTERVAL + 1)}
        for row in first:
            packed = pack_rows(
                [np.array(row["tokens"])], np.array([row["prompt_length"]]), np.array([row["temperature"]])
            )
            assert_same_logprobs(token_logprobs(model, packed)[0][0], row["rollout_logprobs"])


def test_an_engine_without_the_adapter_ends_the_run(config: Path) -> None:
    ended = call_cli("run", str(config), ENGINE, "--progress", "plain")
    assert ended.code == 2, ended
    message = " ".join(ended.err.split())
    assert "step 1: for " in message and "the engine has loaded other weights (an adapter, " in message, ended
    assert "restarts from its newest checkpoint" not in ended.out + ended.err and "rftdask skip" not in ended.err, ended
    storage = open_storage(run_folder(config))
    assert Ledger(storage).last_step() == 1
    assert read_metrics(storage, "trainer").empty
    assert published_versions(storage) == checkpoint_steps(storage) == []
