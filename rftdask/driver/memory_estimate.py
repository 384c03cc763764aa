"""Estimate: the memory that a configuration needs, part by part, before anything is started. docs/trainer.md derives
the formulas.

Pure but for the shapes of the models; it needs no GPU. Where the roles are is what the run's own plan says
(cluster/layout.py). Weights, gradients, optimizer state and key-value caches are exact; activations and logits are
within some percent for decoders of the usual kind (norms, attention, gated MLP).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rftdask.cluster.layout import (
    AUXILIARY_RESOURCE,
    EXPLORER_RESOURCE,
    ROLES,
    TRAINER_RESOURCE,
    Layout,
    num_ranks,
    plan_machines,
)
from rftdask.cluster.slurm import megabytes
from rftdask.config import Config
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.optimizer import OptimizerConfig
from rftdask.data.hub import cached_folder
from rftdask.engines.base import MAX_BATCH_TOKENS
from rftdask.errors import ConfigError, UserError
from rftdask.models.known_models import known_model
from rftdask.models.model_shape import MAX_LOGITS, ModelShape, read_shape

# fmt: off
GPUS_GB = {
    "A100 40GB": 40, "A100 80GB": 80, "A6000": 48, "B200": 180, "GH200": 96, "H100 80GB": 80, "H100 NVL": 94,
    "H200": 141, "L4": 24, "L40S": 48, "MI300X": 192, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32, "T4": 16,
    "V100 16GB": 16, "V100 32GB": 32,
}
# fmt: on
"""Memory by the makers' data sheets, GB of 10^9 bytes (which is a little less than what the driver shows)."""
USABLE = 0.9
"""Usable share of a GPU: the rest is the CUDA context, the kernels' work space and what the allocator cannot join."""
GB = 1e9
_MASTER = 4
"""Bytes of a weight and a gradient, in float32."""
_NUM_SMS = 132
"""Multiprocessors of a GPU (H100, H200), which the attention's deterministic backward pass divides its work over."""
_PROCESS = 1.5 * GB
"""Host memory of a rank or an engine with its libraries."""
_OWNERS = {"engines": EXPLORER_RESOURCE, "asleep": EXPLORER_RESOURCE, "auxiliary": AUXILIARY_RESOURCE}
"""Roles of parts of host memory; the others are of ranks."""
_GRAPHS = 1.0 * GB
"""Allowance for vLLM's CUDA graphs, which it measures when it starts."""
_BLOCK = 16
"""Tokens of a block of vLLM's key-value cache."""
# fmt: off
_STATE_BYTES = {
    "adadelta": 8, "adagrad": 4, "adam": 8, "adamax": 8, "adamw": 8, "asgd": 4, "nadam": 8, "radam": 8, "rmsprop": 4,
    "rprop": 8, "sgd": 0,
    # Two moments of 8, 8 or 4 bits, with a float32 scale for each block of 256, 256 or 128.
    "adamw8bit": 2 + 8 / 256, "adamwfp8": 2 + 8 / 256, "adamw4bit": 1 + 8 / 128,
    "adam8bit": 2 + 8 / 256, "adamfp8": 2 + 8 / 256, "adam4bit": 1 + 8 / 128,
}
# fmt: on
"""Bytes of optimizer state for each trained weight, by the last name of its class in lower case."""
_UNKNOWN_STATE = ", taken for two moments"


@dataclass(frozen=True)
class Part:
    """One line: what takes how much of each GPU of a role."""

    name: str
    num_bytes: float
    why: str
    count: int = 0
    """Processes that it is of, where it is of a number of them."""
    is_certain: bool = False
    """It is no estimate: as many weights, gradients and numbers of an optimizer there are, whatever is computed."""


@dataclass(frozen=True)
class Estimate:
    """Memory of one role on each of its GPUs, or of all of them on the host of a machine."""

    role: str
    num_gpus: int
    """0: host memory."""
    parts: tuple[Part, ...]
    problem: str = ""
    """Why it cannot work, whatever the total."""
    keeps_to_share: bool = False
    """It takes a share of each GPU, and makes its cache by it."""
    change: str = ""
    """Keys that lower what it needs, as they end a sentence."""

    @property
    def total_bytes(self) -> float:
        """On each GPU."""
        return sum(part.num_bytes for part in self.parts)

    def room(self, memory_bytes: float) -> float:
        """What it may have of a GPU's memory."""
        return memory_bytes if self.keeps_to_share else USABLE * memory_bytes

    def fits(self, memory_bytes: float) -> bool:
        """Whether it fits GPUs of `memory_bytes`, for which it was estimated."""
        return self.total_bytes <= self.room(memory_bytes) and not self.problem


@dataclass(frozen=True)
class Shortage:
    """A role that does not fit its GPUs."""

    text: str
    """Role, GB that are needed and there, and what to change."""
    is_certain: bool
    """What is no estimate does not fit already."""


