"""Sampling: the rules of `rftdask.engines.sampling`."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rftdask.engines import sampling
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.sampling import Guides
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import RoleError
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from tests.numerics import shifted_seed

NEVER = -torch.inf


def logprobs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def kept(logprobs_BV: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logprobs_BV]


def top(logprobs_BV: Tensor, k: int, p: float) -> list[int]:
    num_rows = len(logprobs_BV)
    return kept(sampling.keep_top(logprobs_BV, torch.full((num_rows,), k), torch.full((num_rows,), p)))[0]


def test_top_k_keeps_the_first_k_of_equal_tokens() -> None:
    assert top(logprobs(0.1, 0.3, 0.3, 0.3), k=2, p=1.0) == [1, 2]


@pytest.mark.parametrize(
    ("p", "expected"), [(0.0, [2]), (0.49, [2]), (0.5, [2]), (0.51, [0, 2]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, expected: list[int]) -> None:
    assert top(logprobs(0.25, 0.125, 0.5, 0.125), k=2**62, p=p) == expected


def test_top_p_counts_the_share_within_the_top_k() -> None:
    # Within the top 2, token 2 holds 2/3.
    assert top(logprobs(0.25, 0.125, 0.5, 0.125), k=2, p=0.66) == [2]
    assert top(logprobs(0.25, 0.125, 0.5, 0.125), k=2, p=0.67) == [0, 2]


def test_kept_tokens_keep_their_logprob() -> None:
    result = sampling.keep_top(logprobs(0.25, 0.125, 0.5, 0.125), torch.tensor([2]), torch.tensor([1.0]))
    assert result.tolist() == [[pytest.approx(np.log(0.25)), NEVER, pytest.approx(np.log(0.5)), NEVER]]


def test_inverse_cdf_interval_widths_are_token_probabilities() -> None:
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    rows = logprobs(0.25, 0.5, 0.25).expand(6, 3)
    assert sampling.sample_inverse_cdf(rows, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_inverse_cdf_never_draws_an_excluded_token() -> None:
    rows = torch.tensor([[NEVER, 0.0, NEVER, -1.0, NEVER]]).expand(1001, 5)
    uniforms = torch.linspace(0, 1 - 2**-53, 1001, dtype=torch.float64)
    assert set(sampling.sample_inverse_cdf(rows, uniforms).tolist()) == {1, 3}


def test_inverse_cdf_draws_the_distribution() -> None:
    torch.manual_seed(shifted_seed(0))
    wanted = torch.log_softmax(torch.randn(20), dim=0)
    num_draws = 200_000
    uniforms = torch.from_numpy(sampling.Uniforms().draw(1, num_draws))
    counts = torch.bincount(sampling.sample_inverse_cdf(wanted.expand(num_draws, 20), uniforms), minlength=20)
    expected = wanted.exp() * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; the seed is fixed


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    uniforms, fresh = sampling.Uniforms(), sampling.Uniforms()
    assert uniforms.draw(5, 100)[:10].tolist() == uniforms.draw(5, 10).tolist() == fresh.draw(5, 10).tolist()
    assert uniforms.draw(5, 10).tolist() != uniforms.draw(6, 10).tolist()
    # Equal to a NumPy generator created with the seed, so recorded samples can be drawn again.
    for seed in (0, 5, 2**62, -3, -(2**63)):
        made = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
        assert uniforms.draw(seed, 7).tolist() == made.random(7).tolist()


def test_repetition_penalty_lowers_logits_of_either_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0], [2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]] * 2)
    result = sampling.penalize_repetition(logits, seen, torch.tensor([2.0, 1.0]))
    assert result.tolist() == [[1.0, -4.0, 2.0, -2.0], [2.0, -2.0, 2.0, -2.0]]


def test_forbidding_changes_only_the_chosen_rows() -> None:
    logits = torch.zeros(2, 3)
    result = sampling.forbid_tokens(logits, torch.tensor([0, 2]), torch.tensor([True, False]))
    assert result.tolist() == [[NEVER, 0.0, NEVER], [0.0, 0.0, 0.0]]
    assert logits.tolist() == [[0.0] * 3] * 2


MIXED = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0),
    SamplingParams(max_tokens=9, temperature=0.5, top_p=0.7),
    SamplingParams(max_tokens=9, temperature=2.0, top_k=3, min_tokens=4),
    SamplingParams(max_tokens=9, top_k=1),
    SamplingParams(max_tokens=9, repetition_penalty=1.5),
]


def test_a_row_does_not_depend_on_other_rows() -> None:
    torch.manual_seed(shifted_seed(0))
    logits_BV, seen_BV = torch.randn(6, 50) * 2, torch.rand(6, 50) < 0.3
    uniforms_B, end_ids = torch.rand(6, dtype=torch.float64), torch.tensor([3, 4])

    def sample(rows: slice) -> tuple[list[int], list[float]]:
        tokens_B, logprobs_B = sampling.sample_tokens(
            logits_BV[rows],
            uniforms_B[rows],
            sampling.SamplingRows.stack(MIXED[rows]),
            end_ids=end_ids,
            seen_BV=seen_BV[rows],
        )
        return tokens_B.tolist(), logprobs_B.tolist()

    alone = [sample(slice(row, row + 1)) for row in range(6)]
    tokens, token_logprobs = sample(slice(None))
    assert tokens == [row_tokens[0] for row_tokens, _ in alone]
    assert token_logprobs == [row_logprobs[0] for _, row_logprobs in alone]


def test_logprobs_come_from_the_unrestricted_tempered_softmax() -> None:
    torch.manual_seed(shifted_seed(0))
    logits_BV = torch.randn(6, 50)
    tokens_B, logprobs_B = sampling.sample_tokens(
        logits_BV,
        torch.rand(6, dtype=torch.float64),
        sampling.SamplingRows.stack(MIXED),
        end_ids=torch.tensor([3]),
        seen_BV=torch.rand(6, 50) < 0.5,
    )
    temperatures = torch.tensor([params.temperature or 1.0 for params in MIXED])
    expected = torch.log_softmax(logits_BV / temperatures[:, None], dim=-1)[range(6), tokens_B]
    torch.testing.assert_close(logprobs_B, expected)


def test_top_k_of_one_is_greedy() -> None:
    torch.manual_seed(shifted_seed(0))
    logits_BV = torch.randn(32, 50)
    rows = sampling.SamplingRows.stack([SamplingParams(max_tokens=1, top_k=1)] * 32)
    tokens_B, _ = sampling.sample_tokens(logits_BV, torch.rand(32, dtype=torch.float64), rows)
    assert tokens_B.tolist() == logits_BV.argmax(dim=-1).tolist()


def test_end_tokens_are_forbidden_until_min_tokens_are_sampled() -> None:
    logits_BV = torch.tensor([[0.0, 100.0]])
    rows = sampling.SamplingRows.stack([SamplingParams(max_tokens=9, min_tokens=2)])
    uniform_B = torch.tensor([0.5], dtype=torch.float64)
    tokens = [
        sampling.sample_tokens(
            logits_BV, uniform_B, rows, num_sampled_B=torch.tensor([num]), end_ids=torch.tensor([1])
        )[0].item()
        for num in range(4)
    ]
    assert tokens == [0, 0, 1, 1]


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits_BV = torch.randn(1, 50, generator=torch.Generator().manual_seed(shifted_seed(0))).bfloat16()
    uniform_B = torch.tensor([0.5], dtype=torch.float64)
    rows = sampling.SamplingRows.stack([SamplingParams(max_tokens=1)])
    tokens_B, logprobs_B = sampling.sample_tokens(logits_BV, uniform_B, rows)
    expected = torch.log_softmax(logits_BV.float(), dim=-1)[0, tokens_B[0]]
    assert logprobs_B.dtype == torch.float32
    assert logprobs_B[0] == expected


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
PROMPT = (70, 71, 72)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, hidden_size=32, intermediate_size=64, num_heads=2)
    return TransformersEngine(str(folder))


@pytest.fixture(scope="module")
def tokenizer(engine: TransformersEngine) -> Any:
    return AutoTokenizer.from_pretrained(engine.model_path)


def request(seed: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(PROMPT, SamplingParams(**{"max_tokens": 100, **sampling}), seed)


def text(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def test_samples_follow_the_grammar_and_others_are_unchanged(engine: Any, tokenizer: Any) -> None:
    grammar = AnswerParser(tokenizer).grammar(SCHEMA, "", are_calls=False)
    free = [request(seed, max_tokens=8) for seed in range(3)]
    guided = [request(seed, grammar=grammar, temperature=t) for seed, t in ((3, 1.0), (4, 1.0), (5, 0.0))]
    alone, beside = engine.generate(free), engine.generate([*guided, *free])
    for found in beside[:3]:
        answer = json.loads(text(tokenizer, found.tokens))
        assert answer["city"] in ("Rome", "Oslo") and 0 <= answer["n"] <= 99 and found.finish_reason == "stop"
    assert len({found.tokens for found in beside[:3]}) > 1, "the policy still chooses"
    assert [found.tokens for found in alone] == [found.tokens for found in beside[3:]]


def test_logprobs_are_those_without_the_grammar(engine: Any, tokenizer: Any) -> None:
    [found] = engine.generate([request(1, grammar=AnswerParser(tokenizer).grammar(SCHEMA, "", are_calls=False))])
    [expected] = engine.logprobs([(PROMPT, found.tokens)])
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
    assert min(found.logprobs) < -3, "a random policy would not have written it"


def test_reasoning_precedes_the_grammar(tokenizer: Any) -> None:
    parser = AnswerParser(tokenizer, reasoning="think")
    guides = Guides(tokenizer, 258, [1])
    for prompt, thoughts in (("<think>", "hm </think>\n"), ("", "<think>\nhm</think>"), ("", "")):
        guide = guides.guide(SamplingParams(100, grammar=parser.grammar(SCHEMA, prompt, are_calls=False)))
        for token in tokenizer.encode(f'{thoughts}{{"city": "Oslo", "n": 7'):
            assert guide.allowed()[token], (prompt, thoughts, token)
            guide.take(token)
        assert not guide.allowed()[1], "it is not complete"
        guide.take(tokenizer.encode("}")[0])
        assert guide.allowed().nonzero()[0].tolist() == [1]


@pytest.mark.parametrize(("max_calls", "ends"), [(1, True), (None, False)])
def test_tool_calls_are_parsed_as_written(tokenizer: Any, max_calls: int | None, ends: bool) -> None:
    call = {"type": "object", "properties": {"name": {"const": "look"}}, "required": ["name"]}
    call["additionalProperties"] = False
    grammar = AnswerParser(tokenizer).grammar(call, "", are_calls=True, max_calls=max_calls)
    guide = Guides(tokenizer, 258, [1]).guide(SamplingParams(100, grammar=grammar))
    for token in tokenizer.encode('<tool_call>\n{"name": "look"}\n</tool_call>'):
        assert guide.allowed()[token]
        guide.take(token)
    assert guide.allowed()[1]
    assert (guide.allowed().sum() == 1) == ends


def test_forbidden_tokens_are_never_sampled(engine: Any) -> None:
    single = tuple((token,) for token in range(2, 200))
    for found in engine.generate([request(seed, bad_tokens=single, max_tokens=30) for seed in range(3)]):
        assert not set(found.tokens) & set(range(2, 200))
    # 5 is allowed, but not twice in a row.
    others = tuple((token,) for token in range(258) if token not in (0, 5))
    [found] = engine.generate([request(1, bad_tokens=(*others, (5, 5)), max_tokens=60)])
    pairs = set(zip(found.tokens, found.tokens[1:], strict=False))
    assert (5, 5) not in pairs and {(5, 0), (0, 5), (0, 0)} <= pairs


def test_a_response_ends_if_no_token_is_allowed(tokenizer: Any) -> None:
    grammar = AnswerParser(tokenizer).grammar({"const": "a"}, "", are_calls=False)
    bad = ((tokenizer.encode('"')[0],),)
    guide = Guides(tokenizer, 258, [1]).guide(SamplingParams(9, grammar=grammar, bad_tokens=bad))
    assert guide.allowed().nonzero()[0].tolist() == [1]


def test_an_invalid_grammar_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(RoleError, match="invalid grammar"):
        Guides(tokenizer, 258, [1]).guide(SamplingParams(9, grammar="start: nothing"))
