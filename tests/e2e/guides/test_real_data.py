"""Runs on real data with a tiny model: GSM8K by the shipped config, supervised pairs, a generated dataset."""

import os
from pathlib import Path

import pandas as pd
import pytest

from rftdask import Experiment
from tests.e2e.toy_runs import build_tiny_model, run_folder, write_grpo_config, write_rows
from tests.integration.run_cases import assert_sound, finish, num_steps

ROOT = Path(__file__).parents[3]
NUM_EVAL = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def gsm8k() -> Path:
    folder = os.environ.get("RFTDASK_GSM8K")
    if not folder:
        pytest.fail(
            "set RFTDASK_GSM8K to a folder with train.jsonl and test.jsonl of the GSM8K dataset, "
            "each row with question and answer, for example from https://github.com/openai/grade-school-math"
        )
    return Path(folder)


def test_the_gsm8k_config_completes_three_steps_on_real_files(tmp_path: Path, model: Path, gsm8k: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text("".join((gsm8k / "test.jsonl").read_text().splitlines(keepends=True)[:NUM_EVAL]))
    source = "buffer.explorer_input"
    config = ROOT / "config" / "gsm8k-grpo.yaml"
    finish(
        str(config),
        f"checkpoint_root_dir={tmp_path}/runs",
        f"model.model_path={model}",
        "model.max_prompt_tokens=1024",
        "model.max_response_tokens=8",
        "algorithm.repeat_times=4",
        "cluster.num_cpus=2",
        "explorer.rollout_model.engine_type=transformers",
        "explorer.rollout_model.engine_num=1",
        "trainer.num_ranks=1",
        "buffer.batch_size=2",
        f"{source}.taskset.path={gsm8k}/train.jsonl",
        f"{source}.eval_tasksets[0].path={held_out}",
        "trainer.total_steps=3",
    )
    experiment = Experiment.open(tmp_path / "runs" / "gsm8k" / "qwen2.5-1.5b-grpo")
    status = assert_sound(Path(experiment.url))
    assert status["checkpoint"] == status["step"] == 3
    assert status["experiences"] == {"committed": 24, "trained": 24, "waiting": 0}
    experiences = experiment.experiences()
    assert (experiences.truth.str.fullmatch(r"-?[\d,.]+")).all(), "the number after ####"
    assert experiences.prompt_text.str.len().min() > 40
    evals = experiment.metrics("eval")
    assert evals.step.tolist() == [0, 3] and (evals.num_rollouts == NUM_EVAL).all()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_supervised_training_reads_jsonl_and_parquet(tmp_path: Path, model: Path, suffix: str) -> None:
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(16)]
    data = tmp_path / f"pairs.{suffix}"
    if suffix == "jsonl":
        write_rows(data, rows)
    else:
        pd.DataFrame(rows).to_parquet(data)
    finish(
        str(ROOT / "config" / "sft.yaml"),
        f"checkpoint_root_dir={tmp_path}/runs",
        f"model.model_path={model}",
        "model.max_model_len=32",
        f"buffer.trainer_input.experience_buffer.path={data}",
        "buffer.train_batch_size=8",
        "buffer.total_epochs=4",
        "algorithm.optimizer.lr=0.01",
    )
    experiment = Experiment.open(tmp_path / "runs" / "examples" / "sft")
    losses = experiment.metrics("trainer").loss
    assert len(losses) == num_steps(Path(experiment.url)) == 16 * 4 // 8
    assert losses.iloc[-1] < losses.iloc[0]


@pytest.mark.extras
def test_a_reasoning_gym_dataset_is_a_taskset_by_name(tmp_path: Path) -> None:
    config = write_grpo_config(tmp_path)
    source = "buffer.explorer_input"
    finish(
        str(config),
        f"{source}.taskset={{path: 'reasoning-gym:chain_sum', dataset_args: {{size: 20, seed: 1}}}}",
        f"{source}.default_reward_fn_type=reasoning_gym_reward",
        "model.max_prompt_tokens=256",
        "trainer.total_steps=2",
    )
    status = assert_sound(run_folder(config))
    assert status["checkpoint"] == 2 and "failed" not in status["experiences"]
