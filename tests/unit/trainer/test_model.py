"""The trainer's model helpers: logprobs equal a plain forward's and the engine's, weights come back to the bit."""

import math
import string
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rftdask.algorithm.losses.imitation import Jsd
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import DataError
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import distinct_state
from rftdask.trainer.engines.tensor_files import stage_tensors
from rftdask.trainer.model import (
    TeacherStates,
    _score,
    entropy,
    entropy_signals,
    export_hf,
    load_policy,
    row_scores,
    token_logprobs,
)
from rftdask.trainer.packing import PackedRows, pack_rows
from tests.numerics import assert_close, assert_same_logprobs, shifted_seed
from tests.unit.engines.tiny_models import save_tiny_mixture

VOCAB_SIZE = 50
PROMPT_LENGTHS = [3, 1, 5, 4]
LENGTHS = [9, 4, 5, 12]  # the third row has no response
TEMPERATURES = [1.0, 0.5, 1.0, 2.0]


def save_tokenizer(folder: Path) -> None:
    """One token per letter, "a" is 2. Byte-level, because AutoTokenizer makes every tokenizer of a Qwen2 that."""
    letters = string.ascii_letters[: VOCAB_SIZE - 2]
    vocab = {"<pad>": 0, "<end>": 1, **{letter: number for number, letter in enumerate(letters, start=2)}}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(shifted_seed(0))
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def policy(folder: Path) -> Any:
    return load_policy(str(folder), "float32", "cpu")[0]


def row_tokens() -> list[np.ndarray]:
    random = np.random.default_rng(shifted_seed(1))
    return [random.integers(2, VOCAB_SIZE, length) for length in LENGTHS]


def make_rows() -> PackedRows:
    return pack_rows(row_tokens(), np.array(PROMPT_LENGTHS), np.array(TEMPERATURES))


