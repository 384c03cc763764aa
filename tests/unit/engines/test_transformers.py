"""The transformers engine, against a tiny random Qwen2: batching, padding and compaction change no token."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rftdask.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from rftdask.engines.fake import FakeEngine
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import DataError, RoleError
from rftdask.models.toy import build_toy_model
from rftdask.synchronizer.delta import compute_delta
from rftdask.synchronizer.fingerprint import Fingerprint
from tests.numerics import assert_same_logprobs, shifted_seed
from tests.unit.engines.engine_contract import (
    ContinuousContract,
    EngineContract,
    InFlightContract,
    Look,
    make_requests,
    serve,
)
from tests.unit.engines.tiny_models import END_IDS, VOCAB_SIZE, save_tiny_mixture, save_tiny_qwen2

PROMPTS = [(5,), (7, 8, 9), (11, 12, 13, 14, 15, 16, 17), (7, 8, 9), (20, 21)]


def requests_for(prompts: Sequence[tuple[int, ...]], **sampling: object) -> list[GenerateRequest]:
    params = SamplingParams(**{"max_tokens": 12, **sampling})  # type: ignore[arg-type]
    return [GenerateRequest(prompt, params, seed=100 + number) for number, prompt in enumerate(prompts)]


def assert_same(ones: Sequence[Generation], others: Sequence[Generation]) -> None:
    """Equal tokens and ends; logprobs up to rounding."""
    for one, other in zip(ones, others, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert_same_logprobs(one.logprobs, other.logprobs)


@pytest.fixture
def engine(model_folder: Path) -> Engine:
    return TransformersEngine(str(model_folder))


class TestTransformersEngine(EngineContract, ContinuousContract, InFlightContract):
    @pytest.fixture
    def weights_file(self, other_folder: Path) -> Path:
        return other_folder / "model.safetensors"


def test_new_weights_apply_from_the_next_token(engine: Engine, model_folder: Path, other_folder: Path) -> None:
    long, short = requests_for([(5,), (7, 8, 9)], max_tokens=12, ignore_eos=True)
    waiting: list[Look] = [[(0, long), (1, replace(short, sampling=replace(short.sampling, max_tokens=20)))], []]
    looks, answers = 0, dict[int, Generation]()

    def take() -> Look:
        nonlocal looks
        looks += 1
        if looks == 5:
            engine.load_weights(7, [other_folder / "model.safetensors"])
        if looks == 15:  # the first one has ended, and its row may still be in the batch
            engine.load_weights(8, [model_folder / "model.safetensors"])
        return waiting.pop(0) if waiting else []

    engine.serve(take, answers.__setitem__)
    # The logits of the next token were computed before the weights were loaded.
    assert answers[0].version_starts == ((0, 0), (5, 7))
    assert answers[1].version_starts == ((0, 0), (5, 7), (15, 8))
    [by_old] = TransformersEngine(str(model_folder)).logprobs([(long.prompt_tokens, answers[0].tokens)])
    apart = [abs(one - other) > 1e-4 for one, other in zip(answers[0].logprobs, by_old, strict=True)]
    assert apart.index(True) == 5


MIXED_REQUESTS = [
    replace(request, sampling=sampling)
    for request, sampling in zip(
        requests_for([*PROMPTS, *PROMPTS]),
        [
            SamplingParams(max_tokens=12),
            SamplingParams(max_tokens=3),
            SamplingParams(max_tokens=12, temperature=0.0),
            SamplingParams(max_tokens=20, temperature=0.7, top_p=0.8),
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=12, top_k=5),
            SamplingParams(max_tokens=12, min_tokens=6),
            SamplingParams(max_tokens=12, repetition_penalty=1.3),
            SamplingParams(max_tokens=30, ignore_eos=True),
            SamplingParams(max_tokens=12, temperature=1.5),
        ],
        strict=True,
    )
]


class TestBatching:
    @pytest.mark.parametrize("requests", [MIXED_REQUESTS, requests_for(PROMPTS * 4), make_requests(2, 8)])
    def test_a_batch_equals_its_requests_one_by_one(self, engine: Engine, requests: list[GenerateRequest]) -> None:
        assert_same(engine.generate(requests), [engine.generate([request])[0] for request in requests])

    def test_a_longer_neighbor_changes_no_token(self, engine: Engine) -> None:
        [request] = requests_for([(7, 8, 9)], max_tokens=20)
        neighbor = GenerateRequest(tuple(range(3, 60)), SamplingParams(max_tokens=2), seed=0)
        assert_same(engine.generate([neighbor, request])[1:], engine.generate([request]))

    @pytest.mark.parametrize("max_batch_tokens", [30, 60, 100, 200])
    def test_entering_requests_change_no_token(self, model_folder: Path, engine: Engine, max_batch_tokens: int) -> None:
        small = TransformersEngine(str(model_folder), max_batch_tokens=max_batch_tokens)
        answers = small.generate(MIXED_REQUESTS * 2)
        assert_same(answers, engine.generate(MIXED_REQUESTS) * 2)
        assert answers == small.generate(MIXED_REQUESTS * 2), "the same bits"

    def test_a_new_sequence_takes_the_slot_of_a_finished_one(self, model_folder: Path) -> None:
        small = TransformersEngine(str(model_folder), max_batch_tokens=2 * 7)
        shapes: list[tuple[int, ...]] = []
        small._model.register_forward_pre_hook(
            lambda model, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        requests = [
            GenerateRequest((5 + number,), SamplingParams(max_tokens, ignore_eos=True), number)
            for number, max_tokens in enumerate([6, 2, 3])
        ]
        small.generate(requests)
        first_two_enter, both, long_one, third_enters = (2, 1), (2, 1), (1, 1), (1, 1)
        assert shapes == [first_two_enter, both, long_one, third_enters, both, both, long_one]

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("max_batch_tokens", [100, 65536])
    def test_any_order_of_arrival_gives_same_tokens(self, model_folder: Path, seed: int, max_batch_tokens: int) -> None:
        engine = TransformersEngine(str(model_folder), max_batch_tokens=max_batch_tokens)
        drawn = random.Random(shifted_seed(seed))
        looks: list[Look] = [[] for _ in range(30)]
        unwanted = set()
        for number, request in enumerate(MIXED_REQUESTS * 2):
            comes = drawn.randrange(20)
            looks[comes].append((number, request))
            if drawn.random() < 0.3:
                looks[comes + drawn.randrange(10)].append((number, None))
                unwanted.add(number)
        # It polls only while requests run.
        looks[0].append((100, GenerateRequest((3,), SamplingParams(max_tokens=40, ignore_eos=True), 0)))
        answers = serve(engine, looks)
        assert set(answers) >= {100, *range(20)} - unwanted
        numbers = [number for number in answers if number < 100]
        alone = [engine.generate([MIXED_REQUESTS[number % 10]])[0] for number in numbers]
        assert_same([answers[number] for number in numbers], alone)

    def test_a_result_is_returned_before_its_row_leaves(self, engine: Engine) -> None:
        """Batch whose finished rows leave once they are a quarter of it."""
        assert isinstance(engine, TransformersEngine)
        num_passes = 0

        def count_passes(*_: object) -> None:
            nonlocal num_passes
            num_passes += 1

        engine._model.register_forward_pre_hook(count_passes)
        requests = requests_for([(5,)] * 8, max_tokens=20, ignore_eos=True)
        requests[3] = replace(requests[3], sampling=SamplingParams(max_tokens=2, ignore_eos=True))
        coming = iter([list(enumerate(requests))])
        answered_after: dict[int, int] = {}
        engine.serve(lambda: next(coming, []), lambda number, _: answered_after.update({number: num_passes}))
        assert answered_after == {**dict.fromkeys(range(8), 20), 3: 2}

    def test_a_cancelled_sequence_leaves_at_the_next_step(self, engine: Engine) -> None:
        assert isinstance(engine, TransformersEngine)
        rows: list[int] = []
        engine._model.register_forward_pre_hook(
            lambda model, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        requests = [
            GenerateRequest((5 + number,), SamplingParams(max_tokens, ignore_eos=True), number)
            for number, max_tokens in enumerate([9, 5])
        ]
        serve(engine, [list(enumerate(requests)), [], [(0, None)]])
        prompts, both_of_them, the_one_that_is_wanted = 2, 2, 1
        assert rows == [prompts, both_of_them, both_of_them, the_one_that_is_wanted, the_one_that_is_wanted]

    def test_sliding_window_layers_batch_without_joining(self, tmp_path: Path) -> None:
        layers = ["full_attention", "sliding_attention"]
        save_tiny_qwen2(tmp_path, 3, True, use_sliding_window=True, sliding_window=6, layer_types=layers)
        small = TransformersEngine(str(tmp_path), max_batch_tokens=60)
        large = TransformersEngine(str(tmp_path))
        assert_same(small.generate(MIXED_REQUESTS), [large.generate([request])[0] for request in MIXED_REQUESTS])

    def test_a_request_above_max_batch_tokens_runs_unbatched(self, model_folder: Path) -> None:
        small = TransformersEngine(str(model_folder), max_batch_tokens=1)
        assert len(small.generate(make_requests())) == 6


class TestExperts:
    @pytest.mark.parametrize("max_batch_tokens", [60, 65536])
    def test_experts_of_a_request_do_not_depend_on_others(self, tmp_path: Path, max_batch_tokens: int) -> None:
        folder = str(save_tiny_mixture(tmp_path))
        engine = TransformersEngine(folder, max_batch_tokens=max_batch_tokens)
        unrecorded = engine.generate(MIXED_REQUESTS)
        assert all(answer.routed_experts == () for answer in unrecorded)
        engine.record_experts()
        answers = engine.generate(MIXED_REQUESTS)
        assert [replace(answer, routed_experts=()) for answer in answers] == unrecorded, "recording changes no bit"
        for request, answer in zip(MIXED_REQUESTS, answers, strict=True):
            [alone] = engine.generate([request])
            assert answer.routed_experts == alone.routed_experts
            assert len(alone.routed_experts) == len(request.prompt_tokens) + len(answer.tokens) - 1
            # Recorded experts equal those of one pass over the complete response.
            engine.logprobs([(request.prompt_tokens, answer.tokens)])
            assert engine._routers is not None
            taken = engine._routers.taken()[:-1].numpy()
            assert b"".join(answer.routed_experts) == taken.tobytes()

    def test_a_model_without_experts_is_refused(self, engine: Engine) -> None:
        with pytest.raises(DataError, match="Qwen2ForCausalLM has no routers of experts"):
            engine.record_experts()

    def test_an_engine_without_experts_refuses(self) -> None:
        with pytest.raises(RoleError, match="engine FakeEngine cannot record the experts"):
            FakeEngine().record_experts()


class TestLogprobs:
    @pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
    def test_experts_equal_those_of_one_forward(self, engine: Engine, model_folder: Path, temperature: float) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
        requests = requests_for(PROMPTS, temperature=temperature, top_p=0.9)
        for request, generation in zip(requests, engine.generate(requests), strict=True):
            sequence = torch.tensor([[*request.prompt_tokens, *generation.tokens]])
            with torch.no_grad():
                logits = model(sequence).logits[0, len(request.prompt_tokens) - 1 : -1] / (temperature or 1.0)
            expected = torch.log_softmax(logits, dim=-1)[range(len(generation.tokens)), generation.tokens]
            assert_same_logprobs(generation.logprobs, expected)


class TestSampling:
    def test_greedy_equals_transformers_own_greedy(self, engine: Engine, model_folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
        requests = requests_for(PROMPTS, temperature=0.0)
        for request, generation in zip(requests, engine.generate(requests), strict=True):
            prompt = torch.tensor([request.prompt_tokens])
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
            assert list(generation.tokens) == output[0, prompt.shape[1] :].tolist()

    def test_top_k_of_one_is_greedy(self, engine: Engine) -> None:
        assert_same(
            engine.generate(requests_for(PROMPTS, top_k=1)), engine.generate(requests_for(PROMPTS, temperature=0.0))
        )

    def test_a_huge_repetition_penalty_prevents_repetition(self, engine: Engine) -> None:
        requests = requests_for(PROMPTS, temperature=0.0, repetition_penalty=1e6)
        for request, generation in zip(requests, engine.generate(requests), strict=True):
            sequence = [*request.prompt_tokens, *generation.tokens]
            assert len(set(sequence)) == len(sequence)

    def test_first_tokens_are_distributed_as_the_softmax(self, engine: Engine, model_folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
        num_draws, prompt = 4000, (7, 8, 9)
        with torch.no_grad():
            expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1) * num_draws
        generations = engine.generate(requests_for([prompt] * num_draws, max_tokens=1))
        counts = torch.bincount(
            torch.tensor([generation.tokens[0] for generation in generations]), minlength=VOCAB_SIZE
        )
        common = expected >= 5  # where chi-square holds; the rest is one more cell
        cells = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
        chi_square = sum(((count - mean) ** 2 / mean).sum().item() for count, mean in cells if mean.sum() > 0)
        assert (
            chi_square < 2 * VOCAB_SIZE
        )  # far beyond p = 0.001 for at most 64 degrees of freedom; the seeds are fixed


class TestEnds:
    def test_a_response_stops_with_its_first_end_token(self, engine: Engine) -> None:
        generations = engine.generate(requests_for([(7, 8, 9)] * 64, max_tokens=200, temperature=2.0))
        reasons = {generation.finish_reason for generation in generations}
        assert "stop" in reasons
        for generation in generations:
            assert not set(END_IDS) & set(generation.tokens[:-1])
            assert (generation.tokens[-1] in END_IDS) == (generation.finish_reason == "stop")

    def test_both_end_tokens_of_the_config_are_ends(self, engine: Engine) -> None:
        generations = engine.generate(requests_for([(7, 8, 9)] * 64, max_tokens=200, temperature=2.0))
        assert {generation.tokens[-1] for generation in generations if generation.finish_reason == "stop"} == {1, 2}

    def test_no_end_token_before_min_tokens(self, engine: Engine) -> None:
        generations = engine.generate(requests_for([(7, 8, 9)] * 64, max_tokens=30, min_tokens=15, temperature=2.0))
        lengths = [len(generation.tokens) for generation in generations]
        assert min(lengths) >= 16 and min(lengths) < 30

    def test_ignore_eos_continues_to_max_tokens(self, engine: Engine) -> None:
        generations = engine.generate(requests_for([(7, 8, 9)] * 64, max_tokens=40, ignore_eos=True, temperature=2.0))
        assert {(len(generation.tokens), generation.finish_reason) for generation in generations} == {(40, "length")}
        assert any(set(END_IDS) & set(generation.tokens[:-1]) for generation in generations)


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "problem"),
        [
            (GenerateRequest((), SamplingParams(max_tokens=1), 0), "its prompt is empty"),
            (GenerateRequest((VOCAB_SIZE,), SamplingParams(max_tokens=1), 0), "outside the vocabulary of 64"),
            (GenerateRequest((-1,), SamplingParams(max_tokens=1), 0), "outside the vocabulary of 64"),
            (GenerateRequest((3,), SamplingParams(max_tokens=0), 0), "max_tokens is 0"),
            (GenerateRequest((3,), SamplingParams(max_tokens=1, temperature=1e-9), 0), "temperature is 1e-09"),
            (GenerateRequest((3,), SamplingParams(max_tokens=1, temperature=-1), 0), "temperature is -1"),
            (GenerateRequest((3,), SamplingParams(max_tokens=1, temperature=float("nan")), 0), "temperature is nan"),
        ],
    )
    def test_an_unanswerable_request_is_named(self, engine: Engine, request_: GenerateRequest, problem: str) -> None:
        with pytest.raises(RoleError, match=f"request 1: .*{problem}"):
            engine.generate([GenerateRequest((3,), SamplingParams(max_tokens=1), 0), request_])

    def test_a_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be loaded"):
            TransformersEngine(str(tmp_path))

    def test_a_folder_without_a_tensor_is_refused_by_name(self, tmp_path: Path, model_folder: Path) -> None:
        tensors = load_file(model_folder / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
        with pytest.raises(DataError, match=r"model\.norm\.weight"):
            TransformersEngine(str(tmp_path))


def narrow_versions(model_folder: Path, folder: Path) -> list[Path]:
    """Three bfloat16 versions that differ in some values, and the deltas between them."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model_folder / "model.safetensors").items()}
    files: list[Path] = []
    for version in range(3):
        for tensor in tensors.values():
            tensor.view(-1)[:: 17 + version] *= 1.01
        files.append(folder / f"{version}.safetensors")
        save_file(tensors, files[-1])
        if version:
            delta = compute_delta(files[-2].read_bytes(), files[-1].read_bytes())
            assert delta is not None
            files[-1].with_suffix(".delta").write_bytes(delta)
    return files


