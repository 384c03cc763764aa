"""Estimates the memory that a configuration needs, part by part, before anything is started.

docs/trainer.md derives the formulas. The estimate needs no GPU and reads only the shapes of the models; the layout of
the run (cluster/layout.py) places the roles. Weights, gradients, optimizer state and key-value caches are exact.
Activations and logits are within a few percent for standard decoders (norms, attention, gated MLP).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rftdask.cluster.job_shapes import megabytes
from rftdask.cluster.layout import (
    AUXILIARY_RESOURCE,
    EXPLORER_RESOURCE,
    ROLES,
    TRAINER_RESOURCE,
    Layout,
    num_ranks,
    plan_machines,
)
from rftdask.config import Config
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.optimizer import OptimizerConfig
from rftdask.data.hub import cached_folder
from rftdask.engines.base import MAX_BATCH_TOKENS
from rftdask.errors import ConfigError, UserError
from rftdask.models.model_shape import MAX_LOGITS, ModelShape, known_model, read_shape

# fmt: off
GPUS_GB = {
    "A100 40GB": 40, "A100 80GB": 80, "A6000": 48, "B200": 180, "GH200": 96, "H100 80GB": 80, "H100 NVL": 94,
    "H200": 141, "L4": 24, "L40S": 48, "MI300X": 192, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32, "T4": 16,
    "V100 16GB": 16, "V100 32GB": 32,
}
# fmt: on
"""Memory from data sheets, in GB of 10^9 bytes (slightly less than the driver shows)."""
USABLE = 0.9
"""Usable fraction of a GPU. The CUDA context, kernel workspaces and allocator fragmentation take the rest."""
GB = 1e9
_MASTER = 4
"""Bytes of a float32 weight or gradient."""
_NUM_SMS = 132
"""Multiprocessors of an H100 or H200, over which the deterministic attention backward pass divides its work."""
_PROCESS = 1.5 * GB
"""Host memory of a rank or an engine with its libraries."""
_OWNERS = {"engines": EXPLORER_RESOURCE, "asleep": EXPLORER_RESOURCE, "auxiliary": AUXILIARY_RESOURCE}
"""Roles that own parts of host memory; ranks own the other parts."""
_GRAPHS = 1.0 * GB
"""Allowance for the CUDA graphs that vLLM measures when it starts."""
_BLOCK = 16
"""Tokens in a block of vLLM's key-value cache."""
# fmt: off
_STATE_BYTES = {
    "adadelta": 8, "adagrad": 4, "adam": 8, "adamax": 8, "adamw": 8, "asgd": 4, "nadam": 8, "radam": 8, "rmsprop": 4,
    "rprop": 8, "sgd": 0,
    # Two moments of 8, 8 or 4 bits, with a float32 scale per block of 256, 256 or 128.
    "adamw8bit": 2 + 8 / 256, "adamwfp8": 2 + 8 / 256, "adamw4bit": 1 + 8 / 128,
    "adam8bit": 2 + 8 / 256, "adamfp8": 2 + 8 / 256, "adam4bit": 1 + 8 / 128,
}
# fmt: on
"""Bytes of optimizer state per trained weight, by the last name of the optimizer class in lower case."""
_UNKNOWN_STATE = ", taken for two moments"


@dataclass(frozen=True)
class Part:
    """Memory of one purpose, such as weights, on each GPU of a role."""

    name: str
    num_bytes: float
    why: str
    count: int = 0
    """Number of processes that share it. 0: not known."""
    is_certain: bool = False
    """True for weights, gradients and optimizer state, whose size does not depend on the computation."""


@dataclass(frozen=True)
class Estimate:
    """Memory of one role on each of its GPUs, or of all roles on the host of a machine."""

    role: str
    num_gpus: int
    """0: host memory."""
    parts: tuple[Part, ...]
    problem: str = ""
    """Reason why the role cannot start, whatever its total. "": none."""
    keeps_to_share: bool = False
    """True if the role takes a configured share of each GPU and sizes its cache to fill that share."""
    change: str = ""
    """Keys that lower the needed memory, as the end of a sentence."""

    @property
    def total_bytes(self) -> float:
        return _sum(self.parts)

    def limit(self, memory_bytes: float) -> float:
        """Return the bytes that the role can use on a GPU of `memory_bytes`."""
        return memory_bytes if self.keeps_to_share else USABLE * memory_bytes

    def fits(self, memory_bytes: float) -> bool:
        """Return True if the role fits GPUs of `memory_bytes`, the size it was estimated for."""
        return self.total_bytes <= self.limit(memory_bytes) and not self.problem


