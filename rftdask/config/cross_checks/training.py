"""Rules for lengths, batches, ranks and staleness."""

from collections.abc import Iterator

from rftdask.config.base import Problem, is_natural, reading
from rftdask.config.schema.optimizer import OPTIMIZERS
from rftdask.config.schema.run import Config


@reading("mode", "algorithm.algorithm_type")
def _mode_fits_algorithm(config: Config) -> Iterator[Problem]:
    if config.algorithm.schema_type != "experience" and config.mode in ("both", "explore"):
        why = f"{config.mode} makes rollouts, and {config.algorithm.algorithm_type} learns from a dataset"
        yield "mode", f"{why}; use mode train (bench to evaluate its checkpoints)"


@reading(
    "mode",
    "algorithm.algorithm_type",
    "algorithm.policy_loss_fn",
    "model.lora_configs",
    "trainer.ulysses_sequence_parallel_size",
    "trainer.tensor_parallel_size",
)
def _reward_models_are_whole(config: Config) -> Iterator[Problem]:
    if not config.algorithm.trains_reward_model:
        return
    if config.mode == "bench":
        yield "mode", "a reward model generates no answers; use mode train, and its scores as the reward_model reward"
    parts = {
        "model.lora_configs": bool(config.model.lora_configs),
        "trainer.ulysses_sequence_parallel_size": config.trainer.ulysses_sequence_parallel_size > 1,
        "trainer.tensor_parallel_size": config.trainer.tensor_parallel_size > 1,
    }
    for at, chosen in parts.items():
        if chosen:
            yield at, "a reward model is trained whole, and its head reads whole sequences; leave this out"


@reading("mode", "trainer.trainer_type", "algorithm")
def _parts_fit_together(config: Config) -> Iterator[Problem]:
    has_algorithm = config.trainer.has_model or config.trainer.is_hosted
    if config.mode in ("both", "train") and has_algorithm and (problem := config.algorithm.misfit):
        key, why = problem
        yield f"algorithm.{key}", why


@reading(
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "algorithm.sample_strategy",
    "algorithm.sample_strategy_args",
    "buffer.train_batch_size",
    "buffer.batch_size",
)
def _groups_are_whole(config: Config) -> Iterator[Problem]:
    if config.algorithm.schema_type != "experience":
        return
    size, group, at = config.buffer.train_batch_size, config.algorithm.repeat_times, "buffer.train_batch_size"
    # Demonstrations belong to no group, so only the rollouts are counted.
    own, experts = config.num_own_rollouts, config.num_demonstrations
    split = f"multiple of algorithm.repeat_times {group}, and groups are never split"
    if experts and (own < group or own % group):
        demonstrations = f"{experts} demonstrations (expert_data_ratio {config.algorithm.expert_ratio})"
        remedy = "leave it out for the size that fits batch_size"
        yield at, f"{size} - {demonstrations} = {own} rollouts, not a {split}; {remedy}"
    elif not experts and size % group:
        below, above = size // group * group, (size // group + 1) * group
        yield at, f"{size} is not a {split}; use {f'{below} or {above}' if below else above}"


@reading("algorithm.algorithm_type", "buffer.train_batch_size")
def _prompts_have_others(config: Config) -> Iterator[Problem]:
    if config.algorithm.schema_type == "kto" and config.buffer.train_batch_size < 2:
        why = "a batch of one row has no response to another prompt, which kto needs for its KL baseline"
        yield "buffer.train_batch_size", f"{why}; use 2 or more"


@reading("trainer.ppo_mini_batch_size", "buffer.train_batch_size")
def _mini_batches_make_a_batch(config: Config) -> Iterator[Problem]:
    size, mini = config.buffer.train_batch_size, config.trainer.ppo_mini_batch_size
    if mini is not None and size % mini:
        # The largest divisor that is not larger, since that is nearest to what was meant.
        below = next(fits for fits in range(min(mini, size), 0, -1) if size % fits == 0)
        yield "trainer.ppo_mini_batch_size", f"{mini} does not divide buffer.train_batch_size {size}; use {below}"


