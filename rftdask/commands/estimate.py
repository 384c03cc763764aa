"""Estimate: the memory that a configuration needs, part by part, before anything is started. docs/trainer.md derives
the formulas.

Pure but for the shape of the model; it needs no GPU. Weights, gradients and optimizer state are exact; activations and
logits are within some percent for decoders of the usual kind (norms, attention, gated MLP).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from rftdask.config import Config
from rftdask.engines.base import MAX_BATCH_TOKENS
from rftdask.errors import UserError
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
"""Bytes of a weight, a gradient and each of the two moments of Adam, all in float32."""


@dataclass(frozen=True)
class Part:
    """One line: what takes how much of each GPU of a role."""

    name: str
    num_bytes: float
    why: str


@dataclass(frozen=True)
class Estimate:
    """Memory of one role on each of its GPUs."""

    role: str
    num_gpus: int
    parts: tuple[Part, ...]

    @property
    def total_bytes(self) -> float:
        """On each GPU."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class TrainSizes:
    """Sizes that the memory of a rank follows from, beside the shape of the model."""

    tokens: int
    """Tokens of a forward and backward pass."""
    num_ranks: int = 1
    sharded: bool = False
    """fsdp2: each rank holds a part of weights, gradients and optimizer state."""
    offloaded: bool = False
    """Weights, gradients and optimizer state lie in host memory."""
    checkpointing: bool = False
    """Each layer keeps its input only, and is computed again on the way back."""
    trained: int | None = None
    """Number of trained weights beside the frozen ones (LoRA); None: all are trained."""
    num_frozen: int = 0
    """Whole frozen models beside the policy: reference, teachers; each counts as the policy does."""
    critic: bool = False
    scalar_head: bool = False
    """A reward model: no position has logits."""
    compute_bytes: int = 2
    """Bytes of a number in a matrix product: 2 on a GPU (bfloat16), 4 on a CPU."""


def train_parts(shape: ModelShape, sizes: TrainSizes) -> tuple[Part, ...]:
    """Compute the memory of one rank, part by part."""
    held = 0.0 if sizes.offloaded else 1.0 / sizes.num_ranks if sizes.sharded else 1.0
    count, critic = shape.num_parameters, sizes.critic * shape.num_parameters
    trained, adapters = (count, 0) if sizes.trained is None else (sizes.trained, sizes.trained)
    parts = [
        Part("weights", held * _MASTER * (count + critic + adapters), f"{count:,} in float32"),
        Part("gradients", held * _MASTER * (trained + critic), f"{trained:,} in float32"),
        Part("optimizer", held * 2 * _MASTER * (trained + critic), "two moments of Adam"),
        Part("frozen models", held * _MASTER * sizes.num_frozen * count, f"{sizes.num_frozen} (reference, teachers)"),
    ]
    if sizes.compute_bytes < _MASTER:
        whole = count
        if sizes.sharded:  # gathered at a time: two layers, embeddings and output layer
            tables = [dims for dims in shape.weights.values() if len(dims) == 2 and dims[0] == shape.vocab_size]
            outside = sum(rows * columns for rows, columns in tables)
            whole = (count - outside) // max(1, shape.num_layers) * 2 + outside
        parts.append(Part("products", sizes.compute_bytes * whole, "weights in bfloat16, while they multiply"))
    parts.append(Part("activations", activation_bytes(shape, sizes), f"{sizes.tokens:,} tokens a pass"))
    if not sizes.scalar_head:
        parts.append(Part("logits", logit_bytes(shape, sizes.tokens), f"{shape.vocab_size:,} words, in chunks"))
    return tuple(part for part in parts if part.num_bytes)