class TestLoadWeights:
    def test_new_weights_equal_an_engine_created_from_them(self, engine: Engine, other_folder: Path) -> None:
        before = engine.generate(MIXED_REQUESTS)
        engine.load_weights(4, [other_folder / "model.safetensors"])
        other = TransformersEngine(str(other_folder))
        other.policy_version = 4
        after = engine.generate(MIXED_REQUESTS)
        assert after == other.generate(MIXED_REQUESTS)
        assert [one.tokens for one in after] != [one.tokens for one in before]

    def test_files_are_loaded_as_their_union(self, engine: Engine, other_folder: Path, tmp_path: Path) -> None:
        tensors = load_file(other_folder / "model.safetensors")
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names[::2]}, tmp_path / "a.safetensors")
        save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "b.safetensors")
        engine.load_weights(4, [tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
        other = TransformersEngine(str(other_folder))
        assert [one.tokens for one in engine.generate(MIXED_REQUESTS)] == [
            one.tokens for one in other.generate(MIXED_REQUESTS)
        ]

    def test_deltas_equal_the_complete_version(self, model_folder: Path, other_folder: Path, tmp_path: Path) -> None:
        versions = narrow_versions(other_folder, tmp_path)
        engine, other = (TransformersEngine(str(model_folder), dtype="bfloat16") for _ in range(2))
        assert not engine.try_load_changes(4, [versions[1].with_suffix(".delta")], None), (
            "it has not loaded a complete version yet"
        )
        engine.load_weights(3, versions[:1])
        for version, file in enumerate(versions[1:], 4):
            assert engine.try_load_changes(version, [file.with_suffix(".delta")], None)
            other.load_weights(version, [file])
            assert engine.policy_version == version
            for name, tensor in engine._model.state_dict().items():
                assert torch.equal(tensor.view(torch.int16), other._model.state_dict()[name].view(torch.int16)), name
        assert engine.generate(MIXED_REQUESTS) == other.generate(MIXED_REQUESTS)

    def test_a_foreign_delta_changes_nothing(self, model_folder: Path, other_folder: Path, tmp_path: Path) -> None:
        versions = narrow_versions(other_folder, tmp_path)
        engine = TransformersEngine(str(model_folder), dtype="bfloat16")
        engine.load_weights(3, versions[:1])
        before = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
        for file in (versions[2].with_suffix(".delta"), versions[2]):  # of the version after the next; no delta
            assert not engine.try_load_changes(5, [file], None)
        assert not engine.try_load_changes(4, [versions[1].with_suffix(".delta")] * 2, None), "one per file"
        assert engine.policy_version == 3
        for name, tensor in engine._model.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    def test_another_dtype_or_fingerprint_needs_the_complete_version(
        self, model_folder: Path, other_folder: Path, tmp_path: Path
    ) -> None:
        versions = narrow_versions(other_folder, tmp_path)
        wide = TransformersEngine(str(model_folder))
        wide.load_weights(3, versions[:1])
        assert not wide.try_load_changes(4, [versions[1].with_suffix(".delta")], None)
        engine = TransformersEngine(str(model_folder), dtype="bfloat16")
        engine.load_weights(3, versions[:1])
        wrong = Fingerprint(((1, 2, 3),), ((-99.0, -99.0),), "bfloat16")
        assert not engine.try_load_changes(4, [versions[1].with_suffix(".delta")], wrong)

    def test_weights_are_cast_to_the_engines_dtype(self, engine: Engine, model_folder: Path, tmp_path: Path) -> None:
        tensors = load_file(model_folder / "model.safetensors")
        save_file({name: tensor.double() for name, tensor in tensors.items()}, tmp_path / "double.safetensors")
        before = engine.generate(MIXED_REQUESTS)
        engine.load_weights(0, [tmp_path / "double.safetensors"])
        assert engine.generate(MIXED_REQUESTS) == before

    def test_only_tied_names_are_optional(self, engine: Engine, tied: bool, other_folder: Path, tmp_path: Path) -> None:
        tensors = load_file(other_folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, tmp_path / "model.safetensors")
        if tied:
            engine.load_weights(4, [tmp_path / "model.safetensors"])
        else:
            with pytest.raises(RoleError, match=r"lm_head\.weight is in no file"):
                engine.load_weights(4, [tmp_path / "model.safetensors"])

    def test_any_tied_name_fills_both(self, engine: Engine, tied: bool, other_folder: Path, tmp_path: Path) -> None:
        if not tied:
            pytest.skip("the model has no tied tensors")
        tensors = load_file(other_folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, tmp_path / "model.safetensors")
        engine.load_weights(4, [tmp_path / "model.safetensors"])
        other = TransformersEngine(str(other_folder))
        other.policy_version = 4
        assert engine.generate(MIXED_REQUESTS) == other.generate(MIXED_REQUESTS)

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"model.norm.weight": torch.zeros(33)}, r"model\.norm\.weight is \[33\] in .*, \[32\] in the model"),
            ({"model.extra": torch.zeros(1)}, r"holds model\.extra, which the model lacks"),
            ({"model.norm.weight": None}, r"model\.norm\.weight is in no file"),
        ],
    )
    def test_a_mismatched_tensor_is_refused_and_changes_nothing(
        self, engine: Engine, other_folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], problem: str
    ) -> None:
        tensors = {**load_file(other_folder / "model.safetensors"), **change}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "m.safetensors")
        before = engine.generate(MIXED_REQUESTS)
        with pytest.raises(RoleError, match=problem):
            engine.load_weights(4, [tmp_path / "m.safetensors"])
        assert engine.generate(MIXED_REQUESTS) == before

    def test_a_tensor_in_two_files_is_refused(self, engine: Engine, other_folder: Path) -> None:
        file = other_folder / "model.safetensors"
        with pytest.raises(RoleError, match="and in a file before it"):
            engine.load_weights(4, [file, file])

    def test_a_torn_file_is_refused_by_version(self, engine: Engine, other_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "torn.safetensors").write_bytes((other_folder / "model.safetensors").read_bytes()[:-8])
        with pytest.raises(RoleError, match="cannot read the files of version 4"):
            engine.load_weights(4, [tmp_path / "torn.safetensors"])

    def test_logits_that_are_not_numbers_are_an_error(self, engine: Engine, other_folder: Path, tmp_path: Path) -> None:
        tensors = load_file(other_folder / "model.safetensors")
        tensors["model.norm.weight"].fill_(torch.nan)
        save_file(tensors, tmp_path / "model.safetensors")
        engine.load_weights(4, [tmp_path / "model.safetensors"])
        with pytest.raises(RoleError, match="not numbers, for 6 requests"):
            engine.generate(make_requests())


