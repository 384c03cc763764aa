"""Promises of the vLLM engine, on real vLLM on a CPU.

It fulfills the contract of engines. Its logprobs are the trainer's. It computes with the weights it loads, even where
vLLM's own reload fails. Guided answers have the requested form, as with the transformers engine, and the same recorded
logprobs. Images are processed as by the transformers engine. A run with it is as sound as with any engine, and learns.
If vLLM cannot compute with a model, the run ends with vLLM's reason.

One engine with tied embeddings serves most tests, because starting it takes a minute.
"""

import dataclasses
import inspect
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from packaging.version import Version
from PIL import Image
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rftdask import Experiment
from rftdask.algorithm.compose import make_algorithm
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import LoraConfig, ModelConfig
from rftdask.data.images import ImageFolder, ImageProcessor
from rftdask.engines.base import Engine, GenerateRequest, Generation, Give, SamplingParams, Take
from rftdask.engines.sampling import Guides
from rftdask.engines.transformers import TransformersEngine
from rftdask.engines.vllm import VllmEngine, _mixed
from rftdask.engines.vllm_follower import ADDRESS, NODES
from rftdask.errors import RoleError
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.policy.answer_parsers import AnswerParser, ToolCall
from rftdask.storage import open_storage
from rftdask.synchronizer.fingerprint import Fingerprint, fixed_sequences
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import read_published
from rftdask.synchronizer.publisher import Publisher
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.integration.run_cases import RunProcess, assert_sound, run_folder, status_of, write_config
from tests.unit.engines.engine_contract import ContinuousContract, EngineContract
from tests.unit.rollouts.policy import test_recording_forms as guided
from tests.unit.trainer.trainer_cases import engine_config
from tests.versions import needs_newer_transformers
from tests.vllm_engine.vllm_models import END_IDS, save_idefics3, save_qwen2, save_qwen_vl

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "stand_ins"
RUN_DEADLINE_S = 900.0
NUM_EVAL = 4
NUM_GRPO = 8
LAST_LINE = re.compile(r"quickstart: accuracy (\d\.\d\d) -> (\d\.\d\d) in ")
UNSPLIT = "of an image that Idefics3 does not split it counts no part, and fails on its pixels"
# vLLM's imports warn of future changes.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1000)]

Others = dict[int, TransformersEngine]