def activation_bytes(shape: ModelShape, sizes: TrainSizes) -> float:
    """Compute the bytes that a pass keeps for its way back, without the logits.

    A layer keeps, for each token: in float32 the input and the normalized input of both norms (4 H), and those of the
    norms of queries and keys; in the type of products the inputs of all products (2 H, attention's output, the MLP's
    inner one), queries, keys, values, and the two factors and the gate of the MLP.
    """
    product = 2 * shape.hidden_size + 3 * shape.query_size + 2 * shape.key_size + 4 * shape.intermediate_size
    norm = 4 * shape.hidden_size + (2 * (shape.query_size + shape.key_size) if shape.normalizes_heads else 0)
    layer = sizes.compute_bytes * product + 4 * norm
    # Without checkpointing every layer keeps all of it; with it each keeps its input, and one at a time the rest.
    ends = 4 * 5 * shape.hidden_size  # embeddings, the last norm, the states that are scored
    if sizes.checkpointing:
        return sizes.tokens * (4.0 * shape.hidden_size * shape.num_layers + layer + ends)
    return sizes.tokens * (float(layer) * shape.num_layers + ends)


def logit_bytes(shape: ModelShape, tokens: int) -> float:
    """Logits, logprobs and their gradient in float32, of as many tokens at a time as MAX_LOGITS allows."""
    return 3.0 * 4 * min(tokens * shape.vocab_size, max(MAX_LOGITS, shape.vocab_size))


def engine_parts(shape: ModelShape, tokens: int, rows: int, dtype_bytes: int) -> tuple[Part, ...]:
    """Compute the memory of one engine with `tokens` in its cache, of `rows` responses at once."""
    cache = 2 * shape.num_layers * shape.key_size * dtype_bytes
    return (
        Part("weights", dtype_bytes * shape.num_parameters, f"{shape.num_parameters:,} of {dtype_bytes} bytes"),
        Part("KV cache", cache * tokens, f"{tokens:,} tokens of {cache:,} bytes"),
        Part("logits", 3.0 * 4 * rows * shape.vocab_size, f"{rows:,} responses at once"),
    )


