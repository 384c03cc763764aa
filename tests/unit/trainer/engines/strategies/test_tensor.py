"""Promises of tensor parallelism: a plan is the model's own without shared weights."""

from typing import Any

import pytest
import transformers

from rftdask.errors import DataError
from rftdask.trainer.engines.strategies.tensor import plan_of
from tests.unit.trainer.tiny_families import EXPERTS, make_model
from tests.versions import needs_newer_transformers


def test_the_plan_cuts_heads_and_inner_features() -> None:
    layer = "model.layers.*."
    assert plan_of(make_model(), 2) == {
        **{f"{layer}self_attn.{name}_proj": "colwise" for name in "qkv"},
        f"{layer}self_attn.o_proj": "rowwise",
        f"{layer}mlp.gate_proj": "colwise",
        f"{layer}mlp.up_proj": "colwise",
        f"{layer}mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }


@needs_newer_transformers
@pytest.mark.parametrize("config", [transformers.Qwen3MoeConfig, transformers.Qwen2MoeConfig, transformers.OlmoeConfig])
def test_experts_go_to_the_ranks_whole(config: Any) -> None:
    plan, block = plan_of(make_model(config, **EXPERTS), 2), "model.layers.*.mlp."
    assert {key.removeprefix(block): style for key, style in plan.items() if key.startswith(f"{block}experts")} == {
        "experts": "moe_tp_experts",
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
    }
    assert plan[f"{block}gate"] == "ep_router"


def test_dealt_experts_need_whole_router_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(transformers.Qwen3MoeConfig, **EXPERTS)
    monkeypatch.setattr(transformers, "__version__", "5.16.1")
    with pytest.raises(DataError, match=r"transformers 5.16.1 omits a part of the gradient .* install 5.19"):
        plan_of(model, 2)
    assert plan_of(make_model(), 2)


@pytest.mark.parametrize("sizes", [{"tie_word_embeddings": True}, {"vocab_size": 41}])
def test_an_output_layer_that_is_shared_or_uneven_stays_whole(sizes: dict[str, Any]) -> None:
    assert not plan_of(make_model(**sizes), 2).keys() & {"lm_head", "model.embed_tokens"}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (make_model(num_attention_heads=3, num_key_value_heads=3, hidden_size=12), "num_attention_heads 3, which 2"),
        (make_model(num_key_value_heads=1), "num_key_value_heads 1, which 2 ranks cannot share evenly"),
        (make_model(intermediate_size=25), "intermediate_size 25, which 2 ranks"),
        (transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)), "has no tp_plan"),
        pytest.param(
            make_model(transformers.Qwen3MoeConfig, **EXPERTS | {"num_experts": 5}),
            "num_experts 5, which 2 ranks",
            marks=needs_newer_transformers,
        ),
        pytest.param(
            make_model(transformers.GraniteMoeConfig, num_local_experts=4),
            "the experts of GraniteMoeForCausalLM cannot",
            marks=needs_newer_transformers,
        ),
        (
            make_model(transformers.DeepseekV2Config, first_k_dense_replace=2, num_key_value_heads=4),
            "the tp_plan of DeepseekV2ForCausalLM has unsupported styles: mla_kv_a_proj.*; leave trainer.tensor",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(model: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        plan_of(model, 2)
