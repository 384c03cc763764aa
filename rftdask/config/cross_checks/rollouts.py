"""Rules for engines, models and workers of the explorer."""

from collections.abc import Iterator

from rftdask.config.base import Problem, reading
from rftdask.config.schema.explorer import engines_that_follow
from rftdask.config.schema.run import Config

_OF_SERVICES = ("requests_per_minute", "tokens_per_minute", "max_retries")
"""Keys of a model behind an API."""
_IGNORED = ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "gpu_memory_utilization")
"""Keys that only change the speed of an engine: a warning if it does not follow them."""


@reading("explorer.rollout_model", "model.lora_configs")
def _engine_serves_the_adapter(config: Config) -> Iterator[Problem]:
    # Sampling without a part of the adapter would sample from another policy than the trained one.
    engine, loras = config.explorer.rollout_model, config.model.lora_configs or ()
    if any(lora.use_dora for lora in loras) and not engine.traits.takes_dora:
        yield (
            "model.lora_configs[0].use_dora",
            f"engine_type {engine.engine_type} does not support DoRA; use transformers",
        )
    most = engine.traits.max_lora_rank
    for lora in loras:
        if lora.path is None and most is not None and lora.lora_rank > most:
            yield "model.lora_configs[0].lora_rank", f"engine_type {engine.engine_type} serves ranks up to {most}"


@reading("explorer.rollout_model", "explorer.auxiliary_models", "algorithm")
def _engines_keep_their_promises(config: Config) -> Iterator[Problem]:
    for path, section in config.explorer.engines()[1:]:
        if section.max_model_len is not None:
            own = section.own_model(config.model)
            if own.max_prompt_tokens + own.max_response_tokens > section.max_model_len:
                yield (
                    f"{path}.max_model_len",
                    f"{section.max_model_len} is less than a prompt of {own.max_prompt_tokens} and a response of "
                    f"{own.max_response_tokens} tokens (its max_prompt_tokens, max_response_tokens); raise it",
                )
    # Those of one explorer worker are on the same GPUs; teachers are the trainer's.
    engines = [
        (path, section)
        for path, section in config.explorer.engines()
        if section.traits.takes_share and (path == "explorer.rollout_model" or not section.is_apart)
    ]
    shares = [
        float(section.extra_engine_args.get("gpu_memory_utilization", section.gpu_memory_utilization))
        for _, section in engines
    ]
    if not config.algorithm.needs_teacher and len(engines) > 1 and sum(shares) > 1:
        total = " + ".join(f"{share:g}" for share in shares)
        yield (
            f"{engines[-1][0]}.gpu_memory_utilization",
            f"{total} exceeds the GPU that they share; set shares that add up to 0.95 at most "
            f"({', '.join(path for path, _ in engines)})",
        )


@reading("synchronizer", "explorer.rollout_model", "cluster.colocate", "model.lora_configs")
def _weights_load_in_flight_where_they_can(config: Config) -> Iterator[Problem]:
    key, engine = "synchronizer.load_in_flight", config.explorer.rollout_model
    if not config.synchronizer.load_in_flight:
        return
    if config.cluster.colocate:
        yield key, "an engine that shares its GPU with a trainer has no running requests when it loads; leave it out"
    if not engine.traits.loads_in_flight:
        yield key, f"engine_type {engine.engine_type} loads only when no request is running; leave it out"
    elif config.model.lora_configs and not engine.traits.loads_adapters_in_flight:
        why = f"engine_type {engine.engine_type} loads adapters only when no request is running"
        yield key, f"{why}; leave it out, or use transformers"


@reading("mode", "algorithm", "buffer", "explorer", "trainer")
def _images_are_read(config: Config) -> Iterator[Problem]:
    engine, trainer = config.explorer.rollout_model, config.trainer
    if not config.reads_images:
        return
    at = "buffer.explorer_input.taskset.format.image_key"
    source = config.buffer.explorer_input
    tasksets = (*source.train_tasksets, *source.eval_tasksets)
    if not any(taskset.format.image_key for taskset in tasksets):
        at = at.replace("image_key", "video_key")
    if any((t.format.image_key or t.format.video_key) and t.format.prompt_type == "raw" for t in tasksets):
        why = "images and videos need a chat template, which prompt_type raw lacks"
        yield at, f"{why}; use messages or plaintext"
    if config.has_explorer and not engine.traits.reads_images:
        yield at, f"engine_type {engine.engine_type} does not support images here; use engine_type transformers"
    elif config.has_explorer and config.reads_videos and not engine.traits.reads_videos:
        at = "buffer.explorer_input.taskset.format.video_key"
        yield at, f"engine_type {engine.engine_type} does not support videos here; use engine_type transformers"
    others = {
        "trainer.ulysses_sequence_parallel_size": trainer.ulysses_sequence_parallel_size > 1,
        "trainer.tensor_parallel_size": trainer.tensor_parallel_size > 1,
        "trainer.trainer_strategy fsdp2, whose ranks must make equally many passes": (
            trainer.trainer_strategy == "fsdp2" and (trainer.num_ranks or 1) > 1
        ),
        "algorithm.enable_router_replay": config.algorithm.enable_router_replay,
    }
    for other, chosen in others.items():
        if chosen and config.mode != "explore":
            yield at, f"training rows with images or videos does not go with {other}"