def longest_part(config: Config) -> int:
    """Tokens of the longest experience that one rank holds: all, unless ranks split it."""
    return -(-config.model.max_model_len // config.trainer.ulysses_sequence_parallel_size)


def train_sizes(config: Config, shape: ModelShape) -> TrainSizes:
    """Read the sizes of a rank from the config."""
    trainer = config.trainer
    left = config.cluster.gpu_per_node * max(1, config.cluster.node_num) - config.explorer.rollout_model.engine_num
    num_ranks = trainer.num_ranks or max(1, left)
    # A pass takes at least the longest experience, whatever the limit says.
    longest = longest_part(config)
    tokens = max(trainer.max_tokens_per_micro_batch, longest)
    # The last limit is what a batch has at all.
    if trainer.micro_batch_size is not None:
        tokens = min(tokens, trainer.micro_batch_size * longest)
    trained = None
    if config.model.lora_configs:
        trained = shape.lora_parameters(config.model.lora_configs[0])
    # With adapters the reference is the same model with them turned off.
    reference = config.algorithm.compares_reference and config.algorithm.kl_loss_fn != "none" and trained is None
    return TrainSizes(
        tokens=int(min(tokens, config.buffer.train_batch_size * longest)),
        num_ranks=num_ranks,
        sharded=trainer.trainer_strategy == "fsdp2" and num_ranks > 1,
        offloaded=trainer.trainer_strategy == "fsdp2" and trainer.offload_policy,
        checkpointing=trainer.gradient_checkpointing,
        trained=trained,
        num_frozen=int(reference) + len(config.explorer.auxiliary_models) * config.algorithm.needs_teacher,
        critic=config.algorithm.trains_critic,
        scalar_head=config.algorithm.trains_reward_model,
    )


def estimate(config: Config, shape: ModelShape | None = None) -> list[Estimate]:
    """Estimate the memory of the trainer and of the explorer's engines, where the mode has them."""
    shape = shape or read_shape(config.model.model_path, trust_remote_code=config.model.trust_remote_code)
    if config.algorithm.trains_reward_model:
        kept = {name: dims for name, dims in shape.weights.items() if name != "lm_head.weight"}
        shape = replace(shape, weights=kept | {"score.weight": (1, shape.hidden_size)})
    found = []
    if config.mode in ("both", "train"):
        sizes = train_sizes(config, shape)
        found.append(Estimate(config.trainer.name, sizes.num_ranks, train_parts(shape, sizes)))
    if config.mode != "train":
        engine = config.explorer.rollout_model
        num_bytes = {"auto": shape.bytes_at_rest, "float32": 4}.get(engine.dtype, 2)
        # As many responses as a work unit has are under way at most: an explorer works at one unit at a time.
        rows = config.tasks_per_unit * config.algorithm.repeat_times
        tokens = min(MAX_BATCH_TOKENS, rows * config.model.max_model_len)
        parts = engine_parts(shape, tokens, min(rows, tokens), num_bytes)
        found.append(Estimate(config.explorer.name, engine.engine_num, parts))
    return found


def gpu_bytes(name: str) -> float:
    """Memory of a GPU by its name, or a size such as 48GB. Raises: UserError: neither."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", name.strip(), re.IGNORECASE)
    if size:
        return float(size.group(1)) * GB
    wanted = name.lower().split()
    known = [gpu for gpu in GPUS_GB if gpu.lower().split()[: len(wanted)] == wanted]
    if len({GPUS_GB[gpu] for gpu in known}) != 1:
        raise UserError(f"--gpu {name!r}: give a size such as 48GB, or one of {', '.join(known or GPUS_GB)}")
    return GPUS_GB[known[0]] * GB


def what_fits(config: Config, shape: ModelShape, memory_bytes: float) -> list[str]:
    """Say for each role whether it fits, how large a pass may be, and what would make the trainer fit."""
    usable = USABLE * memory_bytes
    lines = []
    for each in estimate(config, shape):
        verdict = "fits" if each.total_bytes <= usable else "does not fit"
        lines.append(
            f"{each.role}: {verdict}, {each.total_bytes / GB:.1f} of {usable / GB:.1f} GB "
            f"({USABLE:.0%} of {memory_bytes / GB:.0f})"
        )
        if each.role != config.trainer.name or config.mode == "explore":
            continue
        sizes, longest = train_sizes(config, shape), longest_part(config)

        def total(sizes: TrainSizes = sizes, **changes: Any) -> float:
            return sum(part.num_bytes for part in train_parts(shape, replace(sizes, **changes)))

        for checkpointing in (False, True):
            # All but the logits grows in proportion to the tokens, so two points give the line.
            fixed, logits = total(tokens=0, checkpointing=checkpointing), logit_bytes(shape, 10**6)
            per_token = (total(tokens=10**6, checkpointing=checkpointing) - fixed - logits) / 10**6
            tokens = int((usable - fixed - logits) / per_token)
            switch = "with" if checkpointing else "without"
            too_few = f"less than the longest experience ({longest:,} tokens a rank)"
            room = f"{tokens:,} tokens" if tokens >= longest else too_few
            lines.append(f"  largest pass {switch} trainer.gradient_checkpointing: {room}")
        if total() > usable:
            few: dict[str, Any] = {"checkpointing": True, "tokens": longest, "sharded": True}
            ranks = next((number for number in range(2, 1025) if total(num_ranks=number, **few) <= usable), None)
            advice = f"fits {ranks} GPUs" if ranks else "does not fit 1,024 GPUs; use LoRA or a GPU with more memory"
            lines.append(f"  fsdp2 with gradient checkpointing, passes of {longest:,} tokens: {advice}")
    return lines


def render(estimates: list[Estimate]) -> str:
    """A table of text."""
    lines = []
    for each in estimates:
        lines.append(f"{each.role}: {each.num_gpus} GPU{'s' if each.num_gpus > 1 else ''}, on each")
        for part in (*each.parts, Part("total", each.total_bytes, "")):
            lines.append(f"  {part.name:<14}{part.num_bytes / GB:>9.2f} GB  {part.why}".rstrip())
    return "\n".join(lines)
