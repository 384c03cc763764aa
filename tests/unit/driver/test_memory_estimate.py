"""Promises of `rftdask estimate`: weights, gradients and optimizer state are exact to the byte, activations and logits
within a factor of 1.25 of measured memory. Shapes come from the files of a model, without torch.
"""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from benchmarks import sizes
from rftdask.algorithm.compose import build_algorithm, make_algorithm
from rftdask.buffer.batches.batch import supervised_batch
from rftdask.cli.app import app
from rftdask.cluster.layout import plan_layout, plan_machines
from rftdask.config import load_config, make_plan
from rftdask.config.schema.model import LoraConfig
from rftdask.driver.memory_estimate import (
    GB,
    TrainSizes,
    activation_bytes,
    engine_parts,
    estimate,
    format_memory_report,
    gpu_bytes,
    gpu_shortages,
    host_shortages,
    job_shortages,
    load_bytes,
    logit_bytes,
    raise_shortages,
    train_parts,
    train_sizes,
    vllm_parts,
    worker_shortages,
)
from rftdask.errors import DataError, UserError
from rftdask.models.lora import adapter_names, begin
from rftdask.models.model_shape import MAX_LOGITS, ModelShape, read_shape
from rftdask.processes.ranks import Ranks
from rftdask.trainer import model as trainer_model
from rftdask.trainer.attention import pack_if_equal
from rftdask.trainer.engines.optimizer import ModelOptimizer
from rftdask.trainer.engines.strategies.base import Strategy
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.packing import pack_rows
from tests.integration.run_cases import call_cli
from tests.unit.processes.test_gpus_usage import fake_nvml

MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
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


def test_activations_are_within_a_quarter_of_measured_memory(saved: tuple[Any, ModelShape, Path]) -> None:
    model, shape, _ = saved
    assert pack_if_equal(model.eval())
    lengths = [100, 100, 60, 40]
    measured = kept_bytes(model, lengths, prompt=39) - 4 * 96 * (sum(lengths) - 4 * 39)  # logprobs over the vocabulary
    formula = activation_bytes(shape, TrainSizes(tokens=sum(lengths), compute_bytes=4))
    assert measured / 1.25 < formula < measured * 1.25


def test_checkpointed_activations_are_within_a_quarter(saved: tuple[Any, ModelShape, Path]) -> None:
    """The estimate adds what one layer keeps while it is recomputed, which the hooks do not see."""
    model, shape, _ = saved
    assert pack_if_equal(model)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    measured = kept_bytes(model, [100, 100], prompt=90) - 4 * 96 * 20
    sizes = TrainSizes(tokens=200, compute_bytes=4, checkpointing=True)
    layer = (activation_bytes(shape, TrainSizes(tokens=200, compute_bytes=4)) - 200 * 4 * 5 * 32) / 3
    assert measured / 1.25 < activation_bytes(shape, sizes) - layer < measured * 1.6


def test_logits_are_the_peak_of_a_pass(saved: tuple[Any, ModelShape, Path]) -> None:
    """Each chunk has logits, logprobs and, in the backward pass, their gradient."""
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


def test_config_json_gives_the_same_shape(saved: tuple[Any, ModelShape, Path]) -> None:
    _, shape, folder = saved
    (folder / "model.safetensors").unlink()
    assert read_shape(str(folder)).num_parameters == shape.num_parameters


