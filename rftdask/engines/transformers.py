"""Engine that generates with a transformers model in this process, on a CPU or one GPU.

Invariant: the computation depends neither on time nor on earlier calls, so the same call on the same weights gives the
same bits.

Why not `model.generate`: it has one set of sampling parameters and one random stream per batch, keeps finished rows to
the end, computes the prompt once per sibling of a group, and its logprobs differ from those in `base`.

Shapes: D = distinct prompts, B = rows (requests not dropped), V = vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoTokenizer, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.hub import local_model
from rftdask.data.images import ImageProcessor
from rftdask.engines.base import MAX_BATCH_TOKENS, MIN_TEMPERATURE, Engine, GenerateRequest, Give, SamplingParams, Take
from rftdask.engines.decode_batch import DecodeBatch, Prompts
from rftdask.engines.sampling import Guide, Guides
from rftdask.errors import DamagedError, DataError, RoleError
from rftdask.models.host_copy import HostCopy
from rftdask.models.image_models import model_class, with_images
from rftdask.models.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, load_files
from rftdask.models.model_shape import WITH_ADAPTER
from rftdask.models.routers import Routers
from rftdask.processes.gpus import set_device
from rftdask.synchronizer.delta import DeltaFile
from rftdask.synchronizer.manifest import BLOCK_BYTES
from rftdask.synchronizer.tensor_heads import read_file_head

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
COMPACT_SHARE = 4
"""Share of finished rows at which they leave the batch, which bounds the cost of copies to four times the cache."""


class TransformersEngine(Engine):
    """Engine of a transformers model in this process; see `Engine`.

    Args:
        model_path: folder or Hub name of a causal language model, for `from_pretrained`.
        dtype: data type of the weights: "float32", "bfloat16", "float16".
        max_batch_tokens: maximum number of tokens of padded prompts and responses in the cache. Further requests enter
            in order when others have left. A single request may exceed it.
    Raises: DataError: the model cannot be loaded.
    """

    engine_type = "transformers"
    repeats_bits = True
    loads_in_flight = True
    guides_sampling = True
    records_experts = True
    reads_images = True
    reads_videos = True
    leaves_device = True
    # In this order, so that processes that need fewer modules do not wait for all of them.
    imports_ahead = (
        "transformers",
        "transformers.modeling_utils",
        "transformers.modeling_layers",
        "transformers.models.auto.modeling_auto",
        "rftdask.engines.transformers",
    )

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        self.model_path, self.dtype, self.device = model_path, dtype, torch.device(device)
        if self.device.type == "cuda":
            set_device()
        self.max_batch_tokens = self.cache_tokens = max_batch_tokens
        source = local_model(model_path)
        disable_progress_bar()  # a progress bar would start a thread and a process
        try:
            loaded = model_class(source, trust_remote_code=trust_remote_code).from_pretrained(
                source,
                dtype=getattr(torch, dtype),
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                local_files_only=Path(source).is_dir(),
            )
            model, report = cast(tuple[PreTrainedModel, Mapping[str, Collection[str]]], loaded)
            ends = end_ids(source, trust_remote_code)
        except (OSError, ValueError) as error:
            raise DataError(f"model {model_path} cannot be loaded; give a saved model's folder: {error}") from error
        if report["missing_keys"]:  # transformers initializes them at random with only a warning
            raise DataError(f"model {model_path} lacks the weights {sorted(report['missing_keys'])}")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise DataError(f"model {model_path} {WITH_ADAPTER}")
        self._loaded: PreTrainedModel | None = model
        # Of the files loaded last. Empty for adapters and before the first load.
        self._loaded_files: list[list[Place]] = []
        self._host_copy: HostCopy | None = None
        self._routers: Routers | None = None
        self._images = ImageProcessor(model_path, trust_remote_code=trust_remote_code)
        self._trust_remote_code = trust_remote_code
        cast(torch.nn.Module, model).to(self.device).eval()
        self._end_ids = torch.tensor(ends, dtype=torch.int64, device=self.device)
        self._vocab_size = len(next(model.get_input_embeddings().parameters()))  # [V, width]

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> TransformersEngine:
        path = section.model_path or model.model_path
        return cls(path, dtype=section.dtype, device=device, trust_remote_code=model.trust_remote_code)

    @property
    def _model(self) -> PreTrainedModel:
        if self._loaded is None:
            raise RoleError(f"{self} was closed; create a new one")
        return self._loaded

    def record_experts(self) -> None:
        self._routers = Routers(self._model)

    def serve(self, take: Take, give: Give) -> None:
        num_choices = 0 if self._routers is None else self._routers.num_choices
        batch = DecodeBatch(self._end_ids, self._vocab_size, self.device, self._text_of, num_choices, self._guide)
        try:
            with torch.inference_mode():
                self._serve(batch, take, give)
        except RuntimeError as error:  # from torch: out of memory, a failed kernel
            raise RoleError(f"{self} failed on a batch of {len(batch.numbers)} requests: {error}") from error

    @cached_property
    def _tokenizer(self) -> Any:  # needed only for stop texts and grammars
        return AutoTokenizer.from_pretrained(local_model(self.model_path), trust_remote_code=self._trust_remote_code)

    @cached_property
    def _guides(self) -> Guides:
        return Guides(self._tokenizer, self._vocab_size, self._end_ids.tolist())

    def _text_of(self, tokens: list[int]) -> str:
        return cast(str, self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _guide(self, sampling: SamplingParams) -> Guide:
        return self._guides.guide(sampling)

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """See Engine. Computed pair by pair without padding, so that the bits depend only on the pair."""
        scored = []
        for prompt, response in pairs:
            if not prompt or not response or max(*prompt, *response) >= self._vocab_size:
                raise RoleError(f"{self} cannot score: an empty prompt or response, or tokens it does not know")
            tokens_1L = torch.tensor([[*prompt, *response]], device=self.device)
            with torch.inference_mode():
                # [R, V]: logits predict the next token, so those of the response begin one position before it.
                logits_RV = self._model(input_ids=tokens_1L, use_cache=False).logits[0, len(prompt) - 1 : -1]
                logprobs_RV = logits_RV.float().log_softmax(dim=-1)
                scored.append(logprobs_RV.gather(1, tokens_1L[0, len(prompt) :, None])[:, 0].tolist())
        return [tuple(logprobs) for logprobs in scored]

    def _check(self, number: int, request: GenerateRequest) -> GenerateRequest:
        """Return the request. Raises: RoleError: the model cannot serve it."""
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
            return request
        raise RoleError(f"{self} cannot answer request {number}: {problem}")

    def _serve(self, batch: DecodeBatch, take: Take, give: Give) -> None:
        cache, logits_BV = DynamicCache(), torch.empty(0)  # cache without rows
        may_enter = False
        while True:
            for number, request in take():
                if request is None:
                    batch.forget(number)
                else:
                    batch.add(number, self._check(number, request))
                    may_enter = True
            # Waiting requests are retried only after an arrival or after rows have left.
            may_enter = may_enter and (not batch.numbers or can_join(cache))
            if may_enter and (num := batch.num_fitting(self.max_batch_tokens)):
                alone = not batch.numbers
                prompts, others = batch.enter(num, self.policy_version), DynamicCache(config=self._model.config)
                # Into a separate cache: in a joint pass every running row would be padded to the longest prompt.
                if any(prompts.images):
                    others_BV, others, shift_D = self._read_images(prompts)
                    batch.shift_positions(prompts, shift_D)
                else:
                    others_BV, experts_DPX = self._forward(
                        prompts.tokens_DP, prompts.mask_DP, prompts.positions_DP, others
                    )
                    batch.note_prompts(prompts, experts_DPX)
                if len(others_BV) < len(prompts.prompt_B):
                    # Each distinct prompt was computed once; each row gets a copy.
                    keep(others, prompts.prompt_B, 0)
                    others_BV = others_BV[prompts.prompt_B]
                if alone:
                    logits_BV, cache = others_BV, others
                else:
                    logits_BV = torch.cat([logits_BV, others_BV])
                    join(cache, others)
            if not batch.numbers:
                return
            # One token per row, also for finished rows in the batch, whose tokens are discarded.
            tokens_B = batch.sample(logits_BV)
            num_done, num_bad = batch.counts()
            if num_bad:
                raise RoleError(
                    f"{self} computed logits that are not numbers, for {num_bad} requests; the weights are damaged or "
                    "training diverged"
                )
            if num_done > len(batch.told):
                for number, generation in batch.finished():
                    give(number, generation)
            batch.tell_newest()
            # Dropping rows copies the cache of the others, so finished rows stay until there are enough of them.
            may_enter = num_done * COMPACT_SHARE >= len(tokens_B)
            if may_enter:
                index_B, num_columns = batch.drop_done(trim=can_join(cache))
                keep(cache, index_B, num_columns)
                tokens_B = tokens_B[index_B]
            if batch.numbers:
                logits_BV, experts_B1X = self._forward(
                    tokens_B[:, None], batch.mask(), batch.positions()[:, None], cache
                )
                batch.note_experts(experts_B1X[:, 0])
                batch.note_version(self.policy_version)

    def _forward(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, Tensor]:
        """([B, V] logits after the last of [B, W] tokens, [B, W, X] int16 experts; X is 0 if not recorded)."""
        if self._routers is not None:
            self._routers.give(None)
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            # Only for the last column: [B, W, V] of a long prompt would be the largest tensor by far.
            logits_to_keep=1,
        )
        experts = (
            torch.empty(*tokens.shape, 0, dtype=torch.int16, device=self.device)
            if self._routers is None
            else self._routers.taken().unflatten(0, tokens.shape)
        )
        return output.logits[:, -1], experts

    def _read_images(self, prompts: Prompts) -> tuple[Tensor, DynamicCache, list[int]]:
        """([D, V] logits after each prompt, their cache, and the position offset after each prompt)."""
        if self._routers is not None:
            raise RoleError(f"{self} cannot record the experts of prompts with images")
        cache, logits, shifts = DynamicCache(), list[Tensor](), list[int]()
        # Prompt by prompt, since models batch images in different ways.
        for tokens_P, length, names in zip(prompts.tokens_DP, prompts.lengths, prompts.images, strict=True):
            own = DynamicCache(config=self._model.config.get_text_config())
            inputs, shift = with_images(self._model, tokens_P[None, -length:], names, self._images)
            output = self._model(**inputs, past_key_values=own, use_cache=True, logits_to_keep=1)
            if not can_join(own):
                raise RoleError(f"{self} cannot batch prompts with images: its cache cannot be joined")
            if logits:
                join(cache, own)
            else:
                cache = own
            logits.append(output.logits[:, -1])
            shifts.append(shift)
        return torch.cat(logits), cache, shifts

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """Load weights as in `Engine`, with the names of `state_dict()`. A mismatched name or shape changes nothing.
        Adapters are not merged, as in the trainer; merged weights would differ by rounding."""
        # Also between two steps, since tensors created here are changed by later loads.
        with torch.inference_mode(False):
            self._load(version, files)

    def _load(self, version: int, files: Sequence[Path]) -> None:
        by_name = {file.name: file for file in files}
        if ADAPTER_FILE in by_name:
            try:
                load_files(self._model, by_name[ADAPTER_CONFIG_FILE], by_name[ADAPTER_FILE])
            except (KeyError, OSError, SafetensorError, DataError) as error:
                raise RoleError(f"{self} cannot load the adapter of version {version}: {error}") from error
            # New modules start in training mode, in which adapters may have dropout.
            cast(torch.nn.Module, self._model).to(self.device).eval()
            self.policy_version = version
            return
        targets: dict[str, Tensor] = self._model.state_dict()
        self._loaded_files = []
        try:
            # All files are checked before the first copy, so that a mismatch leaves the old weights intact.
            problems = _compare(targets, files)
            if problems:
                raise RoleError(f"{self} cannot load version {version}: " + "; ".join(problems))
            for file in files:
                with safe_open(file, framework="pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 (not a dict)
                        # In place, which keeps tied tensors and the dtype of the model.
                        targets[name].copy_(weights.get_tensor(name))
            self._loaded_files = [places_of(file) for file in files]
        except (OSError, SafetensorError) as error:
            raise RoleError(f"{self} cannot read the files of version {version}: {error}") from error
        self.policy_version = version

    def try_change_weights(self, files: Sequence[Path]) -> bool:
        """See Engine. If the hash of a block does not match, all changes are reverted."""
        targets: dict[str, Tensor] = self._model.state_dict()
        for place in (place for places in self._loaded_files for place in places):
            # In another data type or order than the file, they are not the words that the delta changes.
            if targets[place.name].dtype != place.dtype or not targets[place.name].is_contiguous():
                return False

        def change(delta: DeltaFile, number: int, places: Sequence[Place]) -> bool:
            positions, xors = delta.changes(number)
            positions += number * (BLOCK_BYTES // 2)  # from the beginning of the file
            now = []
            for place in places:
                first, last = np.searchsorted(positions, (place.begin // 2, place.end // 2))
                if first < last:
                    words = targets[place.name].view(-1).view(torch.int16)
                    at = torch.from_numpy(positions[first:last] - place.begin // 2).to(words.device)
                    words[at] ^= torch.from_numpy(xors[first:last].view(np.int16)).to(words.device)
                    now.append(words[at].cpu().numpy().tobytes())
            return delta.is_result(number, b"".join(now))

        with torch.inference_mode(False), torch.no_grad():
            try:
                deltas = [DeltaFile(file) for file in files]
            except DamagedError:  # of another version of this package
                return False
            if len(deltas) != len(self._loaded_files):
                return False
            done = []
            for delta, places in zip(deltas, self._loaded_files, strict=True):
                for number in range(delta.num_blocks):
                    done.append((delta, number, places))
                    if not change(delta, number, places):
                        for again in done:  # XOR is its own inverse
                            change(*again)
                        return False
        return True

    def leave_device(self) -> None:
        model = cast(torch.nn.Module, self._model)
        self._host_copy = HostCopy([*model.parameters(), *model.buffers()], self.device)

    def return_to_device(self) -> None:
        if self._host_copy is not None:
            self._host_copy.back()
            self._host_copy = None

    def close(self) -> None:
        self._loaded = None

    def __str__(self) -> str:
        return f"engine 'transformers' ({self.model_path}, policy version {self.policy_version})"


# ---- cache: keys and values of running sequences. The last column is the newest token of every row; padding on the
# left is zero and masked. A layer has keys and values: [rows, heads, columns, head size].


def can_join(cache: DynamicCache) -> bool:
    """True if rows of different lengths fit into one cache: no layer keeps a window or a state instead of all keys."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def keep(cache: DynamicCache, index_B: Tensor, num_columns: int) -> None:
    """Keep the rows `index_B` and drop their first `num_columns` columns; above 0 only in caches that `can_join`."""
    cache.reorder_cache(index_B)  # type: ignore[arg-type]  # any int64 tensor is accepted
    layers: Any = cache.layers if num_columns else ()
    for layer in layers:
        layer.keys = layer.keys[:, :, num_columns:]
        layer.values = layer.values[:, :, num_columns:]


