"""Promises of packing: every row once, within the limits, pairs together, parts of about the same cost."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftdask.trainer import attention
from rftdask.trainer.attention import PACKED, hidden_states, pack_if_equal
from rftdask.trainer.engines.micro_batches import micro_batches
from rftdask.trainer.model import token_logprobs
from rftdask.trainer.packing import Spans, pack_rows
from tests.numerics import assert_close, assert_same_logprobs, shifted_seed
from tests.unit.trainer.tiny_families import EXPERTS, VOCAB_SIZE, make_model

MODELS = {
    "qwen2": make_model(),
    "qwen3": make_model(transformers.Qwen3Config),
    "llama": make_model(transformers.LlamaConfig),
    "mistral with a window of 3": make_model(transformers.MistralConfig, sliding_window=3),
    "gemma 3 with a window of 4": make_model(transformers.Gemma3TextConfig, sliding_window=4),
    "mixture of experts": make_model(transformers.Qwen3MoeConfig, **EXPERTS),
}
lengths_of_rows = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=6)
"""(prompt, response) tokens of each row."""


def siblings(shapes: list[tuple[int, int]], random: np.random.Generator) -> list[np.ndarray]:
    """Rows of random tokens, in which prompts of one length are equal."""
    prompts = {length: random.integers(2, VOCAB_SIZE, length) for length, _ in shapes}
    return [np.concatenate([prompts[p], random.integers(2, VOCAB_SIZE, r)]) for p, r in shapes]


def pad(rows: list[np.ndarray], dtype: type) -> Tensor:
    """[rows, longest], zeros after the end of each."""
    padded: np.ndarray = np.zeros((len(rows), max(map(len, rows))), dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return torch.from_numpy(padded)


def padded_logprobs(model: Any, rows: list[np.ndarray]) -> Tensor:
    """[B, L - 1] of every token after the first, by a right-padded batch through the model as it comes."""
    ids_BL = pad(rows, np.int64)
    mask_BL = torch.arange(ids_BL.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    model.set_attn_implementation("sdpa")
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False).logits
    return logits_BLV[:, :-1].log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


class TestPackedAttention:
    @pytest.mark.parametrize("family", MODELS)
    @settings(max_examples=8, deadline=None)
    @given(shapes=lengths_of_rows, seed=st.integers(0, 99), lean=st.booleans())
    def test_packed_equals_padded(self, family: str, shapes: list[tuple[int, int]], seed: int, lean: bool) -> None:
        model, random = MODELS[family], np.random.default_rng(shifted_seed(seed))
        rows = siblings(shapes, random)
        prompts = [prompt for prompt, _ in shapes]
        weights = torch.from_numpy(random.normal(size=(len(rows), 13))).float()

        padded_BL = padded_logprobs(model, rows)
        parts = [padded_BL[i, p - 1 : len(row) - 1] for i, (row, p) in enumerate(zip(rows, prompts, strict=True))]
        weighted = sum(((part * weights[i, : len(part)]).sum() for i, part in enumerate(parts)), padded_BL.sum() * 0)
        expected = gradients(model, weighted)

        assert pack_if_equal(model)
        logprobs_BT, _ = token_logprobs(model, pack_rows(rows, np.array(prompts), np.ones(len(rows)), lean=lean))
        for values_T, part in zip(logprobs_BT, parts, strict=True):
            assert_same_logprobs(values_T[: len(part)], part)
            assert not values_T[len(part) :].any()
        got = gradients(model, (logprobs_BT * weights[:, : logprobs_BT.shape[1]]).sum())
        scale = max(float(grad.abs().max()) for grad in expected)
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, size=max(scale, 1.0))

    def test_the_model_computes_only_token_positions(self) -> None:
        model = MODELS["qwen2"]
        assert pack_if_equal(model)
        shapes: list[torch.Size] = []
        hook = model.base_model.layers[0].mlp.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
        hidden_states(model, pack_rows([np.arange(2, 9), np.arange(2, 4)], np.array([1, 1]), np.ones(2)))
        hook.remove()
        assert shapes == [(1, 7 + 2, 16)]

    @pytest.mark.parametrize("lean", [False, True])
    def test_an_unpackable_model_computes_row_by_row(self, lean: bool) -> None:
        tokens = [np.arange(2, 9), np.arange(5, 9), np.arange(2, 6)]
        model, rows = MODELS["qwen2"], pack_rows(tokens, np.array([2, 1, 2]), np.ones(3), lean=lean)
        assert pack_if_equal(model)
        packed = hidden_states(model, rows)
        model.set_attn_implementation("eager")
        assert_close(hidden_states(model, rows), packed)

    def test_a_model_whose_state_crosses_rows_does_not_pack(self) -> None:
        config = transformers.MambaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4, bos_token_id=0, eos_token_id=1
        )
        model = transformers.MambaForCausalLM(config).eval()
        assert not pack_if_equal(model)
        assert model.config._attn_implementation != PACKED

    def test_a_packing_model_still_generates_from_padded_prompts(self) -> None:
        model = make_model(transformers.Qwen3Config)
        ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        options = {"max_new_tokens": 5, "do_sample": False}
        expected = model.generate(ids, attention_mask=mask, **options)
        assert pack_if_equal(model)
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)


class TestPackRows:
    @given(lengths_of_rows)
    def test_each_response_token_has_its_place(self, shapes: list[tuple[int, int]]) -> None:
        rows = [100 * i + np.arange(sum(shape)) for i, shape in enumerate(shapes)]
        packed = pack_rows(rows, np.array([prompt for prompt, _ in shapes]), np.ones(len(rows)))
        assert sorted(packed.tokens_S.tolist()) == sorted(np.concatenate(rows).tolist())
        assert (packed.tokens_S % 100 == packed.positions_S).all()
        assert packed.spans.ends.tolist() == [0, *np.cumsum(packed.spans.lengths).tolist()]
        assert [length for rows, length, _ in packed.spans.blocks for _ in range(rows)] == list(packed.spans.lengths)
        assert packed.spans.seen == packed.spans.lengths
        before = np.concatenate([row[prompt - 1 : -1] for row, (prompt, _) in zip(rows, shapes, strict=True)])
        assert packed.tokens_S[packed.before_Q].tolist() == before.tolist()
        aligned_BT = packed.aligned(packed.target_Q)
        assert aligned_BT.tolist() == pad([r[p:] for r, (p, _) in zip(rows, shapes, strict=True)], np.int64).tolist()

    @given(lengths_of_rows)
    def test_lean_packing_omits_repeated_and_last_tokens(self, shapes: list[tuple[int, int]]) -> None:
        assume(any(response for _, response in shapes))
        # A token encodes its position in the row, a response token also its row.
        rows = [
            np.concatenate([1000 * p + np.arange(p), 10_000 * (i + 1) + np.arange(p, p + r)])
            for i, (p, r) in enumerate(shapes)
        ]
        prompts = np.array([prompt for prompt, _ in shapes])
        packed, whole = (pack_rows(rows, prompts, np.ones(len(rows)), lean=lean) for lean in (True, False))
        needed = {p for p, r in shapes if r}
        assert len(packed.tokens_S) == sum(needed) + sum(max(0, r - 1) for _, r in shapes)
        assert (packed.tokens_S % 100 == packed.positions_S).all()
        for name in ("target_Q", "row_Q", "column_Q"):
            assert torch.equal(getattr(packed, name), getattr(whole, name))
        assert torch.equal(packed.tokens_S[packed.before_Q], whole.tokens_S[whole.before_Q])
        # A token sees its row up to itself.
        seen = packed.tokens_S if packed.spans.seen_K is None else packed.tokens_S[packed.spans.seen_K]
        for tokens, own, length in zip(
            seen.split(list(packed.spans.seen)),
            packed.tokens_S.split(list(packed.spans.lengths)),
            packed.spans.lengths,
            strict=True,
        ):
            assert torch.equal(tokens[-length:], own)
            assert any(np.array_equal(tokens, row[: len(tokens)]) for row in rows)

    def test_a_row_without_a_prompt_is_refused(self) -> None:
        with pytest.raises(ValueError, match="a row has no prompt"):
            pack_rows([np.arange(3), np.arange(2)], np.array([1, 0]), np.ones(2))


class TestMicroBatches:
    @given(
        st.lists(st.integers(1, 30), min_size=1, max_size=12),
        st.integers(1, 80),
        st.none() | st.integers(1, 5),
        st.sampled_from([1, 2]),
    )
    def test_every_row_once_within_the_limits_and_with_its_neighbors(
        self, lengths: list[int], max_tokens: int, max_rows: int | None, unit: int
    ) -> None:
        array = np.array(lengths * unit)
        units = list(np.arange(len(array)).reshape(-1, unit))
        parts = micro_batches(array, units, max_tokens=max_tokens, max_rows=max_rows)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(array)))
        for part in parts:
            pairs = part.reshape(-1, unit)
            assert (pairs == pairs[:, :1] // unit * unit + np.arange(unit)).all()
            if len(part) > unit:
                assert array[part].sum() <= max_tokens
                assert max_rows is None or len(part) <= max_rows

    def test_limits_count_tokens_not_padding(self) -> None:
        assert len(micro_batches(np.array([90, 2, 2, 2, 2, 2]), max_tokens=100)) == 1

    def test_parts_are_even_in_cost_not_in_tokens(self) -> None:
        lengths = np.array([100] * 6 + [300])
        for costs, sizes in ((None, [3, 4]), (lengths**2, [1, 6])):
            parts = micro_batches(lengths, max_tokens=700, costs=costs)
            assert sorted(map(len, parts)) == sizes, costs


def test_grouped_heads_are_enabled_if_the_kernel_has_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 has no switch and always supports them; 2.12 requires it."""
    query_S, key_S = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
    spans = Spans((4, 2), (4, 2), (ends := torch.tensor([0, 4, 6], dtype=torch.int32)), ends, None)
    asked: list[dict[str, Any]] = []

    def of_2_11(query: Tensor, *others: Any, scale: Any, window_size: Any) -> Tensor:
        asked.append({"window_size": window_size})
        return torch.zeros_like(query)

    def of_2_12(query: Tensor, *others: Any, scale: Any, window_size: Any, enable_gqa: bool = False) -> Tensor:
        asked.append({"window_size": window_size, "enable_gqa": enable_gqa})
        return torch.zeros_like(query)

    for kernel in (of_2_11, of_2_12):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
        attention._by_kernel(query_S, key_S, key_S, spans, None, None)
    assert asked == [{"window_size": (-1, 0)}, {"window_size": (-1, 0), "enable_gqa": True}]
