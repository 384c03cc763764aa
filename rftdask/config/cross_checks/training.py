"""Rules of lengths, batches, ranks and staleness."""

from collections.abc import Iterator

from rftdask.config.cross_checks.rule import Rules, is_natural
from rftdask.config.plugins import argument_problems
from rftdask.config.schema.algorithm import registered_parts
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

RULES = Rules()


@RULES.reading(
    "model.max_model_len", "model.max_prompt_tokens", "model.max_response_tokens", "model.min_response_tokens"
)
def _lengths_fit(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.max_model_len is None:
        yield "model.max_model_len", "required, unless max_prompt_tokens and max_response_tokens are both given"
        return
    needed = model.max_prompt_tokens + model.max_response_tokens
    if needed > model.max_model_len:
        yield (
            "model.max_model_len",
            f"max_prompt_tokens {model.max_prompt_tokens} + max_response_tokens {model.max_response_tokens} = {needed} "
            f"exceeds max_model_len {model.max_model_len}; lower one of them or raise max_model_len",
        )
    if model.min_response_tokens > model.max_response_tokens:
        yield (
            "model.min_response_tokens",
            f"{model.min_response_tokens} exceeds max_response_tokens {model.max_response_tokens}",
        )


@RULES.reading("mode", "algorithm.algorithm_type")
def _mode_fits_algorithm(config: Config) -> Iterator[Problem]:
    schema = config.algorithm.schema_type
    if schema != "experience" and config.mode in ("both", "explore"):
        yield (
            "mode",
            f"{config.mode} makes rollouts, and {config.algorithm.algorithm_type} learns from a dataset; "
            "use mode train (bench to evaluate its checkpoints)",
        )


@RULES.reading("algorithm.rollout_correction")
def _correction_takes_its_arguments(config: Config) -> Iterator[Problem]:
    [part] = registered_parts("rollout_correction").values()  # there is one, which the key names by being there
    for argument, message in argument_problems(part, config.algorithm.rollout_correction or {}):
        yield f"algorithm.rollout_correction.{argument}", message


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
    size, group = config.buffer.train_batch_size, config.algorithm.repeat_times
    own, experts = config.num_own_rollouts, config.num_demonstrations
    if experts and (own < group or own % group):
        yield (
            "buffer.train_batch_size",
            f"{size} - {experts} demonstrations (expert_data_ratio {config.algorithm.expert_ratio}) = {own} rollouts, "
            f"which is no multiple of algorithm.repeat_times {group}, and groups are never split; leave it out for "
            "the size that fits batch_size",
        )
    elif not experts and size % group:
        below, above = size // group * group, (size // group + 1) * group
        yield (
            "buffer.train_batch_size",
            f"{size} is not a multiple of algorithm.repeat_times {group}, and groups are never split; "
            f"use {f'{below} or {above}' if below else above}",
        )


@RULES.reading("trainer.use_dynamic_bsz", "trainer.micro_batch_size")
def _passes_have_a_size(config: Config) -> Iterator[Problem]:
    if not config.trainer.use_dynamic_bsz and config.trainer.micro_batch_size is None:
        yield (
            "trainer.use_dynamic_bsz",
            "false means that trainer.micro_batch_size says how many experiences a pass has; give it or leave this out",
        )


@RULES.reading("algorithm.optimizer.clip_grad", "trainer.grad_clip")
def _one_gradient_norm(config: Config) -> Iterator[Problem]:
    ours, reference = config.trainer.grad_clip, config.algorithm.optimizer.clip_grad
    if ours != reference:
        yield (
            "trainer.grad_clip",
            f"{ours} differs from algorithm.optimizer.clip_grad {reference}, and both are the same limit; give one",
        )


@RULES.reading("trainer.trainer_strategy", "trainer.num_ranks")
def _ranks_fit_the_strategy(config: Config) -> Iterator[Problem]:
    if config.trainer.trainer_strategy == "single" and (config.trainer.num_ranks or 1) > 1:
        yield (
            "trainer.num_ranks",
            f"{config.trainer.num_ranks} ranks cannot share a model by trainer_strategy single; use ddp or fsdp2",
        )


@RULES.reading(
    "trainer.trainer_strategy",
    "trainer.num_ranks",
    "trainer.ulysses_sequence_parallel_size",
    "trainer.tensor_parallel_size",
    "trainer.torch_compile",
    "model.lora_configs",
)
def _ranks_make_whole_groups(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    split, cut = trainer.ulysses_sequence_parallel_size, trainer.tensor_parallel_size
    for key, size, what in (
        ("trainer.ulysses_sequence_parallel_size", split, "split sequences"),
        ("trainer.tensor_parallel_size", cut, "cut layers"),
    ):
        if size > 1 and trainer.trainer_strategy == "single":
            yield key, f"{size} ranks {what}, and trainer_strategy single is one rank; use ddp or fsdp2"
        elif trainer.num_ranks is not None and trainer.num_ranks % size:
            yield (
                key,
                f"groups of {size} ranks {what}, and num_ranks {trainer.num_ranks} is no multiple of {size}; "
                f"use num_ranks {-(-trainer.num_ranks // size) * size}",
            )
    if cut > 1:
        others = {
            "trainer_strategy fsdp2, which cuts weights its own way; use ddp": trainer.trainer_strategy == "fsdp2",
            "ulysses_sequence_parallel_size; use one of them": split > 1,
            "torch_compile": trainer.torch_compile,
            "model.lora_configs": bool(config.model.lora_configs),
        }
        for other, chosen in others.items():
            if chosen:
                yield "trainer.tensor_parallel_size", f"{cut} does not go with {other}"


@RULES.reading("algorithm.sample_strategy", "algorithm.sample_strategy_args", "synchronizer.max_staleness")
def _one_staleness(config: Config) -> Iterator[Problem]:
    args = config.algorithm.sample_strategy_args
    if not args or "max_staleness" not in args:
        return
    at = "algorithm.sample_strategy_args.max_staleness"
    bound, ours = args["max_staleness"], config.synchronizer.max_staleness
    if not is_natural(bound):
        yield at, f"{bound!r} is not a whole number of at least 0"
    elif ours is not None and ours != bound:
        yield at, f"{bound} differs from synchronizer.max_staleness {ours}, and both are the same bound; give one"
