"""Promises of LoRA: only adapters are trained, saved and published; engine and trainer compute the same with them; an
export merges them; a resumed run continues to the bit.
"""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from rftdask.algorithm.compose import make_algorithm
from rftdask.config import load_config
from rftdask.config.schema.model import LoraConfig
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.client import EngineClient
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import DataError, RoleError, UserError
from rftdask.models.lora import add_adapter, begin, initial_files
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.synchronizer.manifest import Manifest, write_folder
from rftdask.synchronizer.published import read_checkpoint_weights
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.numerics import assert_close, assert_same_logprobs
from tests.unit.engines.engine_contract import engine_spec
from tests.unit.synchronizer.sync_cases import publish_weights
from tests.unit.trainer.engines.test_torch_engine import SIZES, rollouts
from tests.unit.trainer.trainer_cases import engine_config

DEADLINE_S = 120.0
KINDS = {
    "plain": LoraConfig(lora_rank=4, lora_alpha=8),
    "rslora": LoraConfig(lora_rank=4, lora_alpha=8, use_rslora=True, target_modules=("q_proj", "down_proj")),
    "dora": LoraConfig(lora_rank=4, use_dora=True, exclude_modules=("k_proj",)),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    build_toy_model(folder, **SIZES)
    return str(folder)


def trainer(model_folder: str, lora: LoraConfig | None, name: str = "grpo", **overrides: Any) -> TorchEngine:
    return TorchEngine(engine_config(model_folder, lora, **{"deterministic": False, **overrides}), make_algorithm(name))


def trained(model_folder: str, lora: LoraConfig, steps: int = 2) -> TorchEngine:
    engine = trainer(model_folder, lora)
    for step in range(1, steps + 1):
        engine.train_step(rollouts(seed=step), step)
    return engine


def put(folder: Path, files: Any) -> list[Path]:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def exported(engine: TorchEngine, folder: Path) -> Any:
    put(folder, engine.export_files())
    return load_policy(str(folder), "float32", "cpu")[0]


@pytest.mark.parametrize("kind", KINDS)
class TestPublished:
    def test_engine_and_trainer_logprobs_agree(self, kind: str, model_folder: str, tmp_path: Path) -> None:
        policy = trained(model_folder, KINDS[kind])
        engine = TransformersEngine(model_folder)
        engine.load_weights(2, put(tmp_path / "weights", policy.weights()))
        [generation] = engine.generate([GenerateRequest((5, 6, 7), SamplingParams(max_tokens=8), seed=3)])
        row = np.array([5, 6, 7, *generation.tokens])
        rows = pack_rows([row], np.array([3]), np.ones(1))
        scored_T = token_logprobs(policy._model, rows)[0][0]
        assert_same_logprobs(scored_T, generation.logprobs)
        before_T = token_logprobs(load_policy(model_folder, "float32", "cpu")[0], rows)[0][0]
        assert (before_T - scored_T).abs().max() > 1e-3

    def test_peft_reads_the_two_files(self, kind: str, model_folder: str, tmp_path: Path) -> None:
        policy = trained(model_folder, KINDS[kind])
        put(tmp_path / "weights", policy.weights())
        theirs = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "weights"
        )
        ids = torch.arange(2, 12)[None]
        assert_close(theirs(ids).logits, policy._model(ids).logits)

    def test_an_export_has_the_adapters_merged(self, kind: str, model_folder: str, tmp_path: Path) -> None:
        policy = trained(model_folder, KINDS[kind])
        model = exported(policy, tmp_path / "export")
        ids = torch.arange(2, 12)[None]
        assert_close(model(ids).logits, policy._model(ids).logits)
        assert not [name for name, _ in model.named_parameters() if "lora" in name]

    def test_a_checkpoint_restores_to_the_bit(self, kind: str, model_folder: str) -> None:
        first = trained(model_folder, KINDS[kind])
        files = first.state_files()
        second = trainer(model_folder, KINDS[kind], seed=9)
        second.load_state_files(files)
        assert second.state_files() == files
        for engine in (first, second):
            engine._config = trainer(model_folder, KINDS[kind])._config  # the same seed from here on
            engine.train_step(rollouts(seed=3), 3)
        assert first.state_files() == second.state_files()


