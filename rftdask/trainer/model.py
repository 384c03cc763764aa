"""The policy as the trainer handles it: loading it, logprobs of responses, its bytes for publication and export.

Knows neither batches nor losses, nor where bytes go. Invariant: `token_logprobs` uses the formula by which engines
record `rollout_logprobs`, so that on the same weights both agree up to the rounding of the forward pass.

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
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import convert_and_load_state_dict_in_model, set_param_for_module
from transformers.utils import logging

from rftdask.data.hub import local_model
from rftdask.errors import DataError
from rftdask.models.image_models import model_class
from rftdask.models.model_shape import MAX_LOGITS
from rftdask.storage.staging import staged
from rftdask.synchronizer.tensor_heads import read_file_head
from rftdask.trainer.attention import check_splits, hidden_states, pack_if_equal
from rftdask.trainer.engines.strategies.base import distinct_state, local
from rftdask.trainer.packing import PackedRows

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_LOGITS_OF_A_DIVERGENCE = 4
"""Logits that one of a divergence counts for: plain expressions of two models hold twelve [Q, V] at their peak, the
logprobs of one hold three."""
_LOADING = threading.Lock()
"""While transformers loads a model it has functions of its classes swapped; two threads would leave them so."""
SCALAR_HEAD = "score.weight"
"""What a language model lacks of a reward model."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.*")


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
    """The causal language model of a folder (or hub name), in evaluation mode, and its tokenizer.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float16".
        offline: take a name from the cache of this machine alone.
        num_splits: ranks that are to split each sequence.
        scalar_head: a reward model, with one number in place of the vocabulary's; of a language model it begins at 0.
        spread: makes weights without memory DTensors, of which this rank then reads and holds its part alone; a
            strategy lays them out afterwards, and `check_model` is left to who can make a pass. None: all of it.
    Raises: DataError: the folder lacks something or is damaged, the model's logits are not lm_head(hidden states), or
    its sequences cannot be split so.
    """
    source = staged(local_model(model_path))
    folder = Path(source)
    needed = {"configuration (config.json)": ("config.json",), "weights": _WEIGHTS, "tokenizer": _TOKENIZER}
    for what, patterns in needed.items() if folder.is_dir() else ():
        if not any(match for pattern in patterns for match in folder.glob(pattern)):
            raise DataError(
                f"model.model_path {folder} holds no {what}; expected {' or '.join(patterns)}. "
                "Give a folder written by save_pretrained of both the model and the tokenizer"
            )
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": offline or folder.is_dir()}
    logging.disable_progress_bar()  # nobody looks at the log of a rank, and a bar has a thread and a process of its own
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
        options |= {"dtype": getattr(torch, dtype), "output_loading_info": True}
        # The random state stays as it was: ranks that hold different rows of a head draw different numbers of numbers.
        with _LOADING, _parts_alone(spread, device), torch.random.fork_rng(devices=[]):
            loaded: Any = (
                AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, **options)
                if scalar_head
                else model_class(source, trust_remote_code=trust_remote_code).from_pretrained(source, **options)
            )
    except (OSError, ValueError, SafetensorError) as error:
        where = "" if folder.is_dir() else "; it is no folder on this machine"
        raise DataError(f"model.model_path {model_path} cannot be loaded{where}: {error}") from error
    model: PreTrainedModel = loaded[0]
    report: Mapping[str, Collection[str]] = loaded[1]
    missing = sorted(report["missing_keys"])
    if scalar_head and missing == [SCALAR_HEAD]:
        torch.nn.init.zeros_(loaded[0].score.weight)
    elif missing:  # transformers fills them at random, with no more than a warning
        raise DataError(f"model.model_path {model_path} lacks the weights {missing}")
    model.config.name_or_path = model_path  # adapters name their base by it, not by a copy in this machine's cache
    loaded[0].to(device).eval()  # theirs has types that fit no call
    if scalar_head:
        if not isinstance(getattr(model, "score", None), torch.nn.Linear):
            name = type(model).__name__
            raise DataError(f"model.model_path {model_path}: {name} has no linear head `score` to train")
        if model.config.pad_token_id is None:  # by which transformers finds the end of a row in a batch
            model.config.pad_token_id = tokenizer.pad_token_id
    if spread is None:
        check_model(model, num_splits, has_logits=not scalar_head)
    return model, tokenizer