def plain_row(policy: Any, row: int) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of one response by a pass over only its row, with all logits."""
    prompt, length = PROMPT_LENGTHS[row], LENGTHS[row]
    ids_L = torch.from_numpy(row_tokens()[row])
    logits_TV = policy(ids_L[None]).logits[0, prompt - 1 : length - 1] / TEMPERATURES[row]
    categorical = torch.distributions.Categorical(logits=logits_TV)
    return categorical.log_prob(ids_L[prompt:]), categorical.entropy()


def state_dict_bytes(model: torch.nn.Module) -> bytes:
    """Bytes that an engine publishes for a whole model."""
    return bytes(stage_tensors(distinct_state(model), Ranks()))


def test_threads_that_load_at_once_leave_the_library_as_it_was(folder: Path) -> None:
    before = vars(PreTrainedModel)["tie_weights"]
    try:
        with ThreadPoolExecutor(4) as threads:
            loaded = list(threads.map(lambda _: load_policy(str(folder), "float32", "cpu")[0], range(16)))
        assert vars(PreTrainedModel)["tie_weights"] is before
    finally:
        PreTrainedModel.tie_weights = before
    ties = [model.get_output_embeddings().weight is model.get_input_embeddings().weight for model in loaded]
    assert set(ties) == {loaded[0].config.tie_word_embeddings}


class TestTokenLogprobs:
    def test_logprobs_and_entropies_equal_those_of_single_rows(self, policy: Any) -> None:
        logprobs_BT, entropy_BT = token_logprobs(policy, make_rows(), with_entropy=True)
        assert entropy_BT is not None
        assert logprobs_BT.shape == entropy_BT.shape == (4, 8)
        for row in (0, 1, 3):
            logprobs_T, entropy_T = plain_row(policy, row)
            end = LENGTHS[row] - PROMPT_LENGTHS[row]
            assert_same_logprobs(logprobs_BT[row, :end], logprobs_T)
            assert_same_logprobs(entropy_BT[row, :end], entropy_T)
            assert not logprobs_BT[row, end:].any()
            assert not entropy_BT[row, end:].any()
        assert not logprobs_BT[2].any()

    @pytest.mark.parametrize("positions", [100, 3], ids=["at once", "in chunks"])
    def test_entropy_signals_equal_the_explicit_expectation(self, policy: Any, positions: int) -> None:
        got_BT3 = entropy_signals(partial(token_logprobs, policy), rows=make_rows(), max_logits=positions * VOCAB_SIZE)
        for row in (0, 1, 3):
            prompt, length = PROMPT_LENGTHS[row], LENGTHS[row]
            tokens_L = torch.from_numpy(row_tokens()[row])
            logits_LV = policy(tokens_L[None]).logits[0].detach()
            for t, position in enumerate(range(prompt, length)):
                scaled_V = logits_LV[position - 1].double() / TEMPERATURES[row]
                p_V = scaled_V.exp() / scaled_V.exp().sum()
                entropy = -sum(float(p) * math.log(p) for p in p_V)
                mean_change = sum(float(p) * float(p) * (entropy + math.log(p)) for p in p_V)
                logprob = math.log(p_V[tokens_L[position]])
                assert_same_logprobs(got_BT3[row, t].tolist(), [logprob, entropy, mean_change])
            assert not got_BT3[row, length - prompt :].any()

    def test_entropy_is_only_computed_on_request(self, policy: Any) -> None:
        assert token_logprobs(policy, make_rows())[1] is None

    def test_logprobs_equal_those_that_the_engine_recorded(self, policy: Any, folder: Path) -> None:
        engine = TransformersEngine(str(folder))
        temperatures = [1.0, 0.7, 0.0]
        requests = [
            GenerateRequest((5, 6, 7)[: number + 1], SamplingParams(max_tokens=8, temperature=temperature), seed=number)
            for number, temperature in enumerate(temperatures)
        ]
        generations = engine.generate(requests)
        rows = [
            [*request.prompt_tokens, *generation.tokens]
            for request, generation in zip(requests, generations, strict=True)
        ]
        packed = pack_rows([np.array(row) for row in rows], np.array([1, 2, 3]), np.array(temperatures))
        logprobs_BT, _ = token_logprobs(policy, packed)
        for values, generation in zip(logprobs_BT.tolist(), generations, strict=True):
            assert_same_logprobs(values[: len(generation.tokens)], generation.logprobs)

    def gradients(self, policy: Any, **options: Any) -> list[Tensor]:
        policy.zero_grad()
        logprobs_BT, entropy_BT = token_logprobs(policy, make_rows(), with_entropy=True, **options)
        assert entropy_BT is not None
        (logprobs_BT.sum() + 0.1 * entropy_BT.sum()).backward()
        return [parameter.grad.clone() for parameter in policy.parameters()]

    def test_gradients_equal_those_of_single_rows(self, policy: Any) -> None:
        got = self.gradients(policy)
        policy.zero_grad()
        for row in (0, 1, 3):
            logprobs_T, entropy_T = plain_row(policy, row)
            (logprobs_T.sum() + 0.1 * entropy_T.sum()).backward()
        for grad, parameter in zip(got, policy.parameters(), strict=True):
            assert_close(grad, parameter.grad, roundings=96)

    @pytest.mark.parametrize("positions", [1, 3])
    def test_computing_the_logits_in_chunks_changes_nothing(self, policy: Any, positions: int) -> None:
        chunked = {"max_logits": positions * VOCAB_SIZE}
        whole_BT, _ = token_logprobs(policy, make_rows())
        with torch.no_grad():
            chunked_BT, _ = token_logprobs(policy, make_rows(), **chunked)
        assert_close(chunked_BT, whole_BT, roundings=16)
        for grad, expected in zip(self.gradients(policy, **chunked), self.gradients(policy), strict=True):
            assert_close(grad, expected, roundings=96)

    @pytest.mark.parametrize("with_entropy", [False, True])
    def test_no_tensor_of_all_tokens_by_the_vocabulary_is_kept(self, policy: Any, with_entropy: bool) -> None:
        """Chunks of one position keep no [tokens, vocabulary] tensor; a single chunk keeps one."""
        sizes: list[int] = []
        weights = {parameter.data_ptr() for parameter in policy.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.shape[-1] == VOCAB_SIZE and tensor.data_ptr() not in weights:
                sizes.append(tensor.numel())
            return tensor

        num_tokens = sum(LENGTHS) - sum(PROMPT_LENGTHS)
        for positions, expected in ((1, []), (num_tokens, [num_tokens * VOCAB_SIZE])):
            sizes.clear()
            options: dict[str, Any] = {"with_entropy": with_entropy, "max_logits": positions * VOCAB_SIZE}
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                token_logprobs(policy, make_rows(), **options)
            assert sizes == expected

    def test_a_temperature_of_1_changes_no_bits(self, policy: Any) -> None:
        rows = pack_rows(row_tokens(), np.array(PROMPT_LENGTHS), np.ones(len(LENGTHS)))
        assert rows.temperature_Q is None
        ones = replace(rows, temperature_Q=torch.ones(len(rows.target_Q)))
        results = []
        for given in (rows, ones):
            policy.zero_grad()
            logprobs_BT, entropy_BT = token_logprobs(policy, given, with_entropy=True)
            assert entropy_BT is not None
            (logprobs_BT.sum() + entropy_BT.sum()).backward()
            results.append([logprobs_BT, entropy_BT, *(p.grad.clone() for p in policy.parameters())])
        assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))

    def test_deterministic_mode_gives_the_same_gradients_to_the_bit(self, policy: Any) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            one, other = self.gradients(policy), self.gradients(policy)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(grad, again) for grad, again in zip(one, other, strict=True))

    def test_logits_are_computed_at_response_positions_only(self, policy: Any) -> None:
        shapes = []
        hook = policy.get_output_embeddings().register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
        token_logprobs(policy, make_rows())
        hook.remove()
        assert shapes == [(sum(LENGTHS) - sum(PROMPT_LENGTHS), VOCAB_SIZE)]


class TestLoadPolicy:
    def test_it_returns_the_model_in_its_dtype_and_the_tokenizer(self, folder: Path) -> None:
        policy, tokenizer = load_policy(str(folder), "bfloat16", "cpu")
        assert policy.dtype == torch.bfloat16
        assert tokenizer("df").input_ids == [5, 7]

    @pytest.mark.parametrize(
        ("file", "what"),
        [("config.json", "configuration"), ("model.safetensors", "weights"), ("tokenizer", "tokenizer")],
    )
    def test_missing_files_of_a_folder_are_named(self, folder: Path, tmp_path: Path, file: str, what: str) -> None:
        for path in folder.iterdir():
            if not path.name.startswith(file):
                (tmp_path / path.name).write_bytes(path.read_bytes())
        with pytest.raises(DataError, match=f"{tmp_path} has no {what}.*save_pretrained"):
            load_policy(str(tmp_path), "float32", "cpu")

    def test_a_lacking_tensor_is_named_not_made_up(self, folder: Path, tmp_path: Path) -> None:
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(DataError, match=r"lacks the weights \['model\.norm\.weight'\]"):
            load_policy(str(tmp_path), "float32", "cpu")

    def test_experts_that_cannot_be_stacked_are_not_taken_for_none(self, tmp_path: Path) -> None:
        save_tiny_mixture(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.mlp.experts.3.down_proj.weight"
        save_file(
            tensors | {name: tensors[name][:1].clone()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        with pytest.raises(RuntimeError, match="conversion"):  # read in parts, of which there is one
            load_policy(str(tmp_path), "float32", "cpu", spread=lambda model: None)

    def test_torn_weights_are_refused(self, folder: Path, tmp_path: Path) -> None:
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes()[: -8 if path.suffix == ".safetensors" else None])
        with pytest.raises(DataError, match="cannot be loaded"):
            load_policy(str(tmp_path), "float32", "cpu")

    def test_a_path_that_is_not_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not a folder on this machine"):
            load_policy(str(tmp_path / "absent"), "float32", "cpu")

    def test_a_model_that_caps_its_logits_is_refused(self, tmp_path: Path) -> None:
        config = Gemma2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
        Gemma2ForCausalLM(config).save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        with pytest.raises(DataError, match="Gemma2ForCausalLM are not lm_head"):
            load_policy(str(tmp_path), "float32", "cpu")


def train_a_little(policy: Any) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(shifted_seed(number))) * 0.1
            )


class TestWeightsOut:
    def test_the_same_weights_give_the_same_bytes(self, folder: Path) -> None:
        one, other = (state_dict_bytes(load_policy(str(folder), "float32", "cpu")[0]) for _ in range(2))
        assert one == other

    def test_a_tied_tensor_exists_once_under_its_first_name(self, policy: Any) -> None:
        names = set(load(state_dict_bytes(policy)))
        assert "model.embed_tokens.weight" in names
        assert ("lm_head.weight" in names) == (not policy.config.tie_word_embeddings)

    def test_an_engine_generates_with_the_loaded_weights(self, policy: Any, folder: Path, tmp_path: Path) -> None:
        train_a_little(policy)
        (tmp_path / "model.safetensors").write_bytes(state_dict_bytes(policy))
        engine = TransformersEngine(str(folder))
        engine.load_weights(3, [tmp_path / "model.safetensors"])
        [generation] = engine.generate([GenerateRequest((5, 6), SamplingParams(max_tokens=6, temperature=0), seed=0)])
        prompt = torch.tensor([[5, 6]])
        expected = policy.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6, use_cache=False
        )
        assert list(generation.tokens) == expected[0, 2:].tolist()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_exported_folder_loads_completely(self, folder: Path, tmp_path: Path, dtype: str) -> None:
        policy, tokenizer = load_policy(str(folder), dtype, "cpu")
        train_a_little(policy)
        export_hf(policy, tokenizer, tmp_path / "export")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert again.dtype == policy.dtype
        assert state_dict_bytes(again) == state_dict_bytes(policy)
        tokenizer_again = AutoTokenizer.from_pretrained(tmp_path / "export")
        assert tokenizer_again("df").input_ids == [5, 7]
        assert tokenizer_again.chat_template == tokenizer.chat_template
        assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == 1


def test_a_reward_model_scores_rows_as_transformers_does(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    model, tokenizer = load_policy(str(tmp_path / "model"), "float32", "cpu", scalar_head=True)
    assert model.score.weight.abs().sum() == 0.0, "a language model's scores begin at 0"
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    # The last token that is not padding (0) counts, also where the padding token is the end of the text.
    rows = [[5, 6, 7, 8, 1], [9, 10, 1], [9, 10, 11, 0, 0], [4, 5, 0]]
    packed = pack_rows([np.array(row) for row in rows], np.array([2, 1, 2, 2]), np.ones(4))
    scores_BT = row_scores(model, packed)
    assert torch.equal(scores_BT, scores_BT[:, :1].expand(4, 3))
    export_hf(model, tokenizer, tmp_path / "exported")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert theirs.config.num_labels == 1
    padded = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    with torch.no_grad():
        together = theirs(padded, attention_mask=(padded != 0).long()).logits[:, 0]
        alone = torch.stack([theirs(torch.tensor([row])).logits[0, 0] for row in rows])
    assert_same_logprobs(scores_BT[:, 0].detach(), together)
    assert_same_logprobs(scores_BT[:, 0].detach(), alone)


def test_entropies_are_float32_under_bfloat16_autocast() -> None:
    torch.manual_seed(shifted_seed(3))
    head = torch.nn.Linear(8, 500)
    states_QH, targets_Q = torch.randn(6, 8), torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        logits_QV = head(states_QH).float()
        _, entropy_Q = _score(head, states_QH, targets_Q, None, None, True, None)
        _, dotted_Q = _score(
            head,
            states_QH,
            targets_Q,
            None,
            None,
            lambda logprobs_QV: torch.linalg.vecdot(logprobs_QV, logprobs_QV),
            None,
        )
    logprobs_QV = logits_QV.log_softmax(-1)
    assert entropy_Q.dtype == dotted_Q.dtype == torch.float32
    torch.testing.assert_close(entropy_Q, entropy(logprobs_QV), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dotted_Q, logprobs_QV.square().sum(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_from_a_teacher_is_float32(beta: float) -> None:
    torch.manual_seed(shifted_seed(5))
    policy, teacher = torch.nn.Linear(8, 50), torch.nn.Linear(8, 50)
    states_QH, targets_Q = torch.randn(6, 8), torch.arange(6)
    loss = Jsd(beta)
    given = TeacherStates(states_QH, teacher, loss.divergence)
    with torch.autocast("cpu", torch.bfloat16):
        logits_QV, teacher_QV = policy(states_QH).float(), teacher(states_QH).float()
        _, more_Q2 = _score(policy, states_QH, targets_Q, None, states_QH, True, given)
    assert more_Q2.dtype == torch.float32
    torch.testing.assert_close(more_Q2[:, 0], loss.divergence(logits_QV, teacher_QV), rtol=1e-6, atol=1e-7)
