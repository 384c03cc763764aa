"""Rules of tasks, datasets, the experience log and what is read of it."""

from collections.abc import Iterator

from rftdask.config.base import Location, join
from rftdask.config.check import show
from rftdask.config.cross_checks.rule import Rules, is_number
from rftdask.config.plugins import trait
from rftdask.config.schema.algorithm import EXPERT_RATIO, is_share, registered_parts, takes_demonstrations
from rftdask.config.schema.buffer import ExperienceBufferConfig, TasksetConfig
from rftdask.config.schema.run import Config, TaskPipelineConfig
from rftdask.config.yaml_source import Problem, names_environment

RULES = Rules()

_DATABASES = ("sqlite:////", "postgresql://", "postgresql+")
"""Prefixes of database URLs."""

_DATASET_TYPES = ("file", "sql")
"""Values of storage_type that a dataset may have."""


@RULES.reading("mode", "algorithm.algorithm_type", "buffer.explorer_input")
def _data_fits_mode(config: Config) -> Iterator[Problem]:
    source, at = config.buffer.explorer_input, "buffer.explorer_input"
    if source.taskset is not None and source.tasksets:
        yield f"{at}.tasksets", "taskset is given as well; give only one of them"
    explores = config.mode in ("both", "explore") and config.algorithm.schema_type == "experience"
    if explores and not source.train_tasksets:
        yield f"{at}.taskset.path", f"required in mode {config.mode}: the tasks to explore"
    if config.mode == "bench" and not source.eval_tasksets:
        yield f"{at}.eval_tasksets", "required in mode bench: what to evaluate"
    # A name is part of the uid of every experience, so two tasksets must not share one.
    names = [taskset.name for taskset in (*source.train_tasksets, *source.eval_tasksets)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield at, f"{names.count(name)} tasksets are named {name!r}; give each a unique name"


@RULES.reading("mode", "algorithm.algorithm_type", "buffer.trainer_input")
def _buffer_fits_algorithm(config: Config) -> Iterator[Problem]:
    if config.mode != "train" or config.algorithm.schema_type == "experience":
        return
    buffer, at = config.buffer.trainer_input.experience_buffer, "buffer.trainer_input.experience_buffer"
    if buffer.storage_type not in _DATASET_TYPES:
        yield f"{at}.storage_type", f"{config.algorithm.algorithm_type} learns from a dataset; use file or sql"
    if not buffer.path:
        yield f"{at}.path", f"required for {config.algorithm.algorithm_type}: the dataset to learn from"


@RULES.reading("mode", "algorithm.algorithm_type", "buffer.trainer_input")
def _held_out_rows_are_a_dataset(config: Config) -> Iterator[Problem]:
    buffer, at = config.buffer.trainer_input.eval_buffer, "buffer.trainer_input.eval_buffer"
    if buffer is None:
        return
    if config.algorithm.schema_type == "experience":
        yield at, f"{config.algorithm.algorithm_type} learns from rollouts; use buffer.explorer_input.eval_tasksets"
    elif not buffer.path:
        yield f"{at}.path", "required: the dataset to evaluate on"
    elif buffer.storage_type not in _DATASET_TYPES:
        yield f"{at}.storage_type", f"{buffer.storage_type}: it is a dataset; use file or sql"


@RULES.reading("algorithm.algorithm_type", "checkpoint_root_dir", "buffer.trainer_input")
def _log_has_a_place(config: Config) -> Iterator[Problem]:
    """Check the path of the experience log: only databases have one, with a certain kind of URL."""
    buffer, at = config.buffer.trainer_input.experience_buffer, "buffer.trainer_input.experience_buffer.path"
    if config.algorithm.schema_type != "experience" or buffer.storage_type != "sql":
        return
    if buffer.path:
        yield from _no_database(at, buffer.path)
    elif "://" in config.checkpoint_job_dir.removeprefix("file://"):
        yield at, "required: a database file cannot lie on remote storage; give postgresql://user@host/name"


@RULES.reading("private", "checkpoint_root_dir")
def _modes_are_of_folders(config: Config) -> Iterator[Problem]:
    if config.private and "://" in config.checkpoint_job_dir.removeprefix("file://"):
        yield (
            "private",
            f"{config.checkpoint_root_dir} is not a local folder; set access rules at the storage service",
        )


@RULES.reading("algorithm.algorithm_type", "buffer.explorer_input", "buffer.trainer_input")
def _tables_are_in_a_database(config: Config) -> Iterator[Problem]:
    """Check the paths of datasets with storage_type sql."""
    source, read = config.buffer.explorer_input, config.buffer.trainer_input
    datasets: dict[Location, TasksetConfig | ExperienceBufferConfig] = {**source.train_places, **source.eval_places}
    datasets |= read.side_places
    if config.algorithm.schema_type != "experience":
        datasets["buffer", "trainer_input", "experience_buffer"] = read.experience_buffer
    for place, dataset in datasets.items():
        if dataset.storage_type == "sql" and dataset.path:
            yield from _no_database(f"{join(place)}.path", dataset.path)


def _no_database(at: str, path: str) -> Iterator[Problem]:
    """Report a URL that is not a database URL."""
    # A URL that comes from a variable is known only where the run will be.
    if not names_environment(path) and not path.startswith(_DATABASES):
        yield at, f"{show(path)} is not a database URL; use postgresql://user@host/name or sqlite:///file.db"


_WEIGHTS = ("quality", "difficulty", "usage_frequency", "diversity")


@RULES.reading("mode", "algorithm.algorithm_type", "buffer", "data_processor.task_pipeline")
def _pipeline_makes_a_dataset(config: Config) -> Iterator[Problem]:
    """Check the pipeline. `check_pipeline` reports the problems that Data-Juicer finds in its operators."""
    pipeline, at = config.data_processor.task_pipeline, "data_processor.task_pipeline"
    if pipeline == TaskPipelineConfig.model_construct():
        return
    if not pipeline.operators and pipeline.config_path is None:
        yield f"{at}.operators", "required, unless config_path names a recipe of Data-Juicer"
    for number, entry in enumerate(pipeline.operators):
        if set(entry) - {"name", "args"} or not isinstance(entry.get("name"), str):
            yield f"{at}.operators[{number}]", "takes name and args: {name: text_length_filter, args: {min_len: 10}}"
        elif not isinstance(entry.get("args"), dict | None):
            yield f"{at}.operators[{number}].args", f"{show(entry['args'])} is not {{argument: value}}"
    for name, weight in pipeline.priority_weights.items():
        if name not in _WEIGHTS:
            yield f"{at}.priority_weights.{name}", f"unknown; choose from {', '.join(_WEIGHTS)}"
        elif not is_number(weight):
            yield f"{at}.priority_weights.{name}", f"{show(weight)} is not a number"
    if pipeline.top_k == 0:
        yield f"{at}.top_k", "0 keeps no row; use -1 to keep all"
    dataset = config.pipeline_dataset
    if dataset is not None and dataset.storage_type == "sql":
        where = f"{join(config.pipeline_place or ())}.storage_type"
        yield where, f"sql: {at} reads files, folders and datasets of the Hub; export the table"
    if dataset is not None and not pipeline.inputs and pipeline.config_path is None:
        yield f"{at}.inputs", "required: the datasets that the operators run over"


@RULES.reading("data_processor.experience_pipeline")
def _operators_have_their_stage(config: Config) -> Iterator[Problem]:
    pipeline, at = config.data_processor.experience_pipeline, "data_processor.experience_pipeline"
    for number, entry in enumerate(pipeline.operators):
        part = registered_parts("operator").get(str(entry.get("name")))
        if pipeline.stage == "batch" and part is not None and trait(part, "only_at_commit"):
            why = "batches have no text, and every start must drop the same rows"
            yield f"{at}.stage", f"batch: operators[{number}] {entry['name']} runs only at commit ({why}); set commit"


@RULES.reading("buffer.trainer_input.auxiliary_buffers")
def _auxiliary_buffers_are_datasets(config: Config) -> Iterator[Problem]:
    for name, buffer in config.buffer.trainer_input.auxiliary_buffers.items():
        if buffer.storage_type not in _DATASET_TYPES:
            at = f"buffer.trainer_input.auxiliary_buffers.{name}.storage_type"
            yield at, f"{buffer.storage_type}: auxiliary buffers are datasets; use file or sql"


@RULES.reading("mode", "algorithm", "buffer.trainer_input")
def _demonstrations_are_there(config: Config) -> Iterator[Problem]:
    algorithm, strategy = config.algorithm.algorithm_type, config.algorithm.sample_strategy
    mixes, shown = takes_demonstrations(config.algorithm.usual_sample_strategy), takes_demonstrations(strategy)
    # A loss without advantages is the same for a rollout and for a row of a dataset.
    takes_both = config.algorithm.schema_type == "experience" and not config.algorithm.takes_advantages
    if mixes != shown and not takes_both:
        remedy = "leave it out" if mixes else "mix is for mix, mix_chord and rollouts without advantages, such as jsd"
        yield "algorithm.sample_strategy", f"{strategy} does not go with {algorithm}; {remedy}"
    if not shown:
        return
    ratio = (config.algorithm.sample_strategy_args or {}).get("expert_data_ratio", EXPERT_RATIO)
    if not is_share(ratio):
        yield "algorithm.sample_strategy_args.expert_data_ratio", f"{ratio!r} is not a number in [0, 1)"
    buffer = config.buffer.trainer_input.auxiliary_buffers.get(config.demonstrations)
    at = f"buffer.trainer_input.auxiliary_buffers.{config.demonstrations}"
    # Commands that only explore or evaluate read no demonstrations.
    if config.mode in ("both", "train") and (buffer is None or not buffer.path):
        yield f"{at}.path", f"required for {algorithm}: the demonstrations, a dataset in the format of sft"


@RULES.reading("buffer.trainer_input")
def _priorities_are_numbers(config: Config) -> Iterator[Problem]:
    source = config.buffer.trainer_input
    for name, buffer in source.auxiliary_buffers.items():
        if buffer.replay_buffer.enable:
            at = f"buffer.trainer_input.auxiliary_buffers.{name}.replay_buffer.enable"
            yield at, "rows of a dataset are read in order, epoch after epoch; replay is for experience_buffer"
    section, at = source.experience_buffer.replay_buffer, "buffer.trainer_input.experience_buffer.replay_buffer"
    # Only the ranges: names and types are held against the function's signature elsewhere.
    for key, value in sorted(section.priority_fn_args.items()):
        where = f"{at}.priority_fn_args.{key}"
        if key == "use_count_limit" and is_number(value) and value < 1:
            yield where, f"{value!r} is not a whole number of at least 1"
        elif key in ("decay", "sigma") and is_number(value) and value < 0:
            yield where, f"{value!r} is not a number of at least 0"


@RULES.reading("mode", "algorithm", "buffer.trainer_input", "synchronizer")
def _replay_fits(config: Config) -> Iterator[Problem]:
    buffer = config.buffer.trainer_input.experience_buffer
    section, at = buffer.replay_buffer, "buffer.trainer_input.experience_buffer.replay_buffer"
    if not section.enable:
        return
    if config.algorithm.schema_type != "experience":
        yield (
            f"{at}.enable",
            f"{config.algorithm.algorithm_type} learns from a dataset, whose rows repeat each epoch; leave it out",
        )
    # Without a cooldown each group is used once, and none of the following can happen.
    cooldown, cool = section.reuse_cooldown_time, f"{at}.reuse_cooldown_time"
    if cooldown is None:
        return
    if config.algorithm.greedy_baseline:
        why = "compares with a greedy rollout, which is used once"
        yield cool, f"{config.algorithm.algorithm_type} {why}; leave it out"
    if config.mode == "both" and config.synchronizer.sync_style == "fixed" and cooldown > 0:
        why = f"{cooldown} s: style fixed repeats a run bit by bit, which a clock prevents"
        yield cool, f"{why}; set 0, or choose another synchronizer.sync_style"
    if cooldown >= buffer.max_read_timeout:
        why = "after which a batch is formed from the available groups; lower it"
        yield cool, f"{cooldown} s is not below max_read_timeout {buffer.max_read_timeout} s, {why}"
    if section.priority_fn_args.get("decay") == 0 and section.priority_fn == "linear_decay":
        yield f"{at}.priority_fn_args.decay", "0 would train the newest groups for ever; use more than 0"


@RULES.reading("buffer")
def _removed_results_are_not_needed(config: Config) -> Iterator[Problem]:
    kept = config.buffer.trainer_input.experience_buffer
    tasksets = config.buffer.explorer_input.train_tasksets
    at = "buffer.trainer_input.experience_buffer.retention.keep"
    # Compaction loses no row, so nothing that reads old results minds it.
    if kept.retention.keep == "compact":
        if config.algorithm.schema_type == "experience" and kept.storage_type != "queue":
            yield at, f"compact merges Parquet shards, and storage_type {kept.storage_type} has none; use queue, or all"
        return
    for selector in (taskset.data_selector for taskset in tasksets):
        if kept.retention.keep != "all" and trait(selector.selector, "learns"):
            name = selector.selector_type
            yield at, f"{kept.retention.keep} removes results that the selector {name} learns from; use all"
    if kept.retention.keep != "all" and kept.replay_buffer.enable:
        yield at, f"{kept.retention.keep} removes experiences that replay_buffer may use again; use all"


@RULES.reading("buffer.explorer_input", "algorithm.algorithm_type", "algorithm.repeat_times")
def _only_eval_repeats(config: Config) -> Iterator[Problem]:
    for place, taskset in config.buffer.explorer_input.train_places.items():
        if taskset.repeat_times != config.algorithm.repeat_times:
            differs = f"{taskset.repeat_times} differs from algorithm.repeat_times {config.algorithm.repeat_times}"
            yield f"{join(place)}.repeat_times", f"{differs}, which decides for training; leave it out"


@RULES.reading("buffer")
def _selectors_go_together(config: Config) -> Iterator[Problem]:
    source, at = config.buffer.explorer_input, "buffer.explorer_input"
    selectors = [taskset.data_selector for taskset in source.train_tasksets]
    types = {selector.selector_type: selector.selector for selector in selectors}
    names = ", ".join(sorted(types))
    for name, part in types.items():
        if trait(part, "epoch_each_step") and len(types) > 1:
            yield at, f"{name} cannot be mixed with other selectors ({names}); use one for all tasksets"
        if trait(part, "learns") and len(selectors) > 1:
            yield at, f"{name} takes one taskset, not {len(selectors)}; merge them or use shuffle"
    # Each taskset has its own number in the seed of its order, so one seed gives them different orders.
    seeds = sorted({selector.seed for selector in selectors if trait(selector.selector, "seeded")})
    if len(seeds) > 1:
        yield at, f"data_selector.seed differs between tasksets ({seeds}); give one seed; the orders differ anyway"
    for selector in selectors:
        features, count = trait(selector.selector, "features"), trait(selector.selector, "num_features")
        what = f"for {selector.selector_type}: {features}"
        if features and count is None and not selector.feature_keys:
            yield at, f"data_selector.feature_keys is required {what}"
        if features and count is not None and len(selector.feature_keys) != count:
            yield at, f"data_selector.feature_keys must be {count} columns {what}"


@RULES.reading("buffer")
def _some_selectors_are_for_tasks(config: Config) -> Iterator[Problem]:
    source, buffers = config.buffer.explorer_input, config.buffer.trainer_input
    others = [("eval_tasksets", taskset.data_selector) for taskset in source.eval_tasksets]
    others += [(b.name, b.data_selector) for b in (buffers.experience_buffer, *buffers.auxiliary_buffers.values())]
    for where, selector in others:
        if not trait(selector.selector, "for_datasets"):
            yield "buffer", f"{where}: {selector.selector_type} is for training tasksets; use sequential or shuffle"


@RULES.reading("buffer.explorer_input")
def _temperatures_have_a_way(config: Config) -> Iterator[Problem]:
    source = config.buffer.explorer_input
    for place, taskset in source.train_places.items():
        given = taskset.rollout_args
        if (given.final_temperature is None) != (given.temperature_steps is None):
            yield f"{join(place)}.rollout_args.final_temperature", "requires temperature_steps as well; give both"
    for place, taskset in source.eval_places.items():
        if taskset.rollout_args.final_temperature is not None or taskset.rollout_args.temperature_steps is not None:
            why = "evaluations are compared across steps, so their temperature must not change; leave it out"
            yield f"{join(place)}.rollout_args.final_temperature", why