@dataclass(frozen=True)
class TrainSizes:
    """Sizes that determine the memory of a rank, in addition to the shape of the model."""

    tokens: int
    """Tokens in a forward and backward pass."""
    num_ranks: int = 1
    sharded: bool = False
    """True for fsdp2: each rank holds a shard of weights, gradients and optimizer state."""
    tensor_parallel: int = 1
    """Number of ranks that split each layer."""
    offloaded: bool = False
    """True if weights, gradients and optimizer state are in host memory."""
    checkpointing: bool = False
    """True if each layer keeps only its input and is recomputed in the backward pass."""
    trained: int | None = None
    """Number of adapter weights (LoRA) next to the frozen weights. None: all weights are trained."""
    frozen: tuple[ModelShape, ...] = ()
    """Frozen models next to the policy: reference and teachers."""
    critic: ModelShape | None = None
    scalar_head: bool = False
    """True for a reward model, which computes no logits."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    deterministic: bool = False
    master_bytes: int = _MASTER
    """Bytes of a trained weight, and of its gradient."""
    compute_bytes: int = 2
    """Bytes of a number in a matrix product: 2 on a GPU (bfloat16), 4 on a CPU."""


def train_parts(shape: ModelShape, sizes: TrainSizes) -> tuple[Part, ...]:
    count, critic = shape.num_parameters, sizes.critic.num_parameters if sizes.critic else 0
    # With adapters, the weights stay frozen and need neither gradients nor optimizer state.
    trained, adapters = (count, 0) if sizes.trained is None else (sizes.trained, sizes.trained)
    cut = sizes.tensor_parallel

    def held(model: ModelShape | None) -> float:
        return 0.0 if sizes.offloaded or model is None else _share(model, sizes)

    policy_share, critic_share = held(shape), held(sizes.critic)
    # Frozen weights keep the data type of their files, except in layers that are cut but not sharded.
    least = _MASTER if cut > 1 and not sizes.sharded else 0
    frozen = (
        held(model) * model.num_parameters * max(least, min(_MASTER, model.bytes_at_rest)) for model in sizes.frozen
    )
    base = sizes.master_bytes if sizes.trained is None else min(_MASTER, shape.bytes_at_rest)
    weights = policy_share * (base * count + sizes.master_bytes * adapters) + critic_share * sizes.master_bytes * critic
    gradients = sizes.master_bytes * (policy_share * trained + critic_share * critic)
    state, why = _state_bytes(shape, sizes)
    state *= policy_share
    if sizes.critic:
        state += critic_share * _state_bytes(sizes.critic, replace(sizes, trained=None))[0]
    parts = [
        # Frozen weights that config.json reports as 4 bytes may be smaller in the files.
        Part("weights", weights, f"{count:,} of {base} bytes", is_certain=sizes.trained is None or base <= 2),
        Part("gradients", gradients, f"{trained:,} of {sizes.master_bytes} bytes", is_certain=True),
        Part("optimizer", state, why, is_certain=_UNKNOWN_STATE not in why),
        Part("frozen models", sum(frozen), f"{len(sizes.frozen)} (reference, teachers)"),
    ]
    if sizes.compute_bytes < _MASTER:
        layers, summed = (count - shape.num_outside) / cut, 0.0
        layer = layers / max(1, shape.num_layers)
        if sizes.sharded:  # gathered at a time: two layers, embeddings and output layer
            whole = layer * 2 + shape.num_outside
            if sizes.trained is None:  # added up at a time: what lies outside of the layers, or a layer
                summed = (sizes.compute_bytes + _MASTER) * max(layer, shape.num_outside)
        elif sizes.trained is None:
            whole = count * policy_share if cut > 1 else count
        else:
            # Autocast keeps bfloat16 copies of trained weights for a pass. The backward pass keeps copies of frozen
            # float32 weights: of all remaining layers, or with checkpointing of the layer that is recomputed.
            whole = adapters
            if base > sizes.compute_bytes:
                whole += (layer if sizes.checkpointing else layers) + shape.vocab_size * shape.hidden_size
        parts.append(Part("products", sizes.compute_bytes * whole, "weights in bfloat16, while they multiply"))
        parts.append(Part("sums", summed, "gradients of one unit, while ranks add them up"))
        # FlashAttention accumulates the gradient of the queries in float32. In deterministic mode it uses as many
        # copies as fill the GPU; a pass with one sequence has the most.
        num_heads = shape.query_size // shape.head_size
        copies = -(-_NUM_SMS // num_heads) if sizes.deterministic else 1
        purpose = f"{copies} times, since deterministic" if copies > 1 else "gradient of the queries"
        parts.append(Part("attention", 4.0 * copies * sizes.tokens * shape.query_size, purpose))
    parts.append(Part("activations", activation_bytes(shape, sizes), f"{sizes.tokens:,} tokens a pass"))
    if not sizes.scalar_head:
        parts.append(Part("logits", logit_bytes(shape, sizes.tokens), f"{shape.vocab_size:,} words, in chunks"))
    return tuple(part for part in parts if part.num_bytes)


def _share(model: ModelShape, sizes: TrainSizes) -> float:
    """Return the largest share of a model's weights, gradients and optimizer state on any rank.

    Rows are not divided: of 8 experts, each of the first eight of 16 ranks holds one.
    """
    ranks = sizes.num_ranks // sizes.tensor_parallel if sizes.sharded else 1
    most = 0.0
    for (is_outside, rows), count in model.rows.items():  # embeddings and norms are not cut
        most += count * -(-rows // (ranks * (1 if is_outside else sizes.tensor_parallel))) / rows
    return most / model.num_parameters


def load_bytes(shape: ModelShape, sizes: TrainSizes) -> float:
    """Return the peak GPU memory of a rank while it loads one model after another (`load_policy`).

    Under fsdp2 that is at most 1.2 times its rows and one tensor; otherwise each whole model, first in host memory.
    """

    def most(model: ModelShape, dtype_bytes: int) -> float:
        if not (sizes.sharded or sizes.offloaded or sizes.tensor_parallel > 1):
            return float(dtype_bytes * model.num_parameters)
        rows = _share(model, sizes) * model.num_parameters
        return dtype_bytes * (1.2 * rows + max(map(math.prod, model.weights.values())))

    base = sizes.master_bytes if sizes.trained is None else min(_MASTER, shape.bytes_at_rest)
    held = next((part.num_bytes for part in train_parts(shape, sizes) if part.name == "weights"), 0.0)
    others = [most(model, min(_MASTER, model.bytes_at_rest)) for model in sizes.frozen]
    others += [most(sizes.critic, sizes.master_bytes)] if sizes.critic else []
    return max([most(shape, base), *(held + other for other in others)])


def _state_bytes(shape: ModelShape, sizes: TrainSizes) -> tuple[float, str]:
    """Return the optimizer state of a whole model or of its adapters, in bytes, and its description."""
    name = sizes.optimizer.optimizer_type.rpartition(".")[2].lower()
    count = shape.num_parameters if sizes.trained is None else sizes.trained
    if name == "muon":
        hidden = count
        if sizes.trained is None:
            in_layers = (dims for name, dims in shape.weights.items() if any(map(str.isdigit, name.split("."))))
            hidden = sum(math.prod(dims) for dims in in_layers if len(dims) == 2)
        return 4.0 * hidden + 8.0 * (count - hidden), "muon: one momentum of the layers' matrices, AdamW for the rest"
    if name == "adafactor" and sizes.trained is None:
        # Each matrix has the mean squares of its rows and of its columns.
        rows = sum(
            4.0 * (math.prod(dims[:-1]) + math.prod(dims[:-2]) * dims[-1] if len(dims) > 1 else math.prod(dims))
            for dims in shape.weights.values()
        )
        return rows, "adafactor: rows and columns"
    weight_bytes = _STATE_BYTES.get(name, 8)
    arguments = sizes.optimizer.optimizer_args or {}
    weight_bytes += 4 * sum(bool(arguments.get(key)) for key in ("momentum", "centered", "amsgrad"))
    unknown = "" if name in _STATE_BYTES else _UNKNOWN_STATE
    return float(weight_bytes) * count, f"{name}{unknown}: {weight_bytes:.3g} bytes a weight"


def activation_bytes(shape: ModelShape, sizes: TrainSizes) -> float:
    """Compute the bytes that a pass keeps for its backward pass, without the logits.

    A layer keeps for each token, in float32: input and normalized input of both norms (4 H) and of the norms of queries
    and keys. In the data type of products it keeps the inputs of all products (2 H, attention output, inner MLP), the
    queries, keys and values, and the two factors and the gate of the MLP. A mixture of experts also keeps the input and
    output of each expert of a token (2 H each).
    """
    product = 2 * shape.hidden_size + 3 * shape.query_size + 2 * shape.key_size + 4 * shape.intermediate_size
    product += 2 * shape.hidden_size * shape.experts_per_token
    norm = 4 * shape.hidden_size + (2 * (shape.query_size + shape.key_size) if shape.normalizes_heads else 0)
    # Bytes per token and layer.
    layer = (sizes.compute_bytes * product + 4 * norm) / sizes.tensor_parallel
    # With checkpointing, each layer keeps only its input, and one layer at a time keeps everything.
    ends = 4 * 5 * shape.hidden_size  # embeddings, the last norm, the states that are scored
    if sizes.checkpointing:
        # The residual stream has the data type of the embeddings: bfloat16 if fsdp2 gathers them.
        stream = sizes.compute_bytes if sizes.sharded else 4
        return sizes.tokens * (float(stream) * shape.hidden_size * shape.num_layers + layer + ends)
    return sizes.tokens * (float(layer) * shape.num_layers + ends)


def logit_bytes(shape: ModelShape, tokens: int) -> float:
    """Return the bytes of logits, logprobs and their gradient in float32, for the tokens that MAX_LOGITS allows."""
    return 3.0 * 4 * min(tokens * shape.vocab_size, max(MAX_LOGITS, shape.vocab_size))


def longest_part(config: Config) -> int:
    """Return the tokens of the longest experience that one rank holds, after sequence parallelism."""
    return -(-config.model.max_model_len // config.trainer.ulysses_sequence_parallel_size)


def train_sizes(config: Config, shape: ModelShape, layout: Layout | None = None) -> TrainSizes:
    """Read the sizes of a rank from the config. layout: layout of the run. None: planned for this stage only."""
    trainer, algorithm = config.trainer, config.algorithm
    ranks = num_ranks(config, layout or plan_machines(config))
    # A pass has at least the longest experience, whatever the token limit.
    longest = longest_part(config)
    tokens = max(trainer.max_tokens_per_micro_batch, longest)
    # The row limit, and finally the size of the whole batch, bound the pass too.
    if (rows := trainer.max_rows_per_micro_batch) is not None:
        tokens = min(tokens, rows * longest)
    trained = None
    if config.model.lora_configs:
        trained = shape.lora_parameters(config.model.lora_configs[0])
    # With adapters, the reference is the same model with the adapters disabled.
    reference = algorithm.compares_reference and trained is None
    teachers = config.explorer.auxiliary_models if algorithm.needs_teacher else ()
    critic = None
    if algorithm.trains_critic:
        path = config.model.critic_model_path
        critic = _shape(path, config.model.trust_remote_code) if path else shape
    fsdp2 = trainer.trainer_strategy == "fsdp2"
    return TrainSizes(
        tokens=int(min(tokens, config.buffer.train_batch_size * longest)),
        num_ranks=ranks,
        sharded=fsdp2 and (ranks > 1 or trainer.master_weights != "float32"),
        master_bytes=_MASTER if trainer.master_weights == "float32" else 2,
        tensor_parallel=trainer.tensor_parallel_size,
        offloaded=fsdp2 and trainer.offload_policy,
        checkpointing=trainer.gradient_checkpointing,
        trained=trained,
        frozen=(
            *((shape,) if reference else ()),
            *(_shape(model.model_path or "", config.model.trust_remote_code) for model in teachers),
        ),
        critic=critic,
        scalar_head=algorithm.trains_reward_model,
        optimizer=algorithm.optimizer,
        deterministic=config.deterministic is True,  # None means not on GPUs
    )


@cache
def _shape(model_path: str, trust_remote_code: bool) -> ModelShape:
    return read_shape(model_path, trust_remote_code=trust_remote_code)


def engine_parts(shape: ModelShape, tokens: int, rows: int, dtype_bytes: int) -> tuple[Part, ...]:
    """Compute the memory of one engine with `tokens` in its cache and `rows` concurrent responses."""
    # Keys and values of all layers, in bytes per token.
    cache = 2 * shape.num_layers * shape.key_size * dtype_bytes
    return (
        Part(
            "weights",
            dtype_bytes * shape.num_parameters,
            f"{shape.num_parameters:,} of {dtype_bytes} bytes",
            is_certain=not shape.is_quantized,
        ),
        Part("KV cache", cache * tokens, f"{tokens:,} tokens of {cache:,} bytes"),
        Part("logits", 3.0 * 4 * rows * shape.vocab_size, f"{rows:,} responses at once"),
    )


def vllm_parts(
    shape: ModelShape, engine: InferenceModelConfig, max_model_len: int, dtype_bytes: int, memory_bytes: float | None
) -> tuple[tuple[Part, ...], str]:
    """Compute the memory of vLLM on each GPU of an engine, by vLLM's own rule.

    The cache gets what the engine's share of the GPU leaves after weights, the profiled pass and graphs. It must hold
    one sequence of the maximum length.

    Args: memory_bytes: memory of the GPU. None: not known; the cache then has the minimum size.
    Returns: the parts, and why vLLM cannot start, or "".
    """
    args: Mapping[str, Any] = engine.extra_engine_args
    tensor, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    layers = -(-shape.num_layers // stages)
    # Experts are also divided over data-parallel copies. The first pipeline stage has the embeddings, the last one the
    # output layer.
    experts = shape.num_expert_parameters
    dense = shape.num_parameters - experts - shape.num_outside
    in_layers = (dense + experts / engine.data_parallel_size) * layers / shape.num_layers / tensor
    outside = shape.num_outside / tensor / (2 if stages > 1 and "lm_head.weight" in shape.weights else 1)
    weight_bytes = 1 if str(args.get("quantization", "")).startswith("fp8") else dtype_bytes
    cache_bytes = 1 if str(args.get("kv_cache_dtype", "")).startswith("fp8") else dtype_bytes
    # Each GPU has at least one key head.
    keys = shape.head_size * max(1, shape.key_size // shape.head_size // tensor)
    per_token = 2 * layers * keys * cache_bytes
    # vLLM never uses one block of the cache.
    least = per_token * _BLOCK * (-(-max_model_len // _BLOCK) + 1)
    # Defaults of vLLM for offline use: higher on GPUs of 70 GiB and more (EngineArgs).
    large = memory_bytes is not None and memory_bytes > 75 * GB
    batched = int(args.get("max_num_batched_tokens") or (16_384 if large else 8_192))
    rows = int(args.get("max_num_seqs") or (1024 if large else 256))
    width = 4 * shape.hidden_size + (2 * shape.query_size + 3 * shape.intermediate_size) / tensor
    parts = [
        Part(
            "weights",
            weight_bytes * in_layers + dtype_bytes * outside,
            f"{weight_bytes} bytes each, in {tensor} x {stages}",
            # Extra vLLM arguments may select another data type, or move weights to host memory.
            is_certain=not args and not shape.is_quantized,
        ),
        Part("profiled pass", dtype_bytes * batched * width, f"{batched:,} tokens"),
        Part("logits", 2.0 * 4 * rows * shape.vocab_size, f"{rows:,} responses at once"),
        Part("graphs", 0.0 if engine.enforce_eager else _GRAPHS, "CUDA graphs, about"),
    ]
    if memory_bytes is None:
        return (*parts, Part("KV cache", least, f"one sequence of {max_model_len:,} tokens, the least")), ""
    share = float(args.get("gpu_memory_utilization", engine.gpu_memory_utilization))
    left = share * memory_bytes - sum(part.num_bytes for part in parts)
    if (fixed := args.get("kv_cache_memory_bytes")) is not None:
        left = float(fixed)
    tokens = max(0, int(left // (per_token * _BLOCK)) - 1) * _BLOCK
    parts.append(
        Part("KV cache", max(0.0, left), f"{tokens:,} tokens of {per_token:,} bytes, what is left of {share:.0%}")
    )
    problem = ""
    if left < least:
        problem = (
            f"vLLM does not start: its cache has {max(0.0, left) / GB:.1f} GB, and a sequence of {max_model_len:,} "
            f"tokens needs {least / GB:.1f}; raise tensor_parallel_size, or lower model.max_model_len"
        )
    return tuple(part for part in parts if part.num_bytes), problem


def _explorer(config: Config, shape: ModelShape, num_engines: int, memory_bytes: float | None) -> Estimate:
    """Estimate an explorer worker: the engine of the policy and those of the auxiliary models in the same worker."""
    policy, rows = config.explorer.rollout_model, config.slots_per_engine
    if config.explorer.slots_per_engine == "memory":
        rows = max(rows, MAX_BATCH_TOKENS // config.model.max_model_len)
    engines = [_engine(config, policy, config.model.max_model_len, rows, memory_bytes, shape)]
    for model in config.models_beside:
        # Without max_model_len, such a model uses the length that fits.
        parts, problem = _engine(config, model, model.max_model_len or 1, rows, memory_bytes)
        engines.append((tuple(replace(part, why=f"{part.why} of {model.asked_name}") for part in parts), problem))
    num_gpus, traits = num_engines * config.explorer.gpus_per_worker, policy.traits
    all_parts = tuple(part for parts, _ in engines for part in parts)
    problems = "; ".join(problem for _, problem in engines if problem)
    return Estimate(config.explorer.name, num_gpus, all_parts, problems, traits.takes_share, traits.memory_keys)


def _auxiliary(config: Config, model: InferenceModelConfig, memory_bytes: float | None) -> Estimate:
    """Estimate the separate workers of an auxiliary model, which all explorers share."""
    longest = model.max_model_len or model.own_model(config.model).max_model_len
    rows = -(-config.slots_per_engine * config.explorer.most_workers // model.engine_num)
    parts, problem = _engine(config, model, longest, rows, memory_bytes)
    num_gpus, traits = model.engine_num * model.num_gpus, model.traits
    at = f"auxiliary_models[{config.explorer.auxiliary_models.index(model)}]"
    change = traits.memory_keys.replace("rollout_model", at)
    return Estimate(f"auxiliary {model.asked_name}", num_gpus, parts, problem, traits.takes_share, change)


def _engine(
    config: Config,
    engine: InferenceModelConfig,
    longest: int,
    rows: int,
    memory_bytes: float | None,
    shape: ModelShape | None = None,
) -> tuple[tuple[Part, ...], str]:
    """Return the parts of one engine on each of its GPUs, and why it cannot start, or "".

    longest: maximum tokens of a sequence, for an engine that takes a share. rows: concurrent responses, for the others.
    shape: of the policy. None: of an auxiliary model.
    """
    if not engine.traits.has_model or engine.traits.is_external:
        return (), ""
    shape = shape or _shape(engine.model_path or "", config.model.trust_remote_code)
    dtype_bytes = 4 if engine.dtype_on("cuda") == "float32" else 2
    if engine.traits.takes_share:
        longest = int(engine.extra_engine_args.get("max_model_len", longest)) if engine.model_path else longest
        return vllm_parts(shape, engine, longest, dtype_bytes, memory_bytes)
    tokens = min(MAX_BATCH_TOKENS, rows * config.model.max_model_len)
    return engine_parts(shape, tokens, min(rows, tokens), dtype_bytes), ""


def estimate(
    config: Config, shape: ModelShape | None = None, layout: Layout | None = None, memory_bytes: float | None = None
) -> list[Estimate]:
    """Estimate the memory of a stage: trainer and engines of its mode on each GPU, and last all of them on a host.

    Args: layout: layout of the run. None: planned for this stage only; memory_bytes: memory of each GPU, of which vLLM
        takes a share.
    """
    if config.trainer.is_hosted:
        raise UserError("rftdask estimate: model.tinker: the service holds the model, so no GPU memory is needed")
    shape = shape or read_shape(config.model.model_path, trust_remote_code=config.model.trust_remote_code)
    layout = layout or plan_machines(config)
    if config.algorithm.trains_reward_model:
        kept = {name: dims for name, dims in shape.weights.items() if name != "lm_head.weight"}
        shape = replace(shape, weights=kept | {"score.weight": (1, shape.hidden_size)})
    roles, host = [], []
    gpus_per_machine = config.cluster.gpu_per_node or math.inf
    kept_bytes = {"weights", "optimizer", "frozen models"}
    if config.mode in ("both", "train"):
        sizes = train_sizes(config, shape, layout)
        loading, problem = load_bytes(shape, sizes), ""
        if memory_bytes is not None and loading > USABLE * memory_bytes:
            least = load_bytes(shape, replace(sizes, sharded=True, num_ranks=1024))  # an expert is not divided
            ways = ["fsdp2 and more ranks"] * (least <= USABLE * memory_bytes) + ["LoRA"] * (sizes.trained is None)
            way = " or ".join(ways) or "a GPU with more memory"
            problem = f"a rank holds {loading / GB:.1f} GB while it loads; use {way}"
        parts, change = train_parts(shape, sizes), config.trainer_memory_keys()
        roles.append(Estimate(config.trainer.name, sizes.num_ranks, parts, problem, change=change))
        ranks = int(min(sizes.num_ranks, gpus_per_machine))  # on one machine
        host.append(Part("ranks", ranks * _PROCESS, f"{ranks} processes", ranks))
        if sizes.offloaded or layout.colocated:
            names = kept_bytes | ({"gradients"} if sizes.offloaded else set())
            on_gpu = train_parts(shape, replace(sizes, offloaded=False))
            why = "of the ranks" if sizes.offloaded else "of the ranks, while engines sample"
            host.append(Part("offloaded", ranks * _sum([part for part in on_gpu if part.name in names]), why))
        count = float(sizes.trained or shape.num_parameters)
        dtype = config.explorer.rollout_model.dtype_on("cuda" if sizes.compute_bytes == 2 else "cpu")
        # Adapters are published in float32, as they are trained.
        published = _MASTER if sizes.trained or dtype == "float32" else 2
        # A delta is computed from the version before.
        copies = 1 if config.synchronizer.full_publish_interval == 1 else 2
        why = "a copy of the weights" if copies == 1 else "copies of the weights as they are, and as they were"
        # Only rank 0 publishes adapters.
        share, who = (1.0, "rank 0") if sizes.trained else (ranks / sizes.num_ranks, "the ranks, each its part")
        host.append(Part("publication", share * copies * published * count, f"{why}, on {who}"))
        # The trainer continues while each rank writes its part from a copy.
        saved = share * sizes.master_bytes * count + ranks / sizes.num_ranks * _state_bytes(shape, sizes)[0]
        if sizes.critic is not None:
            state = _state_bytes(sizes.critic, replace(sizes, trained=None))[0]
            saved += ranks / sizes.num_ranks * (sizes.master_bytes * sizes.critic.num_parameters + state)
        host.append(Part("checkpoint", saved, f"a copy of weights and optimizer state, on {who}"))
    if config.has_explorer and not config.is_external:
        num_engines = layout.num_workers("explorer")
        roles.append(_explorer(config, shape, num_engines, memory_bytes))
        engines = int(min(num_engines, max(1, gpus_per_machine // config.explorer.gpus_per_worker)))
        host.append(Part("engines", engines * _PROCESS, f"{engines} processes", engines))
        if layout.colocated:
            weights = _sum([part for part in roles[-1].parts if part.name == "weights"])
            host.append(Part("asleep", engines * weights, "weights of the engines, while ranks train"))
    if config.models_apart:
        roles += [_auxiliary(config, model, memory_bytes) for model in config.models_apart]
        # As many as fit on a machine without other roles.
        num_gpus = [model.num_gpus for model in config.models_apart for _ in range(model.engine_num)]
        count = len(num_gpus)
        if gpus_per_machine < math.inf:
            count = min(count, int(max(1, gpus_per_machine // max(num_gpus))))
        host.append(Part("auxiliary", count * _PROCESS, f"{count} processes", count))
    if config.mode in ("both", "train") and not (sizes.sharded or sizes.offloaded):
        # While ranks load, these parts do not exist yet.
        later = _sum([part for part in host if part.name in ("publication", "checkpoint", "offloaded", "asleep")])
        host.append(Part("loading", max(0.0, ranks * loading - later), f"beyond that, of {ranks} whole models"))
    return [*roles, Estimate("host of a machine", 0, tuple(part for part in host if part.num_bytes))]


def gpu_shortages(stages: Sequence[Config], layout: Layout, memory_bytes: float) -> dict[str, bool]:
    """Return the roles of a run that do not fit GPUs of `memory_bytes`. Models of unknown shape are skipped.

    Returns: {role, needed and available GB, and what to change: True if the parts of known size alone do not fit}. An
    estimate may exceed actual use by a quarter (docs/sizes.md), so a run starts unless a shortage is certain.
    """
    shortages = {}
    for stage in stages:
        for role in _estimates(stage, layout, memory_bytes)[:-1]:
            if role.fits(memory_bytes):
                continue
            certain, words = tuple(part for part in role.parts if part.is_certain), list[str]()
            is_certain = _sum(certain) > memory_bytes
            parts, limit = (certain, memory_bytes) if is_certain else (role.parts, role.limit(memory_bytes))
            available = f"a GPU has {memory_bytes / GB:.1f} GB"
            available += f", of which {limit / GB:.1f} are available to it" * (limit < memory_bytes)
            if _sum(parts) > limit:
                of_ranks = is_certain and role.role == stage.trainer.name
                change = stage.trainer_memory_keys(of_passes=False) if of_ranks else role.change
                bound = "at least" if is_certain else "about"
                words.append(f"needs {bound} {_sizes(parts, ' on each GPU')}, and {available}; to change: {change}")
            if role.problem:
                words.append(role.problem if words else f"{available}, and {role.problem}")
            shortages[f"GPU memory: stage {stage.name}, {role.role}: {'; '.join(words)}"] = is_certain
    return shortages


def host_shortages(stages: Sequence[Config], layout: Layout, free_bytes: float) -> list[str]:
    """Return the stages whose GPU roles keep more than `free_bytes` in the host memory of this machine.

    Without GPUs the list is empty: weights and activations are then in host memory too, and are not estimated.
    """
    shortages = []
    for stage in stages if any(worker.gpu is not None for worker in layout.workers) else ():
        for host in _estimates(stage, layout)[-1:]:
            if host.total_bytes > free_bytes:
                change = "more host memory, or fewer ranks and engines"
                if layout.colocated:
                    change += ", or GPUs for each role (cluster.colocate: false)"
                elif stage.trainer.offload_policy:
                    change += ", or trainer.offload_policy: false"
                shortages.append(
                    f"host memory: stage {stage.name} needs about {_sizes(host.parts)} on this machine, and "
                    f"{free_bytes / GB:.1f} GB are free; give it {change}"
                )
    return shortages


def job_shortages(stages: Sequence[Config], layout: Layout) -> list[str]:
    """Return the GPU roles that keep more in host memory than their batch jobs ask for, where the config sets that."""
    shortages = []
    for stage, role in ((stage, role) for stage in stages for role in ROLES):
        key, memory = _job_memory(stage, role)
        parts = [] if memory is None else _worker_parts(stage, layout, role)
        if memory is not None and _sum(parts) > megabytes(memory) * 2**20:
            exclusive = ", or exclusive: true for all memory of a node" if stage.cluster.type == "slurm" else ""
            shortages.append(
                f"{key} is {memory}, and stage {stage.name} keeps about {_host_sizes(role, parts)}; set it to "
                f"{math.ceil(_sum(parts) / GB)}GB or more{exclusive}"
            )
    return shortages


def worker_shortages(stages: Sequence[Config], layout: Layout, role: str, free_bytes: float) -> list[str]:
    """Return the stages for which one more worker of a role keeps more than `free_bytes` in host memory.

    free_bytes: free memory of the machine that joins, which has GPUs, after what its other workers already use.
    """
    workers = [(stage, _worker_parts(stage, layout, role)) for stage in stages]
    return [
        f"host memory: a worker of stage {stage.name} keeps about {_host_sizes(role, parts)}, and "
        f"{free_bytes / GB:.1f} GB are free on this machine; join from a machine with more, or join fewer workers"
        for stage, parts in workers
        if _sum(parts) > free_bytes
    ]


def raise_shortages(shortages: Iterable[str]) -> None:
    """Raises: ConfigError: one or more roles do not fit; it lists all of them."""
    if texts := list(shortages):
        raise ConfigError(texts)


def _estimates(stage: Config, layout: Layout, memory_bytes: float | None = None) -> list[Estimate]:
    """Return `estimate`, or nothing for a model of unknown shape."""
    try:
        return estimate(stage, layout=layout, memory_bytes=memory_bytes)
    except UserError:
        return []


def _job_memory(stage: Config, role: str) -> tuple[str, str | None]:
    """Return (config key, value) of the host memory of each rank or engine of `role`.

    The value is None if the key is not set, if the role has no GPUs, or if its jobs get whole nodes.
    """
    section = stage.cluster
    if section.type == "slurm":
        job = getattr(section.slurm, role)
        return f"cluster.slurm.{role}.memory", job.memory if job.num_gpus and not job.exclusive else None
    # dask-jobqueue starts one job per worker, with options for all roles or for one.
    role_options = section.options.get(role, {})
    memory = {**section.options, **role_options}.get("memory") if section.gpu_per_node else None
    key = f"cluster.options.{role}.memory" if "memory" in role_options else "cluster.options.memory"
    return key, memory if isinstance(memory, str) else None


def _worker_parts(stage: Config, layout: Layout, role: str) -> list[Part]:
    """Return what one GPU worker of a role keeps in host memory. Empty: unknown, or the stage lacks the role."""
    for host in _estimates(stage, layout)[-1:]:
        # Colocated engines run in the workers of the ranks, as many per rank as its GPUs hold.
        owners = {EXPLORER_RESOURCE: TRAINER_RESOURCE} if layout.colocated else {}
        parts = [
            part for part in host.parts if owners.get(owner := _OWNERS.get(part.name, TRAINER_RESOURCE), owner) == role
        ]
        count = next((part.count for part in parts if part.count), 0)
        return [replace(part, num_bytes=part.num_bytes / count) for part in parts] if count else []
    return []


def _sum(parts: Sequence[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def _sizes(parts: Sequence[Part], where: str = "") -> str:
    names = ", ".join(f"{part.name} {part.num_bytes / GB:.1f}" for part in parts)
    return f"{_sum(parts) / GB:.1f} GB{where} ({names})"


def _host_sizes(role: str, parts: Sequence[Part]) -> str:
    return _sizes(parts, f" in host memory for each {'rank' if role == TRAINER_RESOURCE else 'engine'}")


def gpu_bytes(name: str) -> float:
    """Return the memory of a GPU by its model name, or a size such as 48GB. Raises: UserError: neither."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", name.strip(), re.IGNORECASE)
    if size:
        return float(size.group(1)) * GB
    wanted = name.lower().split()
    # Words that match a single size are enough; "A100" matches two sizes and is rejected.
    known = [gpu for gpu in GPUS_GB if gpu.lower().split()[: len(wanted)] == wanted]
    if len({GPUS_GB[gpu] for gpu in known}) != 1:
        raise UserError(f"--gpu {name!r}: give a size such as 48GB, or one of {', '.join(known or GPUS_GB)}")
    return GPUS_GB[known[0]] * GB


