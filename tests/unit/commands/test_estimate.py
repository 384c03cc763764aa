"""Promises of `rftdask estimate`: weights, gradients and optimizer state to the byte, activations and logits within
1.25 of what is kept; the shape of a model from its files alone, without torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from rftdask.cli import app
from rftdask.commands.estimate import (
    GB,
    TrainSizes,
    activation_bytes,
    engine_parts,
    estimate,
    gpu_bytes,
    logit_bytes,
    train_parts,
    train_sizes,
)
from rftdask.config import load_config
from rftdask.config.schema.model import LoraConfig
from rftdask.errors import DataError, UserError
from rftdask.models.lora import adapter_names, begin
from rftdask.models.model_shape import MAX_LOGITS, ModelShape, read_shape
from rftdask.trainer import model as trainer_model
from rftdask.trainer.attention import pack_if_equal
from rftdask.trainer.packing import pack_rows

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
FAMILIES = {
    "qwen2 tied": transformers.Qwen2Config(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, num_attention_heads=8, num_key_value_heads=4, head_dim=16),
    "llama": transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4),
}


@pytest.fixture(params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, ModelShape, Path]:
    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param])
    model.save_pretrained(tmp_path)
    return model, read_shape(str(tmp_path)), tmp_path


def kept_bytes(model: Any, lengths: list[int], prompt: int) -> int:
    """Storage that a pass keeps for its way back, weights left out."""
    rows = pack_rows([np.arange(n) % 96 for n in lengths], np.full(len(lengths), prompt), np.ones(len(lengths)))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer_model.token_logprobs(model, rows)
    return sum(storage.nbytes() for storage in kept.values())


def test_weights_gradients_and_optimizer_state_are_exact(saved: tuple[Any, ModelShape, Path]) -> None:
    model, shape, _ = saved
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(9)[None]).logits.sum().backward()
    optimizer.step()
    measured = {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters()),
        "optimizer": sum(v.nbytes for state in optimizer.state.values() for k, v in state.items() if k != "step"),
    }
    parts = {part.name: part.num_bytes for part in train_parts(shape, TrainSizes(tokens=9, compute_bytes=4))}
    assert {name: parts[name] for name in measured} == measured


def test_activations_are_within_a_quarter_of_what_is_kept(saved: tuple[Any, ModelShape, Path]) -> None:
    model, shape, _ = saved
    assert pack_if_equal(model.eval())
    lengths = [100, 100, 60, 40]
    measured = kept_bytes(model, lengths, prompt=39) - 4 * 96 * (sum(lengths) - 4 * 39)  # logprobs over the vocabulary
    formula = activation_bytes(shape, TrainSizes(tokens=sum(lengths), compute_bytes=4))
    assert measured / 1.25 < formula < measured * 1.25


def test_with_gradient_checkpointing_too(saved: tuple[Any, ModelShape, Path]) -> None:
    """Kept beside the layers' inputs is what one layer keeps while it is computed again, which the hooks do not see."""
    model, shape, _ = saved
    assert pack_if_equal(model)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    measured = kept_bytes(model, [100, 100], prompt=90) - 4 * 96 * 20
    sizes = TrainSizes(tokens=200, compute_bytes=4, checkpointing=True)
    layer = (activation_bytes(shape, TrainSizes(tokens=200, compute_bytes=4)) - 200 * 4 * 5 * 32) / 3
    assert measured / 1.25 < activation_bytes(shape, sizes) - layer < measured * 1.6


def test_logits_are_what_a_pass_holds_at_most(saved: tuple[Any, ModelShape, Path]) -> None:
    """Of each chunk: logits, logprobs and, on the way back, the gradient."""
    _, shape, _ = saved
    assert logit_bytes(shape, 1000) == 3 * 4 * 96 * 1000
    assert logit_bytes(shape, 10**9) == 3 * 4 * MAX_LOGITS