@dataclass(frozen=True)
class TrainSizes:
    """Sizes that the memory of a rank follows from, beside the shape of the model."""

    tokens: int
    """Tokens of a forward and backward pass."""
    num_ranks: int = 1
    sharded: bool = False
    """fsdp2: each rank holds a part of weights, gradients and optimizer state."""
    tensor_parallel: int = 1
    """Ranks that cut each layer among them."""
    offloaded: bool = False
    """Weights, gradients and optimizer state lie in host memory."""
    checkpointing: bool = False
    """Each layer keeps its input only, and is computed again on the way back."""
    trained: int | None = None
    """Number of trained weights beside the frozen ones (LoRA); None: all are trained."""
    frozen: tuple[ModelShape, ...] = ()
    """Frozen models beside the policy: reference, teachers."""
    critic: ModelShape | None = None
    scalar_head: bool = False
    """A reward model: no position has logits."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    deterministic: bool = False
    master_bytes: int = _MASTER
    """Bytes of a trained weight, and of its gradient."""
    compute_bytes: int = 2
    """Bytes of a number in a matrix product: 2 on a GPU (bfloat16), 4 on a CPU."""


# ---- the trainer


def train_parts(shape: ModelShape, sizes: TrainSizes) -> tuple[Part, ...]:
    """Compute the memory of one rank, part by part."""
    count, critic = shape.num_parameters, sizes.critic.num_parameters if sizes.critic else 0
    # Adapters lie beside the weights, which stay frozen and need neither gradients nor optimizer state.
    trained, adapters = (count, 0) if sizes.trained is None else (sizes.trained, sizes.trained)
    cut = sizes.tensor_parallel

    def held(model: ModelShape | None) -> float:
        return 0.0 if sizes.offloaded or model is None else _share(model, sizes)

    own, of_critic = held(shape), held(sizes.critic)
    # Frozen weights stay as their files have them, but for layers that are cut and not spread.
    most = _MASTER if cut > 1 and not sizes.sharded else 0
    frozen = (held(each) * each.num_parameters * max(most, min(_MASTER, each.bytes_at_rest)) for each in sizes.frozen)
    base = sizes.master_bytes if sizes.trained is None else min(_MASTER, shape.bytes_at_rest)
    weights = own * (base * count + sizes.master_bytes * adapters) + of_critic * sizes.master_bytes * critic
    gradients = sizes.master_bytes * (own * trained + of_critic * critic)
    state, why = _state_bytes(shape, sizes)
    state *= own
    if sizes.critic:
        state += of_critic * _state_bytes(sizes.critic, replace(sizes, trained=None))[0]
    parts = [
        # Of 4 bytes that stay as the files have them, the files may know better than config.json.
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
            whole = count * own if cut > 1 else count
        else:
            # Autocast keeps the copies of trained weights for a pass; of frozen ones, unless they have that type
            # already, the way back does: of the layers that it has not passed, or of the one that is computed again.
            whole = adapters
            if base > sizes.compute_bytes:
                whole += (layer if sizes.checkpointing else layers) + shape.vocab_size * shape.hidden_size
        parts.append(Part("products", sizes.compute_bytes * whole, "weights in bfloat16, while they multiply"))
        parts.append(Part("sums", summed, "gradients of one unit, while ranks add them up"))
        # FlashAttention adds up the gradient of the queries in float32; deterministic, in as many copies as fill the
        # GPU, of which a pass with one sequence has the most.
        num_heads = shape.query_size // shape.head_size
        copies = -(-_NUM_SMS // num_heads) if sizes.deterministic else 1
        said = f"{copies} times, since deterministic" if copies > 1 else "gradient of the queries"
        parts.append(Part("attention", 4.0 * copies * sizes.tokens * shape.query_size, said))
    parts.append(Part("activations", activation_bytes(shape, sizes), f"{sizes.tokens:,} tokens a pass"))
    if not sizes.scalar_head:
        parts.append(Part("logits", logit_bytes(shape, sizes.tokens), f"{shape.vocab_size:,} words, in chunks"))
    return tuple(part for part in parts if part.num_bytes)


def _share(model: ModelShape, sizes: TrainSizes) -> float:
    """Share of a model's weights, gradients and optimizer state that the rank with the most of them has. Rows are dealt
    whole: of 8 experts each of the first eight of 16 ranks has one.
    """
    ranks = sizes.num_ranks // sizes.tensor_parallel if sizes.sharded else 1
    most = 0.0
    for (is_outside, rows), count in model.rows.items():  # embeddings and norms are not cut
        most += count * -(-rows // (ranks * (1 if is_outside else sizes.tensor_parallel))) / rows
    return most / model.num_parameters


def load_bytes(shape: ModelShape, sizes: TrainSizes) -> float:
    """The most that a rank holds on its GPU while it loads one model after another (`load_policy`): under fsdp2 its
    rows alone, 1.2 times them and a tensor at most; else each model whole, which is in host memory before.
    """

    def most(model: ModelShape, each: int) -> float:
        if not (sizes.sharded or sizes.offloaded or sizes.tensor_parallel > 1):
            return float(each * model.num_parameters)
        rows = _share(model, sizes) * model.num_parameters  # as they are then held
        return each * (1.2 * rows + max(map(math.prod, model.weights.values())))

    base = sizes.master_bytes if sizes.trained is None else min(_MASTER, shape.bytes_at_rest)
    held = next((part.num_bytes for part in train_parts(shape, sizes) if part.name == "weights"), 0.0)
    others = [most(model, min(_MASTER, model.bytes_at_rest)) for model in sizes.frozen]
    others += [most(sizes.critic, sizes.master_bytes)] if sizes.critic else []
    return max([most(shape, base), *(held + other for other in others)])


def _state_bytes(shape: ModelShape, sizes: TrainSizes) -> tuple[float, str]:
    """Optimizer state of a whole model, or of its adapters, and what it is."""
    name = sizes.optimizer.optimizer_type.rpartition(".")[2].lower()
    count = shape.num_parameters if sizes.trained is None else sizes.trained
    if name == "muon":
        hidden = count
        if sizes.trained is None:
            of_layers = (dims for name, dims in shape.weights.items() if any(map(str.isdigit, name.split("."))))
            hidden = sum(math.prod(dims) for dims in of_layers if len(dims) == 2)
        return 4.0 * hidden + 8.0 * (count - hidden), "muon: one momentum of the layers' matrices, AdamW for the rest"
    if name == "adafactor" and sizes.trained is None:
        # A matrix has the mean of its rows' squares and of its columns', whatever else it is.
        rows = sum(
            4.0 * (math.prod(dims[:-1]) + math.prod(dims[:-2]) * dims[-1] if len(dims) > 1 else math.prod(dims))
            for dims in shape.weights.values()
        )
        return rows, "adafactor: rows and columns"
    each = _STATE_BYTES.get(name, 8)
    arguments = sizes.optimizer.optimizer_args or {}
    each += 4 * sum(bool(arguments.get(key)) for key in ("momentum", "centered", "amsgrad"))
    unknown = "" if name in _STATE_BYTES else _UNKNOWN_STATE
    return float(each) * count, f"{name}{unknown}: {each:.3g} bytes a weight"


def activation_bytes(shape: ModelShape, sizes: TrainSizes) -> float:
    """Compute the bytes that a pass keeps for its way back, without the logits.

    A layer keeps, for each token: in float32 the input and the normalized input of both norms (4 H), and those of the
    norms of queries and keys; in the type of products the inputs of all products (2 H, attention's output, the MLP's
    inner one), queries, keys, values, and the two factors and the gate of the MLP. A mixture of experts keeps what
    enters and leaves each expert of a token, too (2 H each).
    """
    product = 2 * shape.hidden_size + 3 * shape.query_size + 2 * shape.key_size + 4 * shape.intermediate_size
    product += 2 * shape.hidden_size * shape.experts_per_token
    norm = 4 * shape.hidden_size + (2 * (shape.query_size + shape.key_size) if shape.normalizes_heads else 0)
    # Bytes for each token and layer.
    layer = (sizes.compute_bytes * product + 4 * norm) / sizes.tensor_parallel
    # Without checkpointing every layer keeps all of it; with it each keeps its input, and one at a time the rest.
    ends = 4 * 5 * shape.hidden_size  # embeddings, the last norm, the states that are scored
    if sizes.checkpointing:
        # What runs through the layers has the type of the embeddings: that of products where fsdp2 gathers them.
        stream = sizes.compute_bytes if sizes.sharded else 4
        return sizes.tokens * (float(stream) * shape.hidden_size * shape.num_layers + layer + ends)
    return sizes.tokens * (float(layer) * shape.num_layers + ends)


def logit_bytes(shape: ModelShape, tokens: int) -> float:
    """Logits, logprobs and their gradient in float32, of as many tokens at a time as MAX_LOGITS allows."""
    return 3.0 * 4 * min(tokens * shape.vocab_size, max(MAX_LOGITS, shape.vocab_size))


def longest_part(config: Config) -> int:
    """Tokens of the longest experience that one rank holds: all, unless ranks split it."""
    return -(-config.model.max_model_len // config.trainer.ulysses_sequence_parallel_size)


def train_sizes(config: Config, shape: ModelShape, layout: Layout | None = None) -> TrainSizes:
    """Read the sizes of a rank from the config; layout: the run's, else that of this stage alone."""
    trainer, algorithm = config.trainer, config.algorithm
    ranks = num_ranks(config, layout or plan_machines(config))
    # A pass takes at least the longest experience, whatever the limit says.
    longest = longest_part(config)
    tokens = max(trainer.max_tokens_per_micro_batch, longest)
    # The last limit is what a batch has at all.
    if (rows := trainer.max_rows_per_micro_batch) is not None:
        tokens = min(tokens, rows * longest)
    trained = None
    if config.model.lora_configs:
        trained = shape.lora_parameters(config.model.lora_configs[0])
    # With adapters the reference is the same model with them turned off.
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
        deterministic=config.deterministic is True,  # None: not on GPUs
    )


