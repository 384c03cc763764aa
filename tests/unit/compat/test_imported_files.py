"""Promises of `rftdask import`: every key of a file is taken or named, and a script is never executed."""

from pathlib import Path

import pytest
import yaml

from rftdask.compat import trl, verl
from rftdask.compat.imported import Key
from rftdask.compat.trl import read_trl
from rftdask.compat.verl import read_verl
from rftdask.config import Config, load_config
from rftdask.errors import DataError
from tests.integration.run_cases import call_cli
from tests.unit.test_docs_paths import is_key

GRPO = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this script was executed")
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
dataset = load_dataset("openai/gsm8k", "main", split="train")

def close(completions, **columns):
    return [0.0 for _ in completions]

args = GRPOConfig(
    output_dir="out", run_name="mine", learning_rate=5e-6, beta=0.04, num_generations=4, max_completion_length=256,
    per_device_train_batch_size=8, gradient_accumulation_steps=4, epsilon=0.2, epsilon_high=0.28, loss_type="dr_grpo",
    scale_rewards=False, num_iterations=2, max_steps=100, warmup_ratio=0.1, bf16=True, use_vllm=True, adam_beta2=0.99,
    mask_truncated_completions=True, logging_steps=1, seed=make_seed(), report_to=["wandb"], sync_ref_model=True,
)
trainer = GRPOTrainer(
    model=MODEL, args=args, reward_funcs=[close], train_dataset=dataset, peft_config=LoraConfig(r=16, lora_dropout=0.1)
)
"""
DPO = """
import trl
model = AutoModelForCausalLM.from_pretrained("a/model")
args = trl.DPOConfig(beta=0.2, max_length=512, loss_type="ipo")
trainer = trl.DPOTrainer(model=model, args=args, train_dataset=mine())
"""
VERL = """
data:
  train_files: ~/gsm8k/train.parquet
  val_files: [~/gsm8k/test.parquet]
  train_batch_size: 256
  max_response_length: 1024
  filter_overlong_prompts: true
actor_rollout_ref:
  hybrid_engine: true
  model: {path: Qwen/Qwen2.5-7B-Instruct, enable_gradient_checkpointing: true, use_remove_padding: true}
  actor:
    optim: {lr: 2.0e-6}
    ppo_mini_batch_size: 64
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    entropy_coeff: 0.001
    clip_ratio_high: 0.28
  rollout: {name: vllm, n: 5, temperature: 0.8, tensor_model_parallel_size: 1, log_prob_micro_batch_size_per_gpu: 8}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, norm_adv_by_std_in_grpo: false}
