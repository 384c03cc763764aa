"""Promise: files like Trinity-RFT's examples (GRPO on math, SFT, an explorer and a trainer as two commands) run to
their end with --from trinity, including plug-ins in its style, on the toy model without a GPU.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rftdask import Experiment
from tests.e2e.toy_runs import build_tiny_model
from tests.integration.run_cases import call_cli

PLUGIN = """
import torch
from trinity.algorithm import ADVANTAGE_FN
from trinity.algorithm.advantage_fn import GroupAdvantage
from trinity.common.experience import group_by
from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn
from trinity.common.workflows import WORKFLOWS
from trinity.common.workflows.workflow import MultiTurnWorkflow


@REWARD_FUNCTIONS.register_module("digit_reward")
class DigitReward(RewardFn):
    def __init__(self, **kwargs):
        pass

    def __call__(self, response, truth=None, **kwargs):
        return {"digits": sum(c.isdigit() for c in response) / 8, "varied": len(set(response)) / 16}


@WORKFLOWS.register_module("two_turn_math")
class TwoTurnMath(MultiTurnWorkflow):
    def run(self):
        reward_fn = self.task.reward_fn(**self.task.reward_fn_args)
        messages = [{"role": "user", "content": self.task.task_desc}]
        for turn in range(2):
            answer = self.model.chat(messages)[0].response_text
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "?"}]
        reward = sum(reward_fn(response=answer, truth=self.task.truth).values())
        return [self.process_messages_to_experience(messages[:-1], reward, {"turns": 2})]


@ADVANTAGE_FN.register_module("centered")
class Centered(GroupAdvantage):
    def group_experiences(self, exps):
        return group_by(exps, id_type="task")

    def calculate_group_advantage(self, group_id, exps):
        mean = torch.tensor([exp.reward for exp in exps]).mean()
        for exp in exps:
            exp.advantages = (exp.reward - mean) * exp.action_mask
        return exps, {}
"""
GRPO = """
project: "Trinity-RFT-toy"
name: "grpo"
algorithm: {algorithm_type: grpo, repeat_times: 4, optimizer: {lr: 1e-5}, advantage_fn: centered}
model: {max_response_tokens: 4, max_model_len: 64}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 1
  batch_size: 4
  explorer_input:
    taskset:
      name: toy
      storage_type: file
      split: 'train'
      format: {prompt_key: 'question', response_key: 'answer'}
      rollout_args: {temperature: 1.0, logprobs: 0}
    default_workflow_type: 'two_turn_math'
    default_reward_fn_type: 'digit_reward'
  trainer_input:
    experience_buffer: {name: toy_buffer, storage_type: queue, path: 'sqlite:///toy.db'}
explorer:
  eval_interval: 50
  runner_per_model: 8
  rollout_model: {engine_num: 2, enable_prefix_caching: false, enforce_eager: true, dtype: bfloat16, seed: 42}
synchronizer: {sync_method: 'nccl', sync_interval: 1, sync_timeout: 1200}
trainer:
  save_interval: 100
  trainer_config: {actor_rollout_ref: {actor: {use_dynamic_bsz: true, grad_clip: 1.0}}}
"""
SFT = """
mode: train
project: "Trinity-RFT-toy"
name: "sft"
algorithm: {algorithm_type: sft, optimizer: {lr: 1e-5}}
model: {max_response_tokens: 16, max_model_len: 64}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 1
  train_batch_size: 8
  trainer_input:
    experience_buffer:
      name: toy_sft
      storage_type: file
      split: train
      format: {prompt_type: plaintext, prompt_key: question, response_key: answer}
synchronizer: {sync_method: 'checkpoint', sync_interval: 10}
trainer: {save_interval: 10, use_dynamic_bsz: true, max_token_len_per_gpu: 22000}
"""
ON_A_CPU = (
    "cluster.node_num=0",
    "cluster.gpu_per_node=0",
    "explorer.rollout_model.engine_type=transformers",
    "explorer.rollout_model.engine_num=1",
    "explorer.rollout_model.dtype=float32",
    "monitor.monitor_type=none",
    "cluster.num_cpus=2",
)
"""Warnings for such a file on a machine without a GPU."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trinity")
    build_tiny_model(folder / "model")
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(16)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plugins").mkdir()
    (folder / "plugins/own_trinity_parts.py").write_text(PLUGIN)
    return folder


def run(toy: Path, text: str, *overrides: str) -> Path:
    tree = yaml.safe_load(text)
    path = toy / f"{tree['name']}.yaml"
    path.write_text(text)
    paths = [f"model.model_path={toy / 'model'}", f"checkpoint_root_dir={toy / 'runs'}"]
    ended = call_cli("run", "--from", "trinity", str(path), *paths, *ON_A_CPU, *overrides)
    assert ended.code == 0, ended.err
    assert "read as a file of Trinity-RFT" in ended.err
    return toy / "runs" / tree["project"] / tree["name"]


@pytest.mark.timeout(600)
def test_grpo_with_trinity_style_workflow_reward_and_advantage(toy: Path) -> None:
    tasks = f"buffer.explorer_input.taskset.path={toy / 'tasks.jsonl'}"
    folder = run(toy, GRPO, tasks, "buffer.total_steps=2", f"explorer.plugin_dirs=[{toy / 'plugins'}]")
    rows = pa.concat_tables([pq.read_table(file) for file in (folder / "experiences").rglob("*.parquet")])
    assert set(rows["status"].to_pylist()) <= {"ok", "truncated"}, set(rows["error"].to_pylist())
    assert {dict(metrics)["turns"] for metrics in rows["metrics"].to_pylist()} == {2.0}
    assert len(set(rows["reward"].to_pylist())) > 1
    assert Experiment.open(folder).metrics("trainer")["step"].max() == 2


@pytest.mark.timeout(600)
def test_sft_of_two_columns(toy: Path) -> None:
    folder = run(toy, SFT, f"buffer.trainer_input.experience_buffer.path={toy / 'tasks.jsonl'}")
    assert Experiment.open(folder).metrics("trainer")["step"].max() == 2


@pytest.mark.timeout(600)
def test_an_explorer_and_a_trainer_as_two_commands(toy: Path) -> None:
    text = GRPO.replace('name: "grpo"', 'name: "async"').replace("'two_turn_math'", "'math_workflow'")
    text = text.replace("advantage_fn: centered", "").replace("'digit_reward'", "'math_reward'")
    tasks = f"buffer.explorer_input.taskset.path={toy / 'tasks.jsonl'}"
    run(toy, text, "mode=explore", tasks, "buffer.total_steps=2", "synchronizer.sync_method=checkpoint")
    folder = run(toy, text, "mode=train", tasks, "buffer.total_steps=2", "synchronizer.sync_method=checkpoint")
    assert Experiment.open(folder).metrics("trainer")["step"].max() == 2
