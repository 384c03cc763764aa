"""Rules for lengths, batches, ranks and staleness."""

from collections.abc import Iterator
from dataclasses import replace

from rftdask.config.cross_checks.rule import Rules, is_natural
from rftdask.config.plugins import argument_problems
from rftdask.config.schema.algorithm import registered_parts
from rftdask.config.schema.optimizer import OPTIMIZERS, OWN_KEYS, SCHEDULES
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

RULES = Rules()


@RULES.reading(
    "model.max_model_len", "model.max_prompt_tokens", "model.max_response_tokens", "model.min_response_tokens"
)
def _lengths_fit(config: Config) -> Iterator[Problem]:
    total, prompt = config.model.max_model_len, config.model.max_prompt_tokens
    response, least = config.model.max_response_tokens, config.model.min_response_tokens
    if total is None:
        yield "model.max_model_len", "required, unless max_prompt_tokens and max_response_tokens are both given"
        return
    if prompt + response > total:
        # Both at their longest must fit, or a long prompt would leave no room for its answer.
        needed = f"max_prompt_tokens {prompt} + max_response_tokens {response} = {prompt + response}"
        remedy = "lower one of them or raise max_model_len"
        yield "model.max_model_len", f"{needed} exceeds max_model_len {total}; {remedy}"
    if least > response:
        yield "model.min_response_tokens", f"{least} exceeds max_response_tokens {response}"


@RULES.reading("mode", "algorithm.algorithm_type")
def _mode_fits_algorithm(config: Config) -> Iterator[Problem]:
    if config.algorithm.schema_type != "experience" and config.mode in ("both", "explore"):
        why = f"{config.mode} makes rollouts, and {config.algorithm.algorithm_type} learns from a dataset"
        yield "mode", f"{why}; use mode train (bench to evaluate its checkpoints)"