def test_files_at_hand_are_read_without_torch(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
    code = (
        "import sys, rftdask.driver.memory_estimate; from rftdask.models.model_shape import MAX_LOGITS, read_shape; "
        f"read_shape({str(tmp_path)!r}); "
        "print(*sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot determine the parameter shapes"):
        read_shape(str(tmp_path))


def test_an_invalid_model_name_needs_no_request_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*args: object, **options: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", ask)
    with pytest.raises(DataError, match="neither a folder nor a name on the Hub"):
        read_shape("none")


class TestStrategies:
    def shape(self, tmp_path: Path) -> ModelShape:
        transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
        return read_shape(str(tmp_path))

    def test_fsdp2_shards_training_state_and_ddp_does_not(self, tmp_path: Path) -> None:
        shape = self.shape(tmp_path)

        def held(**options: Any) -> float:
            parts = train_parts(shape, TrainSizes(tokens=10, **options))
            return sum(p.num_bytes for p in parts if p.name in ("weights", "gradients", "optimizer"))

        assert held(num_ranks=4, sharded=True) == held() / 4
        assert held(num_ranks=4) == held()
        assert held(num_ranks=4, sharded=True, offloaded=True) == 0
        assert held() == 16 * shape.num_parameters

    def test_cut_layers_are_divided_and_under_fsdp2_all_of_it(self, tmp_path: Path) -> None:
        shape = self.shape(tmp_path)
        layers, outside = shape.num_parameters - shape.num_outside, shape.num_outside
        cut = {part.name: part.num_bytes for part in train_parts(shape, TrainSizes(64, 4, tensor_parallel=2))}
        assert cut["weights"] == pytest.approx(4 * (outside + layers / 2))
        mesh = TrainSizes(64, 4, sharded=True, tensor_parallel=2)
        spread = {part.name: part.num_bytes for part in train_parts(shape, mesh)}
        assert spread["weights"] == pytest.approx(4 * (outside / 2 + layers / 4))
        assert spread["optimizer"] == 2 * spread["weights"]
        # Two layers of which a rank has a half, and what is outside of them.
        assert spread["products"] == pytest.approx(2 * (layers / shape.num_layers + outside))
        assert load_bytes(shape, mesh) < load_bytes(shape, replace(mesh, sharded=False)) < 4 * shape.num_parameters

    def test_narrow_weights_are_half_of_weights_and_gradients(self, tmp_path: Path) -> None:
        shape = self.shape(tmp_path)
        settings = ("trainer.master_weights=bfloat16", "algorithm.optimizer.optimizer_type=torchao.optim.AdamW8bit")
        config = make_config(tmp_path, *settings)
        parts = {part.name: part.num_bytes for part in train_parts(shape, train_sizes(config, shape))}
        count = shape.num_parameters
        assert (parts["weights"], parts["gradients"]) == (2 * count, 2 * count)
        assert parts["optimizer"] == pytest.approx(2 * count, rel=0.05)
        assert parts["products"] < 2 * count  # of some layers at a time, also where there is one rank

    def test_lora_holds_training_state_only_for_adapters(self, tmp_path: Path) -> None:
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
        "trainer.max_token_len_per_gpu=10": 64,  # a longer experience is a pass of its own
        "trainer.micro_batch_size=3": 192,
        "trainer.use_dynamic_bsz=false": 64,  # one experience, whatever its length
        "trainer.ulysses_sequence_parallel_size=2": 4 * 8 * 32,  # a half of every experience
        "trainer.save_interval=0": 4 * 8 * 64,  # a whole batch is less than the default
    }
    for setting, tokens in cases.items():
        assert train_sizes(make_config(folder, "trainer.num_ranks=2", setting), shape).tokens == tokens, setting
    lora = train_sizes(make_config(folder, "model.lora_configs=[{lora_rank: 2}]"), shape)
    assert lora.trained == shape.lora_parameters(LoraConfig(lora_rank=2))
    assert lora.frozen == ()
    assert train_sizes(make_config(folder), shape).frozen == (shape,)
    roles = [item.role for item in estimate(make_config(folder), shape)]
    assert roles == ["trainer", "explorer", "host of a machine"]


