"""Promise: each vLLM key of an engine reaches vLLM. Tested by the arguments, without vLLM."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rftdask.config import load_config
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import LoraConfig, ModelConfig
from rftdask.engines.vllm import VllmEngine, cache_tokens
from rftdask.models.toy import build_toy_model


class Recorded(VllmEngine):
    """Engine that does not start vLLM; its arguments are in `given`."""

    given: dict[str, Any]

    def _start(self, model_path: str) -> None:
        self.given = {**self._args, "model": model_path}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    return folder


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("dtype", "bfloat16", "dtype"),
        ("tensor_parallel_size", 2, "tensor_parallel_size"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size"),
        ("data_parallel_size", 2, "data_parallel_size"),
        ("enable_expert_parallel", True, "enable_expert_parallel"),
        ("enforce_eager", True, "enforce_eager"),
        ("enable_prefix_caching", False, "enable_prefix_caching"),
        ("enable_chunked_prefill", False, "enable_chunked_prefill"),
        ("gpu_memory_utilization", 0.5, "gpu_memory_utilization"),
        ("extra_engine_args", {"max_num_seqs": 3}, "max_num_seqs"),
        ("model.max_model_len", 96, "max_model_len"),
        ("model.trust_remote_code", True, "trust_remote_code"),
        ("model.lora_configs", [{"lora_rank": 5}], "max_lora_rank"),
    ],
)
def test_a_key_reaches_vllm(model: Path, key: str, value: Any, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    tree: dict[str, Any] = {
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 8},
        "buffer": {"total_steps": 1, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "explorer": {"rollout_model": {"engine_type": "vllm"}},
        "cluster": {"gpu_per_node": 8},
    }

    def given(tree: dict[str, Any]) -> dict[str, Any]:
        config = load_config(tree)
        engine = Recorded.from_config(config.explorer.rollout_model, config.model, "cuda")
        assert isinstance(engine, Recorded)
        try:
            return engine.given
        finally:
            engine.close()

    usual = given(tree)
    section = tree["model"] if key.startswith("model.") else tree["explorer"]["rollout_model"]
    section[key.removeprefix("model.")] = value
    wanted = {"max_num_seqs": 3, "max_lora_rank": 8}.get(argument, value)  # vLLM supports certain ranks
    assert given(tree)[argument] == wanted != usual.get(argument)


@pytest.mark.parametrize(
    ("settings", "rank"), [({"r": 20}, 32), ({"r": 4, "rank_pattern": {"q_proj": 40, "k_proj": 2}}, 64)]
)
def test_the_rank_of_an_adapter_folder_reaches_vllm(
    model: Path, tmp_path: Path, settings: dict[str, Any], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    section = InferenceModelConfig.model_construct(engine_type="vllm", dtype="float32", engine_num=1)
    lora = LoraConfig(path=str(tmp_path), lora_rank=8)
    policy = ModelConfig(model_path=str(model), max_model_len=64, lora_configs=(lora,))
    engine = Recorded.from_config(section, policy, "cpu")
    assert isinstance(engine, Recorded)
    engine.close()
    assert engine.given["max_lora_rank"] == rank


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        # As in vLLM 0.32 for a model with several kinds of layers, in two replicas.
        ({"num_gpu_blocks": 2000, "kv_cache_size_tokens": 9000}, 18_000),
        ({"num_gpu_blocks": 2000, "kv_cache_size_tokens": None}, 32_000),
        ({"num_gpu_blocks": 2000}, 32_000),
        ({"num_gpu_blocks": None}, None),
        ({"num_gpu_blocks": 0, "kv_cache_size_tokens": None}, None),
    ],
)
def test_the_cache_size_covers_all_replicas_of_vllm(told: dict[str, int | None], tokens: int | None) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, **told), parallel_config=SimpleNamespace(data_parallel_size=2)
    )
    assert cache_tokens(config) == tokens