@RULES.reading(
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


@RULES.reading("mode", "trainer.trainer_type", "algorithm")
def _parts_fit_together(config: Config) -> Iterator[Problem]:
    has_algorithm = config.trainer.has_model or config.trainer.is_hosted
    if config.mode in ("both", "train") and has_algorithm and (problem := config.algorithm.misfit):
        key, why = problem
        yield f"algorithm.{key}", why


@RULES.reading("algorithm.rollout_correction")
def _correction_takes_its_arguments(config: Config) -> Iterator[Problem]:
    [part] = registered_parts("rollout_correction").values()  # there is one, which the key names by being there
    for argument, message in argument_problems(part, config.algorithm.rollout_correction or {}):
        yield f"algorithm.rollout_correction.{argument}", message


@RULES.reading(
    "algorithm.optimizer.lr_scheduler_type", "algorithm.optimizer.lr_scheduler_args", "algorithm.optimizer.min_lr_ratio"
)
def _schedule_takes_its_arguments(config: Config) -> Iterator[Problem]:
    section, at = config.algorithm.optimizer, "algorithm.optimizer"
    name = section.lr_scheduler_type
    for argument, message in argument_problems(SCHEDULES[name], section.lr_scheduler_args or {}):
        yield f"{at}.lr_scheduler_args.{argument}", message
    if section.min_lr_ratio and name not in ("constant", "constant_with_warmup", "linear", "cosine"):
        yield f"{at}.min_lr_ratio", f"only for linear and cosine; {name} takes lr_scheduler_args"


@RULES.reading("algorithm.optimizer.optimizer_type", "algorithm.optimizer.betas", "algorithm.optimizer.weight_decay")
def _optimizer_takes_its_settings(config: Config) -> Iterator[Problem]:
    section = config.algorithm.optimizer
    name = section.optimizer_type
    # muon uses AdamW for weights other than hidden matrices. `ModelOptimizer` checks optimizers that are not listed.
    if name not in OPTIMIZERS or name.lower() == "muon":
        return
    takes = replace(OPTIMIZERS[name], supplied=()).parameters
    if takes is None:  # PyTorch is not on this machine
        return
    for key in section.changed(*OWN_KEYS):
        if key not in takes:
            yield f"algorithm.optimizer.{key}", f"optimizer {name} does not have it; leave it out"


@RULES.reading(
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


@RULES.reading("algorithm.algorithm_type", "buffer.train_batch_size")
def _prompts_have_others(config: Config) -> Iterator[Problem]:
    if config.algorithm.schema_type == "kto" and config.buffer.train_batch_size < 2:
        why = "a batch of one row has no response to another prompt, which kto needs for its KL baseline"
        yield "buffer.train_batch_size", f"{why}; use 2 or more"


@RULES.reading("trainer.ppo_mini_batch_size", "buffer.train_batch_size")
def _mini_batches_make_a_batch(config: Config) -> Iterator[Problem]:
    size, mini = config.buffer.train_batch_size, config.trainer.ppo_mini_batch_size
    if mini is not None and size % mini:
        # The largest divisor that is not larger, since that is nearest to what was meant.
        below = next(fits for fits in range(min(mini, size), 0, -1) if size % fits == 0)
        yield "trainer.ppo_mini_batch_size", f"{mini} does not divide buffer.train_batch_size {size}; use {below}"


@RULES.reading("algorithm.optimizer.clip_grad", "trainer.grad_clip")
def _one_gradient_norm(config: Config) -> Iterator[Problem]:
    ours, reference = config.trainer.grad_clip, config.algorithm.optimizer.clip_grad
    if ours != reference:
        differs = f"{ours} differs from algorithm.optimizer.clip_grad {reference}"
        yield "trainer.grad_clip", f"{differs}, and both are the same limit; give one"


@RULES.reading("trainer.trainer_strategy", "trainer.num_ranks")
def _ranks_fit_the_strategy(config: Config) -> Iterator[Problem]:
    num_ranks = config.trainer.num_ranks or 1
    if config.trainer.trainer_strategy == "single" and num_ranks > 1:
        why = "cannot share a model by trainer_strategy single"
        yield "trainer.num_ranks", f"{num_ranks} ranks {why}; use ddp or fsdp2"


@RULES.reading(
    "trainer.trainer_strategy",
    "trainer.num_ranks",
    "trainer.ulysses_sequence_parallel_size",
    "trainer.tensor_parallel_size",
    "trainer.torch_compile",
    "model.lora_configs",
)
def _ranks_make_whole_groups(config: Config) -> Iterator[Problem]:
    trainer, num_ranks = config.trainer, config.trainer.num_ranks
    split, cut = trainer.ulysses_sequence_parallel_size, trainer.tensor_parallel_size
    for key, size, what in (
        ("trainer.ulysses_sequence_parallel_size", split, "split sequences"),
        ("trainer.tensor_parallel_size", cut, "cut layers"),
    ):
        if size > 1 and trainer.trainer_strategy == "single":
            yield key, f"{size} ranks {what}, and trainer_strategy single is one rank; use ddp or fsdp2"
        # A number of ranks that is not given follows from the GPUs, and is checked where they are known.
        elif num_ranks is not None and num_ranks % size:
            why = f"groups of {size} ranks {what}, and num_ranks {num_ranks} is not a multiple of {size}"
            yield key, f"{why}; use num_ranks {-(-num_ranks // size) * size}"
    # The plan of a model that cuts its layers knows whole weights, whole sequences and eager layers.
    others = {
        "ulysses_sequence_parallel_size; use one of them": split > 1,
        "torch_compile": trainer.torch_compile,
        "model.lora_configs": bool(config.model.lora_configs),
    }
    for other, chosen in others.items():
        if cut > 1 and chosen:
            yield "trainer.tensor_parallel_size", f"{cut} does not go with {other}"


@RULES.reading("trainer.master_weights", "trainer.trainer_strategy", "algorithm.optimizer", "model.lora_configs")
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


@RULES.reading("trainer")
def _routers_are_heard(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    others = {
        "ulysses_sequence_parallel_size, where each rank sees a part of a sequence": (
            trainer.ulysses_sequence_parallel_size > 1
        ),
        "torch_compile, which hides the routers": trainer.torch_compile,
    }
    for other, chosen in others.items():
        if trainer.router_aux_loss_coef and chosen:
            yield "trainer.router_aux_loss_coef", f"{trainer.router_aux_loss_coef} does not go with {other}"


@RULES.reading("mode", "algorithm", "explorer.rollout_model", "trainer")
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


@RULES.reading("algorithm.sample_strategy", "algorithm.sample_strategy_args", "synchronizer.max_staleness")
def _one_staleness(config: Config) -> Iterator[Problem]:
    args, ours = config.algorithm.sample_strategy_args or {}, config.synchronizer.max_staleness
    at = "algorithm.sample_strategy_args.max_staleness"
    if "max_staleness" not in args:
        return
    bound = args["max_staleness"]
    if not is_natural(bound):
        yield at, f"{bound!r} is not a whole number of at least 0"
    elif ours is not None and ours != bound:
        yield at, f"{bound} differs from synchronizer.max_staleness {ours}, and both are the same bound; give one"