@pytest.fixture(scope="module")
def tied_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tied")
    policy, tokenizer = load_policy(model_folder, "float32", "cpu")
    policy.config.tie_word_embeddings = True
    policy.tie_weights()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("target", [("q_proj", "lm_head"), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_adapters_of_tied_embeddings_stay_apart(tied_folder: str, tmp_path: Path, target: tuple[str, ...]) -> None:
    lora = LoraConfig(lora_rank=4, target_modules=target)
    policy = trained(tied_folder, lora)
    ids = torch.arange(2, 12)[None]
    files = policy.weights()
    put(tmp_path / "weights", files)
    engine = TransformersEngine(tied_folder)
    engine.load_weights(2, [tmp_path / "weights" / name for name in files])
    assert_close(engine._model(ids).logits, policy._model(ids).logits)
    model = exported(policy, tmp_path / "export")
    assert_close(model(ids).logits, policy._model(ids).logits)
    assert not model.config.tie_word_embeddings


@pytest.fixture
def with_base(tied_folder: str, tmp_path: Path) -> Path:
    """An adapter as PEFT itself saves it by default, with the base weight of the head."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with warnings.catch_warnings(action="ignore"):
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tied_folder), lora)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_with_its_base_weights_is_loaded(tied_folder: str, with_base: Path, dtype: str) -> None:
    tensors = load((with_base / "adapter_model.safetensors").read_bytes())
    assert "base_model.model.lm_head.base_layer.weight" in tensors
    model = load_policy(tied_folder, dtype, "cpu")[0]
    begin(model, LoraConfig(path=str(with_base)))
    assert torch.equal(model.lm_head.lora_B.default.weight, tensors["base_model.model.lm_head.lora_B.weight"])
    engine = TransformersEngine(tied_folder, dtype=dtype)
    engine.load_weights(0, initial_files(LoraConfig(path=str(with_base))))
    ids = torch.arange(2, 12)[None]
    assert_close(engine._model(ids).logits, model(ids).logits, roundings=4)


def test_an_adapter_of_other_base_weights_is_refused(tied_folder: str, with_base: Path) -> None:
    file = with_base / "adapter_model.safetensors"
    tensors = load(file.read_bytes())
    tensors["base_model.model.lm_head.base_layer.weight"][0] += 1.0
    file.write_bytes(save(tensors))
    with pytest.raises(DataError, match=r"another base model: .*lm_head\.base_layer\.weight"):
        begin(load_policy(tied_folder, "float32", "cpu")[0], LoraConfig(path=str(with_base)))


def test_an_export_of_other_adapters_stays_tied(tied_folder: str, tmp_path: Path) -> None:
    model = exported(trained(tied_folder, KINDS["rslora"]), tmp_path / "export")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_only_adapters_are_trained_checkpointed_and_published(model_folder: str) -> None:
    engine = trained(model_folder, KINDS["plain"])
    start = load_policy(model_folder, "float32", "cpu")[0].state_dict()
    for name, tensor in engine._model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(tensor, start[name.replace(".base_layer", "")]), name
    files = engine.state_files()
    assert sorted(files) == [
        "actor/kl_coefs.safetensors",
        "actor/lora_adapter/adapter_config.json",
        "actor/lora_adapter/adapter_model.safetensors",
        "actor/optim.safetensors",
    ]
    own = load(bytes(files["actor/optim.safetensors"]))
    assert {name for name in own if ".lora_" not in name} == {"num_skipped_in_a_row", "spares_norms_biases_embeddings"}
    published = engine.weights()
    assert sorted(published) == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(".lora_" in name for name in load(bytes(published["adapter_model.safetensors"])))
    assert json.loads(published["adapter_config.json"])["base_model_name_or_path"] == model_folder


def test_a_new_adapter_changes_nothing(model_folder: str) -> None:
    parts = {"kl": [], "grad_norm": []}
    for lora in (None, KINDS["plain"]):
        engine = trainer(model_folder, lora)
        metrics = [engine.train_step(rollouts(seed=1), step) for step in (1, 2)]
        parts["kl"].append(metrics[0]["kl"])
        assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-9)
        assert metrics[1]["kl"] > 0.0
    assert parts["kl"][0] == pytest.approx(parts["kl"][1], abs=1e-9)


def test_training_continues_from_an_adapter_folder(model_folder: str, tmp_path: Path) -> None:
    first = trained(model_folder, KINDS["rslora"])
    put(tmp_path / "adapter", first.weights())
    second = trainer(model_folder, LoraConfig(path=str(tmp_path / "adapter")))
    assert second.weights()["adapter_model.safetensors"] == first.weights()["adapter_model.safetensors"]
    metrics = second.train_step(rollouts(seed=1), 1)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)  # the reference begins with the adapter too


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_begins_with_the_given_adapter(kind: str, model_folder: str, tmp_path: Path) -> None:
    put(tmp_path / "adapter", trained(model_folder, KINDS[kind]).weights())
    lora = LoraConfig(path=str(tmp_path / "adapter"))
    spec = engine_spec("transformers", model_folder)
    client = EngineClient(replace(spec, model=spec.model.model_copy(update={"lora_configs": (lora,)})))
    try:
        client.wait_ready()
        [generation] = client.generate([GenerateRequest((5, 6, 7), SamplingParams(max_tokens=8), seed=3)], DEADLINE_S)
    finally:
        client.close()
    rows = pack_rows([np.array([5, 6, 7, *generation.tokens])], np.array([3]), np.ones(1))
    assert_same_logprobs(token_logprobs(trainer(model_folder, lora)._model, rows)[0][0], generation.logprobs)
    bare = EngineClient(spec)
    bare.close()
    assert client.weights.content_hash != bare.weights.content_hash, "the records of rollouts name the adapter"


@pytest.mark.parametrize("load", [TransformersEngine, lambda folder: load_policy(folder, "float32", "cpu")])
def test_a_model_with_an_adapter_in_its_folder_is_refused(
    load: Callable[[str], object], model_folder: str, tmp_path: Path
) -> None:
    merged = shutil.copytree(model_folder, tmp_path / "merged")
    for name, data in trained(model_folder, KINDS["plain"]).weights().items():
        (merged / name).write_bytes(data)
    with pytest.raises(DataError, match="transformers adds that adapter to them and vLLM does not"):
        load(str(merged))


@pytest.mark.slow
def test_an_engine_refuses_an_adapter_that_does_not_exist(model_folder: str, tmp_path: Path) -> None:
    spec = engine_spec("transformers", model_folder)
    lora = LoraConfig(path=str(tmp_path / "missing"))
    client = EngineClient(replace(spec, model=spec.model.model_copy(update={"lora_configs": (lora,)})))
    with pytest.raises(DataError, match=r"missing.*adapter_config\.json"):
        client.wait_ready()


def test_adapter_files_are_published_and_loaded(model_folder: str) -> None:
    storage = open_storage("memory://lora")
    engine = trained(model_folder, KINDS["plain"], steps=1)
    published = publish_weights(storage, 1, engine.weights())
    assert [name for name, _ in published.files] == ["adapter_config.json", "adapter_model.safetensors"]
    write_folder(storage, "global_step_1", Manifest("main", 1, {}), engine.state_files())
    held = read_checkpoint_weights(storage, "global_step_1")
    assert held is not None
    assert [name.rpartition("/")[2] for name, _ in held.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert held.content_hash == published.content_hash


def test_unknown_target_layers_are_rejected(model_folder: str) -> None:
    with pytest.raises(DataError, match=r"LoRA adapters cannot be added to Qwen2ForCausalLM.*nosuch"):
        trainer(model_folder, LoraConfig(target_modules=("nosuch",)))


def test_an_adapter_of_another_shape_is_refused(model_folder: str, tmp_path: Path) -> None:
    engine = TransformersEngine(model_folder)
    engine.load_weights(1, put(tmp_path / "one", trainer(model_folder, LoraConfig(lora_rank=4)).weights()))
    with pytest.raises(RoleError, match=r"cannot load the adapter of version 2: .*expected \(4, 32\)"):
        engine.load_weights(2, put(tmp_path / "two", trainer(model_folder, LoraConfig(lora_rank=2)).weights()))
    assert engine.policy_version == 1


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(UserError, match=r"pip install 'rftdask\[lora\]'"):
        add_adapter(None, {})


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("lora_rank", {"lora_rank": 3}),
        ("lora_alpha", {"lora_alpha": 5.0}),
        ("lora_dtype", {"lora_dtype": "bfloat16"}),
        ("target_modules", {"target_modules": ["q_proj"]}),
        ("exclude_modules", {"exclude_modules": ["q_proj"]}),
    ],
)
def test_adapters_follow_their_config_keys(model_folder: str, key: str, changes: dict[str, Any]) -> None:
    model = load_policy(model_folder, "float32", "cpu")[0]
    tree = {
        "model": {"model_path": model_folder, "max_model_len": 32, "lora_configs": [{"lora_rank": 8, **changes}]},
        "buffer": {"total_steps": 1, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    [section] = load_config(tree).model.lora_configs or ()
    settings = begin(model, section)
    adapters = {name: p for name, p in model.named_parameters() if "lora_A" in name}
    [rank] = {p.shape[0] for p in adapters.values()}
    layers = {name.split(".lora_A")[0].rpartition(".")[2] for name in adapters}
    found = {
        "lora_rank": rank,
        "lora_alpha": settings["lora_alpha"],
        "lora_dtype": str({p.dtype for p in adapters.values()}.pop()).removeprefix("torch."),
        "target_modules": sorted(layers),
        "exclude_modules": sorted({"q_proj"} - layers),
    }
    assert found[key] == changes[key]
