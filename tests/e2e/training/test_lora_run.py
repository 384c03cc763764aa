"""Promise: in a run that trains only adapters, on two ranks that share the weights, explorers sample with the published
adapters, and the checkpoint can be converted to a model.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rftdask.driver.convert import convert
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from tests.e2e.toy_runs import run_folder, write_grpo_config
from tests.integration.run_cases import finish


def test_explorers_sample_with_adapters_that_two_ranks_train(tmp_path: Path) -> None:
    config = write_grpo_config(tmp_path, trainer={"total_steps": 3, "num_ranks": 2, "save_interval": 0})
    lora = "model.lora_configs=[{lora_rank: 4, lora_alpha: 64, use_rslora: true}]"
    finish(config, lora, "synchronizer.sync_offset=0", "cluster.num_cpus=3")
    run = run_folder(config)
    published = sorted(path.name for path in (run / "weights" / "3").iterdir())
    assert published == ["MANIFEST.json", "adapter_config.json", "adapter_model.safetensors"]
    for name, tensor in load_file(run / "weights" / "3" / "adapter_model.safetensors").items():
        assert tensor.abs().max() > 0, name  # the input matrix starts at random, the output matrix at 0

    converted = convert(str(run), tmp_path / "converted")
    assert converted.step == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    exported = AutoModelForCausalLM.from_pretrained(run / "global_step_3" / "actor" / "huggingface")
    for name, tensor in exported.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name

    # With different adapters in engine and trainer, the ratios to the rollouts' logprobs would not be 1.
    metrics = read_metrics(open_storage(str(run)), "trainer")
    assert list(metrics["step"]) == [1, 2, 3]
    assert metrics["ppo_kl"].abs().max() < 1e-5
