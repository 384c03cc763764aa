"""Promises of guided sampling: samples follow the grammar, logprobs are those without the grammar, forbidden tokens are
never sampled, and rows without a guide are not affected.
"""

import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.sampling import Guides
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import RoleError
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.policy.answer_parsers import AnswerParser

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