@pytest.mark.parametrize(
    ("target", "exclude"),
    [("all-linear", None), ("all-linear", ("k_proj",)), (("q_proj", "down_proj"), None), (r".*\.1\..*_proj", None)],
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_counted_as_peft_makes_them(
    saved: tuple[Any, ModelShape, Path], target: Any, exclude: Any, use_dora: bool
) -> None:
    model, shape, _ = saved
    section = LoraConfig(lora_rank=3, target_modules=target, exclude_modules=exclude, use_dora=use_dora)
    begin(model, section)
    own = dict(model.named_parameters())
    measured = sum(own[name].numel() for name in adapter_names(model))
    assert shape.lora_parameters(section) == measured


def test_the_key_value_cache_of_an_engine_is_exact(saved: tuple[Any, ModelShape, Path]) -> None:
    model, shape, _ = saved
    cache = model(torch.arange(20)[None].expand(2, 20), use_cache=True).past_key_values
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert engine_parts(shape, 40, 2, 4)[1].num_bytes == measured


def test_the_configuration_alone_gives_the_same_shape(saved: tuple[Any, ModelShape, Path]) -> None:
    _, shape, folder = saved
    (folder / "model.safetensors").unlink()
    assert read_shape(str(folder)).num_parameters == shape.num_parameters


def test_files_at_hand_are_read_without_torch(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
    code = (
        "import sys, rftdask.commands.estimate; from rftdask.models.model_shape import MAX_LOGITS, read_shape; "
        f"read_shape({str(tmp_path)!r}); "
        "print(*sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be sized"):
        read_shape(str(tmp_path))


class TestStrategies:
    def shape(self, tmp_path: Path) -> ModelShape:
        transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
        return read_shape(str(tmp_path))

    def test_fsdp2_divides_weights_gradients_and_optimizer_state_and_ddp_nothing(self, tmp_path: Path) -> None:
        shape = self.shape(tmp_path)

        def held(**options: Any) -> float:
            parts = train_parts(shape, TrainSizes(tokens=10, **options))
            return sum(p.num_bytes for p in parts if p.name in ("weights", "gradients", "optimizer"))

        assert held(num_ranks=4, sharded=True) == held() / 4
        assert held(num_ranks=4) == held()
        assert held(num_ranks=4, sharded=True, offloaded=True) == 0
        assert held() == 16 * shape.num_parameters

    def test_lora_holds_gradients_and_optimizer_state_of_the_adapters_alone(self, tmp_path: Path) -> None:
        shape = self.shape(tmp_path)
        parts = {p.name: p.num_bytes for p in train_parts(shape, TrainSizes(tokens=10, trained=1000))}
        assert parts["weights"] == 4 * (shape.num_parameters + 1000)
        assert (parts["gradients"], parts["optimizer"]) == (4000, 8000)


def make_config(folder: Path, *settings: str) -> Any:
    tree = {
        "mode": "both",
        "model": {"model_path": str(folder), "max_model_len": 64},
        "buffer": {"batch_size": 4, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    return load_config(tree, list(settings))


def test_the_sizes_of_a_pass_follow_from_the_config(saved: tuple[Any, ModelShape, Path]) -> None:
    _, shape, folder = saved
    cases = {
        "trainer.max_token_len_per_gpu=100": 100,
        "trainer.max_token_len_per_gpu=10": 64,  # a longer experience goes alone
        "trainer.micro_batch_size=3": 192,
        "trainer.ulysses_sequence_parallel_size=2": 4 * 8 * 32,  # a half of every experience
        "trainer.save_interval=0": 4 * 8 * 64,  # a whole batch is less than the default
    }
    for setting, tokens in cases.items():
        assert train_sizes(make_config(folder, setting), shape).tokens == tokens, setting
    lora = train_sizes(make_config(folder, "model.lora_configs=[{lora_rank: 2}]"), shape)
    assert lora.trained == shape.lora_parameters(LoraConfig(lora_rank=2))
    assert lora.num_frozen == 0
    assert train_sizes(make_config(folder), shape).num_frozen == 1
    roles = [each.role for each in estimate(make_config(folder), shape)]
    assert roles == ["trainer", "explorer"]


@pytest.mark.parametrize(("name", "size"), [("H100 80GB", 80), ("h200", 141), ("a100 40gb", 40), ("24 GB", 24)])
def test_gpus_go_by_name_or_size(name: str, size: int) -> None:
    assert gpu_bytes(name) == size * GB


@pytest.mark.parametrize("name", ["A100", "Voodoo"])
def test_a_name_that_is_unknown_or_has_two_sizes_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="A100 40GB, A100 80GB"):
        gpu_bytes(name)


def test_the_command_prints_every_part_and_what_fits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"]).save_pretrained(folder)
    (tmp_path / "c.yaml").write_text(make_config(folder).to_yaml())
    done = CliRunner().invoke(app, ["estimate", str(tmp_path / "c.yaml"), "--gpu", "RTX 4090"])
    assert done.exit_code == 0, done.output
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "largest pass without"):
        assert part in done.output
    assert "trainer: fits" in done.output
    tight = CliRunner().invoke(app, ["estimate", str(tmp_path / "c.yaml"), "--gpu", "0.001GB"])
    assert "does not fit" in tight.output
