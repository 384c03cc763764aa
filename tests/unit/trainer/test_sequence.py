"""Sequences split over ranks: logprobs, entropies and summed gradients equal those of one rank."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftdask.errors import DataError
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.attention import pack_if_equal
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from rftdask.trainer.sequence import SequenceSplit
from tests.numerics import assert_close, assert_same_logprobs, shifted_seed
from tests.thread_ranks import in_threads
from tests.unit.trainer.tiny_families import EXPERTS, VOCAB_SIZE, make_model


def packed_model(config: Any, **sizes: Any) -> Any:
    model = make_model(config, hidden_size=24, num_attention_heads=12, **sizes)
    assert pack_if_equal(model)
    return model


MODELS = {
    "as many key-value heads as the ranks divide": packed_model(transformers.Qwen3Config, num_key_value_heads=4),
    "fewer than ranks": packed_model(transformers.LlamaConfig, num_key_value_heads=1),
    "three, which neither divides": packed_model(transformers.Qwen2Config, num_key_value_heads=3),
    "a window of 3": packed_model(transformers.MistralConfig, num_key_value_heads=2, sliding_window=3),
    "mixture of experts": packed_model(transformers.Qwen3MoeConfig, num_key_value_heads=2, **EXPERTS),
}


def scores_and_gradients(
    model: Any, shapes: list[tuple[int, int]], ranks: Ranks
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """[B, T] logprobs and entropies, and what this rank adds to the gradients of a loss that takes both of whole rows,
    and not as a sum over tokens.
    """
    random = np.random.default_rng(shifted_seed(len(shapes)))
    rows = [random.integers(2, VOCAB_SIZE, prompt + response) for prompt, response in shapes]
    weights = torch.from_numpy(random.normal(size=len(rows))).float()
    prompts = np.array([prompt for prompt, _ in shapes])
    packed = pack_rows(rows, prompts, np.full(len(rows), 0.7), sequence=ranks)
    logprobs_BT, entropy_BT = token_logprobs(model, packed, with_entropy=True)
    assert entropy_BT is not None
    loss = ((logprobs_BT.sum(-1) / 8).exp() * weights).sum() + (entropy_BT.sum(-1).square() * weights).sum() / 100
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)  # threads share the parameters, so not into .grad
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return logprobs_BT.detach(), entropy_BT.detach(), gradients


class TestSplitSequences:
    @pytest.mark.parametrize("family", MODELS)
    @settings(max_examples=4, deadline=None)
    @given(
        shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4),
        size=st.sampled_from([2, 4]),
    )
    def test_split_equals_whole_also_in_gradients(self, family: str, shapes: list[tuple[int, int]], size: int) -> None:
        model = MODELS[family]
        expected = scores_and_gradients(model, shapes, Ranks())
        parts = in_threads(size, lambda ranks: scores_and_gradients(model, shapes, ranks))
        for logprobs_BT, entropy_BT, _ in parts:
            assert torch.equal(logprobs_BT, parts[0][0]) and torch.equal(entropy_BT, parts[0][1])
            assert_same_logprobs(logprobs_BT, expected[0])
            assert_same_logprobs(entropy_BT, expected[1])
        scale = max(float(gradient.abs().max()) for gradient in expected[2])
        for number, whole in enumerate(expected[2]):
            total = torch.stack([gradients[number] for _, _, gradients in parts]).sum(0)
            assert_close(total, whole, size=max(scale, 1.0))

    def test_a_rank_computes_only_its_own_tokens(self) -> None:
        def shapes(ranks: Ranks) -> tuple[int, int]:
            rows = pack_rows([np.arange(2, 9), np.arange(2, 6)], np.array([2, 1]), np.ones(2), sequence=ranks)
            return len(rows.tokens_S), len(rows.target_Q)

        # The token before a boundary predicts the one after it: 7 + 4 tokens over two ranks, 5 + 3 of them responses.
        assert in_threads(2, shapes) == [(5, 4), (6, 4)]

    @given(st.integers(0, 40), st.integers(1, 8))
    def test_every_token_is_with_one_rank(self, num_tokens: int, size: int) -> None:
        ranks = Ranks()
        ranks.size = size
        sizes = SequenceSplit(ranks, num_tokens).sizes
        assert sum(sizes) == num_tokens
        assert max(sizes) - min(sizes) <= 1


class TestModelsThatCannotBeSplit:
    def test_heads_that_the_ranks_do_not_divide_are_refused(self, tmp_path: Any) -> None:
        build_toy_model(tmp_path, hidden_size=18, num_heads=3)
        with pytest.raises(DataError, match=r"3 attention heads, which 2 ranks .*ulysses_sequence_parallel_size 2"):
            load_policy(str(tmp_path), "float32", "cpu", num_splits=2)

    def test_a_model_that_does_not_pack_is_refused(self, tmp_path: Any) -> None:
        build_toy_model(tmp_path)
        config = transformers.BloomConfig(vocab_size=200, hidden_size=16, n_layer=1, n_head=2)
        transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
        with pytest.raises(DataError, match="BloomForCausalLM does not compute packed rows"):
            load_policy(str(tmp_path), "float32", "cpu", num_splits=2)