def test_a_row_ends_with_the_token_that_completes_its_text(tmp_path: Path) -> None:
    build_toy_model(tmp_path, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path))
    prompts = [(70 + number, 80, 90) for number in range(6)]
    whole = engine.generate(requests_for(prompts, max_tokens=40, ignore_eos=True))
    asked, expected = [], []
    for request, answer in zip(requests_for(prompts, max_tokens=40, ignore_eos=True), whole, strict=True):
        text = tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
        # Two letters that first occur together in the middle; the other rows have no stop text.
        pairs = [text[at : at + 2] for at in range(4, 30) if text[at : at + 2].isascii()]
        stop = () if len(asked) % 2 else ("never", next(pair for pair in pairs if pair not in text[:4]))
        asked.append(replace(request, sampling=replace(request.sampling, stop=stop)))
        length = 40
        if stop:
            decoded = (tokenizer.decode(list(answer.tokens[:n]), skip_special_tokens=True) for n in range(41))
            length = next(n for n, part in enumerate(decoded) if stop[1] in part)
        expected.append((answer.tokens[:length], "stop" if stop else "length"))
    stopped = engine.generate(asked)
    assert [(answer.tokens, answer.finish_reason) for answer in stopped] == expected
    assert min(len(answer.tokens) for answer in stopped) < 40