def join(cache: DynamicCache, others: DynamicCache) -> None:
    """Append the rows of `others` to `cache`."""

    def joined(ones: Tensor, others: Tensor) -> Tensor:
        """[rows of both, heads, columns, head size], padded on the left."""
        columns = max(ones.shape[2], others.shape[2])
        return torch.cat([pad(part, (0, 0, columns - part.shape[2], 0)) for part in (ones, others)])

    layers: Any = zip(cache.layers, others.layers, strict=True)
    for layer, other in layers:
        layer.keys = joined(layer.keys, other.keys)
        layer.values = joined(layer.values, other.values)


# ---- model folders


def end_ids(model_path: str, trust_remote_code: bool) -> list[int]:
    """End-of-response tokens from the generation config, the config and the tokenizer of a model.

    Raises: OSError, ValueError: the model has no config, or its tokenizer cannot be read.
    """
    folder = Path(model_path)
    local, trust = folder.is_dir(), trust_remote_code
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust, local_files_only=local)
    found = [config.get_text_config().eos_token_id]
    with contextlib.suppress(OSError):  # optional
        found.append(GenerationConfig.from_pretrained(model_path, local_files_only=local).eos_token_id)
    if not local or (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust, local_files_only=local)
        found.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(ids)


@dataclass(frozen=True)
class Place:
    """Location of a tensor in a safetensors file."""

    name: str
    dtype: torch.dtype | None
    """None: a data type without deltas."""
    begin: int
    """Offset in the file, in bytes."""
    end: int


def places_of(file: Path) -> list[Place]:
    """Locations of the tensors in a file, in order."""
    head, start = read_file_head(file)
    head.pop("__metadata__", None)
    places = (
        Place(name, _DTYPES.get(entry["dtype"]), *(start + offset for offset in entry["data_offsets"]))
        for name, entry in head.items()
    )
    return sorted(places, key=lambda place: place.begin)


def _compare(targets: dict[str, Tensor], files: Sequence[Path]) -> list[str]:
    # Reasons why the tensors of the files are not a complete state dict, one line each. Reads only headers.
    problems: list[str] = []
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                shape = tuple(weights.get_slice(name).get_shape())
                if name not in targets:
                    problems.append(f"{file} holds {name}, which the model lacks")
                elif shape != tuple(targets[name].shape):
                    problems.append(f"{name} is {list(shape)} in {file}, {list(targets[name].shape)} in the model")
                elif name in found:
                    problems.append(f"{name} is in {file} and in a file before it")
                found.add(name)
    # Compared by storage, not by name: a file holds only one name of tied tensors.
    filled = {targets[name].data_ptr() for name in found if name in targets}
    problems += [f"{name} is in no file" for name, tensor in targets.items() if tensor.data_ptr() not in filled]
    return problems