def test_vllm_has_the_arguments_for_a_shared_gpu() -> None:
    # A CPU has no sleep mode; the test records the calls that the engine would make.
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    inspect.signature(AsyncLLM.sleep).bind(None, level=1)
    inspect.signature(AsyncLLM.wake_up).bind(None, tags=["weights"])
    assert "enable_sleep_mode" in {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of one model with the weights of versions 0 and 1."""
    root = tmp_path_factory.mktemp("models")
    return {version: save_qwen2(root / str(version), seed=version, tied=True) for version in (0, 1)}


@pytest.fixture(scope="module")
def others(folders: dict[int, Path]) -> dict[int, TransformersEngine]:
    """Outputs of these weights, computed by the transformers engine."""
    return {version: TransformersEngine(str(folder)) for version, folder in folders.items()}


@pytest.fixture(scope="module")
def engine(folders: dict[int, Path]) -> Iterator[VllmEngine]:
    if find_spec("vllm") is None:
        pytest.fail("vLLM is not installed here; tests/vllm_engine/install_vllm.sh VENV makes an environment with it")
    section = InferenceModelConfig.model_validate(
        {"engine_type": "vllm", "engine_num": 1, "dtype": "float32", "seed": 42}
    )
    model = ModelConfig(model_path=str(folders[0]), max_model_len=512, max_prompt_tokens=64, max_response_tokens=64)
    engine = VllmEngine.from_config(section, model, "cpu")
    yield engine
    engine.close()
    engine.close()
    with pytest.raises(RoleError, match="was closed"):
        engine.generate([GenerateRequest((3, 4), SamplingParams(max_tokens=1), 0)])


def skip_before(release: str, fault: str) -> None:
    """Skip the test if vLLM is older than the release that introduced the tested behavior."""
    from vllm import __version__

    if Version(__version__) < Version(release):
        pytest.skip(f"vLLM {__version__}: {fault}")


def weights_of(folder: Path) -> list[Path]:
    return [folder / "model.safetensors"]


def fingerprint_of(engine: TransformersEngine) -> Fingerprint:
    empty = Fingerprint(fixed_sequences(128), (), "float32")
    return Fingerprint(empty.sequences, tuple(engine.logprobs(empty.pairs)), "float32")


def largest_gap(one: Engine, other: Engine) -> float:
    pairs = [((3, 4), tuple(range(10, 40))), ((9,), (8, 7, 6, 127))]
    rows = zip(one.logprobs(pairs), other.logprobs(pairs), strict=True)
    return max(abs(a - b) for row, others in rows for a, b in zip(row, others, strict=True))


REQUESTS = [
    GenerateRequest(
        tuple(range(3, 3 + length)), SamplingParams(24, temperature, top_p, top_k, repetition_penalty=penalty), seed
    )
    for seed, (length, temperature, top_p, top_k, penalty) in enumerate(
        [
            (3, 1.0, 1.0, -1, 1.0),
            (40, 1.0, 1.0, -1, 1.0),
            (5, 0.7, 0.9, -1, 1.0),
            (7, 1.3, 1.0, 20, 1.2),
            (4, 0.0, 1.0, -1, 1.0),
        ]
    )
]


FOLLOW = "import sys, pathlib, rftdask.engines.vllm_follower as f; f.follow(f.Nodes(2, pathlib.Path(sys.argv[1])), 1)"


def test_an_engine_over_two_nodes_works_like_one_and_ends(
    folders: dict[int, Path], others: Others, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both nodes are this machine, each with its own processes, which connect over the network.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    monkeypatch.setenv(NODES, f"2:{tmp_path}")
    section = InferenceModelConfig.model_validate(
        {"engine_type": "vllm", "engine_num": 1, "dtype": "float32", "tensor_parallel_size": 2}
    )
    model = ModelConfig(model_path=str(folders[0]), max_model_len=128, max_prompt_tokens=64, max_response_tokens=64)
    with subprocess.Popen([sys.executable, "-c", FOLLOW, str(tmp_path)]) as follower:
        try:
            engine = VllmEngine.from_config(section, model, "cpu")
            try:
                assert largest_gap(engine, others[0]) < 1e-4
                engine.load_verified(1, weights_of(folders[1]), fingerprint_of(others[1]))
                assert largest_gap(engine, others[1]) < 1e-4
                parts = psutil.Process(follower.pid).children(recursive=True)
                assert any("VLLM" in part.name() or "vllm" in " ".join(part.cmdline()) for part in parts), parts
            finally:
                engine.close()
        finally:
            follower.terminate()
    assert psutil.wait_procs(parts, timeout=60)[1] == []


class TestContract:
    """The contract of engines, except for tests that need a separate engine."""

    test_nothing = EngineContract.test_no_requests_no_generations
    test_order = EngineContract.test_one_generation_per_request_in_order
    test_logprobs = EngineContract.test_one_logprob_per_token_and_none_above_zero
    test_scores = EngineContract.test_logprobs_of_prompt_tokens_equal_those_of_sampling
    test_max_tokens = EngineContract.test_no_response_exceeds_its_max_tokens
    test_length = EngineContract.test_a_truncated_response_has_finish_reason_length
    test_other_seeds = EngineContract.test_another_seed_gives_other_tokens
    test_neighbors = EngineContract.test_tokens_do_not_depend_on_the_seeds_of_neighbors
    test_seeds = EngineContract.test_the_largest_and_negative_seeds_are_seeds
    test_later = EngineContract.test_later_requests_get_the_same_tokens_as_without_a_batch
    test_unwanted = EngineContract.test_a_cancelled_request_delays_nothing
    test_unknown = EngineContract.test_dropping_an_ended_or_unknown_request_has_no_effect
    test_streams = EngineContract.test_streamed_tokens_equal_those_of_the_result
    test_short = ContinuousContract.test_a_later_short_request_is_answered_first
    test_slot = ContinuousContract.test_a_cancelled_long_request_is_not_finished

    def test_the_same_call_twice_gives_the_same_tokens(self, engine: Engine) -> None:
        once, again = ([generation.tokens for generation in engine.generate(REQUESTS)] for _ in range(2))
        assert once == again

    def test_an_end_token_ends_a_response_and_is_its_last(self, engine: Engine) -> None:
        sampling = SamplingParams(max_tokens=100, temperature=2.0)
        answers = engine.generate([GenerateRequest((5, 6), sampling, seed) for seed in range(16)])
        ended = [answer for answer in answers if answer.finish_reason == "stop"]
        assert ended and all(answer.tokens[-1] in END_IDS for answer in ended)
        assert not any(set(answer.tokens[:-1]) & set(END_IDS) for answer in answers)

    def test_a_missing_weights_file_is_refused_by_name(self, engine: Engine, tmp_path: Path) -> None:
        with pytest.raises(RoleError, match=r"version 3.*absent\.safetensors"):
            engine.load_weights(3, [tmp_path / "absent.safetensors"])

    def test_a_temperature_that_vllm_would_change_is_refused(self, engine: Engine) -> None:
        with pytest.raises(RoleError, match=r"temperature is 0\.001"):
            engine.generate([GenerateRequest((3, 4), SamplingParams(2, temperature=0.001), 0)])


def trainer_logprobs(model: torch.nn.Module, answers: Sequence[Generation]) -> list[list[float]]:
    rows = [np.array([*r.prompt_tokens, *a.tokens]) for r, a in zip(REQUESTS, answers, strict=True)]
    prompts = np.array([len(request.prompt_tokens) for request in REQUESTS])
    temperatures = np.array([request.sampling.temperature for request in REQUESTS])
    with torch.no_grad():
        scored_BT, _ = token_logprobs(model, pack_rows(rows, prompts, temperatures))
    return [row[: len(answer.tokens)].tolist() for row, answer in zip(scored_BT, answers, strict=True)]


def test_prompts_that_exceed_one_pass_are_all_answered(engine: VllmEngine) -> None:
    prompts = [(3 + number, *range(20, 120)) for number in range(90)]  # 9,000 tokens, with no common prefixes
    answers = engine.generate([GenerateRequest(prompt, SamplingParams(2), prompt[0]) for prompt in prompts])
    assert all(1 <= len(answer.tokens) <= 2 for answer in answers) and len(answers) == 90


@pytest.mark.parametrize("sampler", ["vllm", "transformers"])
def test_both_engines_record_the_logprobs_of_the_trainer(sampler: str, engine: VllmEngine, others: Others) -> None:
    answers = (engine if sampler == "vllm" else others[0]).generate(REQUESTS)
    computed = trainer_logprobs(others[0]._model, answers)
    gaps = [t - s for row, a in zip(computed, answers, strict=True) for t, s in zip(row, a.logprobs, strict=True)]
    assert max(map(abs, gaps)) < 1e-4
    assert sum(math.expm1(gap) - gap for gap in gaps) / len(gaps) < 1e-6
    pairs = [(r.prompt_tokens, a.tokens) for r, a in zip(REQUESTS, answers, strict=True)]
    for one, other in zip(engine.logprobs(pairs), others[0].logprobs(pairs), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


FORM = """start: %json {"enum": [{"yes": true, "n": 1}, {"yes": true, "n": 23}, {"no": [4, 5]}],
"x-guidance": {"whitespace_flexible": false}}"""


def test_guided_answers_equal_those_of_the_transformers_engine(engine: VllmEngine, others: Others) -> None:
    forms = (FORM, "", 'start: /[a-c]{3,5}/ "!"', FORM, FORM)  # in the order of REQUESTS, the last of which is greedy
    asked = [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, grammar=form))
        for each, form in zip(REQUESTS, forms, strict=True)
    ]
    answers = engine.generate(asked)
    guides = Guides(others[0]._tokenizer, 128, END_IDS)
    for request, answer in zip(asked, answers, strict=True):
        guide = guides.guide(request.sampling)
        for token in answer.tokens:
            assert guide.allowed()[token]
            guide.take(token)
        assert answer.finish_reason == "stop" or not request.sampling.grammar
    assert answers[-1].tokens == others[0].generate(asked)[-1].tokens
    computed = trainer_logprobs(others[0]._model, answers)
    gaps = [t - s for row, a in zip(computed, answers, strict=True) for t, s in zip(row, a.logprobs, strict=True)]
    assert max(map(abs, gaps)) < 1e-4


def test_forbidden_words_never_occur_and_forced_answers_end(engine: VllmEngine, others: Others) -> None:
    greedy = SamplingParams(12, temperature=0.0)
    [free] = engine.generate([GenerateRequest((3, 4), greedy, 0)])
    for bad in ((free.tokens[0],), free.tokens[:3]):
        sampling = dataclasses.replace(greedy, bad_tokens=(bad,))
        [answer], [expected] = (each.generate([GenerateRequest((3, 4), sampling, 0)]) for each in (engine, others[0]))
        assert answer.tokens == expected.tokens != free.tokens
    [y] = others[0]._tokenizer.encode("y")
    nothing = SamplingParams(12, grammar='start: "yes"', bad_tokens=((y,),))
    [ended] = engine.generate([GenerateRequest((3, 4), nothing, 0)])
    assert (len(ended.tokens), ended.finish_reason) == (1, "stop") and ended.tokens[0] in END_IDS
    assert engine.generate([GenerateRequest((3, 4), greedy, 0)])[0].tokens == free.tokens


test_answers_through_the_api_have_the_form_that_is_asked_for = guided.test_answer_has_the_requested_form
test_tools_are_called_where_that_is_required = guided.test_required_tool_is_called
test_a_form_that_is_none_costs_no_engine = guided.test_invalid_form_is_refused_by_name


def test_the_second_model_runner_also_tempers_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the samplers of vLLM 0.26 and 0.32, whose kernels need a GPU: their return values are simulated."""
    from rftdask.engines.vllm_worker import KernelSampler, TemperedKernelSampler, WeightWorker

    asked = []

    def sample(self: object, logits: torch.Tensor, rows: torch.Tensor, *args: object, return_logprobs: bool) -> object:
        asked.append((args, return_logprobs))
        return logits.argmax(dim=-1), torch.full_like(logits, math.nan)  # as after top-k

    monkeypatch.setattr(KernelSampler, "sample", sample)
    sampler = object.__new__(KernelSampler)
    sampler.logprobs_mode = "raw_logprobs"
    sampler.sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=torch.tensor([0.5, 9.0, 0.0, 1.0])))
    worker = object.__new__(WeightWorker)
    masks = SimpleNamespace(apply_grammar_bitmask=lambda logits, *rest: logits.fill_(-math.inf))
    worker.model_runner = SimpleNamespace(sampler=sampler, structured_outputs_worker=masks)  # type: ignore[assignment]
    assert worker.use_tempered_logprobs((1,))
    assert type(sampler) is TemperedKernelSampler and sampler.logprobs_mode == "processed_logprobs"
    logits = torch.tensor([[1.0, 3.0], [2.0, 1.0], [4.0, 8.0]], dtype=torch.bfloat16)
    slots = torch.tensor([0, 2, 3], dtype=torch.int32)
    tokens, tempered = sampler.sample(logits, slots, "positions", return_logprobs=True)
    assert tokens.tolist() == [1, 0, 1]
    assert tempered.tolist() == [[2.0, 6.0], [2.0, 1.0], [4.0, 8.0]]
    assert asked == [(("positions",), False)], "so that it may use its fused sampler"
    # If a grammar allows no token, the logprobs are those before the grammar.
    masked = logits.clone()
    masks.apply_grammar_bitmask(masked, "requests", "bits")
    assert masked.isneginf().all()
    _, tempered = sampler.sample(masked, slots, "positions", return_logprobs=True)
    assert tempered.tolist() == [[2.0, 6.0], [2.0, 1.0], [4.0, 8.0]]
    _, tempered = sampler.sample(logits[:1], slots[:1], "positions", return_logprobs=True)
    assert tempered.tolist() == [[2.0, 6.0]], "the next step has a mask of its own, or none"