@cache
def _shape(model_path: str, trust_remote_code: bool) -> ModelShape:
    return read_shape(model_path, trust_remote_code=trust_remote_code)


# ---- the engines


def engine_parts(shape: ModelShape, tokens: int, rows: int, dtype_bytes: int) -> tuple[Part, ...]:
    """Compute the memory of one engine with `tokens` in its cache, of `rows` responses at once."""
    # Keys and values of each layer, in bytes for a token.
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
    """Compute the memory of vLLM on each of an engine's GPUs, by its own rule: its cache is what its share of the GPU
    leaves after weights, the pass it profiles, and graphs, and has to hold one sequence of the longest length.

    Args: memory_bytes: of the GPU; None: not known, and the cache is the least that works.
    Returns: the parts; why it cannot start, or "".
    """
    args: Mapping[str, Any] = engine.extra_engine_args
    tensor, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    layers = -(-shape.num_layers // stages)
    # Experts are divided over the copies of the rest, too. Of several stages the first has the embeddings, the last the
    # output layer.
    experts = shape.num_expert_parameters
    dense = shape.num_parameters - experts - shape.num_outside
    of_layers = (dense + experts / engine.data_parallel_size) * layers / shape.num_layers / tensor
    outside = shape.num_outside / tensor / (2 if stages > 1 and "lm_head.weight" in shape.weights else 1)
    weight_bytes = 1 if str(args.get("quantization", "")).startswith("fp8") else dtype_bytes
    cache_bytes = 1 if str(args.get("kv_cache_dtype", "")).startswith("fp8") else dtype_bytes
    # A GPU has at least one head of keys.
    keys = shape.head_size * max(1, shape.key_size // shape.head_size // tensor)
    per_token = 2 * layers * keys * cache_bytes
    # One block of the cache is never used.
    least = per_token * _BLOCK * (-(-max_model_len // _BLOCK) + 1)
    # vLLM's defaults for offline use on GPUs of 70 GiB and more, else the lower ones (EngineArgs).
    large = memory_bytes is not None and memory_bytes > 75 * GB
    batched = int(args.get("max_num_batched_tokens") or (16_384 if large else 8_192))
    rows = int(args.get("max_num_seqs") or (1024 if large else 256))
    width = 4 * shape.hidden_size + (2 * shape.query_size + 3 * shape.intermediate_size) / tensor
    parts = [
        Part(
            "weights",
            weight_bytes * of_layers + dtype_bytes * outside,
            f"{weight_bytes} bytes each, in {tensor} x {stages}",
            # Arguments of vLLM's own may ask for another type, or for some of them in host memory.
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
            f"tokens takes {least / GB:.1f}; raise tensor_parallel_size, or lower model.max_model_len"
        )
    return tuple(part for part in parts if part.num_bytes), problem


def _explorer(config: Config, shape: ModelShape, num_engines: int, memory_bytes: float | None) -> Estimate:
    """An explorer worker: the engine of the policy, and those of the auxiliary models beside it."""
    policy, rows = config.explorer.rollout_model, config.slots_per_engine
    if config.explorer.slots_per_engine == "memory":
        rows = max(rows, MAX_BATCH_TOKENS // config.model.max_model_len)
    found = [_engine(config, policy, shape, config.model.max_model_len, rows, memory_bytes)]
    for model in config.models_beside:
        own = _own_shape(config, model)
        # A model beside the policy takes what fits, unless it is told a length.
        beside, problem = _engine(config, model, own, model.max_model_len or 1, rows, memory_bytes)
        found.append((tuple(replace(part, why=f"{part.why} of {model.asked_name}") for part in beside), problem))
    num_gpus = num_engines * config.explorer.gpus_per_worker
    parts, problems = [part for parts, _ in found for part in parts], [problem for _, problem in found if problem]
    takes_share = policy.traits.takes_share
    change = policy.traits.memory_keys
    return Estimate(config.explorer.name, num_gpus, tuple(parts), "; ".join(problems), takes_share, change)


def _apart(config: Config, model: InferenceModelConfig, memory_bytes: float | None) -> Estimate:
    """The workers of an auxiliary model that has some of its own, of which all explorers ask."""
    longest = model.max_model_len or model.own_model(config.model).max_model_len
    rows = -(-config.slots_per_engine * config.explorer.most_workers // model.engine_num)
    parts, problem = _engine(config, model, _own_shape(config, model), longest, rows, memory_bytes)
    num_gpus, traits = model.engine_num * model.num_gpus, model.traits
    at = f"auxiliary_models[{config.explorer.auxiliary_models.index(model)}]"
    change = traits.memory_keys.replace("rollout_model", at)
    return Estimate(f"auxiliary {model.asked_name}", num_gpus, parts, problem, traits.takes_share, change)


def _own_shape(config: Config, model: InferenceModelConfig) -> ModelShape | None:
    """None: it computes with no weights."""
    return _shape(model.model_path or "", config.model.trust_remote_code) if model.traits.has_model else None


def _engine(
    config: Config,
    engine: InferenceModelConfig,
    shape: ModelShape | None,
    longest: int,
    rows: int,
    memory_bytes: float | None,
) -> tuple[tuple[Part, ...], str]:
    """The parts of one engine on each of its GPUs, and why it cannot start. longest: tokens of a sequence, for one that
    takes a share; rows: responses at once, for one that takes what it needs.
    """
    if shape is None or not engine.traits.has_model or engine.traits.is_external:
        return (), ""
    dtype_bytes, problem = 4 if engine.dtype_on("cuda") == "float32" else 2, ""
    if engine.traits.takes_share:
        longest = int(engine.extra_engine_args.get("max_model_len", longest)) if engine.model_path else longest
        parts, problem = vllm_parts(shape, engine, longest, dtype_bytes, memory_bytes)
    else:
        tokens = min(MAX_BATCH_TOKENS, rows * config.model.max_model_len)
        parts = engine_parts(shape, tokens, min(rows, tokens), dtype_bytes)
    return parts, problem


def estimate(
    config: Config, shape: ModelShape | None = None, layout: Layout | None = None, memory_bytes: float | None = None
) -> list[Estimate]:
    """Estimate the memory of a stage: of the trainer and of the explorer's engines, where its mode has them, on each
    GPU, and of all of them on the host of a machine.

    Args: layout: the run's, else that of this stage alone; memory_bytes: of each GPU, of which vLLM takes a share.
    """
    if config.trainer.is_hosted:
        raise UserError("rftdask estimate: model.tinker: the service has the model, and nothing of it is on a GPU here")
    shape = shape or read_shape(config.model.model_path, trust_remote_code=config.model.trust_remote_code)
    layout = layout or plan_machines(config)
    if config.algorithm.trains_reward_model:
        kept = {name: dims for name, dims in shape.weights.items() if name != "lm_head.weight"}
        shape = replace(shape, weights=kept | {"score.weight": (1, shape.hidden_size)})
    found, host = [], []
    a_machine = config.cluster.gpu_per_node or math.inf
    kept_bytes = {"weights", "optimizer", "frozen models"}
    if config.mode in ("both", "train"):
        sizes = train_sizes(config, shape, layout)
        loading, problem = load_bytes(shape, sizes), ""
        if memory_bytes is not None and loading > USABLE * memory_bytes:
            least = load_bytes(shape, replace(sizes, sharded=True, num_ranks=1024))  # an expert is not divided
            ways = ["fsdp2 and more ranks"] * (least <= USABLE * memory_bytes) + ["LoRA"] * (sizes.trained is None)
            way = " or ".join(ways) or "a GPU with more memory"
            problem = f"a rank holds {loading / GB:.1f} GB while it loads; take {way}"
        parts, change = train_parts(shape, sizes), config.trainer_memory_keys()
        found.append(Estimate(config.trainer.name, sizes.num_ranks, parts, problem, change=change))
        here = int(min(sizes.num_ranks, a_machine))
        host.append(Part("ranks", here * _PROCESS, f"{here} processes", here))
        if sizes.offloaded or layout.colocated:
            lying = train_parts(shape, replace(sizes, offloaded=False))
            wanted = kept_bytes | ({"gradients"} if sizes.offloaded else set())
            num_bytes = here * sum(part.num_bytes for part in lying if part.name in wanted)
            host.append(
                Part(
                    "offloaded", num_bytes, "of the ranks" if sizes.offloaded else "of the ranks, while engines sample"
                )
            )
        count = float(sizes.trained or shape.num_parameters)
        dtype = config.explorer.rollout_model.dtype_on("cuda" if sizes.compute_bytes == 2 else "cpu")
        # Adapters are published as they are trained.
        published = _MASTER if sizes.trained or dtype == "float32" else 2
        # What has changed is found by the version before.
        copies = 1 if config.synchronizer.full_publish_interval == 1 else 2
        why = "a copy of the weights" if copies == 1 else "copies of the weights as they are, and as they were"
        # Rank 0 has adapters alone.
        share, who = (1.0, "rank 0") if sizes.trained else (here / sizes.num_ranks, "the ranks, each its part")
        host.append(Part("publication", share * copies * published * count, f"{why}, on {who}"))
        # The trainer goes on while it is written, each rank its part.
        saved = share * sizes.master_bytes * count + here / sizes.num_ranks * _state_bytes(shape, sizes)[0]
        if sizes.critic is not None:
            state = _state_bytes(sizes.critic, replace(sizes, trained=None))[0]
            saved += here / sizes.num_ranks * (sizes.master_bytes * sizes.critic.num_parameters + state)
        host.append(Part("checkpoint", saved, f"a copy of weights and optimizer state, on {who}"))
    if config.has_explorer and not config.is_external:
        num_engines = layout.num_workers("explorer")
        found.append(_explorer(config, shape, num_engines, memory_bytes))
        here = int(min(num_engines, max(1, a_machine // config.explorer.gpus_per_worker)))
        host.append(Part("engines", here * _PROCESS, f"{here} processes", here))
        if layout.colocated:
            weights = sum(part.num_bytes for part in found[-1].parts if part.name == "weights")
            host.append(Part("asleep", here * weights, "weights of the engines, while ranks train"))
    for model in config.models_apart:
        found.append(_apart(config, model, memory_bytes))
    if config.models_apart:
        # Of a machine as many as fit on it beside nothing else.
        sizes_apart = [model.num_gpus for model in config.models_apart for _ in range(model.engine_num)]
        here = min(len(sizes_apart), int(max(1, a_machine // max(sizes_apart))) if a_machine < math.inf else 1 << 30)
        host.append(Part("auxiliary", here * _PROCESS, f"{here} processes", here))
    if config.mode in ("both", "train") and not (sizes.sharded or sizes.offloaded):
        # When they load, ranks have nothing else there but themselves.
        beside = sum(
            part.num_bytes for part in host if part.name in ("publication", "checkpoint", "offloaded", "asleep")
        )
        ranks = int(min(sizes.num_ranks, a_machine))
        host.append(Part("loading", max(0.0, ranks * loading - beside), f"beyond that, of {ranks} whole models"))
    return [*found, Estimate("host of a machine", 0, tuple(part for part in host if part.num_bytes))]


def gpu_shortages(stages: Sequence[Config], layout: Layout, memory_bytes: float) -> list[Shortage]:
    """The roles of a run that do not fit GPUs of `memory_bytes`; nothing of a model whose shape is not known.

    An estimate may ask for a quarter more than there is use for (docs/sizes.md), so who is to start what has been
    planned goes by what is certain.
    """
    found = []
    for stage in stages:
        try:
            estimates = estimate(stage, layout=layout, memory_bytes=memory_bytes)[:-1]
        except UserError:
            continue
        for each in estimates:
            if each.fits(memory_bytes):
                continue
            certain, words = [part for part in each.parts if part.is_certain], list[str]()
            is_certain = sum(part.num_bytes for part in certain) > memory_bytes
            told, room = (certain, memory_bytes) if is_certain else (each.parts, each.room(memory_bytes))
            there = f"a GPU has {memory_bytes / GB:.1f} GB"
            there += f", of which {room / GB:.1f} are for it" * (room < memory_bytes)
            if (total := sum(part.num_bytes for part in told)) > room:
                of_ranks = is_certain and each.role == stage.trainer.name
                change = stage.trainer_memory_keys(of_passes=False) if of_ranks else each.change
                parts = ", ".join(f"{part.name} {part.num_bytes / GB:.1f}" for part in told)
                needed = f"{'at least' if is_certain else 'about'} {total / GB:.1f} GB on each GPU ({parts})"
                words.append(f"needs {needed}, and {there}; to change: {change}")
            if each.problem:
                words.append(each.problem if words else f"{there}, and {each.problem}")
            found.append(Shortage(f"GPU memory: stage {stage.name}, {each.role}: {'; '.join(words)}", is_certain))
    return list(dict.fromkeys(found))


def check_gpus(stages: Sequence[Config], layout: Layout, memory_bytes: float) -> None:
    """Whether the roles of a run fit GPUs of `memory_bytes`, by the estimate. Raises: ConfigError: each that does not.

    For a plan alone: a run that starts goes by what is certain.
    """
    if short := gpu_shortages(stages, layout, memory_bytes):
        raise ConfigError([each.text for each in short])


def check_host(stages: Sequence[Config], layout: Layout, free_bytes: float) -> None:
    """Whether what the roles of a run keep in host memory fits this machine, where they have GPUs; nothing is started.

    Raises: UserError: it does not, part by part.
    """
    if all(worker.gpu is None for worker in layout.workers):
        return  # on a CPU weights and activations are in host memory, too, and none of them is estimated here
    for stage in stages:
        try:
            host = estimate(stage, layout=layout)[-1]
        except UserError:
            continue  # of a model whose shape is not known, nothing is known
        if host.total_bytes > free_bytes:
            parts = ", ".join(f"{part.name} {part.num_bytes / GB:.1f}" for part in host.parts)
            change = "more host memory, or fewer ranks and engines"
            if layout.colocated:
                change += ", or GPUs for each role (cluster.colocate: false)"
            elif stage.trainer.offload_policy:
                change += ", or trainer.offload_policy: false"
            raise UserError(
                f"host memory: stage {stage.name} needs about {host.total_bytes / GB:.1f} GB of this machine's "
                f"({parts}), and {free_bytes / GB:.1f} GB are free; give it {change}"
            )


def check_jobs(stages: Sequence[Config], layout: Layout) -> None:
    """Whether what ranks and engines keep in host memory fits what a batch system gives their jobs, where those have
    GPUs and the memory of a job is said.

    Raises: UserError: it does not, part by part.
    """
    for stage, role in ((stage, role) for stage in stages for role in ROLES):
        key, told = _job_memory(stage, role)
        parts = [] if told is None else _of_worker(stage, layout, role)
        needed = sum(part.num_bytes for part in parts)
        if told is not None and needed > megabytes(told) * 2**20:
            more = ", or exclusive: true, which has all of a node's" if stage.cluster.type == "slurm" else ""
            raise UserError(
                f"{key} is {told}, and stage {stage.name} keeps about {_words(role, parts)}; set it to "
                f"{math.ceil(needed / GB)}GB or more{more}"
            )


def _job_memory(stage: Config, role: str) -> tuple[str, str | None]:
    """(The key that gives a job of a role its host memory, for each rank or engine; what it says, None where that is
    not said or no matter).
    """
    section = stage.cluster
    if section.type == "slurm":
        job = getattr(section.slurm, role)
        return f"cluster.slurm.{role}.memory", job.memory if job.num_gpus and not job.exclusive else None
    # Of dask-jobqueue: a job for each worker, and options for all roles or one.
    own = section.options.get(role, {})
    told = {**section.options, **own}.get("memory") if section.gpu_per_node else None
    key = f"cluster.options.{role}.memory" if "memory" in own else "cluster.options.memory"
    return key, told if isinstance(told, str) else None


def check_joined(stages: Sequence[Config], layout: Layout, role: str, free_bytes: float) -> None:
    """Whether what one more worker of a role keeps in host memory fits the machine on which it is to join, which has
    GPUs. What other workers there have taken is not free any more.

    Raises: UserError: it does not, part by part.
    """
    for stage in stages:
        parts = _of_worker(stage, layout, role)
        if sum(part.num_bytes for part in parts) > free_bytes:
            raise UserError(
                f"host memory: a worker of stage {stage.name} keeps about {_words(role, parts)}, and "
                f"{free_bytes / GB:.1f} GB are free on this machine; let it join on one with more, or fewer join here"
            )


def _of_worker(stage: Config, layout: Layout, role: str) -> list[Part]:
    """What one worker of a role keeps in host memory beside a GPU; nothing where it is not known, or it has no role."""
    try:
        host = estimate(stage, layout=layout)[-1]
    except UserError:
        return []  # of a model whose shape is not known, nothing is known
    # Engines that take turns are with the ranks, one with each as many as its GPUs are for.
    owners = {EXPLORER_RESOURCE: TRAINER_RESOURCE} if layout.colocated else {}
    kept = [p for p in host.parts if owners.get(owner := _owner(p), owner) == role]
    count = next((part.count for part in kept if part.count), 0)
    return [replace(part, num_bytes=part.num_bytes / count) for part in kept] if count else []


def _words(role: str, parts: Sequence[Part]) -> str:
    told = ", ".join(f"{part.name} {part.num_bytes / GB:.1f}" for part in parts)
    total = sum(part.num_bytes for part in parts)
    return f"{total / GB:.1f} GB in host memory for each {'rank' if role == TRAINER_RESOURCE else 'engine'} ({told})"


def _owner(part: Part) -> str:
    return _OWNERS.get(part.name, TRAINER_RESOURCE)


def gpu_bytes(name: str) -> float:
    """Memory of a GPU by its name, or a size such as 48GB. Raises: UserError: neither."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", name.strip(), re.IGNORECASE)
    if size:
        return float(size.group(1)) * GB
    wanted = name.lower().split()
    # "A100" alone would be one of two sizes, and is refused; words that fit one size only are enough.
    known = [gpu for gpu in GPUS_GB if gpu.lower().split()[: len(wanted)] == wanted]
    if len({GPUS_GB[gpu] for gpu in known}) != 1:
        raise UserError(f"--gpu {name!r}: give a size such as 48GB, or one of {', '.join(known or GPUS_GB)}")
    return GPUS_GB[known[0]] * GB


def what_fits(config: Config, shape: ModelShape, memory_bytes: float, layout: Layout | None = None) -> list[str]:
    """Say for each role whether it fits, how large a pass may be, and what would make the trainer fit."""
    usable = USABLE * memory_bytes
    lines = []
    layout = layout or plan_machines(config)
    for each in estimate(config, shape, layout, memory_bytes):
        if not each.num_gpus:
            continue
        room, verdict = each.room(memory_bytes), "fits" if each.fits(memory_bytes) else "does not fit"
        lines.append(
            f"{each.role}: {verdict}, {each.total_bytes / GB:.1f} of {room / GB:.1f} GB "
            f"({room / memory_bytes:.0%} of {memory_bytes / GB:.0f}){each.problem and '; '}{each.problem}"
        )
        if each.role != config.trainer.name or config.mode == "explore":
            continue
        sizes, longest = train_sizes(config, shape, layout), longest_part(config)

        def total(sizes: TrainSizes = sizes, **changes: Any) -> float:
            return sum(part.num_bytes for part in train_parts(shape, replace(sizes, **changes)))

        for checkpointing in (False, True):
            # All but the logits grows in proportion to the tokens, so two points give the line.
            fixed = total(tokens=0, checkpointing=checkpointing)
            logits = 0.0 if sizes.scalar_head else logit_bytes(shape, 10**6)
            per_token = (total(tokens=10**6, checkpointing=checkpointing) - fixed - logits) / 10**6
            tokens = int((usable - fixed - logits) / per_token)
            switch = "with" if checkpointing else "without"
            too_few = f"less than the longest experience ({longest:,} tokens a rank)"
            largest = f"{tokens:,} tokens" if tokens >= longest else too_few
            lines.append(f"  largest pass {switch} trainer.gradient_checkpointing: {largest}")
        if total() > usable:
            # The least that a rank can be asked for: only the number of ranks is searched.
            few: dict[str, Any] = {"checkpointing": True, "tokens": longest, "sharded": True}
            ranks = next((number for number in range(2, 1025) if total(num_ranks=number, **few) <= usable), None)
            advice = f"fits {ranks} GPUs" if ranks else "does not fit 1,024 GPUs; use LoRA or a GPU with more memory"
            lines.append(f"  fsdp2 with gradient checkpointing, passes of {longest:,} tokens: {advice}")
    return lines


def what_hosts_have(stage: Config, layout: Layout, host: Estimate) -> list[str]:
    """Say whether machines that may be elsewhere have the host memory that is needed, or who says that."""
    section, lines = stage.cluster, list[str]()
    looks = {"joined": "`rftdask join` looks at each that joins", "existing": "compare it with what its workers have"}
    if section.is_one_machine or section.type in looks:
        who = looks.get(section.type, "`rftdask run` looks at it before anything starts")
        return [f"host of a machine: not known whether it has {host.total_bytes / GB:.1f} GB; {who}"]
    for role in ROLES:
        key, told = _job_memory(stage, role)
        needed = sum(part.num_bytes for part in _of_worker(stage, layout, role))
        if not needed:
            continue
        each = f"host memory of each {'rank' if role == TRAINER_RESOURCE else f'{role} engine'}"
        if told is not None:
            there = megabytes(told) * 2**20
            verdict = "fits" if needed <= there else "does not fit"
            lines.append(f"{each}: {verdict}, {needed / GB:.1f} of {there / GB:.1f} GB ({key})")
        else:
            is_whole = section.type == "slurm" and getattr(section.slurm, role).exclusive
            why = "it shares what whole nodes have (exclusive)" if is_whole else f"give {key}"
            lines.append(f"{each}: not known whether {needed / GB:.1f} GB are there; {why}")
    return lines


def tell_memory(config: Config, gpu: str = "") -> str:
    """What each role of each stage needs, and whether that fits `gpu`, unless it is "".

    Raises: UserError: the roles fit no machine, or there is no such GPU; DataError: the model's sizes are not known.
    """
    memory, layout, lines = gpu_bytes(gpu) if gpu else None, plan_machines(config), list[str]()
    if config.cluster.gpu_per_node:
        lines.append(f"placement  {layout.describe()}")
    for stage in config.stage_configs():
        shape = None
        if not stage.trainer.is_hosted:  # of which nothing may be here
            shape = read_shape(stage.model.model_path, trust_remote_code=stage.model.trust_remote_code)
        if len(config.stage_configs()) > 1:
            lines.append(f"stage {stage.name}")
        found = estimate(stage, shape, layout, memory)
        lines.append(render(found))
        if memory is not None and shape is not None:
            lines += [*what_fits(stage, shape, memory, layout), *what_hosts_have(stage, layout, found[-1])]
    return "\n".join(lines)


def can_be_sized(config: Config) -> bool:
    """Whether the models' sizes are known without the network, and without code that comes with them."""
    for stage in config.stage_configs():
        loaded = [model.model_path for model in stage.explorer.auxiliary_models if model.traits.has_model]
        for path in (stage.model.model_path, stage.model.critic_model_path, *loaded):
            found = None if not path else Path(path) if Path(path).exists() else cached_folder(path)
            is_here = found is not None and (found / "config.json").is_file() and not stage.model.trust_remote_code
            if path and not is_here and known_model(path) is None:
                return False
    return True


def render(estimates: list[Estimate]) -> str:
    """A table of text."""
    lines = []
    for each in estimates:
        gpus = f": {each.num_gpus} GPU{'s' if each.num_gpus > 1 else ''}, on each" if each.num_gpus else ""
        lines.append(f"{each.role}{gpus}")
        for part in (*each.parts, Part("total", each.total_bytes, "")):
            lines.append(f"  {part.name:<14}{part.num_bytes / GB:>9.2f} GB  {part.why}".rstrip())
    return "\n".join(lines)