@contextmanager
def _parts_alone(spread: Callable[[PreTrainedModel], None] | None, device: str) -> Iterator[None]:
    """Let transformers read into models, for the block, this rank's part of each weight alone, straight to `device`.

    It fills DTensors so by itself, names and layouts of old files converted, but makes them by plans of its own: by the
    time it would read, they are made here.
    """
    if spread is None:
        yield
        return
    theirs: Any = PreTrainedModel
    usual = theirs._load_pretrained_model

    def load(model: PreTrainedModel, state_dict: Any, files: list[str], settings: Any, *more: Any) -> Any:
        spread(model)
        with ExitStack() as opened:
            held: dict[str, Any] = dict(state_dict or {})
            for file in () if state_dict is not None else files:
                if file.endswith(".safetensors"):
                    # Nothing is read yet.
                    reader: Any = opened.enter_context(safe_open(file, framework="pt"))
                    held |= dict(zip(names := list(reader.keys()), map(reader.get_slice, names), strict=True))
                else:
                    held |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            info, rest = convert_and_load_state_dict_in_model(model, held, replace(settings, device_map={"": device}))
        # It stacks the experts that a rank has, and fails where it has none.
        for name, weight in list(model.named_parameters()):
            if name in info.conversion_errors and not len(none := local(weight)):
                set_param_for_module(model, name, torch.empty_like(none, device=device), info, settings.hf_quantizer)
                del info.conversion_errors[name]
        return info, rest

    theirs._load_pretrained_model = staticmethod(load)
    try:
        yield
    finally:
        theirs._load_pretrained_model = staticmethod(usual)


@torch.no_grad()
def check_model(model: PreTrainedModel, num_splits: int, *, has_logits: bool = True) -> None:
    """Find out by passes whether a loaded model packs rows, which it then does, and whether it can be trained.

    Where ranks hold parts of its weights it is called by all of them (`Strategy.within`).

    Args: num_splits: as of `load_policy`. has_logits: its logits are used.
    Raises: DataError: they are not lm_head(hidden states), or its sequences cannot be split so.
    """
    training, model_path = model.training, str(model.config.name_or_path)
    model.eval()
    if has_logits:
        _check_head(model, model_path)
    pack_if_equal(model)
    model.train(training)
    if num_splits > 1:
        try:
            check_splits(model, num_splits)
        except ValueError as error:
            raise DataError(
                f"model.model_path {model_path}: {error}; lower trainer.ulysses_sequence_parallel_size {num_splits}"
            ) from error


def frozen_dtype(model_path: str) -> str:
    """Of weights that are never trained: that of the files, if all of it is of 16 bits and one kind; else float32.

    By the heads of the files themselves, since a configuration may say another. "float32", "bfloat16" or "float16".
    """
    kinds = set()
    for file in Path(local_model(model_path)).glob("*.safetensors"):
        kinds |= {told["dtype"] for name, told in read_file_head(file)[0].items() if name != "__metadata__"}
    return {frozenset({"BF16"}): "bfloat16", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "float32")