@pytest.mark.parametrize(
    "settings",
    [
        ("adamw",),
        ("adam", "amsgrad=true"),
        ("sgd",),
        ("sgd", "momentum=0.9"),
        ("adagrad",),
        ("rmsprop", "centered=true", "momentum=0.9"),
        ("adamax",),
        ("adadelta",),
        ("asgd",),
        ("rprop",),
        ("nadam",),
        ("radam",),
        ("adafactor",),
        ("muon",),
    ],
    ids=" ".join,
)
def test_the_state_of_an_optimizer_is_exact(saved: tuple[Any, ModelShape, Path], settings: tuple[str, ...]) -> None:
    model, shape, folder = saved
    at = "algorithm.optimizer.optimizer_"
    config = make_config(folder, f"{at}type={settings[0]}", *(f"{at}args.{setting}" for setting in settings[1:]))
    optimizer = ModelOptimizer(model, config.algorithm.optimizer, 1.0, Strategy(Ranks()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1, 1)
    # Without what is counted once for a tensor: its steps, and factors of a rate.
    states = [value for _, state in optimizer._states() for value in state.values() if isinstance(value, torch.Tensor)]
    measured = sum(value.nbytes for value in states if value.numel() > 1)
    parts = {part.name: part.num_bytes for part in train_parts(shape, train_sizes(config, shape))}
    assert parts.get("optimizer", 0) == measured


@pytest.mark.parametrize("settings", [(), ("algorithm.algorithm_type=ppo",), ("model.lora_configs=[{lora_rank: 2}]",)])
def test_host_copies_match_those_of_a_trainer(saved: tuple[Any, ModelShape, Path], settings: tuple[str, ...]) -> None:
    _, shape, folder = saved
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0"))
    ).save_pretrained(folder)
    config = make_config(folder, "algorithm.repeat_times=2", "explorer.rollout_model.dtype=float32", *settings)
    algorithm = make_algorithm(config.algorithm.algorithm_type)
    engine = TorchEngine(config, algorithm)
    batch = supervised_batch([([1, 2, 3, 4], 2, None)] * 2, [f"t/0/0/{i}/0" for i in range(2)], 2)
    logprobs = np.full(len(batch.rollout_logprobs), -5.0, np.float32)
    batch = replace(
        batch, rewards=np.array([0.0, 1.0], np.float32), rollout_logprobs=logprobs, experts=np.zeros(2, bool)
    )
    engine.train_step(batch, 1)
    parts = {part.name: part.num_bytes for part in estimate(config, shape)[-1].parts}
    for name, files in (("publication", engine.weights()), ("checkpoint", engine.state_files())):
        held = [load(bytes(data)) for file, data in files.items() if not file.endswith(".json")]
        # Without what is counted once: the steps of the optimizer, coefficients.
        num_bytes = sum(tensor.nbytes for tensors in held for tensor in tensors.values() if tensor.numel() > 2)
        # A critic is counted with the head of its body, in place of which it has one number.
        assert num_bytes == pytest.approx(parts[name], rel=0.05 if "ppo" in str(settings) else 1e-9), name


@pytest.mark.parametrize(
    ("algorithm", "settings", "is_held"),
    [
        ("grpo", [], True),
        ("grpo", ["kl_loss_fn=none"], False),
        ("dapo", [], False),
        ("dapo", ["kl_loss_fn=k2"], True),
        ("dapo", ["kl_penalty_fn=k1"], True),
        ("grpo", ["kl_loss_fn=none", "kl_penalty_fn=k1"], True),
    ],
)
def test_the_reference_that_a_trainer_loads_is_counted(
    tmp_path: Path, algorithm: str, settings: list[str], is_held: bool
) -> None:
    config = make_config(
        tmp_path,
        "model.model_path=Qwen/Qwen3-0.6B",
        f"algorithm.algorithm_type={algorithm}",
        *(f"algorithm.{setting}" for setting in settings),
    )
    shape = read_shape("Qwen/Qwen3-0.6B")
    assert build_algorithm(config).use_reference is is_held
    assert train_sizes(config, shape).frozen == (shape,) * is_held
    assert ("with a frozen reference" in make_plan(config).render()) is is_held


def test_teachers_critics_and_judges_have_their_own_sizes(tmp_path: Path) -> None:
    small, large = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"
    distilled = make_config(
        tmp_path,
        f"model.model_path={small}",
        "algorithm.algorithm_type=on_policy_distill",
        f"explorer.auxiliary_models=[{{model_path: {large}}}]",
    )
    result = {part.name: part for part in estimate(distilled)[0].parts}
    assert result["frozen models"].num_bytes >= 2 * read_shape(large).num_parameters
    critic = make_config(
        tmp_path, f"model.model_path={large}", "algorithm.algorithm_type=ppo", f"model.critic_model_path={small}"
    )
    gradients = next(part for part in estimate(critic)[0].parts if part.name == "gradients")
    assert gradients.num_bytes == 4 * (read_shape(large).num_parameters + read_shape(small).num_parameters)
    judged = make_config(
        tmp_path, f"model.model_path={small}", f"explorer.auxiliary_models=[{{model_path: {large}, name: judge}}]"
    )
    weights = [part for part in estimate(judged)[1].parts if part.name == "weights"]
    assert [part.num_bytes for part in weights] == [2 * read_shape(name).num_parameters for name in (small, large)]


