"""Policy of the trainer: loading models, logprobs of responses, and export.

Invariant: `token_logprobs` uses the formula by which engines record `rollout_logprobs`: on the same weights both
agree up to the rounding of the forward pass.

Letters: as in packing.py; H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import convert_and_load_state_dict_in_model, set_param_for_module
from transformers.utils import logging

from rftdask.data.hub import local_model
from rftdask.data.images import PROCESSOR_FILES
from rftdask.errors import DataError
from rftdask.models.image_models import model_class
from rftdask.models.model_shape import MAX_LOGITS, WITH_ADAPTER
from rftdask.storage.staging import staged
from rftdask.synchronizer.tensor_heads import read_file_head
from rftdask.trainer.attention import PACKED, hidden_states, pack_if_equal
from rftdask.trainer.engines.strategies.base import distinct_state, local
from rftdask.trainer.packing import PackedRows

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_LOGITS_OF_A_DIVERGENCE = 4
"""Memory of a divergence relative to logprobs: expressions of two models hold up to twelve [Q, V], logprobs three."""
_LOADING = threading.Lock()
"""Held while transformers loads a model: it replaces methods of classes, which two threads would not restore."""
SCALAR_HEAD = "score.weight"
"""Weight of a reward model that a language model lacks."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.*")
_READ_ONLY = (
    *("config.json", "generation_config.json", *PROCESSOR_FILES, "*.py"),
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "spiece.model"),
    *("sentencepiece*.model", "*.tiktoken", "chat_template*"),
)
"""Files of a model folder that training does not change."""