def what_fits(config: Config, shape: ModelShape, memory_bytes: float, layout: Layout | None = None) -> list[str]:
    """Return lines with whether each role fits, the largest pass, and what would make the trainer fit."""
    usable = USABLE * memory_bytes
    lines = []
    layout = layout or plan_machines(config)
    for role in estimate(config, shape, layout, memory_bytes):
        if not role.num_gpus:
            continue
        limit, verdict = role.limit(memory_bytes), "fits" if role.fits(memory_bytes) else "does not fit"
        lines.append(
            f"{role.role}: {verdict}, {role.total_bytes / GB:.1f} of {limit / GB:.1f} GB "
            f"({limit / memory_bytes:.0%} of {memory_bytes / GB:.0f}){role.problem and '; '}{role.problem}"
        )
        if role.role != config.trainer.name or config.mode == "explore":
            continue
        sizes, longest = train_sizes(config, shape, layout), longest_part(config)

        def total(sizes: TrainSizes = sizes, **changes: Any) -> float:
            return _sum(train_parts(shape, replace(sizes, **changes)))

        for checkpointing in (False, True):
            # Everything except the logits is linear in the tokens, so two points determine it.
            fixed = total(tokens=0, checkpointing=checkpointing)
            logits = 0.0 if sizes.scalar_head else logit_bytes(shape, 10**6)
            per_token = (total(tokens=10**6, checkpointing=checkpointing) - fixed - logits) / 10**6
            tokens = int((usable - fixed - logits) / per_token)
            switch = "with" if checkpointing else "without"
            too_few = f"less than the longest experience ({longest:,} tokens a rank)"
            largest = f"{tokens:,} tokens" if tokens >= longest else too_few
            lines.append(f"  largest pass {switch} trainer.gradient_checkpointing: {largest}")
        if total() > usable:
            # The smallest settings of a rank; only the number of ranks is searched.
            smallest: dict[str, Any] = {"checkpointing": True, "tokens": longest, "sharded": True}
            ranks = next((number for number in range(2, 1025) if total(num_ranks=number, **smallest) <= usable), None)
            advice = f"fits {ranks} GPUs" if ranks else "does not fit 1,024 GPUs; use LoRA or a GPU with more memory"
            lines.append(f"  fsdp2 with gradient checkpointing, passes of {longest:,} tokens: {advice}")
    return lines


