"""Contract of engines. Subclass `EngineContract` with the fixtures `engine` and `weights_file`."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from rftdask.engines.client import EngineSpec
from rftdask.errors import RoleError
from tests.numerics import LOGIT_SIZE, assert_close


def engine_spec(engine_type: str, model_path: str = "no/such/model") -> EngineSpec:
    section = InferenceModelConfig.model_construct(engine_type=engine_type, engine_num=1, seed=42)
    model = ModelConfig(model_path=model_path, max_model_len=64, max_prompt_tokens=32, max_response_tokens=32)
    return EngineSpec(section, model, threads=1)


def make_requests(num_prompts: int = 3, group_size: int = 2, max_tokens: int = 6, first_seed: int = 0):
    return [
        GenerateRequest(
            tuple(range(3 + prompt, 6 + 3 * prompt)),
            SamplingParams(max_tokens=max_tokens + prompt),
            seed=first_seed + prompt * group_size + sibling,
        )
        for prompt in range(num_prompts)
        for sibling in range(group_size)
    ]


LONG = GenerateRequest((5, 6, 7), SamplingParams(max_tokens=100, ignore_eos=True), seed=1)
SHORT = GenerateRequest((8, 9), SamplingParams(max_tokens=2, ignore_eos=True), seed=2)

Look = list[tuple[int, GenerateRequest | None]]


def serve(engine: Engine, looks: Iterable[Look]) -> dict[int, Generation]:
    """Results of the engine in order, when each poll finds the next of these requests and later polls find nothing."""
    coming = iter(looks)
    answers: dict[int, Generation] = {}
    engine.serve(lambda: next(coming, []), answers.__setitem__)
    return answers


class EngineContract:
    def test_no_requests_no_generations(self, engine: Engine) -> None:
        assert engine.generate([]) == []

    def test_streamed_tokens_equal_those_of_the_result(self, engine: Engine) -> None:
        told: list[int] = []
        # Enough tokens to observe an engine of another process before the last one, also on a busy machine.
        num_tokens = 32
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        streamed = replace(LONG, sampling=sampling, on_tokens=told.extend)
        seen: list[int] = []
        answers: dict[int, Generation] = {}
        looks: list[Look] = [[(1, SHORT), (2, replace(streamed, on_tokens=None))], [(0, streamed)]]

        def take() -> Look:
            seen.append(len(told) if 0 not in answers else -1)
            return looks.pop() if looks else []

        engine.serve(take, answers.__setitem__)
        assert max(seen) > 0, "some were streamed before the result"
        assert 0 < len(told) <= num_tokens and tuple(told) == answers[0].tokens[: len(told)]
        assert (answers[0].tokens, answers[0].finish_reason) == (answers[2].tokens, answers[2].finish_reason)
        assert answers[0].logprobs == pytest.approx(answers[2].logprobs, abs=1e-4)

    def test_one_generation_per_request_in_order(self, engine: Engine) -> None:
        requests = make_requests()
        forward, backward = engine.generate(requests), engine.generate(requests[::-1])
        assert len(forward) == len(requests)
        assert [generation.tokens for generation in forward] == [generation.tokens for generation in backward[::-1]]

    def test_one_logprob_per_token_and_none_above_zero(self, engine: Engine) -> None:
        for generation in engine.generate(make_requests()):
            assert len(generation.logprobs) == len(generation.tokens) > 0
            assert max(generation.logprobs) <= 0

    def test_logprobs_of_prompt_tokens_equal_those_of_sampling(self, engine: Engine) -> None:
        requests = make_requests()
        generations = engine.generate(requests)
        pairs = [(request.prompt_tokens, said.tokens) for request, said in zip(requests, generations, strict=True)]
        for scored, said in zip(engine.logprobs(pairs), generations, strict=True):
            assert_close(scored, said.logprobs, size=LOGIT_SIZE)

    def test_no_response_exceeds_its_max_tokens(self, engine: Engine) -> None:
        requests = make_requests(max_tokens=1)
        lengths = [len(generation.tokens) for generation in engine.generate(requests)]
        assert all(length <= request.sampling.max_tokens for length, request in zip(lengths, requests, strict=True))

    def test_a_truncated_response_has_finish_reason_length(self, engine: Engine) -> None:
        sampling = SamplingParams(max_tokens=2, min_tokens=2, ignore_eos=True)
        [generation] = engine.generate([GenerateRequest((3, 4), sampling, seed=0)])
        assert (len(generation.tokens), generation.finish_reason) == (2, "length")

    def test_the_same_call_twice_gives_the_same_bits(self, engine: Engine) -> None:
        assert engine.generate(make_requests()) == engine.generate(make_requests())

    def test_another_seed_gives_other_tokens(self, engine: Engine) -> None:
        one, other = engine.generate(make_requests()), engine.generate(make_requests(first_seed=1000))
        assert [generation.tokens for generation in one] != [generation.tokens for generation in other]

    def test_tokens_do_not_depend_on_the_seeds_of_neighbors(self, engine: Engine) -> None:
        one, other = make_requests(), make_requests(first_seed=1000)
        mixed = [one[0], *other[1:]]
        assert engine.generate(mixed)[0].tokens == engine.generate(one)[0].tokens

    def test_the_largest_and_negative_seeds_are_seeds(self, engine: Engine) -> None:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        seeds = (2**63 - 1, -(2**63), -1)
        generations = engine.generate([GenerateRequest((3, 4), sampling, seed) for seed in seeds])
        assert len({generation.tokens for generation in generations}) == 3

    def test_it_serves_version_0_by_default(self, engine: Engine, weights_file: Path) -> None:
        def versions() -> set[tuple[int, int]]:
            generations = engine.generate(make_requests())
            return {(generation.min_policy_version, generation.max_policy_version) for generation in generations}

        assert versions() == {(0, 0)}
        engine.load_weights(7, [weights_file])
        assert engine.policy_version == 7
        assert versions() == {(7, 7)}

    def test_a_missing_weights_file_is_refused_by_name(self, engine: Engine, tmp_path: Path) -> None:
        with pytest.raises(RoleError, match=r"version 3.*absent\.safetensors"):
            engine.load_weights(3, [tmp_path / "absent.safetensors"])
        assert engine.policy_version == 0

    def test_close_is_idempotent_and_a_closed_engine_refuses(self, engine: Engine) -> None:
        engine.close()
        engine.close()
        with pytest.raises(RoleError, match="was closed"):
            engine.generate(make_requests())

    def test_later_requests_get_the_same_tokens_as_without_a_batch(self, engine: Engine) -> None:
        requests = make_requests(max_tokens=12)
        answers = serve(engine, ([(10 + number, request)] for number, request in enumerate(requests)))
        assert sorted(answers) == list(range(10, 16))
        for number, request in enumerate(requests):
            [alone] = engine.generate([request])
            assert answers[10 + number].tokens == alone.tokens
            assert_close(answers[10 + number].logprobs, alone.logprobs, size=LOGIT_SIZE)

    def test_a_cancelled_request_delays_nothing(self, engine: Engine) -> None:
        requests = make_requests(max_tokens=12)
        looks: list[Look] = [list(enumerate(requests)), [(0, None), (3, None)], [(5, None)]]
        answers = serve(engine, looks)
        assert {1, 2, 4} <= set(answers) <= set(range(6))
        expected = engine.generate(requests)
        assert all(answers[number].tokens == expected[number].tokens for number in (1, 2, 4))

    def test_dropping_an_ended_or_unknown_request_has_no_effect(self, engine: Engine) -> None:
        answers: dict[int, Generation] = {}
        looks: list[Look] = [[(0, LONG), (1, SHORT), (7, None)], [(1, None)]]

        def take() -> Look:
            # The second poll comes after the end of the short request.
            return looks.pop(0) if len(looks) == 2 or (looks and 1 in answers) else []

        engine.serve(take, answers.__setitem__)
        assert set(answers) == {0, 1} and not looks
        assert serve(engine, [[(0, None)]]) == {}


class InFlightContract:
    """Contract of engines that `loads_in_flight`."""

    def test_each_token_records_the_weights_that_sampled_it(self, engine: Engine, weights_file: Path) -> None:
        answers: dict[int, Generation] = {}
        looks: list[Look] = [[(0, LONG), (1, SHORT)], [(2, SHORT)]]

        def take() -> Look:
            if len(looks) == 1 and 1 in answers and 0 not in answers:  # while the long one runs
                engine.load_verified(7, [weights_file], None)
                return looks.pop()
            return looks.pop(0) if len(looks) == 2 else []

        engine.serve(take, answers.__setitem__)
        versions = {number: (each.min_policy_version, each.max_policy_version) for number, each in answers.items()}
        assert versions == {0: (0, 7), 1: (0, 0), 2: (7, 7)}
        assert len(answers[0].tokens) == len(answers[0].logprobs)
        (first, oldest), (changed, newest) = answers[0].version_starts
        assert (first, oldest, newest) == (0, 0, 7) and 0 < changed < len(answers[0].tokens)
        assert answers[1].version_starts == answers[2].version_starts == ()
        [alone] = engine.generate([SHORT])
        assert answers[2].tokens == alone.tokens, "later requests have no old keys and values"


class ContinuousContract:
    """Further contract of engines with a model: requests enter and leave between steps."""

    def test_a_later_short_request_is_answered_first(self, engine: Engine) -> None:
        answers = serve(engine, [[(0, LONG)], [(1, SHORT)]])
        assert list(answers) == [1, 0]
        assert [answers[0].tokens, answers[1].tokens] == [each.tokens for each in engine.generate([LONG, SHORT])]

    def test_a_cancelled_long_request_is_not_finished(self, engine: Engine) -> None:
        answers = serve(engine, [[(0, LONG), (1, SHORT)], [(0, None)]])
        assert list(answers) == [1]