def load_policy(
    model_path: str,
    dtype: str,
    device: str,
    *,
    trust_remote_code: bool = False,
    offline: bool = False,
    num_splits: int = 1,
    scalar_head: bool = False,
    spread: Callable[[PreTrainedModel], None] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model from a folder or hub name, in evaluation mode, with its tokenizer.

    Args:
        dtype: data type of the weights: "float32", "bfloat16", "float16".
        offline: look up names only in the cache of this machine.
        num_splits: number of ranks that split each sequence.
        scalar_head: load a reward model, whose head gives one number; the head of a language model starts at 0.
        spread: `Strategy.spread`, after which the caller runs `check_model`. None: all weights are read.
    Raises: DataError: the folder is incomplete or damaged, or as `check_model`.
    """
    source = staged(local_model(model_path))
    folder = Path(source)
    needed = {"configuration (config.json)": ("config.json",), "weights": _WEIGHTS, "tokenizer": _TOKENIZER}
    for what, patterns in needed.items() if folder.is_dir() else ():
        if not any(match for pattern in patterns for match in folder.glob(pattern)):
            raise DataError(
                f"model.model_path {folder} has no {what}; expected {' or '.join(patterns)}. "
                "Give a folder written by save_pretrained of both the model and the tokenizer"
            )
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": offline or folder.is_dir()}
    logging.disable_progress_bar()  # a bar starts a thread and a process, and nobody watches the log of a rank
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
        options |= {"dtype": getattr(torch, dtype), "output_loading_info": True}
        # Forked random state: ranks with different rows of a head draw different amounts of random numbers.
        with _LOADING, _reading_parts(spread, device), torch.random.fork_rng(devices=[]):
            loaded: Any = (
                AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, **options)
                if scalar_head
                else model_class(source, trust_remote_code=trust_remote_code).from_pretrained(source, **options)
            )
    except (OSError, ValueError, SafetensorError) as error:
        where = "" if folder.is_dir() else "; it is not a folder on this machine"
        raise DataError(f"model.model_path {model_path} cannot be loaded{where}: {error}") from error
    model: PreTrainedModel = loaded[0]
    report: Mapping[str, Collection[str]] = loaded[1]
    missing = sorted(report["missing_keys"])
    if scalar_head and missing == [SCALAR_HEAD]:
        torch.nn.init.zeros_(loaded[0].score.weight)
    elif missing:  # transformers initializes them randomly, with a warning
        raise DataError(f"model.model_path {model_path} lacks the weights {missing}")
    if getattr(model, "_hf_peft_config_loaded", False):  # of a name on the Hub, which is not checked earlier
        raise DataError(f"model.model_path {model_path} {WITH_ADAPTER}")
    model.config.name_or_path = model_path  # recorded in adapters, instead of a path in this machine's cache
    loaded[0].to(device).eval()  # untyped: the annotations of `to` do not fit
    if scalar_head:
        if not isinstance(getattr(model, "score", None), torch.nn.Linear):
            name = type(model).__name__
            raise DataError(f"model.model_path {model_path}: {name} has no linear head `score` to train")
        if model.config.pad_token_id is None:  # transformers finds the end of a row by it
            model.config.pad_token_id = tokenizer.pad_token_id
    if spread is None:
        check_model(model, num_splits, has_logits=not scalar_head)
    return model, tokenizer


@contextmanager
def _reading_parts(spread: Callable[[PreTrainedModel], None] | None, device: str) -> Iterator[None]:
    """Make transformers read only this rank's part of each weight in the block, directly to `device`."""
    if spread is None:
        yield
        return
    patched: Any = PreTrainedModel
    original = patched._load_pretrained_model

    def load(model: PreTrainedModel, state_dict: Any, files: list[str], settings: Any, *_: Any) -> Any:
        # transformers can fill DTensors, converting old names and layouts, but creates them by its own plans.
        spread(model)
        with ExitStack() as opened:
            weights: dict[str, Any] = dict(state_dict or {})
            for file in () if state_dict is not None else files:
                if file.endswith(".safetensors"):
                    reader: Any = opened.enter_context(safe_open(file, framework="pt"))
                    weights |= dict(zip(names := list(reader.keys()), map(reader.get_slice, names), strict=True))
                else:
                    weights |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            settings_on_device = replace(settings, device_map={"": device})
            info, rest = convert_and_load_state_dict_in_model(model, weights, settings_on_device)
        # transformers stacks the experts of a rank, and fails if the rank has none.
        for name, weight in list(model.named_parameters()):
            if name in info.conversion_errors and not len(empty := local(weight)):
                set_param_for_module(model, name, torch.empty_like(empty, device=device), info, settings.hf_quantizer)
                del info.conversion_errors[name]
        return info, rest

    patched._load_pretrained_model = staticmethod(load)
    try:
        yield
    finally:
        patched._load_pretrained_model = staticmethod(original)


@torch.no_grad()
def check_model(model: PreTrainedModel, num_splits: int, *, has_logits: bool = True) -> None:
    """Run a few passes to check that a model can be trained, and let it pack rows if it can.

    If ranks hold parts of its weights, all of them must call this (`Strategy.within`).

    Raises: DataError: its logits are not lm_head(hidden states), or its sequences cannot be split.
    """
    training, model_path = model.training, str(model.config.name_or_path)
    model.eval()
    if has_logits:
        _check_head(model, model_path)
    pack_if_equal(model)
    model.train(training)
    problem = ""
    if num_splits > 1 and model.config._attn_implementation != PACKED:
        problem = "does not compute packed rows, so ranks cannot split a sequence"
    elif num_splits > 1 and (heads := model.config.get_text_config().num_attention_heads) % num_splits:
        problem = f"has {heads} attention heads, which {num_splits} ranks cannot split evenly"
    if problem:
        remedy = f"lower trainer.ulysses_sequence_parallel_size {num_splits}"
        raise DataError(f"model.model_path {model_path}: {type(model).__name__} {problem}; {remedy}")


def frozen_dtype(model_path: str) -> str:
    """Return the data type for weights that are never trained: "bfloat16" or "float16" if all tensors in the files have
    that type, else "float32"."""
    kinds = set()  # of the files, from which the configuration may differ
    for file in Path(local_model(model_path)).glob("*.safetensors"):
        kinds |= {entry["dtype"] for name, entry in read_file_head(file)[0].items() if name != "__metadata__"}
    return {frozenset({"BF16"}): "bfloat16", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "float32")


def compute_wide(model: torch.nn.Module) -> None:
    """Make a model compute in float32 with its frozen 16-bit weights, which are converted for each call.

    Results have the bits of a float32 model, with half of its memory. Under autocast, which uses 16 bits in linear
    layers anyway, their weights are not converted.
    """

    def narrow(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {
            name: weight
            for name, weight in module.named_parameters(recurse=False)
            if weight.dtype in (torch.bfloat16, torch.float16) and not weight.requires_grad
        }

    def widen(module: torch.nn.Module, _: Any) -> None:
        weights = narrow(module)
        if isinstance(module, torch.nn.Linear) and torch.is_autocast_enabled(next(iter(weights.values())).device.type):
            return
        vars(module)["_narrow"] = weights
        module._parameters.update({name: cast(torch.nn.Parameter, weight.float()) for name, weight in weights.items()})

    def restore(module: torch.nn.Module, *_: Any) -> None:
        module._parameters.update(vars(module).pop("_narrow", {}))

    for module in model.modules():
        if not narrow(module):
            continue
        if isinstance(module, torch.nn.Embedding):  # converts the selected rows, not the table
            module.register_forward_hook(lambda _, __, rows: rows.float())
        else:
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(restore, always_call=True)


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to 0, in place; layers need training mode to decide about recomputation."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            # Layers of transformers call it dropout, attention_dropout, hidden_dropout, ...
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_head(model: PreTrainedModel, model_path: str) -> None:
    """Raises: DataError: the model scales or caps the input or output of lm_head, unlike `token_logprobs`."""
    seen: dict[str, Any] = {}
    head = model.get_output_embeddings()
    hooks = [
        model.base_model.register_forward_hook(lambda _, __, out: seen.update(hidden=out["last_hidden_state"].clone())),
        head.register_forward_hook(lambda _, args, out: seen.update(head_in=args[0].clone(), head_out=out.clone())),
    ]
    logits = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    if not (torch.equal(seen["hidden"], seen["head_in"]) and torch.equal(seen["head_out"], logits)):
        raise DataError(
            f"model.model_path {model_path}: the logits of {type(model).__name__} are not lm_head(last hidden states); "
            "models that scale or cap their logits cannot be trained"
        )


@dataclass(frozen=True)
class TeacherStates:
    """Hidden states of a teacher for packed rows, from which its head computes logits in chunks."""

    states_QH: Tensor
    head: torch.nn.Module
    divergence: Callable[[Tensor, Tensor], Tensor]
    """([Q, V] logits of the policy, of the teacher) -> [Q]; see `PolicyLoss.divergence`."""


def predicting_states(model: torch.nn.Module, rows: PackedRows) -> Tensor:
    """Return [Q, H] last hidden states from which the response tokens are predicted."""
    return hidden_states(model, rows).index_select(0, rows.before_Q)


def token_logprobs(
    model: torch.nn.Module,
    rows: PackedRows,
    *,
    with_entropy: bool = False,
    statistic: Callable[[Tensor], Tensor] | None = None,
    teacher: TeacherStates | None = None,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor | None]:
    """Return logprobs of the response tokens under softmax(logits / temperature), from one forward pass.

    Logits are only computed at response positions, about `max_logits` at once; if there are several chunks, the
    backward pass recomputes them instead of keeping them.

    Args:
        statistic: [Q, V] logprobs -> [Q] or [Q, K]; returned without gradient in place of the entropy.
        teacher: also return the divergence from this teacher.
    Returns:
        [B, T] float32 logprobs, and [B, T] float32 entropies of the same distributions in nats (None unless
        `with_entropy`); with a teacher [B, T, 2], divergence and entropy (0 unless `with_entropy`). Values are 0 beyond
        the end of a response. All have gradients, if enabled.
    """
    hidden_QH = predicting_states(model, rows)
    causal: Any = model
    head = causal.get_output_embeddings()
    size = max(1, max_logits // head.weight.shape[0])
    if teacher is not None:
        size = max(1, size // _LOGITS_OF_A_DIVERGENCE)
    wanted = statistic or with_entropy
    inputs = (hidden_QH, rows.target_Q, rows.temperature_Q, None if teacher is None else teacher.states_QH)
    # A single chunk keeps its logits for the backward pass, which is faster.
    if len(hidden_QH) <= size:
        logprobs_Q, extra_Q = _score(head, *inputs, wanted, teacher)
    else:
        num_chunks = -(-len(hidden_QH) // size)
        split = ([None] * num_chunks if values is None else values.split(size) for values in inputs)
        chunks = zip(*split, strict=True)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        parts = [checkpoint(_score, head, *chunk, wanted, teacher, **options) for chunk in chunks]
        logprobs_Q, extra_Q = (torch.cat(values) for values in zip(*parts, strict=True))
    return rows.aligned(logprobs_Q), rows.aligned(extra_Q) if wanted or teacher else None


def row_scores(model: torch.nn.Module, rows: PackedRows) -> Tensor:
    """Return [B, T] float32 scores of a reward model, the same for all tokens of a row; with gradient.

    As in transformers, the score is read at the last token that is not padding. `rows` must not be packed lean.
    """
    scorer: Any = model
    hidden_SH = hidden_states(model, rows)
    # Counted from 1: 0 is the end of the prompt, used if a response is all padding.
    counted_Q = rows.column_Q + 1
    if scorer.config.pad_token_id is not None:
        counted_Q = counted_Q.masked_fill(rows.target_Q == scorer.config.pad_token_id, 0)
    last_B = rows.aligned(counted_Q).amax(dim=-1)
    prompt_end_B = rows.before_Q[rows.column_Q == 0]
    last_BH = hidden_SH.index_select(0, prompt_end_B + last_B)
    weight_1H, bias_1 = scorer.score.weight, scorer.score.bias
    # Always in float32: losses use the difference of two scores.
    with torch.autocast(hidden_SH.device.type, enabled=False):
        bias_1 = None if bias_1 is None else bias_1.float()
        scores_B1 = torch.nn.functional.linear(last_BH.float(), weight_1H.float(), bias_1)
    return scores_B1.expand(-1, rows.max_response)


def entropy(logprobs_QV: Tensor) -> Tensor:
    """Return [Q] entropies in nats."""
    return -(logprobs_QV.exp() * logprobs_QV).sum(dim=-1)


def entropy_and_change(logprobs_QV: Tensor) -> Tensor:
    """Return [Q, 2]: the entropy H, and E_v[p_v (H + log p_v)] over the vocabulary, v drawn from p.

    To first order, raising the logit of token k by one lowers H by p_k (H + log p_k); the second value is its average
    over sampled tokens. Source: "On the Entropy Dynamics in Reinforcement Fine-Tuning", arXiv:2602.03392,
    theorem 3.2 and Clip_V.
    """
    entropy_Q = entropy(logprobs_QV)
    # One p belongs to the expectation, the other to the derivative.
    change_Q = (logprobs_QV.exp().square() * (logprobs_QV + entropy_Q[:, None])).sum(dim=-1)
    return torch.stack([entropy_Q, change_Q], dim=-1)


@torch.no_grad()
def entropy_signals(score: Callable[..., tuple[Tensor, Tensor | None]], **inputs: Any) -> Tensor:
    """Return [B, T, 3]: logprob, entropy and expected entropy change of every response token, by `token_logprobs`."""
    logprobs_BT, signals_BT2 = score(**inputs, statistic=entropy_and_change)
    assert signals_BT2 is not None
    return torch.cat([logprobs_BT[..., None], signals_BT2], dim=-1)


def _score(
    head: torch.nn.Module,
    hidden_QH: Tensor,
    targets_Q: Tensor,
    temperature_Q: Tensor | None,
    states_QH: Tensor | None,
    wanted: Callable[[Tensor], Tensor] | bool,
    teacher: TeacherStates | None,
) -> tuple[Tensor, Tensor]:
    """Return [Q] logprobs, and [Q] entropies (wanted: True), a statistic or nothing (False); [Q, 2] with a teacher."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not callable(wanted)):
        logits_QV = head(hidden_QH).float()
    teacher_QV = logits_QV
    if teacher is not None:
        with torch.no_grad():
            teacher_QV = teacher.head(states_QH).float()
    # Autocast would compute some sums over the vocabulary in bfloat16.
    with torch.autocast(logits_QV.device.type, enabled=False):
        if callable(wanted):
            with torch.no_grad():
                logprobs_QV = _logprobs(logits_QV, temperature_Q)
                return logprobs_QV.gather(-1, targets_Q[:, None])[:, 0], wanted(logprobs_QV)
        score: Callable[[Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]] = _LogprobAndEntropy.apply
        logprobs_Q, entropy_Q = score(logits_QV, targets_Q, temperature_Q, wanted)
        if teacher is None:
            return logprobs_Q, entropy_Q
        divergence_Q = teacher.divergence(logits_QV, teacher_QV)
        return logprobs_Q, torch.stack([divergence_Q, entropy_Q if wanted else torch.zeros_like(divergence_Q)], dim=-1)


def _logprobs(logits_QV: Tensor, temperature_Q: Tensor | None) -> Tensor:
    # Dividing by 1 would cost a pass over [Q, V], and another one in the backward pass.
    return torch.log_softmax(logits_QV if temperature_Q is None else logits_QV / temperature_Q[:, None], dim=-1)


class _LogprobAndEntropy(torch.autograd.Function):
    """[Q] logprobs of the targets, and [Q] entropies (empty unless `with_entropy`).

    One [Q, V] is kept for the backward pass, which creates another one; PyTorch's functions would keep three to six.
    With l the logprobs, p = exp(l) and H the entropy: dl_t / dlogit_j = 1[j = t] - p_j, dH / dlogit_j = -p_j (l_j + H),
    both divided by the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_QV: Tensor, targets_Q: Tensor, temperature_Q: Tensor | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_QV = _logprobs(logits_QV, temperature_Q)
        chosen_Q = logprobs_QV.gather(-1, targets_Q[:, None])[:, 0]
        entropy_Q = -torch.linalg.vecdot(logprobs_QV.exp(), logprobs_QV) if with_entropy else chosen_Q.new_empty(0)
        ctx.save_for_backward(logprobs_QV, targets_Q, temperature_Q, entropy_Q)
        return chosen_Q, entropy_Q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, chosen_grad_Q: Tensor, entropy_grad_Q: Tensor) -> tuple[Tensor, None, None, None]:
        logprobs_QV, targets_Q, temperature_Q, entropy_Q = ctx.saved_tensors
        if temperature_Q is not None:
            chosen_grad_Q = chosen_grad_Q / temperature_Q
            entropy_grad_Q = entropy_grad_Q / temperature_Q if len(entropy_Q) else entropy_grad_Q
        grad_QV = logprobs_QV.exp()
        if len(entropy_Q):
            # -p (c + e (l + H)) with c and e the gradients of logprob and entropy; in place to save memory.
            grad_QV *= ((logprobs_QV + entropy_Q[:, None]) * entropy_grad_Q[:, None]).add_(chosen_grad_Q[:, None])
            grad_QV.neg_()
        else:
            grad_QV *= -chosen_grad_Q[:, None]
        # The term 1[j = t], at one position of each row.
        at_targets_Q1 = grad_QV.gather(-1, targets_Q[:, None]) + chosen_grad_Q[:, None]
        return grad_QV.scatter_(-1, targets_Q[:, None], at_targets_Q1), None, None, None


def dtype_at_rest(model_path: str, *, trust_remote_code: bool = False, offline: bool = False) -> torch.dtype | None:
    """Return the data type of a model's files by its configuration; None: not specified."""
    source = local_model(model_path)
    config = AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, local_files_only=offline or Path(source).is_dir()
    )
    dtype: torch.dtype | None = config.dtype
    return dtype


def read_only_files(model_path: str, template: str | None = None) -> dict[str, bytes]:
    """Return the files that training does not change: configurations, tokenizer, chat template, code. Call it after the
    model is loaded, which downloads a model of the Hub.

    Args: template: chat template of the run, which replaces that of the tokenizer.
    """
    source = Path(local_model(model_path))
    found = {file for pattern in _READ_ONLY for file in source.glob(pattern) if file.is_file()}
    files = {file.name: file.read_bytes() for file in sorted(found)}
    # transformers and vLLM prefer this file to the template in tokenizer_config.json.
    return files | ({} if template is None else {"chat_template.jinja": template.encode()})


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write model, tokenizer and generation config for `from_pretrained`.

    Args:
        tensors: the weights, tied ones once; None: those of the model.
        dtype: data type of floating-point weights; None: unchanged, to the bit.
        files: `read_only_files` of the model, which are copied as they are; None: all files are made from the objects.
    """
    if dtype not in (None, model.dtype):
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in (distinct_state(model) if tensors is None else tensors).items()
        }
    causal: Any = model
    generation = causal.generation_config if model.can_generate() else None
    try:
        # transformers refuses to write generation configs that it reads, such as a temperature without do_sample.
        if generation is not None:
            causal.generation_config = GenerationConfig()
        model.save_pretrained(folder, state_dict=tensors)
    finally:
        if generation is not None:
            causal.generation_config = generation
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    if dtype is not None:  # has the dtype of the model, to which the loader would convert
        config = json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(config, indent=2))
    copied = dict(files or {})
    # A reward model that began as a language model, or a head with an adapter of its own, has another configuration.
    read, ties = json.loads(copied.get("config.json", b"{}")), type(model.config)().tie_word_embeddings
    if read.get("architectures") != model.config.architectures or _ties(read, ties) != _ties(
        model.config.to_dict(), ties
    ):
        copied.pop("config.json", None)
    if generation is None:
        copied.pop("generation_config.json", None)
    for name, data in copied.items():
        (folder / name).write_bytes(data)


def _ties(config: Mapping[str, Any], default: bool) -> bool:
    """Return True if the head of a configuration shares the weight of the embeddings."""
    default = config.get("tie_word_embeddings", default)
    return bool(config.get("text_config", config).get("tie_word_embeddings", default))
