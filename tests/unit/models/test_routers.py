"""Promises of routers: replaying recorded experts gives the same bits, if routers choose by one topk; replayed experts
are used, with a gradient to the router; other models are rejected by name.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rftdask.errors import DataError
from rftdask.models.routers import Routers
from tests.numerics import shifted_seed
from tests.versions import needs_newer_transformers

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    **{"vocab_size": 64, "intermediate_size": 16, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1},
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Family -> its own sizes, and how many of the three layers have experts.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3Moe": ({"num_experts": 6, "moe_intermediate_size": 8}, 3),
    "Qwen2Moe": ({"num_experts": 6, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, 3),
    "Mixtral": ({"num_local_experts": 6}, 3),
    "Olmoe": ({"num_experts": 6}, 3),
    "GptOss": ({"num_local_experts": 6}, 3),
    # Groups of experts are chosen first, and the first layer is dense.
    "DeepseekV3": ({"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 8, **LATENT}, 2),
    "Glm4Moe": ({"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8}, 2),
}
TOKENS = torch.arange(3, 20)[None]


def make_model(family: str, **more: Any) -> Any:
    torch.manual_seed(shifted_seed(0))
    dense = {"first_k_dense_replace": 1} if family in ("DeepseekV3", "Glm4Moe") else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, num_experts_per_tok=2, **dense, **more)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=needs_newer_transformers if family in ("DeepseekV3", "Glm4Moe") else ())
        for family in FAMILIES
    ],
)
def test_replayed_experts_are_used_and_repeat_the_bits(family: str) -> None:
    sizes, num_routers = FAMILIES[family]
    model = make_model(family, **sizes)
    unheard = logits(model)
    routers = Routers(model)
    assert torch.equal(logits(model), unheard), "hearing changes nothing"
    taken = routers.taken()
    assert (taken.shape, routers.num_choices) == ((TOKENS.shape[1], num_routers * 2), num_routers * 2)
    assert len(taken.unique()) > 3, "not the same experts for all"
    routers.give(taken)
    assert torch.equal(logits(model), unheard)
    routers.give((taken + 1) % 6)
    assert not torch.allclose(logits(model), unheard, atol=1e-2)
    same, given = routers.agreement().values()
    assert given == taken.numel() and same < given
    routers.give(torch.full_like(taken, -1))
    assert torch.equal(logits(model), unheard), "each chooses"
    routers.give(taken)
    (logits(model) ** 2).sum().backward()
    [gate, *_] = [p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))]
    assert gate.grad.abs().max() > 0


def test_recomputed_layers_use_the_replayed_routes() -> None:
    model = make_model("Qwen3Moe", **FAMILIES["Qwen3Moe"][0])
    routers = Routers(model)
    logits(model)
    routers.give((routers.taken() + 1) % 6)
    (logits(model) ** 2).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    (logits(model) ** 2).sum().backward()
    for parameter, expected in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_models_without_routers_or_topk_are_rejected() -> None:
    dense = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    with pytest.raises(DataError, match="Qwen2ForCausalLM has no routers of experts"):
        Routers(dense)
    model = make_model("Phimoe", num_local_experts=6)
    routers = Routers(model)
    logits(model)
    with pytest.raises(DataError, match="PhimoeForCausalLM does not choose experts by one topk in each layer"):
        routers.taken()