custom_reward_function: {path: rewards/gsm.py, name: score}
trainer: {total_epochs: 15, test_freq: 5, save_freq: -1, n_gpus_per_node: 4, nnodes: 1, logger: [console, wandb]}
"""


def write(folder: Path, text: str, name: str = "theirs.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_grpo_script_becomes_the_same_run_and_is_not_executed(tmp_path: Path) -> None:
    found = read_trl(write(tmp_path, GRPO))
    config = load_config(found.tree)
    algorithm = config.algorithm
    assert (config.name, config.model.model_path, config.trainer.total_steps) == (
        "mine",
        "Qwen/Qwen2.5-0.5B-Instruct",
        100,
    )
    assert (algorithm.algorithm_type, algorithm.repeat_times, config.buffer.batch_size) == ("grpo", 4, 8)
    assert (algorithm.kl_loss_fn, algorithm.kl_loss_fn_args) == ("corrected_k3", {"kl_coef": 0.04})
    assert algorithm.policy_loss_fn_args == {"clip_range_low": 0.2, "clip_range_high": 0.28}
    assert (algorithm.loss_agg_mode, algorithm.advantage_fn_args) == ("seq-mean-token-sum-norm", {"std": "none"})
    assert algorithm.optimizer.betas == (0.9, 0.99) and algorithm.optimizer.lr_warmup_steps_ratio == 0.1
    assert config.trainer.ppo_epochs == 2 and config.explorer.rollout_model.engine_type == "vllm"
    assert config.model.lora_configs is not None and config.model.lora_configs[0].lora_rank == 16
    [taskset] = config.buffer.explorer_input.train_tasksets
    assert (taskset.path, taskset.subset_name) == ("openai/gsm8k", "main")
    assert found.left["seed"] == "make_seed() is computed while the script runs"
    assert "close: (completions, **columns) -> list must become" in found.left["reward_funcs"]
    assert config.explorer.plugin_dirs == ("plugins",), "all files of the script's own folder would be imported"
    assert {"bf16", "logging_steps", "report_to", "sync_ref_model", "LoraConfig.lora_dropout"} <= found.left.keys()


def test_beta_of_rloo_is_a_penalty_and_uncorrected_kl_is_k3(tmp_path: Path) -> None:
    def parts(config: str) -> dict[str, object]:
        return load_config(read_trl(write(tmp_path, f"args = {config}")).tree).algorithm.model_dump()

    rloo, grpo = parts("RLOOConfig()"), parts("GRPOConfig(beta=0.1, use_bias_correction_kl=False)")
    assert (rloo["kl_penalty_fn"], rloo["kl_penalty_fn_args"], rloo["kl_loss_fn"]) == ("k1", {"kl_coef": 0.05}, "none")
    assert (grpo["kl_loss_fn"], grpo["kl_loss_fn_args"], grpo["kl_penalty_fn"]) == ("k3", {"kl_coef": 0.1}, None)


@pytest.mark.parametrize(
    ("call", "path", "left"),
    [
        ('load_dataset("csv", data_files="sums.csv", split="train")', "sums.csv", ""),
        ('load_dataset("csv", data_files=["a.csv", "b.csv"])', "csv", "data_files"),
        ("load_dataset(arguments.dataset_name)", "DATA", "load_dataset"),
    ],
)
def test_data_of_a_script_is_taken_or_named(tmp_path: Path, call: str, path: str, left: str) -> None:
    found = read_trl(write(tmp_path, GRPO.replace('load_dataset("openai/gsm8k", "main", split="train")', call)))
    assert load_config(found.tree).buffer.explorer_input.train_tasksets[0].path == path
    assert {"data_files", "load_dataset"} & found.left.keys() == {left} - {""}


def test_every_key_of_a_file_is_taken_or_named(tmp_path: Path) -> None:
    for found in (
        read_trl(write(tmp_path, GRPO)),
        read_trl(write(tmp_path, DPO)),
        read_verl(write(tmp_path, VERL, "v.yaml")),
    ):
        assert set(found.given) <= found.taken.keys() | found.left.keys()
        assert found.taken.keys() & found.left.keys() <= {"algorithm.gamma", "algorithm.lam"}


def test_a_dpo_script_becomes_the_same_run(tmp_path: Path) -> None:
    found = read_trl(write(tmp_path, DPO))
    config = load_config({**found.tree})
    assert (config.mode, config.algorithm.algorithm_type, config.model.model_path) == ("train", "dpo", "a/model")
    assert config.algorithm.policy_loss_fn_args == {"beta": 0.2, "loss_type": "ipo"}
    assert (config.model.max_model_len, config.buffer.train_batch_size) == (512, 8)
    assert "write it as jsonl" in found.left["train_dataset"]


def test_a_file_of_verl_becomes_the_same_run(tmp_path: Path) -> None:
    found = read_verl(write(tmp_path, VERL, "v.yaml"))
    config = load_config(found.tree)
    algorithm = config.algorithm
    assert (algorithm.algorithm_type, algorithm.repeat_times, config.buffer.batch_size) == ("grpo", 5, 256)
    assert config.trainer.ppo_mini_batch_size == 64 * 5, "prompts there, experiences here"
    assert (algorithm.kl_loss_fn, algorithm.kl_loss_fn_args) == ("low_var_kl", {"kl_coef": 0.002})
    assert algorithm.policy_loss_fn_args == {"clip_range_low": 0.2, "clip_range_high": 0.28}
    assert algorithm.advantage_fn_args == {"std": "none"} and algorithm.optimizer.lr == 2e-6
    assert (config.buffer.total_epochs, config.explorer.eval_interval, config.trainer.save_interval) == (15, 5, 0)
    assert (config.model.max_prompt_tokens, config.model.max_response_tokens) == (512, 1024)
    source = config.buffer.explorer_input
    assert [t.path for t in source.train_tasksets] == ["~/gsm8k/train.parquet"] and len(source.eval_tasksets) == 1
    assert source.default_reward_fn_type == "gsm.score" and config.explorer.plugin_dirs == ("plugins",)
    assert "must become score(response, truth, task)" in found.left["custom_reward_function.path"]
    assert "data.filter_overlong_prompts" in found.left and "trainer.logger" in found.left


@pytest.mark.parametrize("table", [trl.KEYS, trl.ROLLOUT_KEYS, verl.KEYS], ids=["trl", "trl rollouts", "verl"])
def test_every_key_here_that_a_table_names_is_one(table: dict[str, Key]) -> None:
    assert [key.ours for key in table.values() if key.ours and not is_key(key.ours, Config)] == []
    assert [theirs for theirs, key in table.items() if not key.ours and not key.why] == []


def test_the_command_writes_a_valid_file_and_lists_unread_keys(tmp_path: Path) -> None:
    for system, path in (("trl", write(tmp_path, GRPO)), ("verl", write(tmp_path, VERL, "v.yaml"))):
        out = tmp_path / f"{system}.yaml"
        ended = call_cli("import", system, str(path), "--out", str(out))
        assert ended.code == 0 and "not translated: " in ended.err, ended
        assert load_config(str(out)).algorithm.algorithm_type == "grpo"
        assert "# Not translated:\n#   " in out.read_text()
        assert call_cli("import", system, str(path), "--out", str(out)).code == 2, "it is there already"
    write(
        tmp_path,
        "mode: both\nmodel: {model_path: m, max_model_len: 64}\nbuffer: {explorer_input: {taskset: {path: t.jsonl}}}\n",
        "t.yaml",
    )
    ended = call_cli("import", "trinity", str(tmp_path / "t.yaml"))
    assert ended.code == 0 and yaml.safe_load(ended.out)["algorithm"]["algorithm_type"] == "ppo", ended


def test_a_refused_value_is_reported_with_its_place_in_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        VERL.replace("name: vllm", "name: sglang").replace("adv_estimator: grpo", "adv_estimator: opo"),
        "v.yaml",
    )
    ended = call_cli("import", "verl", str(path))
    assert ended.code == 0 and "#   algorithm.adv_estimator: there is no opo" in ended.out
    assert "#   (to be mended) explorer.rollout_model.engine_type: " in ended.out


@pytest.mark.parametrize(
    ("system", "text", "told"),
    [
        ("trl", "parser = HfArgumentParser(GRPOConfig)", "values from its command line are not in the script"),
        ("trl", "def broken(:", "cannot be read as Python"),
        ("verl", "a: 1", "it is not a verl configuration"),
        ("verl", "algorithm: {algorithm_type: grpo}", "it is not a verl configuration"),
        ("axolotl", "a: 1", "use trl, verl or trinity"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, system: str, text: str, told: str) -> None:
    ended = call_cli("import", system, str(write(tmp_path, text)))
    assert ended.code == 2 and told in ended.err, ended


def test_a_script_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_trl(tmp_path / "no_such_file.py")