def _host_lines(stage: Config, layout: Layout, host: Estimate) -> list[str]:
    """Return lines with whether the machines of a run, which may be elsewhere, have the needed host memory."""
    section, lines = stage.cluster, list[str]()
    checks = {"joined": "`rftdask join` checks each machine", "existing": "compare it with the memory of its workers"}
    if section.is_one_machine or section.type in checks:
        check = checks.get(section.type, "`rftdask run` checks it before anything starts")
        return [f"host of a machine: not known whether it has {host.total_bytes / GB:.1f} GB; {check}"]
    for role in ROLES:
        key, memory = _job_memory(stage, role)
        needed = _sum(_worker_parts(stage, layout, role))
        if not needed:
            continue
        worker = f"host memory of each {'rank' if role == TRAINER_RESOURCE else f'{role} engine'}"
        if memory is not None:
            job_bytes = megabytes(memory) * 2**20
            verdict = "fits" if needed <= job_bytes else "does not fit"
            lines.append(f"{worker}: {verdict}, {needed / GB:.1f} of {job_bytes / GB:.1f} GB ({key})")
        else:
            is_whole = section.type == "slurm" and getattr(section.slurm, role).exclusive
            why = "it shares the memory of whole nodes (exclusive)" if is_whole else f"set {key}"
            lines.append(f"{worker}: not known whether {needed / GB:.1f} GB are available; {why}")
    return lines