def test_the_peak_while_loading_must_fit() -> None:
    shape, teacher = read_shape("Qwen/Qwen3-32B"), read_shape("Qwen/Qwen3-8B")
    table = 151_936 * 5120
    cut = TrainSizes(tokens=1000, num_ranks=64, sharded=True)
    assert load_bytes(shape, cut) == pytest.approx(4 * (1.2 * shape.num_parameters / 64 + table))
    assert load_bytes(shape, replace(cut, sharded=False)) == 4 * shape.num_parameters
    assert load_bytes(shape, replace(cut, sharded=False, trained=10**6)) == 2 * shape.num_parameters
    taught = load_bytes(read_shape("Qwen/Qwen3-0.6B"), replace(cut, sharded=False, frozen=(teacher,)))
    assert taught == 2 * teacher.num_parameters + 4 * 596_049_920
    engines = "explorer.rollout_model.engine_num=8"
    config = sizes.make_config("Qwen/Qwen3-32B", (8, 8), engines, "trainer.trainer_strategy=ddp")
    trainer, _, host = estimate(config, memory_bytes=80 * GB)
    assert "a rank holds 131.0 GB while it loads; use fsdp2 and more ranks or LoRA" in trainer.problem
    mixture = sizes.make_config(MIXTRAL, (4, 8), "explorer.rollout_model.engine_num=16")
    # Each of eight ranks has an expert of eight, however many more there are.
    assert estimate(mixture, memory_bytes=24 * GB)[0].problem == "a rank holds 31.3 GB while it loads; use LoRA"
    assert host.total_bytes > 8 * 4 * shape.num_parameters
    assert estimate(sizes.make_config("Qwen/Qwen3-32B", (8, 8), engines), memory_bytes=80 * GB)[0].problem == ""


@pytest.mark.parametrize(("model", "num_ranks", "share"), [("Qwen/Qwen3-235B-A22B", 24, 6 / 128), (MIXTRAL, 16, 1 / 8)])
def test_experts_are_not_divided_over_ranks(model: str, num_ranks: int, share: float) -> None:
    shape = read_shape(model)
    experts, tensor = shape.num_expert_parameters, max(map(math.prod, shape.weights.values()))
    sizes = TrainSizes(tokens=1000, num_ranks=num_ranks, sharded=True)
    most = 4 * (share * experts + (shape.num_parameters - experts) / num_ranks)
    # Other weights are 3 % of the total and are divided almost evenly.
    assert train_parts(shape, sizes)[0].num_bytes == pytest.approx(most, rel=0.01)
    assert load_bytes(shape, sizes) == pytest.approx(1.2 * most + 4 * tensor, rel=0.01)
    apart: dict[str, tuple[int, ...]] = {}
    for name, dims in shape.weights.items():  # as files of the Hub have them
        more = {name.replace(".experts.", f".experts.{i}."): dims[1:] for i in range(dims[0])}
        apart |= more if ".experts." in name else {name: dims}
    assert train_parts(replace(shape, weights=apart), sizes)[0] == train_parts(shape, sizes)[0]


@pytest.mark.parametrize("num_ranks", [3, 5, 7, 64])
def test_the_first_rank_has_the_most_rows(saved: tuple[Any, ModelShape, Path], num_ranks: int) -> None:
    model, shape, _ = saved
    measured = sum(parameter.chunk(num_ranks)[0].nbytes for parameter in model.parameters())
    assert train_parts(shape, TrainSizes(9, num_ranks, sharded=True))[0].num_bytes == pytest.approx(measured)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("trained", ["all", "adapters on bfloat16", "adapters on float32"])
def test_autocast_copies_of_weights_are_counted(tmp_path: Path, trained: str, checkpointing: bool) -> None:
    """The estimate with `checkpointing` adds the tensors of a layer being recomputed, which the hooks do not see."""
    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen2 tied"])
    model.to(torch.bfloat16 if "bfloat16" in trained else torch.float32).save_pretrained(tmp_path)
    shape, lora = read_shape(str(tmp_path)), LoraConfig(lora_rank=3)
    if trained != "all":
        begin(model, lora)
        trainer_model.compute_wide(model)
    assert pack_if_equal(model)
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    copies, held = dict[int, torch.UntypedStorage](), {item.untyped_storage().data_ptr() for item in model.parameters()}
    shapes = {tuple(sorted(parameter.shape)) for parameter in model.parameters() if parameter.dim() > 1}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tuple(sorted(tensor.shape)) in shapes and storage.data_ptr() not in held:
            copies[storage.data_ptr()] = storage
        return tensor

    rows = pack_rows([np.arange(71) % 96], np.array([30]), np.ones(1))  # no width is 71
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        trainer_model.token_logprobs(model, rows)[0].sum().backward()
    measured = sum(storage.nbytes() for storage in copies.values())
    sizes = TrainSizes(
        9, checkpointing=checkpointing, trained=None if trained == "all" else shape.lora_parameters(lora)
    )
    counted = {part.name: part.num_bytes for part in train_parts(shape, sizes)}["products"]
    layers = shape.num_parameters - shape.num_outside
    if checkpointing:
        counted -= {"all": 2 * layers, "adapters on bfloat16": counted}.get(trained, 0)
        counted -= 2 * (layers / 3 + sizes.trained) if "float32" in trained else 0
    # The first of three layers keeps no copies for its input, which has no gradient.
    assert measured == pytest.approx(counted, rel=0.08)