def compute_wide(model: torch.nn.Module) -> None:
    """Let a model compute in float32 with its frozen weights of 16 bits, each made wide for the call that uses it.

    The bits are those of a model in float32, in half of its memory; where autocast narrows the weights of linear layers
    anyway, they are not made wide first.
    """

    def narrow(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {
            name: weight
            for name, weight in module.named_parameters(recurse=False)
            if weight.dtype in (torch.bfloat16, torch.float16) and not weight.requires_grad
        }

    def widen(module: torch.nn.Module, _: Any) -> None:
        held = narrow(module)
        if isinstance(module, torch.nn.Linear) and torch.is_autocast_enabled(next(iter(held.values())).device.type):
            return
        vars(module)["_narrow"] = held
        module._parameters.update({name: cast(torch.nn.Parameter, weight.float()) for name, weight in held.items()})

    def restore(module: torch.nn.Module, *_: Any) -> None:
        module._parameters.update(vars(module).pop("_narrow", {}))

    for module in model.modules():
        if not narrow(module):
            continue
        if isinstance(module, torch.nn.Embedding):  # the rows that were looked up, not the table
            module.register_forward_hook(lambda _, __, rows: rows.float())
        else:
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(restore, always_call=True)


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Make every dropout of a model one of probability 0, in place; training mode stays, by which layers decide whether
    to recompute activations.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            # What a layer gives to a function: transformers call it dropout, attention_dropout, hidden_dropout, ...
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_head(model: PreTrainedModel, model_path: str) -> None:
    """Refuse models that scale or cap what enters or leaves lm_head: `token_logprobs` would be wrong for them."""
    seen: dict[str, Any] = {}
    head = model.get_output_embeddings()
    # By two hooks in one forward pass: what leaves the body must be what enters the head, and its output the logits.
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
    """What a teacher says of packed rows, short of its logits, which are made of it some positions at a time."""

    states_QH: Tensor
    """`predicting_states` of the teacher."""
    head: torch.nn.Module
    """Makes logits of them."""
    divergence: Callable[[Tensor, Tensor], Tensor]
    """([Q, V] logits of the policy, of the teacher) -> [Q]; see `PolicyLoss.divergence`."""


def predicting_states(model: torch.nn.Module, rows: PackedRows) -> Tensor:
    """[Q, H] last hidden states from which each response token is predicted."""
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
    """Logprobs of the response tokens under softmax(logits / temperature), by one forward pass over the tokens alone.

    Logits are computed at response positions alone and about `max_logits` of them at a time; if that takes several
    times, the backward pass computes them again instead of keeping them.

    Args:
        statistic: returned in place of the entropy, with_entropy or not, and without gradient: [Q, V] logprobs -> [Q]
            or [Q, K].
        teacher: the divergence from it is wanted, too.
    Returns:
        [B, T] float32 logprobs, and [B, T] float32 entropies of the same distributions in nats (None unless
        `with_entropy`); with a teacher [B, T, 2], its divergence and the entropy (0 unless `with_entropy`). [b, t] is
        about response token t, zero beyond its end. All have gradients, if enabled.
    """
    hidden_QH = predicting_states(model, rows)
    causal: Any = model
    head = causal.get_output_embeddings()
    # Logits are the largest tensor by far, tokens times vocabulary: a chunk of them at a time bounds the memory.
    size = max(1, max_logits // head.weight.shape[0])
    if teacher is not None:
        size = max(1, size // _LOGITS_OF_A_DIVERGENCE)
    wanted = statistic or with_entropy
    of_positions = (hidden_QH, rows.target_Q, rows.temperature_Q, None if teacher is None else teacher.states_QH)
    # In one piece its logits are kept for the backward pass, which is the quicker way where they fit.
    if len(hidden_QH) <= size:
        logprobs_Q, more_Q = _score(head, *of_positions, wanted, teacher)
    else:
        num_chunks = -(-len(hidden_QH) // size)
        split = ([None] * num_chunks if values is None else values.split(size) for values in of_positions)
        chunks = zip(*split, strict=True)
        # Without checkpoint() the chunks' logits would be kept for backward and add up to what chunks should avoid.
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        parts = [checkpoint(_score, head, *chunk, wanted, teacher, **again) for chunk in chunks]
        logprobs_Q, more_Q = (torch.cat(values) for values in zip(*parts, strict=True))
    return rows.aligned(logprobs_Q), rows.aligned(more_Q) if wanted or teacher else None


def row_scores(model: torch.nn.Module, rows: PackedRows) -> Tensor:
    """[B, T] float32 score of each row by a reward model, the same at each of its places; with gradient.

    It is read where transformers reads it: at the last token of the row that is not the padding token. `rows` are not
    packed lean.
    """
    scorer: Any = model
    hidden_SH = hidden_states(model, rows)
    # Counted from 1, so that 0 is the end of the prompt, which is read where a response is all padding.
    counted_Q = rows.column_Q + 1
    if scorer.config.pad_token_id is not None:
        counted_Q = counted_Q.masked_fill(rows.target_Q == scorer.config.pad_token_id, 0)
    # The largest place that counts; 0 where none does.
    last_B = rows.aligned(counted_Q).amax(dim=-1)
    prompt_end_B = rows.before_Q[rows.column_Q == 0]
    last_BH, weight_1H, bias_1 = (
        hidden_SH.index_select(0, prompt_end_B + last_B),
        scorer.score.weight,
        scorer.score.bias,
    )
    # In float32 whatever the products before it, and weights that lie in bfloat16: the difference of two scores counts.
    with torch.autocast(hidden_SH.device.type, enabled=False):
        bias_1 = None if bias_1 is None else bias_1.float()
        scores_B1 = torch.nn.functional.linear(last_BH.float(), weight_1H.float(), bias_1)
    return scores_B1.expand(-1, rows.max_response)


def entropy(logprobs_QV: Tensor) -> Tensor:
    """[Q] entropies in nats."""
    return -(logprobs_QV.exp() * logprobs_QV).sum(dim=-1)


def entropy_and_change(logprobs_QV: Tensor) -> Tensor:
    """[Q, 2]: the entropy H, and E_v[p_v (H + log p_v)] over the vocabulary, v drawn from p.

    To first order, a step up the logit of token k lowers H by p_k (H + log p_k) a unit; the second number is what that
    is on average over the tokens that could have been sampled. "On the Entropy Dynamics in Reinforcement Fine-Tuning",
    arXiv:2602.03392, theorem 3.2 and Clip_V.
    """
    entropy_Q = entropy(logprobs_QV)
    # p^2 (H + log p), summed over v: one p of the expectation, the other of the derivative.
    change_Q = (logprobs_QV.exp().square() * (logprobs_QV + entropy_Q[:, None])).sum(dim=-1)
    return torch.stack([entropy_Q, change_Q], dim=-1)


@torch.no_grad()
def entropy_signals(score: Callable[..., tuple[Tensor, Tensor | None]], **inputs: Any) -> Tensor:
    """[B, T, 3] logprob, entropy and expected entropy change of every response token; `score`: `token_logprobs` of a
    model, which takes the inputs.
    """
    logprobs_BT, more_BT2 = score(**inputs, statistic=entropy_and_change)
    assert more_BT2 is not None
    return torch.cat([logprobs_BT[..., None], more_BT2], dim=-1)


def _score(
    head: torch.nn.Module,
    hidden_QH: Tensor,
    targets_Q: Tensor,
    temperature_Q: Tensor | None,
    states_QH: Tensor | None,
    wanted: Callable[[Tensor], Tensor] | bool,
    teacher: TeacherStates | None,
) -> tuple[Tensor, Tensor]:
    """[Q] logprobs, and of each position the entropy (True), a statistic or nothing (False); [Q, 2] with a teacher, of
    whose states `states_QH` are those of these positions.
    """
    # Statistics of the whole vocabulary have no gradient; logprobs and entropies of a loss have one, by a formula of
    # their own.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not callable(wanted)):
        logits_QV = head(hidden_QH).float()
    teacher_QV = logits_QV
    if teacher is not None:
        with torch.no_grad():
            teacher_QV = teacher.head(states_QH).float()
    # Sums over the vocabulary are float32, also where autocast takes some of them for products in bfloat16.
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
    # A division by 1 would be a pass over [Q, V], and one more in the backward pass.
    return torch.log_softmax(logits_QV if temperature_Q is None else logits_QV / temperature_Q[:, None], dim=-1)


class _LogprobAndEntropy(torch.autograd.Function):
    """[Q] logprobs of the targets and [Q] entropies (empty unless `with_entropy`).

    One [Q, V] is kept for the backward pass, which makes one more; composed of PyTorch's functions it is three to six.
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
        # d log p / d logit has a factor 1 / temperature, by the chain rule.
        if temperature_Q is not None:
            chosen_grad_Q = chosen_grad_Q / temperature_Q
            entropy_grad_Q = entropy_grad_Q / temperature_Q if len(entropy_Q) else entropy_grad_Q
        grad_QV = logprobs_QV.exp()
        if len(entropy_Q):
            # -p (c + e (l + H)) with c and e the gradients of logprob and entropy; in place, because [Q, V] is the
            # largest tensor.
            grad_QV *= ((logprobs_QV + entropy_Q[:, None]) * entropy_grad_Q[:, None]).add_(chosen_grad_Q[:, None])
            grad_QV.neg_()
        else:
            grad_QV *= -chosen_grad_Q[:, None]
        # The 1[j = t] of the formula, added at one place of each row.
        at_targets_Q1 = grad_QV.gather(-1, targets_Q[:, None]) + chosen_grad_Q[:, None]
        return grad_QV.scatter_(-1, targets_Q[:, None], at_targets_Q1), None, None, None


def dtype_at_rest(model_path: str, *, trust_remote_code: bool = False, offline: bool = False) -> torch.dtype | None:
    """Data type of a model's files by its configuration; None if that does not say."""
    source = local_model(model_path)
    config = AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, local_files_only=offline or Path(source).is_dir()
    )
    dtype: torch.dtype | None = config.dtype
    return dtype


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write what `from_pretrained` of model, tokenizer and generation config reads.

    Args:
        tensors: the weights, tied ones once; None takes those of the model.
        dtype: to write them in; None: as they are, and then they come back bit for bit.
    """
    # Floating point alone is converted: masks and counters keep their type.
    if dtype not in (None, model.dtype):
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in (tensors or distinct_state(model)).items()
        }
    model.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)
    if dtype is not None:
        path = folder / "config.json"  # where the model's own dtype stands, which the loader would convert to
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}, indent=2)
        )
