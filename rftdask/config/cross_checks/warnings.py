"""Warnings: keys that are ignored, and settings that have no effect.

Pure: a Config in, messages out.
"""

from collections.abc import Iterator

from rftdask.config.base import Problem, default_of, join
from rftdask.config.cross_checks.hosted import hosted_warnings
from rftdask.config.cross_checks.rollouts import engine_warnings
from rftdask.config.schema.algorithm import registered_parts
from rftdask.config.schema.explorer import ExplorerConfig
from rftdask.config.schema.run import Config

_EVAL_INTERVAL = default_of(ExplorerConfig.model_fields["eval_interval"])
"""The default is rounded without a warning."""

_LOOPBACK = ("127.", "localhost:", "[::1]:")


def warn(config: Config) -> Iterator[Problem]:
    """Yield (path, message) for accepted settings that may surprise."""
    buffer = config.buffer
    times = config.algorithm.repeat_times
    if config.algorithm.compares_groups and times < 2 and config.mode != "bench":
        why = f"{config.algorithm.algorithm_type} compares rollouts of a task, so a single one gives no gradient"
        yield "algorithm.repeat_times", f"{times}: {why}; use 2 or more"
    if buffer.total_steps is not None and buffer.total_epochs != 1:
        yield "buffer.total_epochs", "ignored: buffer.total_steps is given and decides"
    source = buffer.trainer_input
    # With storage_type sql the path is the database, which is used.
    log = source.experience_buffer
    if config.algorithm.schema_type == "experience" and log.path and log.storage_type != "sql":
        yield "buffer.trainer_input.experience_buffer.path", "ignored: rollouts are read from the log of the run"
    read = config.demonstrations if config.num_demonstrations else None
    why = f"{config.algorithm.algorithm_type} does not mix in other data"
    if read is not None:
        why = f"sample_strategy mix reads {read}"
    for name in sorted(set(source.auxiliary_buffers) - {read}):
        yield f"buffer.trainer_input.auxiliary_buffers.{name}", f"ignored: {why}"
    interval, wanted = config.eval_interval, config.explorer.eval_interval
    evaluated = buffer.explorer_input.eval_tasksets and config.mode != "train"
    if evaluated and interval != wanted and wanted != _EVAL_INTERVAL:
        why = f"{wanted} is not a multiple of explorer_sync_interval {config.synchronizer.explorer_sync_interval}"
        yield "explorer.eval_interval", f"{why}: evaluated every {interval} steps"
    if (page := config.cluster.dashboard_address) and not page.startswith(_LOOPBACK):
        why = f"{page}: Dask's dashboard has no password and is open to everyone who reaches the port"
        yield "cluster.dashboard_address", f"{why}; use 127.0.0.1:8787 for this machine only"
    yield from _of_kl(config)
    yield from _of_task_pipeline(config)
    yield from _of_another_place(config)
    yield from _of_other_rows(config)
    yield from _idle_boundaries(config)
    yield from engine_warnings(config)
    yield from hosted_warnings(config)
    (method, why), chosen = config.sync_choice, config.synchronizer.sync_method
    if chosen in ("memory", "nccl") and method != chosen and config.mode in ("both", "explore", "train"):
        yield "synchronizer.sync_method", f"{chosen} is not used: {why}, so weights go through files"
    if not config.algorithm.trains_critic:
        given = ["model.critic_model_path"] * bool(config.model.critic_model_path)
        given += [f"trainer.{key}" for key in config.trainer.changed("critic", "critic_warmup")]
        for path in given:
            yield path, f"ignored: {config.algorithm.algorithm_type} has no critic"
    if (trainer := config.trainer).trainer_strategy != "fsdp2":
        for name in trainer.changed("offload_policy", "prefetch_layers", "reshard_after_forward"):
            yield f"trainer.{name}", f"ignored: trainer_strategy {trainer.trainer_strategy} shards nothing"
    if config.model.custom_chat_template and config.model.chat_template_path:
        yield "model.chat_template_path", "ignored: model.custom_chat_template is given and wins"
    if not config.continue_from_checkpoint and config.mode in ("bench", "serve"):
        yield "continue_from_checkpoint", f"ignored: {config.mode} reads the weights of the run"


def _of_kl(config: Config) -> Iterator[Problem]:
    """Warn about KL estimates that do not hold the policy; docs/algorithms.md derives which."""
    if config.algorithm.kl_loss_fn == "k1":
        why = "as a loss its gradient is 0 on average, so it does not hold the policy"
        yield "algorithm.kl_loss_fn", f"k1: {why}; use k2 here, or k1 as kl_penalty_fn"
    penalty = config.algorithm.kl_penalty_fn
    if penalty in registered_parts("kl_penalty_fn").keys() - {"none", "k1"}:
        why = "as a penalty only the signed estimate k1 holds the policy"
        yield "algorithm.kl_penalty_fn", f"{penalty}: {why}; use k1 here, or {penalty} as kl_loss_fn"


def _of_task_pipeline(config: Config) -> Iterator[Problem]:
    pipeline, at = config.data_processor.task_pipeline, "data_processor.task_pipeline"
    if (pipeline.operators or pipeline.config_path) and config.pipeline_place is None:
        yield at, "ignored: no taskset reads the result"
    if pipeline.config_path is not None and pipeline.operators:
        yield f"{at}.operators", "ignored: config_path is given and wins"
    for name in ("diversity", "usage_frequency"):
        if pipeline.priority_weights.get(name):
            yield f"{at}.priority_weights.{name}", "without effect: it is not measured before a run"