def test_a_deterministic_backward_pass_counts_its_copies() -> None:
    shape = read_shape("Qwen/Qwen3-0.6B")  # 16 heads: 132 / 16 = 8.25 times the gradient of the queries

    def attention(deterministic: bool) -> float:
        parts = train_parts(shape, TrainSizes(tokens=1000, deterministic=deterministic))
        return next(part.num_bytes for part in parts if part.name == "attention")

    assert attention(False) == 4 * 1000 * 16 * 128
    assert attention(True) == 9 * attention(False)


class TestVllm:
    """Rules of vLLM 0.32: v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py, config/model.py."""

    def parts(self, model: str, *settings: str, memory: float | None = 80 * GB) -> tuple[dict[str, float], str]:
        section = [f"explorer.rollout_model.{setting}" for setting in ("engine_type=vllm", *settings)]
        engine = make_config(Path(model), *section).explorer.rollout_model
        parts, problem = vllm_parts(read_shape(model), engine, 4096, 2, memory)
        return {part.name: part.num_bytes for part in parts}, problem

    def test_the_cache_takes_the_rest_of_the_gpu_share(self) -> None:
        parts, problem = self.parts("Qwen/Qwen3-0.6B", "gpu_memory_utilization=0.5")
        assert sum(parts.values()) == pytest.approx(40 * GB)
        assert parts["weights"] == 2 * 596_049_920
        assert problem == ""

    def test_a_cache_that_holds_no_longest_sequence_does_not_start(self) -> None:
        assert "raise tensor_parallel_size" in self.parts("Qwen/Qwen3-32B")[1]
        assert self.parts("Qwen/Qwen3-32B", "tensor_parallel_size=2")[1] == ""

    def test_the_minimum_cache_is_one_sequence_and_an_unused_block(self) -> None:
        # 28 layers, keys and values, 8 heads of 128, 2 bytes.
        parts, _ = self.parts("Qwen/Qwen3-0.6B", memory=None)
        assert parts["KV cache"] == 28 * 2 * 8 * 128 * 2 * (4096 + 16)

    def test_gpus_share_heads_and_each_has_one_at_least(self) -> None:
        one, two, eight = (
            self.parts("Qwen/Qwen3-30B-A3B", f"tensor_parallel_size={size}", memory=None)[0] for size in (1, 2, 8)
        )
        assert (one["KV cache"] / two["KV cache"], one["KV cache"] / eight["KV cache"]) == (2, 4)  # of 4 heads
        assert one["weights"] == pytest.approx(8 * eight["weights"])

    def test_copies_divide_experts_and_stages_divide_layers(self) -> None:
        shape = read_shape("Qwen/Qwen3-30B-A3B")
        one, copies, stages = (
            self.parts("Qwen/Qwen3-30B-A3B", setting, memory=None)[0]
            for setting in ("tensor_parallel_size=1", "data_parallel_size=4", "pipeline_parallel_size=2")
        )
        assert one["weights"] - copies["weights"] == pytest.approx(2 * shape.num_expert_parameters * 3 / 4)
        assert stages["weights"] == pytest.approx(one["weights"] / 2, rel=0.01)
        assert stages["KV cache"] == one["KV cache"] / 2


def test_published_peaks_are_met_within_a_third() -> None:
    for model, num_gpus, lora_rank, tokens, peak in sizes.PEAKS:
        assert 0.85 <= sizes.peak_bytes(model, num_gpus, lora_rank, tokens) / sizes.GIB / peak <= 1.35, model
    for model, num_gpus, tokens, peak in sizes.WITH_ALL_LOGITS:
        assert 0.85 <= sizes.peak_with_all_logits(model, num_gpus, tokens) / sizes.GIB / peak <= 1.15, model