def format_memory_report(config: Config, gpu: str = "") -> str:
    """Return the memory needs of each role of each stage, and whether they fit `gpu`. gpu: "": only the needs.

    Raises: UserError: the roles fit no machine, or the GPU is unknown; DataError: the sizes of the model are unknown.
    """
    memory, layout, lines = gpu_bytes(gpu) if gpu else None, plan_machines(config), list[str]()
    if config.cluster.gpu_per_node:
        lines.append(f"placement  {layout.describe()}")
    for stage in config.stage_configs():
        shape = None
        if not stage.trainer.is_hosted:  # a hosted model may have no files here
            shape = read_shape(stage.model.model_path, trust_remote_code=stage.model.trust_remote_code)
        if len(config.stage_configs()) > 1:
            lines.append(f"stage {stage.name}")
        estimates = estimate(stage, shape, layout, memory)
        lines.append(render(estimates))
        if memory is not None and shape is not None:
            lines += [*what_fits(stage, shape, memory, layout), *_host_lines(stage, layout, estimates[-1])]
    return "\n".join(lines)


def can_be_sized(config: Config) -> bool:
    """Return True if the sizes of the models are known without the network and without running their code."""
    for stage in config.stage_configs():
        loaded = [model.model_path for model in stage.explorer.auxiliary_models if model.traits.has_model]
        for path in (stage.model.model_path, stage.model.critic_model_path, *loaded):
            folder = None if not path else Path(path) if Path(path).exists() else cached_folder(path)
            is_here = folder is not None and (folder / "config.json").is_file() and not stage.model.trust_remote_code
            if path and not is_here and known_model(path) is None:
                return False
    return True


def render(estimates: list[Estimate]) -> str:
    lines = []
    for role in estimates:
        gpus = f": {role.num_gpus} GPU{'s' if role.num_gpus > 1 else ''}, on each" if role.num_gpus else ""
        lines.append(f"{role.role}{gpus}")
        for part in (*role.parts, Part("total", role.total_bytes, "")):
            lines.append(f"  {part.name:<14}{part.num_bytes / GB:>9.2f} GB  {part.why}".rstrip())
    return "\n".join(lines)