def test_seeds_are_valid_for_both_model_runners() -> None:
    seeds = [_mixed(seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63), 1 << 32)]
    assert all(np.int64(seed) == seed >= 0 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_loaded_weights_are_verified_and_reset_the_prefix_cache(
    engine: VllmEngine, folders: dict[int, Path], others: Others
) -> None:
    prompt = tuple(range(3, 100))  # several blocks of vLLM's cache
    request = GenerateRequest(prompt, SamplingParams(8, temperature=0.0), 0)
    engine.generate([request])
    served_by = engine._llm
    for version in (1, 0, 1):
        engine.load_verified(10 + version, weights_of(folders[version]), fingerprint_of(others[version]))
        [answer], [expected] = engine.generate([request]), others[version].generate([request])
        assert (answer.tokens, answer.min_policy_version) == (expected.tokens, 10 + version)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert engine._llm is served_by, "loaded in place, tied embeddings and all, not started again"


def test_a_cache_fits_after_returning_to_the_gpu_and_loading(
    folders: dict[int, Path], engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        usual = getattr(type(engine._llm), name)

        async def call(llm: Any, *given: Any, **named: Any) -> Any:
            calls.append(f"{name} {named}" if name == "wake_up" else name)
            # A CPU has no sleep mode.
            return None if name in ("sleep", "wake_up") else await usual(llm, *given, **named)

        monkeypatch.setattr(type(engine._llm), name, call)

    for name in ("sleep", "wake_up", "collective_rpc"):
        noted(name)
    monkeypatch.setattr(engine, "_sleeps", True)
    weights, cache = ("wake_up {'tags': ['" + tag + "']}" for tag in ("weights", "kv_cache"))
    for _ in range(2):
        calls.clear()
        engine.leave_device()
        engine.return_to_device()
        engine.load_weights(0, weights_of(folders[0]))
        engine.generate([GenerateRequest((3, 4), SamplingParams(max_tokens=1), 0)])
        engine.logprobs([((3,), (4,))])
        assert calls == ["sleep", weights, "collective_rpc", cache]


def test_a_response_under_way_goes_on_with_new_weights(
    engine: VllmEngine, folders: dict[int, Path], others: Others
) -> None:
    from vllm.outputs import CompletionOutput

    engine.load_verified(30, weights_of(folders[0]), fingerprint_of(others[0]))
    long = GenerateRequest((3, 4, 5), SamplingParams(100, ignore_eos=True), 1)
    short = GenerateRequest((3, 4), SamplingParams(1), 2)
    answers: dict[int, Generation] = {}
    looks: list[list[tuple[int, GenerateRequest | None]]] = [[(2, short)], [(0, long), (1, short)]]

    def take() -> Sequence[tuple[int, GenerateRequest | None]]:
        if len(looks) == 1 and 1 in answers and 0 not in answers:
            engine.load_verified(31, weights_of(folders[1]), fingerprint_of(others[1]))
            return looks.pop()
        return looks.pop() if len(looks) == 2 else []

    engine.serve(take, answers.__setitem__)
    versions = {number: (each.min_policy_version, each.max_policy_version) for number, each in answers.items()}
    assert versions == {0: (30, 31), 1: (30, 30), 2: (31, 31)}
    # Each token has the logprob with which it was sampled; after the change, the cache of earlier tokens is recomputed.
    pair = (long.prompt_tokens, answers[0].tokens)
    old, new = (np.array(others[version].logprobs([pair])[0]) for version in (0, 1))
    said = np.array(answers[0].logprobs)
    of_old = np.abs(said - old) < 1e-3
    changed = int(np.argmin(of_old))
    assert 0 < changed < len(said), "loaded before its first or after its last token"
    # Since 0.32 vLLM reports which version sampled each token; before, only that both did.
    is_told = "weight_versions" in {field.name for field in dataclasses.fields(CompletionOutput)}
    assert answers[0].version_starts == (((0, 30), (changed, 31)) if is_told else ())
    assert np.abs(said - new)[changed:].max() < 1e-3


def test_a_delta_becomes_the_whole_that_is_loaded(
    tmp_path: Path, engine: VllmEngine, folders: dict[int, Path], others: Others
) -> None:
    """vLLM does not change weights in place: the machine builds the whole file. Some values of version 0 equal those of
    version 1.
    """
    storage = open_storage(str(tmp_path / "run"))
    publisher = Publisher(storage, "main", full_publish_interval=2)
    tensors = load_file(weights_of(folders[0])[0])
    published = []
    for version in (1, 2):
        publisher.publish(version, {"model.safetensors": bytearray(save(tensors, {"format": "pt"}))})
        found = read_published(storage, version)
        assert found is not None
        published.append(found)
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    assert published[0].delta is None and published[1].delta is not None
    assert storage.list("weights/2") == ["MANIFEST.json", "model.safetensors.delta"]
    other = TransformersEngine(str(folders[0]))
    for each in published:
        copy = NodeCache(storage, each, 60.0)
        assert not engine.try_load_changes(each.version, copy.files, None)
        other.load_weights(each.version, copy.files)
        engine.load_verified(each.version, copy.files, fingerprint_of(other))
        assert largest_gap(engine, other) < 1e-4
        copy.close()
    assert largest_gap(engine, others[0]) > 1e-3


class VllmsOwnReload(Engine):
    """The engine, but it loads weights as vLLM documents it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.num_anew = 0

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> Engine:
        raise AssertionError("it is made by hand")

    def serve(self, take: Take, give: Give) -> None:
        self.engine.serve(take, give)

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return self.engine.logprobs(pairs)

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        call = self.engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(files[0].parent)})
        self.engine._run(call, "its own reload")

    def load_anew(self, version: int, files: Sequence[Path]) -> None:
        self.num_anew += 1
        self.engine.load_anew(version, files)


def test_a_stale_output_head_is_noticed_and_restarts_the_engine(
    engine: VllmEngine, folders: dict[int, Path], others: Others
) -> None:
    """vLLM since 0.28 on a CPU, with tied embeddings. If this test fails, `load_published` may no longer need its last
    lines.
    """
    engine.load_verified(20, weights_of(folders[1]), fingerprint_of(others[1]))
    trusting = VllmsOwnReload(engine)
    trusting.load_weights(21, weights_of(folders[0]))
    if largest_gap(engine, others[0]) < 1e-4:
        skip_before("0.28", "its own reload leaves nothing stale")
    assert largest_gap(engine, others[0]) > 0.1
    trusting.load_verified(21, weights_of(folders[0]), fingerprint_of(others[0]))
    assert trusting.num_anew == 1
    assert largest_gap(engine, others[0]) < 1e-4
    engine.load_verified(22, weights_of(folders[1]), fingerprint_of(others[1]))  # and later loads work as before
    assert largest_gap(engine, others[1]) < 1e-4


def moved_trainer(folder: Path, lora: LoraConfig) -> Iterator[TorchEngine]:
    """Return a trainer of adapters whose weights have moved repeatedly; its tokenizer is unused."""
    build_toy_model(folder, hidden_size=128, intermediate_size=128, num_layers=2, num_heads=2)
    trainer = TorchEngine(engine_config(folder, lora, deterministic=False), make_algorithm("grpo"))
    while True:
        for number, parameter in enumerate(p for p in trainer._model.parameters() if p.requires_grad):
            parameter.data += 0.02 * (-1) ** number
        yield trainer


def test_adapters_are_loaded_next_to_the_frozen_weights(tmp_path: Path, engine: VllmEngine) -> None:
    """Uses its own engine, with `engine` closed to free memory: vLLM must know of adapters from the start."""
    engine.close()
    trainers = moved_trainer(tmp_path / "model", LoraConfig(lora_rank=4))
    first = next(trainers)
    adapted = VllmEngine(str(tmp_path / "model"), max_model_len=64, lora_rank=4)
    try:
        for version in (1, 2):
            trainer = first if version == 1 else next(trainers)
            fingerprint = trainer.fingerprint()
            assert fingerprint.problem(adapted.logprobs(fingerprint.pairs), "float32")
            files = []
            for name, data in trainer.weights().items():
                files.append(tmp_path / name)
                files[-1].write_bytes(data)
            adapted.load_verified(version, files, fingerprint)
            assert adapted.logprobs(fingerprint.pairs)[0] == pytest.approx(fingerprint.logprobs[0], abs=1e-4)
    finally:
        adapted.close()


def picture(seed: int, size: tuple[int, int] = (56, 28)) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def check_images(models: Sequence[Path], folder: Path, then: Callable[[VllmEngine, ImageProcessor], None]) -> None:
    """A separate engine answers about images as the transformers engine does, with the trainer's logprobs, before and
    after it loads new weights. then: further checks.
    """
    images = ImageProcessor(str(models[0]), folder=ImageFolder(folder))
    encode, names = images.hf_processor.tokenizer.encode, [images.folder.put(picture(seed)) for seed in range(3)]
    names[1] = images.folder.put(picture(1, (84, 140)))
    greedy = SamplingParams(8, temperature=0.0, ignore_eos=True, bad_tokens=((images.placeholder_id,),))
    # No image, one, two, and the same tokens with other images: caches must not be confused.
    requests = []
    for shown in ((), (names[0],), (names[0], names[1]), (names[1], names[0]), (names[2],)):
        tokens = encode("see ") + [token for name in shown for token in (*images.tokens(name), *encode("and"))]
        for sampling in (greedy, dataclasses.replace(greedy, temperature=0.7)):
            requests.append(GenerateRequest(tuple(tokens), sampling, len(requests), shown))
    others = [TransformersEngine(str(folder)) for folder in models]
    for each in others:
        each._images = images
    seeing = VllmEngine(str(models[0]), max_model_len=128)
    seeing._images = images
    try:
        for version in (0, 1, 0):
            if version != seeing.policy_version:
                seeing.load_verified(version, weights_of(models[version]), fingerprint_of(others[version]))
            answers = seeing.generate(requests)
            for answer, expected in list(zip(answers, others[version].generate(requests), strict=True))[::2]:
                assert answer.tokens == expected.tokens
            assert answers[4].tokens != answers[6].tokens, "the order of the images counts"
            rows = pack_rows(
                [np.array([*r.prompt_tokens, *a.tokens]) for r, a in zip(requests, answers, strict=True)],
                np.array([len(request.prompt_tokens) for request in requests]),
                np.array([request.sampling.temperature for request in requests]),
                images=[request.images for request in requests],
                processor=images,
            )
            with torch.no_grad():
                scored_BT, _ = token_logprobs(load_policy(str(models[version]), "float32", "cpu")[0], rows)
            for scored, answer in zip(scored_BT.tolist(), answers, strict=True):
                assert answer.logprobs == pytest.approx(scored[: len(answer.tokens)], abs=1e-4)
        # A response in progress while weights load processes its image again.
        told: list[tuple[int, ...]] = []
        long = dataclasses.replace(
            requests[3], sampling=SamplingParams(100, ignore_eos=True), on_tokens=lambda tokens: told.append(tokens)
        )
        looks: list[list[tuple[int, GenerateRequest | None]]] = [[(1, requests[0])], [(0, long)]]
        found: dict[int, Generation] = {}

        def take() -> Sequence[tuple[int, GenerateRequest | None]]:
            if len(looks) == 1 and told:
                seeing.load_weights(1, weights_of(models[1]))
            return looks.pop() if len(looks) == 2 or (looks and told) else []

        seeing.serve(take, found.__setitem__)
        assert (found[0].min_policy_version, found[0].max_policy_version) == (0, 1) and len(found[0].tokens) == 100
        then(seeing, images)
    finally:
        seeing.close()


@needs_newer_transformers
def test_images_match_transformers_and_trainer_after_loading(tmp_path: Path, engine: VllmEngine) -> None:
    """Uses its own engine, with `engine` closed to free memory."""
    skip_before("0.31", UNSPLIT)
    engine.close()
    models = [save_idefics3(tmp_path / str(version), seed=version) for version in (0, 1)]

    def check_other_tokens(seeing: VllmEngine, images: ImageProcessor) -> None:
        other = ImageProcessor(str(models[0]), folder=images.folder)
        other.hf_processor.image_seq_len = 3
        seeing._images = other
        name = images.folder.put(picture(0))
        with pytest.raises(RoleError, match="makes other tokens of the images of a prompt"):
            seeing.generate([GenerateRequest(other.tokens(name), SamplingParams(8), 0, (name,))])

    check_images(models, tmp_path, check_other_tokens)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl"])
def test_images_of_torchvision_models_match_the_trainer(tmp_path: Path, engine: VllmEngine, model_type: str) -> None:
    """Runs in a separate process, because transformers decides at import time which classes need torchvision."""
    engine.close()
    for version in (0, 1):
        save_qwen_vl(tmp_path / str(version), version, model_type)
    program = (
        "import sys, pathlib; from tests.vllm_engine.test_vllm_engine import check_images; "
        "folder = pathlib.Path(sys.argv[1]); check_images([folder / '0', folder / '1'], folder, lambda *_: None)"
    )
    path = os.pathsep.join([str(STAND_INS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", f"if __name__ == '__main__':\n    {program}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


@needs_newer_transformers
def test_a_run_with_images_trains_on_vllm_samples(tmp_path: Path, engine: VllmEngine) -> None:
    skip_before("0.31", UNSPLIT)
    engine.close()
    save_idefics3(tmp_path / "model", seed=0)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    rows = [{"question": "what? ", "answer": "a", "image": f"{number}.png"} for number in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {
        "path": str(tmp_path / "tasks.jsonl"),
        "format": {"prompt_key": "question", "response_key": "answer", "image_key": "image"},
    }
    reward = "tests.e2e.toy_reward.varied_reward"
    tree = {
        "name": "seeing",
        "mode": "both",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tmp_path / "model"), "max_prompt_tokens": 64, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "kl_loss_fn": "none", "optimizer": {"lr": 0.01}},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset, "default_reward_fn_type": reward}},
        "explorer": {"rollout_model": {"engine_type": "vllm", "engine_num": 1}},
        "trainer": {"total_steps": 2, "num_ranks": 1},
        "synchronizer": {"sync_style": "fixed", "sync_offset": 0},
        "cluster": {"num_cpus": 2},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(tree))
    with RunProcess("run", str(config), "--progress", "plain") as run:
        ended = run.end(RUN_DEADLINE_S)
        assert ended.code == 0, ended
        run.wait_for_no_survivors()
    folder = tmp_path / "runs" / "rftdask" / "seeing"
    assert_sound(folder)
    assert len(list((folder / "media").iterdir())) == 4
    steps = Experiment.open(folder).metrics("trainer")
    assert len(steps) == 2 and (steps.grad_norm > 0).all(), "the weights moved, and the engine moved with them:"
    assert (steps.mismatch_kl.abs() < 1e-6).all()


def test_the_gsm8k_config_completes_three_steps_with_vllm(tmp_path: Path, engine: VllmEngine) -> None:
    """Untied embeddings; `engine` stays closed from here on to free memory."""
    engine.close()
    data = os.environ.get("RFTDASK_GSM8K")
    if not data:
        pytest.fail("set RFTDASK_GSM8K to a folder with train.jsonl and test.jsonl; see test_real_data.py")
    build_toy_model(tmp_path / "model", hidden_size=128, intermediate_size=128, num_layers=1, num_heads=2)
    held_out = tmp_path / "test.jsonl"
    held_out.write_text("".join(Path(data, "test.jsonl").read_text().splitlines(keepends=True)[:NUM_EVAL]))
    arguments = (
        f"checkpoint_root_dir={tmp_path}/runs",
        f"model.model_path={tmp_path}/model",
        "model.max_prompt_tokens=1024",
        "model.max_response_tokens=8",
        "algorithm.repeat_times=4",
        "algorithm.optimizer.lr=0.01",
        "algorithm.optimizer.lr_warmup_steps=0",
        "cluster.num_cpus=2",
        "explorer.rollout_model.engine_type=vllm_async",
        "explorer.rollout_model.engine_num=1",
        "trainer.num_ranks=1",
        "synchronizer.sync_offset=0",
        "buffer.batch_size=2",
        "buffer.explorer_input.default_reward_fn_type=tests.e2e.toy_reward.varied_reward",
        f"buffer.explorer_input.taskset.path={data}/train.jsonl",
        f"buffer.explorer_input.eval_tasksets[0].path={held_out}",
        "trainer.total_steps=3",
    )
    with RunProcess("run", str(ROOT / "config" / "gsm8k.yaml"), *arguments, "--progress", "plain") as run:
        ended = run.end(RUN_DEADLINE_S)
        assert ended.code == 0, ended
        run.wait_for_no_survivors()
    experiment = Experiment.open(tmp_path / "runs" / "gsm8k" / "qwen2.5-1.5b-grpo")
    status = assert_sound(Path(experiment.url))
    assert status["checkpoint"] == status["step"] == 3
    steps = experiment.metrics("trainer")
    assert steps.staleness_max.tolist() == [0.0, 0.0, 0.0]
    assert (steps.grad_norm > 0).all(), "the weights moved, and the engine moved with them:"
    assert (steps.mismatch_kl.abs() < 1e-6).all()


def test_the_quickstart_learns_with_vllm(tmp_path: Path, engine: VllmEngine) -> None:
    """Runs half of the GRPO steps, in which it learns most."""
    engine.close()
    arguments = ("explorer.rollout_model.engine_type=vllm", f"stages[1].trainer.total_steps={NUM_GRPO}")
    script = (str(ROOT / "examples" / "quickstart.py"),)
    with RunProcess(*arguments, program=script, env={"RFTDASK_RUNS": str(tmp_path)}) as run:
        ended = run.end(RUN_DEADLINE_S)
        assert ended.code == 0, ended
        run.wait_for_no_survivors()
    last = LAST_LINE.match(ended.out.splitlines()[-1])
    assert last is not None, ended.out[-500:]
    before, after = map(float, last.groups())
    assert after >= 0.5 and after >= 2 * before, last[0]
    steps = Experiment.open(tmp_path / "rftdask" / "quickstart" / "grpo").metrics("trainer")
    assert len(steps) == NUM_GRPO and (steps.mismatch_kl.abs() < 0.1).all(), "one step off policy, and no further"


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        ("mistral", '[TOOL_CALLS]add{"x": 1}'),
        ("glm45", "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
        (
            "deepseek_v3",
            "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>add\n"
            '```json\n{"x": 1}\n```<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>',
        ),
    ],
)
def test_parsers_of_vllm_see_marks_that_are_special_tokens(parser: str, said: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    marks = sorted({"[ARGS]", *re.findall(r"\[TOOL_CALLS\]|</?[a-z_]+>|<\uff5c[^\uff5c]*\uff5c>", said)})
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokens = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text != said
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    parsed = AnswerParser(tokenizer, parser, "none").parse(text, tokens, "", tools)
    assert parsed.calls == (ToolCall("add", {"x": 1}),)
    assert AnswerParser(tokenizer, parser, "none").parse("4", [*map(ord, "4")], "", tools).content == "4"


def test_a_model_that_vllm_cannot_compute_ends_with_the_reason(tmp_path: Path, engine: VllmEngine) -> None:
    engine.close()
    build_toy_model(tmp_path / "model", hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2)
    config = write_config(tmp_path)
    arguments = (f"model.model_path={tmp_path}/model", "explorer.rollout_model.engine_type=vllm")
    with RunProcess("run", str(config), *arguments, "--progress", "plain") as run:
        ended = run.end(RUN_DEADLINE_S)
        run.wait_for_no_survivors()
    assert ended.code == 1, ended
    assert "Unsupported CPU attention configuration: head_dim=16" in ended.err.splitlines()[-1], ended.err
    notes = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "runs again (1 of" in notes[0], notes
    assert "poisoned" not in status_of(run_folder(config))["experiences"]
