"""Code inside vLLM's processes: loading of published weights, logprobs as a trainer computes them (also with grammars),
a watch on the engine process, and a record of fatal errors. vLLM imports this module by name and mixes `WeightWorker`
into its worker class.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.sample.sampler import Sampler as KernelSampler

from rftdask.engines.vllm import CAUSE_FILE, end_with_engine

_GREEDY_BELOW = 1e-5  # temperature below which vLLM samples greedily
_WHERE_PROCESSES_END = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
"""Modules of vLLM that log fatal errors of a worker or the engine core; others log recoverable errors."""


class TemperedSampler(Sampler):  # type: ignore[misc]  # without types where vLLM is not installed
    """Sampler of vLLM with logprobs of softmax(logits / temperature), before penalties, min_tokens, grammars, top-k and
    top-p. vLLM offers logprobs after grammars or after everything, which a trainer cannot recompute from the tokens.
    """

    end_ids: Sequence[int] = ()
    """Tokens that end a response."""
    unmasked_BV: Tensor | None = None
    """Logits of this step before grammars. None: no row has a grammar."""
    _temperature_B: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: object, **kwargs: object) -> object:
        self._temperature_B = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            # Logprobs of prompt tokens are requested outside of this call.
            self._temperature_B = self.unmasked_BV = None

    def apply_logits_processors(self, logits: Tensor, *args: object, **kwargs: object) -> Tensor:
        """[B, V] logits of allowed tokens."""
        allowed_BV: Tensor = super().apply_logits_processors(logits, *args, **kwargs)
        return allowed_BV if self.unmasked_BV is None else _let_end(allowed_BV, self.end_ids)

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # static there
        """[B, V] float32 logprobs of `logits`, or of those before grammars; with temperature while sampling."""
        if self.unmasked_BV is not None:
            logits = self.unmasked_BV
        if self._temperature_B is not None:
            logits = _tempered(logits, self._temperature_B)
        return logits.log_softmax(dim=-1, dtype=torch.float32)


class TemperedKernelSampler(KernelSampler):  # type: ignore[misc]  # without types where vLLM is not installed
    """`TemperedSampler` for vLLM's second model runner, which samples in kernels by a hash of seed and position, so
    that seeds have no cost.
    """

    end_ids: Sequence[int] = ()
    unmasked_BV: Tensor | None = None
    """See `TemperedSampler`."""

    def apply_sampling_params(self, logits: Tensor, *args: object, **kwargs: object) -> Tensor:
        """[B, V] logits of allowed tokens."""
        allowed_BV: Tensor = super().apply_sampling_params(logits, *args, **kwargs)
        return allowed_BV if self.unmasked_BV is None else _let_end(allowed_BV, self.end_ids)

    def sample(
        self, logits: Tensor, expanded_idx_mapping: Tensor, *args: object, return_logprobs: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(tokens, [B, V] logits for the logprobs). The slot of each row is in expanded_idx_mapping."""
        # Without logprobs it may use a fused sampler, whose logits have passed top-k and top-p.
        tokens, _ = super().sample(logits, expanded_idx_mapping, *args, return_logprobs=False)
        if self.unmasked_BV is not None:
            logits, self.unmasked_BV = self.unmasked_BV, None
        if return_logprobs:
            logits = _tempered(logits, self.sampling_states.temperature.gpu[expanded_idx_mapping.long()])
        return tokens, logits


class WeightWorker:
    """Methods that VllmEngine calls in every worker through `collective_rpc`."""

    model_runner: Any

    def use_tempered_logprobs(self, end_ids: Sequence[int]) -> bool:
        """Replace the sampler of this worker and pass it the logits before grammars. end_ids: tokens that end a
        response. Returns: False if the sampler is not vLLM's. Workers that do not sample have none to replace.
        """
        sampler = getattr(self.model_runner, "sampler", None)
        if sampler is None:
            return True
        tempered = {Sampler: TemperedSampler, KernelSampler: TemperedKernelSampler}.get(type(sampler))
        if tempered is None:
            return False
        # In place, which keeps the state of vLLM's sampler.
        sampler.__class__ = tempered
        sampler.end_ids = end_ids
        if tempered is TemperedSampler and not hasattr(torch.ops._C, "fused_gumbel_argmax"):
            # On a CPU, vLLM before 0.29 ignored all seeds if one row, such as a greedy one, had none.
            drawing = sampler.topk_topp_sampler
            if drawing.forward == drawing.forward_cpu:
                drawing.forward = drawing.forward_native
        # vLLM applies grammars as masks to the logits before it calls the sampler.
        if tempered is TemperedKernelSampler:
            sampler.logprobs_mode = "processed_logprobs"  # computes logprobs from the logits that `sample` returns
            masks = self.model_runner.structured_outputs_worker
            masks.apply_grammar_bitmask = _keeping_logits(sampler, masks.apply_grammar_bitmask)
        else:
            gpu_model_runner.apply_grammar_bitmask = _keeping_logits(sampler, gpu_model_runner.apply_grammar_bitmask)
        return True

    def load_published(self, files: Sequence[str]) -> None:
        """Replace the weights by the tensors in `files`, with only the first name of tied tensors."""
        model = self.model_runner.get_model()
        tied = list(_tied_heads(model))
        self.model_runner.reload_weights(weights_iterator=_tensors(files))
        for head, embedding in tied:
            # vLLM loads by layer; of a tied layer without a tensor in the file a CPU would keep an old packed copy.
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)


def _keeping_logits(sampler: Any, apply: Callable[..., None]) -> Callable[..., None]:
    """Wrap `apply`, which masks logits in place, to keep a copy for the sampler."""

    def keep_and_apply(*args: object) -> None:
        [sampler.unmasked_BV] = [arg.clone() for arg in args if isinstance(arg, Tensor)]
        apply(*args)

    return keep_and_apply


def _tempered(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    # Greedy rows have temperature 0 in vLLM; their logprobs are those of softmax(logits), see `SamplingParams`.
    return logits_BV.float() / torch.where(temperature_B < _GREEDY_BELOW, 1.0, temperature_B)[:, None]


def _let_end(logits_BV: Tensor, end_ids: Sequence[int]) -> Tensor:
    """Logits that allow an end token in rows in which grammar and `bad_tokens` together allow nothing."""
    nothing_B = logits_BV.isneginf().all(dim=-1)
    ids = torch.tensor(list(end_ids), device=logits_BV.device)
    logits_BV[:, ids] = logits_BV[:, ids].masked_fill(nothing_B[:, None], 0.0)
    return logits_BV


def _tensors(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                yield name, weights.get_tensor(name)


def _tied_heads(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    # (output layer, the embedding that it shares its weights with).
    modules = [module for module in model.modules() if getattr(module, "weight", None) is not None]
    for head in modules:
        if isinstance(head, ParallelLMHead):
            for other in modules:
                if other is not head and other.weight is head.weight:
                    yield head, other


class CauseHandler(logging.Handler):
    """Writes the first logged exception to the engine's CAUSE_FILE. A vLLM worker logs its failure; the engine only
    receives "see stack trace (above)".
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Ignore records without an exception, and all records after the first one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError), open(os.environ[CAUSE_FILE], "x", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}")


if CAUSE_FILE in os.environ:
    for _name in _WHERE_PROCESSES_END:
        logging.getLogger(_name).addHandler(CauseHandler(logging.ERROR))
# On import, long before the first call, since the engine may be killed while the model loads.
end_with_engine()
