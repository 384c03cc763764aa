"""Engine that generates with a transformers model in this process, on a CPU or one GPU.

It knows nothing of text. Invariants: responses come in the order of the requests, and nothing about the computation
depends on time or on earlier calls, so that the same call on the same weights gives the same bits.

Why not `model.generate`: it has one set of sampling parameters and one random stream for the whole batch, keeps
finished rows to the end, computes the prompt once per sibling of a group, and its logprobs are not those of `base`.

Shapes: D = distinct prompts, B = rows (requests not dropped), V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import MAX_BATCH_TOKENS, Engine, GenerateRequest, Give, Take
from rftdask.engines.decode_batch import DecodeBatch, Prompts
from rftdask.engines.sampling import MIN_TEMPERATURE
from rftdask.errors import DataError, RoleError
from rftdask.models.hub import local_model
from rftdask.models.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, load_files

COMPACT_SHARE = 4
"""Finished rows leave the batch when they are at least 1/4 of it: all copies then cost less than four of the cache."""


class TransformersEngine(Engine):
    """Engine of one transformers model, loaded in this process; see `Engine`.

    Args:
        model_path: folder (or hub name) of a causal language model as `from_pretrained` takes it.
        dtype: of the weights: "float32", "bfloat16", "float16".
        attn_implementation: as in transformers; None lets it choose.
        max_batch_tokens: at most so many tokens of prompt (padded) and response are held in the cache at once; of a
            longer list the rest enters, in order, when others have left. One request alone may exceed it.
    Raises: DataError: the model cannot be loaded.
    """

    engine_type = "transformers"
    repeats_bits = True
    imports_ahead = ("rftdask.engines.transformers", "transformers.models.auto.modeling_auto")

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        self.model_path = model_path
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_batch_tokens = max_batch_tokens
        source = local_model(model_path)
        options: dict[str, Any] = {
            "trust_remote_code": trust_remote_code,
            "local_files_only": Path(source).is_dir(),
        }
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
                output_loading_info=True,
                **options,
            )
            model, report = loaded
            end_ids = _end_ids(model, source, options)
        except (OSError, ValueError) as error:
            raise DataError(f"model {model_path} cannot be loaded; give a saved model's folder: {error}") from error
        if report["missing_keys"]:  # transformers fills them at random, with no more than a warning
            raise DataError(f"model {model_path} lacks the weights {sorted(report['missing_keys'])}")
        self._model: Any = model
        self._model.to(self.device).eval()
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=self.device)
        self._vocab_size = int(self._model.get_input_embeddings().weight.shape[0])

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> TransformersEngine:
        path = section.model_path or model.model_path
        return cls(path, dtype=section.dtype, device=device, trust_remote_code=model.trust_remote_code)

    def serve(self, take: Take, give: Give) -> None:
        if self._model is None:
            raise RoleError(f"{self} was closed; make a new one")
        batch = DecodeBatch(self._end_ids, self._vocab_size, self.device)
        try:
            with torch.inference_mode():
                self._serve(batch, take, give)
        except RuntimeError as error:  # torch's own: out of memory, a failed kernel
            raise RoleError(f"{self} failed on a batch of {len(batch.numbers)} requests: {error}") from error

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        if self._model is None:
            raise RoleError(f"{self} was closed; make a new one")
        scored = []
        for prompt, response in pairs:
            if not prompt or not response or max(*prompt, *response) >= self._vocab_size:
                raise RoleError(f"{self} cannot score: an empty prompt or response, or tokens it does not know")
            tokens_1L = torch.tensor([[*prompt, *response]], device=self.device)
            with torch.inference_mode():
                logits_RV = self._model(input_ids=tokens_1L, use_cache=False).logits[0, len(prompt) - 1 : -1]
                logprobs_RV = logits_RV.float().log_softmax(dim=-1)
                scored.append(logprobs_RV.gather(1, tokens_1L[0, len(prompt) :, None])[:, 0].tolist())
        return [tuple(logprobs) for logprobs in scored]

    def _check(self, number: int, request: GenerateRequest) -> None:
        sampling = request.sampling
        if not request.prompt_tokens:
            problem = "its prompt is empty"
        elif not 0 <= min(request.prompt_tokens) <= max(request.prompt_tokens) < self._vocab_size:
            problem = f"its prompt holds tokens outside the vocabulary of {self._vocab_size}"
        elif sampling.max_tokens < 1:
            problem = f"max_tokens is {sampling.max_tokens}, must be at least 1"
        elif sampling.temperature != 0 and not sampling.temperature >= MIN_TEMPERATURE:
            problem = f"temperature is {sampling.temperature}, must be 0 (greedy) or at least {MIN_TEMPERATURE}"
        else:
            return
        raise RoleError(f"{self} cannot answer request {number}: {problem}")

    def _take(self, batch: DecodeBatch, take: Take) -> bool:
        """Move what has come into the batch. Returns: whether a new request was among it."""
        came = False
        for number, request in take():
            if request is None:
                batch.forget(number)
            else:
                self._check(number, request)
                batch.add(number, request)
                came = True
        return came

    def _serve(self, batch: DecodeBatch, take: Take, give: Give) -> None:
        logits_BV: Any = None
        cache: Any = None
        compact = False
        while True:
            # Once they did not fit, the waiting fit no better before rows have left.
            may_enter = self._take(batch, take) or compact
            if may_enter and (not batch.numbers or can_join(cache)):
                num_newcomers = batch.num_fitting(self.max_batch_tokens)
                if num_newcomers:
                    alone = not batch.numbers
                    others_BV, others = self._prefill(batch.enter(num_newcomers))
                    if alone:
                        logits_BV, cache = others_BV, others
                    else:
                        logits_BV = torch.cat([logits_BV, others_BV])
                        join(cache, others)
            if not batch.numbers:
                return
            tokens_B = batch.sample(logits_BV)
            num_done, num_bad = batch.counts()
            if num_bad:
                raise RoleError(
                    f"{self} computed logits that are not numbers, for {num_bad} requests; the weights are damaged or "
                    "training diverged"
                )
            if num_done > batch.num_told:
                for number, generation in batch.finished(self.policy_version):
                    give(number, generation)
            compact = num_done * COMPACT_SHARE >= len(tokens_B)
            if compact:
                index_B, num_columns = batch.drop_done(trim=can_join(cache))
                keep(cache, index_B, num_columns)
                tokens_B = tokens_B[index_B]
            if batch.numbers:
                logits_BV = self._forward(tokens_B[:, None], batch.mask(), batch.positions()[:, None], cache)

    def _prefill(self, prompts: Prompts) -> tuple[Tensor, DynamicCache]:
        """Compute the logits of the first response token and the cache, once per distinct prompt, then copied."""
        cache = DynamicCache(config=self._model.config)
        logits_DV = self._forward(prompts.tokens_DP, prompts.mask_DP, prompts.positions_DP, cache)
        if len(logits_DV) == len(prompts.prompt_B):
            return logits_DV, cache
        keep(cache, prompts.prompt_B, 0)
        return logits_DV[prompts.prompt_B], cache

    def _forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """Load weights as in `Engine`; names as in `state_dict()`. A name or shape that does not fit changes nothing.

        Adapters stay beside the weights, where the trainer has them: added to them, both would differ by rounding.
        """
        if self._model is None:
            raise RoleError(f"{self} was closed; make a new one")
        by_name = {file.name: file for file in files}
        if ADAPTER_FILE in by_name:
            try:
                load_files(self._model, by_name[ADAPTER_CONFIG_FILE], by_name[ADAPTER_FILE])
            except (KeyError, OSError, SafetensorError, DataError) as error:
                raise RoleError(f"{self} cannot load the adapter of version {version}: {error}") from error
            self._model.to(self.device).eval()
            self.policy_version = version
            return
        targets: dict[str, Tensor] = self._model.state_dict()
        try:
            problems = _compare(targets, files)
            if problems:
                raise RoleError(f"{self} cannot load version {version}: " + "; ".join(problems))
            for file in files:
                with safe_open(file, framework="pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 (not a dict)
                        targets[name].copy_(weights.get_tensor(name))  # in place: tied stays tied, dtype is the model's
        except (OSError, SafetensorError) as error:
            raise RoleError(f"{self} cannot read the files of version {version}: {error}") from error
        self.policy_version = version

    def close(self) -> None:
        self._model = None

    def __str__(self) -> str:
        return f"engine 'transformers' ({self.model_path}, policy version {self.policy_version})"


# ---- the cache: keys and values of sequences under way. Its last column is the newest token of every row; what is
# missing on the left is zero, and masked.


def can_join(cache: DynamicCache) -> bool:
    """True if rows of different lengths fit into one cache. They do not where a layer keeps a window or a state of the
    past instead of all keys: it then knows how many tokens there were, one number for all rows.
    """
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def keep(cache: DynamicCache, index_B: Tensor, num_columns: int) -> None:
    """Keep the rows `index_B` and drop their first `num_columns` columns; above 0 only in caches that `can_join`."""
    cache.reorder_cache(index_B)  # type: ignore[arg-type]  # any int64 tensor will do
    if num_columns:
        for layer in _layers(cache):
            layer.keys = layer.keys[:, :, num_columns:]
            layer.values = layer.values[:, :, num_columns:]


def join(cache: DynamicCache, others: DynamicCache) -> None:
    """Add the rows of `others` after those of `cache`."""
    for layer, other in zip(_layers(cache), _layers(others), strict=True):
        layer.keys = _joined(layer.keys, other.keys)
        layer.values = _joined(layer.values, other.values)


def _layers(cache: DynamicCache) -> list[Any]:
    return list(cache.layers)


def _joined(ones: Tensor, others: Tensor) -> Tensor:
    """[rows of both, heads, columns, head size], padded on the left."""
    columns = max(ones.shape[2], others.shape[2])
    return torch.cat([pad(part, (0, 0, columns - part.shape[2], 0)) for part in (ones, others)])


# ---- model folders


def _end_ids(model: Any, model_path: str, options: dict[str, Any]) -> list[int]:
    """Every token that the generation config, the config or the tokenizer of the folder calls the end of a response."""
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id):
        found.update([value] if isinstance(value, int) else value or [])
    folder = Path(model_path)
    if not folder.is_dir() or (folder / "tokenizer_config.json").is_file():
        value = AutoTokenizer.from_pretrained(model_path, **options).eos_token_id
        found.update([] if value is None else [value])
    return sorted(found)


def _compare(targets: dict[str, Tensor], files: Sequence[Path]) -> list[str]:
    """Problems that keep the files' tensors from being the whole state dict, a line each. Reads headers only."""
    problems: list[str] = []
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                shape = tuple(weights.get_slice(name).get_shape())
                if name not in targets:
                    problems.append(f"{file} holds {name}, which the model has not")
                elif shape != tuple(targets[name].shape):
                    problems.append(f"{name} is {list(shape)} in {file}, {list(targets[name].shape)} in the model")
                elif name in found:
                    problems.append(f"{name} is in {file} and in a file before it")
                found.add(name)
    filled = {targets[name].data_ptr() for name in found if name in targets}
    problems += [f"{name} is in no file" for name, tensor in targets.items() if tensor.data_ptr() not in filled]
    return problems