def test_the_sizes_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    sizes.print_page()
    page = (Path(__file__).parents[3] / "docs" / "sizes.md").read_text()
    assert capsys.readouterr().out == page, "python benchmarks/sizes.py > docs/sizes.md"


@pytest.mark.parametrize(("name", "size"), [("H100 80GB", 80), ("h200", 141), ("a100 40gb", 40), ("24 GB", 24)])
def test_gpus_go_by_name_or_size(name: str, size: int) -> None:
    assert gpu_bytes(name) == size * GB


@pytest.mark.parametrize("name", ["A100", "Voodoo"])
def test_unknown_and_ambiguous_gpu_names_are_rejected(name: str) -> None:
    with pytest.raises(UserError, match="A100 40GB, A100 80GB"):
        gpu_bytes(name)


def test_the_command_prints_every_part_and_the_sizes_that_fit(tmp_path: Path) -> None:
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


GPUS_1 = str(Path(__file__).parents[3] / "config" / "gpus" / "gpus-1.yaml")


def test_a_shortage_names_needs_limits_and_remedies() -> None:
    ended = call_cli("validate", GPUS_1, "--gpus", "1", "--gpu", "33GB")
    assert ended.code == 2, ended
    assert "trainer: does not fit, 30.7 of 29.7 GB" in ended.out, ended
    printed = " ".join(ended.err.split())
    assert printed.startswith(
        "error: 1 problem: - GPU memory: stage qwen2.5-1.5b-1gpu, trainer: needs about 30.7 GB on e"
    )
    assert "(weights 6.2, gradients 6.2, optimizer 12.3, " in printed, ended
    assert (
        "and a GPU has 33.0 GB, of which 29.7 are available to it; to change: trainer.max_token_len_per_gpu" in printed
    )
    assert call_cli("validate", GPUS_1, "--gpus", "1", "--gpu", "35GB").code == 0
    assert call_cli("estimate", GPUS_1, "--gpus", "1", "--gpu", "33GB").code == 0  # estimate only reports


def test_an_engine_that_cannot_start_is_a_shortage() -> None:
    more = ("explorer.rollout_model.gpu_memory_utilization=0.05", "model.lora_configs=[{lora_rank: 8}]")
    ended = call_cli("validate", GPUS_1, *more, "--gpus", "1", "--gpu", "80GB")
    printed = " ".join(ended.err.split())
    assert ended.code == 2, ended
    assert "explorer: a GPU has 80.0 GB, and vLLM does not start: its cache has 0.0 GB" in printed, ended
    assert "trainer: " not in printed, ended


def test_validate_checks_the_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    nvml = fake_nvml()  # of 80 GiB
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    ended = call_cli("validate", GPUS_1)
    assert (ended.code, "memory" in ended.out.splitlines()[-1]) == (0, False), ended
    nvml.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(used=0, total=[8, 24][gpu] * GB)
    ended = call_cli("validate", GPUS_1)
    assert (ended.code, "and a GPU has 24.0 GB; to change" in " ".join(ended.err.split())) == (2, True), ended
    assert call_cli("validate", GPUS_1, "--gpus", "1").code == 0  # of a machine elsewhere
    ended = call_cli("validate", GPUS_1, f"model.model_path={tmp_path}")
    assert ended.out.splitlines()[-1] == "memory     not known, since the model is not on this machine; give --gpu"
    nvml.nvmlInit = None
    ended = call_cli("validate", GPUS_1)
    assert ended.code == 0, ended
    assert ended.out.endswith("memory     not known, since nvidia-ml-py does not report the GPUs; give --gpu\n"), ended


def test_only_weights_gradients_and_state_are_certain(tmp_path: Path) -> None:
    def short(memory: float, *settings: str) -> dict[str, bool]:
        config = load_config(GPUS_1, ["cluster.gpu_per_node=1", *settings])
        result = gpu_shortages(config.stage_configs(), plan_machines(config), memory * GB)
        return {re.search(r", (\w+): needs", text)[1]: is_certain for text, is_certain in result.items()}  # type: ignore[index]

    assert short(80) == {}
    assert short(33) == short(25) == {"trainer": False}
    assert short(24) == {"trainer": True}  # 16 bytes a weight are 24.7
    # Whose numbers are not known, or may be others than are counted.
    assert short(24, "algorithm.optimizer.optimizer_type=some.where.Else") == {"trainer": False}
    lora = "model.lora_configs=[{lora_rank: 8}]"
    assert short(2.5, lora) == {"trainer": True, "explorer": True}
    printed = "explorer.rollout_model.extra_engine_args={quantization: bitsandbytes}"
    assert short(2.5, lora, printed) == {"trainer": True, "explorer": False}


