"""Rules for a policy that is trained and sampled at a service: `model.tinker`."""

from collections.abc import Iterator

from rftdask.config.base import Problem, join, reading
from rftdask.config.schema.run import Config

_IDLE = (
    *("gradient_checkpointing", "torch_compile", "reshard_after_forward", "prefetch_layers", "micro_batch_size"),
    *("max_token_len_per_gpu", "use_dynamic_bsz", "master_weights", "offload_policy", "save_strategy"),
)
"""Keys of section trainer that only matter for local training: a warning otherwise."""


@reading("trainer.trainer_type", "explorer.rollout_model.engine_type", "mode")
def _both_sides_are_at_the_service(config: Config) -> Iterator[Problem]:
    trains, samples = config.trainer.is_hosted, config.explorer.rollout_model.traits.is_hosted
    enabled = "model.tinker.enable: true sets both"
    if trains and not samples:
        yield ("trainer.trainer_type", f"tinker requires engine_type tinker; {enabled}")
    elif samples and not trains:
        yield "explorer.rollout_model.engine_type", f"tinker requires trainer_type tinker; {enabled}"


@reading("model", "trainer", "explorer", "algorithm", "buffer", "synchronizer", "cluster.colocate")
def _the_service_can_do_it(config: Config) -> Iterator[Problem]:
    if not config.trainer.is_hosted:
        return
    algorithm, model, trainer, sync = config.algorithm, config.model, config.trainer, config.synchronizer
    optimizer = algorithm.optimizer
    others = {
        "model.lora_configs": (bool(model.lora_configs), "the adapter is configured in model.tinker; leave it out"),
        "model.min_response_tokens": (model.min_response_tokens > 0, "its sampler has no such limit; leave it out"),
        "model.repetition_penalty": (model.repetition_penalty != 1, "its sampler has none; leave it out"),
        "model.temperature": (model.temperature != 1, "it only trains logprobs of temperature 1; leave it out"),
        "trainer.num_ranks": ((trainer.num_ranks or 1) > 1, "the service has its own ranks; leave it out"),
        "trainer.tensor_parallel_size": (trainer.tensor_parallel_size > 1, "the service has its own; leave it out"),
        "trainer.ulysses_sequence_parallel_size": (
            trainer.ulysses_sequence_parallel_size > 1,
            "the service has its own; leave it out",
        ),
        "trainer.router_aux_loss_coef": (trainer.router_aux_loss_coef > 0, "it does not report routers; leave it out"),
        "trainer.save_hf_checkpoint": (
            trainer.save_hf_checkpoint == "always",
            "the service keeps the model; use `tinker checkpoint download` for its adapter",
        ),
        "algorithm.enable_router_replay": (algorithm.enable_router_replay, "it does not report experts; leave it out"),
        "algorithm.optimizer.optimizer_type": (
            optimizer.optimizer_type.lower() not in ("adam", "adamw"),
            "it only has AdamW; use adamw",
        ),
        "algorithm.optimizer.optimizer_args": (
            bool(set(optimizer.optimizer_args or {}) - {"eps"}),
            "its AdamW takes only eps and the keys of this section; leave others out",
        ),
        "algorithm.algorithm_type": (
            algorithm.trains_critic or algorithm.trains_reward_model or algorithm.needs_teacher,
            f"{algorithm.algorithm_type} needs a critic, a teacher or a head, and the service only returns logprobs; "
            "choose another, or trainer_type torch",
        ),
        "algorithm.entropy_loss_fn": (algorithm.adds_entropy, "it returns no entropies; set none"),
        "algorithm.advantage_fn": (algorithm.needs_entropy, "it returns no entropies; choose another"),
        "algorithm.policy_loss_fn": (
            algorithm.uses_kl_baseline,
            "it computes no KL over other prompts; choose another",
        ),
        "synchronizer.sync_method": (
            sync.sync_method in ("memory", "nccl"),
            "weights stay at the service, and files name them; leave it out",
        ),
        "synchronizer.full_publish_interval": (sync.full_publish_interval > 1, "the service keeps them; leave it out"),
        "cluster.colocate": (bool(config.cluster.colocate), "no GPU is shared; leave it out (mode: both)"),
    }
    for place, taskset in config.buffer.explorer_input.train_places.items():
        others[f"{join(place)}.rollout_args.temperature"] = (
            taskset.rollout_args.temperature not in (None, 1, model.temperature),
            "it only trains logprobs of temperature 1; leave it out",
        )
    for path, (is_asked, why) in others.items():
        if is_asked:
            yield path, f"not available with trainer_type tinker: {why}"


def hosted_warnings(config: Config) -> Iterator[Problem]:
    """Yield (path, message) for keys without effect."""
    if config.trainer.is_hosted:
        for key in config.trainer.changed(*_IDLE):
            yield f"trainer.{key}", "ignored: the Tinker service decides"