def _of_another_place(config: Config) -> Iterator[Problem]:
    """Warn about keys of a section with several places, set where nothing reads them."""
    source, at = config.buffer.trainer_input, "buffer.trainer_input"
    of_dataset, of_log = ("split", "format"), ("capacity", "max_unread_bytes", "max_read_timeout", "retention")
    idle: tuple[str, ...]
    if config.algorithm.schema_type == "experience":
        idle, why = of_dataset, "rollouts are read from the log of the run"
    else:
        idle, why = of_log, f"{config.algorithm.algorithm_type} reads a dataset and keeps no log"
    places = [(f"{at}.experience_buffer", source.experience_buffer, idle, why)]
    shown = source.auxiliary_buffers.get(config.demonstrations) if config.num_demonstrations else None
    if shown is not None:
        places.append((f"{at}.auxiliary_buffers.{config.demonstrations}", shown, of_log, "it is a dataset, not a log"))
    if source.eval_buffer is not None:
        places.append((f"{at}.eval_buffer", source.eval_buffer, of_log, "it is a dataset, not a log"))
        if source.eval_buffer.data_selector.selector_type != "sequential":
            yield f"{at}.eval_buffer.data_selector.selector_type", "ignored: an evaluation takes every row once"
    elif config.trainer.eval_interval and not config.evaluates_training:
        yield (
            "trainer.eval_interval",
            "ignored: there is neither buffer.trainer_input.eval_buffer nor, on a dataset, eval_tasksets",
        )
    if config.algorithm.trains_reward_model and config.buffer.explorer_input.eval_tasksets:
        yield "buffer.explorer_input.eval_tasksets", "ignored: a reward model generates no answers; use eval_buffer"
    for path, section, keys, why in places:
        for key in section.changed(*keys):
            yield f"{path}.{key}", f"ignored: {why}"
    for place, taskset in config.buffer.explorer_input.eval_places.items():
        if taskset.data_selector.selector_type != "sequential":
            why = "ignored: an evaluation takes every task once, in the order stored"
            yield f"{join(place)}.data_selector.selector_type", why
    for number, model in enumerate(config.explorer.auxiliary_models):
        path = f"explorer.auxiliary_models[{number}]"
        why = "a model behind an API has no engine here" if model.traits.is_external else "the trainer has the teachers"
        if model.engine_num and not (model.is_apart and not config.algorithm.needs_teacher):
            yield f"{path}.engine_num", f"ignored: {why}"
        if model.seed != config.seed:
            yield f"{path}.seed", "ignored: explorer.rollout_model.seed decides for all requests of a rollout"


_OF_ROWS = (
    *("chosen_key", "rejected_key", "label_key"),
    *("enable_concatenated_multi_turn", "return_assistant_tokens_mask"),
)
_OF_TASKS = ("workflow_key", "reward_fn_key")
_OF_DATASETS = ("split", "subset_name")


def _of_other_rows(config: Config) -> Iterator[Problem]:
    """Warn about columns for tasks that are set for supervised rows, and the reverse."""
    inputs, source, at = config.buffer.explorer_input, config.buffer.trainer_input, "buffer.trainer_input"
    for place, taskset in (inputs.train_places | inputs.eval_places).items():
        for key in taskset.format.changed(*_OF_ROWS):
            why = "ignored: it belongs to supervised rows, and these are tasks"
            yield f"{join(place)}.format.{key}", why
    rows = [] if config.algorithm.schema_type == "experience" else [("experience_buffer", source.experience_buffer)]
    if (shown := source.auxiliary_buffers.get(config.demonstrations)) is not None and config.num_demonstrations:
        rows.append((f"auxiliary_buffers.{config.demonstrations}", shown))
    rows += [] if source.eval_buffer is None else [("eval_buffer", source.eval_buffer)]
    for name, dataset in rows:
        for key in dataset.format.changed(*_OF_TASKS):
            yield f"{at}.{name}.format.{key}", "ignored: it belongs to tasks, and these are supervised rows"
    if config.algorithm.schema_type == "experience":
        log = source.experience_buffer
        shuffled = log.data_selector.selector_type != "sequential"
        for key in (*log.changed(*_OF_DATASETS), *["data_selector.selector_type"] * shuffled):
            yield f"{at}.experience_buffer.{key}", "ignored: rollouts are read from the log of the run"
    if source.experience_buffer.data_selector.feature_keys:
        yield f"{at}.experience_buffer.data_selector.feature_keys", "ignored: only tasks are ordered by their columns"


def _idle_boundaries(config: Config) -> Iterator[Problem]:
    """In style fixed no side waits for what the other cannot have made, but some synchronizations bring nothing new."""
    sync = config.synchronizer
    if config.mode != "both" or sync.sync_style != "fixed":
        return
    # What one explore step makes against what one train step needs, both between two hand-overs.
    rollouts = config.buffer.batch_size * config.algorithm.repeat_times
    made = sync.explorer_sync_interval * rollouts
    needed = sync.trainer_sync_interval * config.num_own_rollouts
    if made < needed:
        yield (
            "synchronizer.explorer_sync_interval",
            "not every synchronization brings new weights: between two of them the explorer makes "
            f"explorer_sync_interval {sync.explorer_sync_interval} x batch_size {config.buffer.batch_size} x "
            f"repeat_times {config.algorithm.repeat_times} = {made} experiences, and new weights need "
            f"trainer_sync_interval {sync.trainer_sync_interval} x train_batch_size {config.num_own_rollouts} = "
            f"{needed}; with {-(-needed // rollouts)} each would",
        )