@reading("algorithm.optimizer.clip_grad", "trainer.grad_clip")
def _one_gradient_norm(config: Config) -> Iterator[Problem]:
    ours, reference = config.trainer.grad_clip, config.algorithm.optimizer.clip_grad
    if ours != reference:
        differs = f"{ours} differs from algorithm.optimizer.clip_grad {reference}"
        yield "trainer.grad_clip", f"{differs}, and both are the same limit; give one"


@reading("trainer.tensor_parallel_size", "model.lora_configs")
def _cut_layers_have_no_adapters(config: Config) -> Iterator[Problem]:
    cut = config.trainer.tensor_parallel_size
    # The plan of a model that cuts its layers knows whole weights.
    if cut > 1 and config.model.lora_configs:
        yield "trainer.tensor_parallel_size", f"{cut} does not go with model.lora_configs"


@reading("trainer.master_weights", "trainer.trainer_strategy", "algorithm.optimizer", "model.lora_configs")
def _narrow_weights_are_rounded_at_random(config: Config) -> Iterator[Problem]:
    narrow, name = config.trainer.master_weights, config.algorithm.optimizer.optimizer_type
    strategy = config.trainer.trainer_strategy
    others = {
        f"optimizer_type {name}, which rounds to nearest, so that small steps are lost; use torchao.optim.AdamW8bit": (
            name in OPTIMIZERS
        ),
        f"trainer_strategy {strategy}, which computes in the data type of the weights; use fsdp2": strategy != "fsdp2",
        "model.lora_configs, whose adapters are small; leave it out": bool(config.model.lora_configs),
    }
    for other, chosen in others.items():
        if narrow != "float32" and chosen:
            yield "trainer.master_weights", f"{narrow} does not go with {other}"


@reading("trainer.num_ranks", "trainer.trainer_strategy", "algorithm.optimizer.optimizer_type")
def _spread_weights_are_updated(config: Config) -> Iterator[Problem]:
    is_spread = config.trainer.trainer_strategy == "fsdp2" and (config.trainer.num_ranks or 1) > 1
    if is_spread and config.algorithm.optimizer.optimizer_type.lower() == "adafactor":
        why = "PyTorch's adafactor cannot update weights sharded over ranks"
        yield "algorithm.optimizer.optimizer_type", f"{why}; set trainer.trainer_strategy: ddp"


@reading("mode", "algorithm", "explorer.rollout_model", "trainer")
def _routers_are_replayed(config: Config) -> Iterator[Problem]:
    engine, trainer = config.explorer.rollout_model, config.trainer
    if not config.algorithm.enable_router_replay:
        return
    explores = config.mode in ("both", "explore", "serve")
    others = {
        f"{config.algorithm.algorithm_type}, which learns from a dataset: no engine reported its experts": (
            config.algorithm.schema_type != "experience"
        ),
        f"engine_type {engine.engine_type}, which does not report its experts here; use transformers": (
            explores and not engine.traits.records_experts
        ),
        "trainer.torch_compile, which hides the routers": trainer.torch_compile,
    }
    for other, chosen in others.items():
        if chosen:
            yield "algorithm.enable_router_replay", f"does not go with {other}"


@reading("algorithm.sample_strategy", "algorithm.sample_strategy_args", "synchronizer.max_staleness")
def _one_staleness(config: Config) -> Iterator[Problem]:
    bound, ours = (config.algorithm.sample_strategy_args or {}).get("max_staleness"), config.synchronizer.max_staleness
    if is_natural(bound) and ours not in (None, bound):
        differs = f"{bound} differs from synchronizer.max_staleness {ours}"
        yield "algorithm.sample_strategy_args.max_staleness", f"{differs}, and both are the same bound; give one"