@reading("mode", "algorithm", "explorer.auxiliary_models", "buffer")
def _teachers_are_configured(config: Config) -> Iterator[Problem]:
    models, at = config.explorer.auxiliary_models, "explorer.auxiliary_models"
    algorithm = config.algorithm.advantage_fn or config.algorithm.algorithm_type
    if config.algorithm.needs_teacher:
        if config.mode not in ("both", "train"):
            return
        if not models or not models[0].model_path:
            yield at, f"required for {algorithm}: a teacher with the policy's vocabulary; give [{{model_path: ...}}]"
        else:
            yield from _teaching_is_shared_out(config)
        return
    # A name is looked up when a workflow asks, hours into a run; a second one of it would never be found.
    names = [model.name or model.model_path for model in models]
    for number, model in enumerate(models):
        if model.teacher_for is not None:
            yield f"{at}[{number}].teacher_for", f"{algorithm} has no teachers; leave it out"
        if not model.model_path:
            yield f"{at}[{number}].model_path", "required: the model that workflows get by model.auxiliary(name)"
        elif names.count(names[number]) > 1:
            yield (f"{at}[{number}].name", f"{names[number]!r} also names another model; give each a unique name")


def _teaching_is_shared_out(config: Config) -> Iterator[Problem]:
    """Check that every trained taskset has one teacher. Tasksets that only a log contains are unknown here."""
    models, at = config.explorer.auxiliary_models, "explorer.auxiliary_models"
    taught = [name for model in models for name in model.teacher_for or ()]
    trained = [str(taskset.name) for taskset in config.buffer.explorer_input.train_tasksets if config.mode == "both"]
    trained += [config.dataset_name] * bool(config.num_demonstrations or config.algorithm.schema_type != "experience")
    num_others = sum(model.teacher_for is None for model in models)
    if num_others > 1:
        yield at, f"{num_others} models have no `teacher_for`; all teachers but one must list their tasksets"
    for number, model in enumerate(models):
        if not model.model_path:
            yield f"{at}[{number}].model_path", "required: a teacher with the policy's vocabulary"
        for name in model.teacher_for or ():
            if taught.count(name) > 1:
                yield f"{at}[{number}].teacher_for", f"{name!r} has two teachers; remove it from one"
            elif config.mode == "both" and name not in trained:
                yield f"{at}[{number}].teacher_for", f"{name!r} is not trained; choose from {', '.join(trained)}"
    for name in trained if not num_others else ():
        if name not in taught:
            yield at, f"{name!r} has no teacher; add it to the `teacher_for` of one"


@reading("mode", "algorithm", "model.external_model", "explorer")
def _external_is_not_trained(config: Config) -> Iterator[Problem]:
    """A model behind an API returns text without tokens and logprobs, and takes no weights."""
    remotes = [model for model in config.explorer.auxiliary_models if model.traits.is_external]
    if remotes and config.algorithm.needs_teacher and config.mode in ("both", "train"):
        number = config.explorer.auxiliary_models.index(remotes[0])
        why = f"{remotes[0].engine_type}: a model behind an API returns no teacher logprobs"
        yield f"explorer.auxiliary_models[{number}].engine_type", why
    if not config.is_external:
        return
    at = "model.external_model"
    # Both ways to name such a model; the message is for the key that was used.
    key = f"{at}.enable" if config.model.external_model.enable else "explorer.rollout_model.engine_type"
    if config.mode != "bench":
        yield (key, f"a model behind an API returns no tokens or logprobs to train; use mode bench, not {config.mode}")
    if not config.model.external_model.model_name:
        yield f"{at}.model_name", "required: the model's name at the service"


@reading("explorer", "model.external_model")
def _services_have_limits(config: Config) -> Iterator[Problem]:
    for path, section in config.explorer.engines():
        is_remote = config.is_external if path == "explorer.rollout_model" else section.traits.is_external
        for key in () if is_remote else section.changed(*_OF_SERVICES):
            yield f"{path}.{key}", f"only for models behind an API, and engine_type is {section.engine_type}"


@reading("synchronizer.sync_style", "explorer.over_rollout", "explorer.dynamic_timeout", "mode")
def _fixed_is_repeatable(config: Config) -> Iterator[Problem]:
    """In style fixed two runs are equal bit by bit, which rollouts cancelled by a clock would break."""
    explorer = config.explorer
    if config.synchronizer.sync_style != "fixed" or config.mode != "both":
        return
    remedy = "in sync_style fixed, whose runs are equal bit by bit; choose another style, or leave it out"
    if (ratio := explorer.over_rollout.ratio) > 0:
        yield "explorer.over_rollout.ratio", f"{ratio}: which tasks are late depends on time, {remedy}"
    if explorer.dynamic_timeout.enable:
        yield "explorer.dynamic_timeout.enable", f"true: the limit depends on measured times, {remedy}"


def engine_warnings(config: Config) -> Iterator[Problem]:
    """Yield (path, message) for keys without effect."""
    for path, section in config.explorer.engines():
        for key in section.without_effect(*_IGNORED):
            tuned = " and ".join(engines_that_follow(key))
            yield f"{path}.{key}", f"ignored: it tunes {tuned}, and engine_type is {section.engine_type}"
