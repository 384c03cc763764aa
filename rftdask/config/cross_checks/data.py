"""Rules of tasks, datasets, the experience log and what is read of it."""

from collections.abc import Iterator

from rftdask.config.base import Location, Problem, join, reading, show
from rftdask.config.schema.algorithm import takes_demonstrations
from rftdask.config.schema.buffer import DATASET_TYPES, ExperienceBufferConfig, TasksetConfig
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import names_environment

_DATABASES = ("sqlite:////", "postgresql://", "postgresql+")
"""Prefixes of database URLs."""


@reading("mode", "algorithm.algorithm_type", "buffer.explorer_input")
def _data_fits_mode(config: Config) -> Iterator[Problem]:
    source, at = config.buffer.explorer_input, "buffer.explorer_input"
    explores = config.mode in ("both", "explore") and config.algorithm.schema_type == "experience"
    if explores and not source.train_tasksets:
        yield f"{at}.taskset.path", f"required in mode {config.mode}: the tasks to explore"
    if config.mode == "bench" and not source.eval_tasksets:
        yield f"{at}.eval_tasksets", "required in mode bench: what to evaluate"


@reading("mode", "algorithm.algorithm_type", "buffer.trainer_input")
def _buffer_fits_algorithm(config: Config) -> Iterator[Problem]:
    if config.mode != "train" or config.algorithm.schema_type == "experience":
        return
    buffer, at = config.buffer.trainer_input.experience_buffer, "buffer.trainer_input.experience_buffer"
    if buffer.storage_type not in DATASET_TYPES:
        yield f"{at}.storage_type", f"{config.algorithm.algorithm_type} learns from a dataset; use file or sql"
    if not buffer.path:
        yield f"{at}.path", f"required for {config.algorithm.algorithm_type}: the dataset to learn from"


@reading("mode", "algorithm.algorithm_type", "buffer.trainer_input")
def _held_out_rows_are_a_dataset(config: Config) -> Iterator[Problem]:
    buffer, at = config.buffer.trainer_input.eval_buffer, "buffer.trainer_input.eval_buffer"
    if buffer is None:
        return
    if config.algorithm.schema_type == "experience":
        yield at, f"{config.algorithm.algorithm_type} learns from rollouts; use buffer.explorer_input.eval_tasksets"
    elif not buffer.path:
        yield f"{at}.path", "required: the dataset to evaluate on"
    elif buffer.storage_type not in DATASET_TYPES:
        yield f"{at}.storage_type", f"{buffer.storage_type}: it is a dataset; use file or sql"


@reading("algorithm.algorithm_type", "checkpoint_root_dir", "buffer.trainer_input")
def _log_has_a_place(config: Config) -> Iterator[Problem]:
    """Check the path of the experience log: only databases have one, with a certain kind of URL."""
    buffer, at = config.buffer.trainer_input.experience_buffer, "buffer.trainer_input.experience_buffer.path"
    if config.algorithm.schema_type != "experience" or buffer.storage_type != "sql":
        return
    if buffer.path:
        yield from _no_database(at, buffer.path)
    elif "://" in config.checkpoint_job_dir.removeprefix("file://"):
        yield at, "required: a database file cannot lie on remote storage; give postgresql://user@host/name"


@reading("algorithm.algorithm_type", "buffer.explorer_input", "buffer.trainer_input")
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


@reading("mode", "algorithm.algorithm_type", "buffer", "data_processor.task_pipeline")
def _pipeline_makes_a_dataset(config: Config) -> Iterator[Problem]:
    pipeline, at = config.data_processor.task_pipeline, "data_processor.task_pipeline"
    dataset = config.pipeline_dataset
    if dataset is not None and dataset.storage_type == "sql":
        where = f"{join(config.pipeline_place or ())}.storage_type"
        yield where, f"sql: {at} reads files, folders and datasets of the Hub; export the table"
    if dataset is not None and not pipeline.inputs and pipeline.config_path is None:
        yield f"{at}.inputs", "required: the datasets that the operators run over"


@reading("mode", "algorithm", "buffer.trainer_input")
def _demonstrations_have_a_dataset(config: Config) -> Iterator[Problem]:
    # Commands that only explore or evaluate read no demonstrations.
    if config.mode not in ("both", "train") or not takes_demonstrations(config.algorithm.sample_strategy):
        return
    buffer = config.buffer.trainer_input.auxiliary_buffers.get(config.demonstrations)
    if buffer is None or not buffer.path:
        why = f"required for {config.algorithm.algorithm_type}: the demonstrations, a dataset in the format of sft"
        yield f"buffer.trainer_input.auxiliary_buffers.{config.demonstrations}.path", why


@reading("mode", "algorithm", "buffer.trainer_input", "synchronizer")
def _replay_fits(config: Config) -> Iterator[Problem]:
    at = "buffer.trainer_input.experience_buffer.replay_buffer"
    section = config.buffer.trainer_input.experience_buffer.replay_buffer
    if not section.enable:
        return
    if config.algorithm.schema_type != "experience":
        yield (
            f"{at}.enable",
            f"{config.algorithm.algorithm_type} learns from a dataset, whose rows repeat each epoch; leave it out",
        )
    # Without a cooldown each group is used once.
    cooldown, cool = section.reuse_cooldown_time, f"{at}.reuse_cooldown_time"
    if cooldown is None:
        return
    if config.algorithm.greedy_baseline:
        why = "compares with a greedy rollout, which is used once"
        yield cool, f"{config.algorithm.algorithm_type} {why}; leave it out"
    if config.mode == "both" and config.synchronizer.sync_style == "fixed" and cooldown > 0:
        why = f"{cooldown} s: style fixed repeats a run bit by bit, which a clock prevents"
        yield cool, f"{why}; set 0, or choose another synchronizer.sync_style"


@reading("algorithm.algorithm_type", "buffer.trainer_input.experience_buffer")
def _compaction_has_shards(config: Config) -> Iterator[Problem]:
    log, at = config.buffer.trainer_input.experience_buffer, "buffer.trainer_input.experience_buffer.retention.keep"
    if log.retention.keep == "compact" and config.algorithm.schema_type == "experience" and log.storage_type != "queue":
        yield at, f"compact merges Parquet shards, and storage_type {log.storage_type} has none; use queue, or all"


@reading("buffer.explorer_input", "algorithm.algorithm_type", "algorithm.repeat_times")
def _only_eval_repeats(config: Config) -> Iterator[Problem]:
    for place, taskset in config.buffer.explorer_input.train_places.items():
        if taskset.repeat_times != config.algorithm.repeat_times:
            differs = f"{taskset.repeat_times} differs from algorithm.repeat_times {config.algorithm.repeat_times}"
            yield f"{join(place)}.repeat_times", f"{differs}, which decides for training; leave it out"
