"""Promises of the shipped shapes: published weight counts, the tensors of transformers, and no network access."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from rftdask.models.model_shape import MODELS, known_model, read_shape

# Published counts: the presets of keras-hub (github.com/keras-team/keras-hub, keras_hub/src/models/*/*_presets.py),
# and the model cards on the Hub, which show the sum over the weight files, where those have none or other tying.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
}
SAME_SHAPE = {
    "Qwen/Qwen2.5-Math-7B": "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-Coder-7B": "Qwen/Qwen2.5-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen/Qwen2.5-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-14B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "Qwen/Qwen2.5-32B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "meta-llama/Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B": "meta-llama/Llama-3.1-70B",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
}
CLASSES: dict[str, Any] = {
    "Qwen/Qwen2.5-7B": transformers.Qwen2Config,
    "Qwen/Qwen3-4B": transformers.Qwen3Config,
    "Qwen/Qwen3-30B-A3B": transformers.Qwen3MoeConfig,
    "meta-llama/Llama-3.1-8B": transformers.LlamaConfig,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_weights_as_is_published(name: str) -> None:
    assert read_shape(name).num_parameters == PUBLISHED[SAME_SHAPE.get(name, name)]


@pytest.mark.parametrize("name", CLASSES)
def test_tensors_are_those_that_transformers_makes(name: str) -> None:
    found = known_model(name)
    assert found is not None
    weights, values = found
    own = {key: value for key, value in values.items() if key != "num_hidden_layers"}
    if "moe_intermediate_size" in own:
        own["num_experts"] = 128
    config = CLASSES[name](**own, num_hidden_layers=1, tie_word_embeddings="lm_head.weight" not in weights)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    made = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: shape for name, shape in weights.items() if ".layers." not in name or ".layers.0." in name} == made


def test_variants_have_the_shape_of_their_model() -> None:
    assert known_model("Qwen/Qwen3-235B-A22B-Instruct-2507") == known_model("Qwen/Qwen3-235B-A22B")
    assert known_model("Qwen/Qwen3-4B-Embedding") is None
    assert known_model("somebody/Qwen3-4B") is None


def test_a_known_model_needs_neither_torch_nor_a_network() -> None:
    code = (
        "import sys, socket; socket.socket.connect = None; from rftdask.models.model_shape import read_shape; "
        "print(read_shape('Qwen/Qwen3-8B').num_layers, *sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["36"]