def test_quantized_files_are_not_certain(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"]).save_pretrained(tmp_path)
    assert engine_parts(read_shape(str(tmp_path)), 10, 1, 2)[0].is_certain
    tree = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert not engine_parts(read_shape(str(tmp_path)), 10, 1, 2)[0].is_certain


def test_an_engine_uses_its_gpu_data_type(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"]).save_pretrained(tmp_path)  # float32
    count = read_shape(str(tmp_path)).num_parameters
    for dtype, size in (("auto", 2), ("float16", 2), ("float32", 4)):
        engine = estimate(make_config(tmp_path, f"explorer.rollout_model.dtype={dtype}"))[1]
        assert engine.parts[0].num_bytes == size * count, dtype


def test_a_run_with_too_little_host_memory_does_not_start() -> None:
    one = ("mode=colocate", "cluster.gpu_per_node=1", "trainer.trainer_strategy=single", "trainer.num_ranks=1")
    config = load_config(
        {
            "model": {"model_path": "Qwen/Qwen3-0.6B", "max_model_len": 64},
            "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        },
        one,
    )
    layout = plan_layout([config], 16, num_gpus=1)
    raise_shortages(host_shortages([config], layout, 64 * GB))
    with pytest.raises(UserError, match=r"host memory: stage rft needs .*offloaded \d.*asleep .*5.0 GB are fr"):
        raise_shortages(host_shortages([config], layout, 5 * GB))
    raise_shortages(host_shortages([config], plan_layout([config], 16), 5 * GB))  # on CPUs


def test_slurm_jobs_must_have_enough_host_memory() -> None:
    path = Path(__file__).parents[3] / "config" / "gpus" / "gpus-32.yaml"

    def check(*settings: str) -> None:
        config = load_config(path, settings)
        raise_shortages(job_shortages(config.stage_configs(), plan_machines(config)))

    check()
    usual = "cluster.slurm.trainer.memory=4GB"  # default of SLURM
    with pytest.raises(
        UserError, match=r"trainer.memory is 4GB.* 30\.2 GB .*for each rank \(ranks 1.5, publ.*set it to 31GB or"
    ):
        check(usual, "cluster.slurm.trainer.exclusive=false")
    check("cluster.slurm.trainer.memory=31GB", "cluster.slurm.trainer.exclusive=false")
    check(usual)  # exclusive nodes give all their memory
    with pytest.raises(UserError, match=r"explorer.memory is 1GB.* for each engine \(engines 1.5\); set it to 2GB"):
        check("cluster.slurm.explorer.memory=1GB")
    # Colocated ranks and engines share a job, whose host memory also holds the offloaded weights.
    turns = ("mode=colocate", "trainer.num_ranks=8", "explorer.rollout_model.engine_num=2", "cluster.node_num=1")
    with pytest.raises(UserError, match=r"trainer.memory is 60GB.*\(ranks 1.5, offloaded .*engines 0.4, asleep"):
        check(*turns, "cluster.slurm.trainer.exclusive=false", "cluster.slurm.trainer.memory=60GB")


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        (["cluster.type=joined"], ["host of a machine: not known whether it has 244.3 GB; `rftdask join` checks each"]),
        (["cluster.type=existing"], ["host of a machine: not known whether it has 244.3 GB; compare it with the mem"]),
        (
            ["cluster.type=local", "cluster.node_num=1", "mode=colocate", "trainer.num_ranks=8"],
            ["host of a machine: not known whether it has 899.6 GB; `rftdask run` checks it before anything starts"],
        ),
        (
            [],
            [
                "host memory of each rank: not known whether 30.2 GB are available; it shares the memory of whole node",
                "host memory of each explorer engine: fits, 1.5 of 100.0 GB (cluster.slurm.explorer.memory)",
            ],
        ),
        (
            ["cluster.slurm.trainer.exclusive=false", "cluster.slurm.trainer.memory=20GB"],
            [
                "host memory of each rank: does not fit, 30.2 of 20.0 GB (cluster.slurm.trainer.memory)",
                "host memory of each explorer engine: fits, 1.5 of 100.0 GB (cluster.slurm.explorer.memory)",
            ],
        ),
        (
            ["cluster.type=pbs", "cluster.options.trainer.memory=40GB"],
            [
                "host memory of each rank: fits, 30.2 of 40.0 GB (cluster.options.trainer.memory)",
                "host memory of each explorer engine: not known whether 1.5 GB are available; set cluster.options.memo",
            ],
        ),
    ],
)
def test_the_report_compares_host_memory_of_other_machines(settings: list[str], printed: list[str]) -> None:
    path = str(Path(__file__).parents[3] / "config" / "gpus" / "gpus-32.yaml")
    engines = ["explorer.rollout_model.engine_num=2"] * ("mode=colocate" in settings)
    ended = call_cli("estimate", path, *settings, *engines, "--gpu", "H100 80GB")
    lines = [line for line in ended.out.splitlines() if line.startswith("host ") and ": " in line]
    assert [line[: len(start)] for line, start in zip(lines, printed, strict=True)] == printed, ended


def test_separate_auxiliary_models_are_estimated_and_placed(tmp_path: Path) -> None:
    apart = (
        "explorer.auxiliary_models=[{name: judge, model_path: Qwen/Qwen3-8B, engine_type: vllm, engine_num: 2, "
        "tensor_parallel_size: 2, max_model_len: 8192, gpu_memory_utilization: 0.8}]"
    )
    more = ("explorer.rollout_model.engine_type=vllm", "cluster.gpu_per_node=8", "cluster.colocate=false")
    config = make_config(tmp_path, "model.model_path=Qwen/Qwen3-0.6B", apart, *more)
    explorer, judge, host = estimate(config, memory_bytes=80 * GB)[1:]
    assert (judge.role, judge.num_gpus, judge.problem) == ("auxiliary judge", 4, "")
    weights = {part.name: part.num_bytes for part in judge.parts}["weights"]
    assert weights == pytest.approx(read_shape("Qwen/Qwen3-8B").num_parameters)  # half of them, of 2 bytes
    assert judge.total_bytes == pytest.approx(0.8 * 80 * GB, rel=0.01)
    assert [part.name for part in explorer.parts].count("weights") == 1
    assert {part.name: part.count for part in host.parts}["auxiliary"] == 2
    printed = format_memory_report(config, "H100 80GB")
    assert (
        printed.splitlines()[0] == "placement  3 ranks on GPUs 0-2, 1 engine on GPU 3, 2 auxiliary engines on GPUs 4-7"
    )
    assert "auxiliary judge: fits, 64.0 of 80.0 GB" in printed
    assert "auxiliary judge: does not fit" in format_memory_report(config, "8GB")


def test_other_batch_jobs_must_have_enough_host_memory() -> None:
    path = Path(__file__).parents[3] / "config" / "gpus" / "gpus-32.yaml"

    def check(*settings: str) -> None:
        config = load_config(path, ("cluster.type=pbs", *settings))
        raise_shortages(job_shortages(config.stage_configs(), plan_machines(config)))

    check()  # without the key, the site sets the memory of a job
    with pytest.raises(
        UserError, match=r"cluster.options.memory is 4GB.* 30\.2 GB .*for each rank .* to 31GB or more$"
    ):
        check("cluster.options.memory=4GB")
    check("cluster.options.memory=4GB", "cluster.options.trainer.memory=31GB")
    with pytest.raises(UserError, match=r"cluster.options.explorer.memory is 1GB.* for each engine \(engines 1.5\)"):
        check("cluster.options.memory=31GB", "cluster.options.explorer.memory=1GB")
    check("cluster.options.memory=1GB", "cluster.gpu_per_node=0", "cluster.node_num=0")  # not estimated without GPUs


def test_a_joining_worker_needs_enough_host_memory() -> None:
    config = load_config(Path(__file__).parents[3] / "config" / "gpus" / "gpus-32.yaml", ["cluster.type=joined"])
    stages, layout = config.stage_configs(), plan_machines(config)
    raise_shortages(worker_shortages(stages, layout, "trainer", 31 * GB))
    with pytest.raises(
        UserError, match=r"30\.2 GB .*for each rank .*and 29.0 GB are free on this machine; join from a machine"
    ):
        raise_shortages(worker_shortages(stages, layout, "trainer", 29 * GB))
    raise_shortages(worker_shortages(stages, layout, "explorer", 2 * GB))
    with pytest.raises(UserError, match=r"for each engine \(engines 1.5\), and 1.0 GB are free"):
        raise_shortages(worker_shortages(stages, layout, "explorer", 1 * GB))
