"""Plan: roles, steps and experiences of a configuration, computed without running it. Shown by `rftdask validate`.

Reads the sizes of local datasets and nothing else. Numbers that depend on an unknown size are None.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.run import Config

_UNKNOWN = "known when the dataset is read"


@dataclass(frozen=True)
class RolePlan:
    """One role of a stage."""

    name: str
    num_workers: int
    what: str
    """Description of each worker."""


@dataclass(frozen=True)
class StagePlan:
    """One stage. None as a count: the size of a dataset is unknown, or nothing limits the count."""

    config: Config
    roles: tuple[RolePlan, ...]
    weights: str | None
    """How published weights travel, and why. None: no engine follows the trainer."""
    num_tasks: int | None
    """Training tasks (sft: rows) of one epoch."""
    explore_steps: int | None
    """None: also if the mode does not explore."""
    train_steps: int | None
    """None: also if the mode does not train."""
    experiences: int | None
    """Experiences of all explore steps."""


@dataclass(frozen=True)
class Plan:
    """Plan of a configuration. Usage: `print(make_plan(config).render())`."""

    stages: tuple[StagePlan, ...]

    def render(self) -> str:
        """Return a text table for each stage, at most 100 columns wide unless a path is longer."""
        return "\n\n".join(_render(stage) for stage in self.stages)


def make_plan(config: Config, num_ranks: int = 1) -> Plan:
    """Return the plan of a checked configuration. Counts the rows of local datasets.

    num_ranks: ranks of a trainer that takes all GPUs that other roles leave.
    """
    return Plan(tuple(_stage_plan(stage, num_ranks) for stage in config.stage_configs()))


@dataclass(frozen=True)
class StageWork:
    """Number of steps of a stage."""

    explore_steps: int
    train_steps: int | None
    """None: until the data ends."""


def plan_work(config: Config, sizes: Mapping[str, int]) -> StageWork:
    """Return the steps of a stage, from the sizes of its tasksets by name ("dataset": rows to learn from)."""
    buffer, limit = config.buffer, config.trainer.total_steps

    def limited(steps: int | None) -> int | None:
        return min((count for count in (steps, limit) if count is not None), default=None)

    steps = buffer.total_steps
    if config.algorithm.schema_type != "experience":
        rows = sizes.get("dataset")
        if steps is None and rows is not None:
            # Rounded down: batches continue over epochs, and the rows left at the very end fill none.
            steps = rows * buffer.total_epochs // buffer.train_batch_size
        return StageWork(0, limited(steps))
    tasksets = [sizes[taskset.name] for taskset in buffer.explorer_input.train_tasksets if taskset.name in sizes]
    if not tasksets:
        # In mode train another command fills the log, and how far is not known here.
        return StageWork(0, limit)
    if steps is None:
        steps = sum(tasksets) * buffer.total_epochs // buffer.batch_size
    per_step, per_batch = buffer.batch_size * config.algorithm.repeat_times, config.num_own_rollouts
    train_steps = limited(steps * per_step // per_batch)
    # Explore steps beyond the last train step would cost compute and never be trained.
    if config.mode == "both" and train_steps is not None:
        steps = min(steps, -(-train_steps * per_batch // per_step))
    return StageWork(steps, train_steps)


def _stage_plan(config: Config, num_ranks: int) -> StagePlan:
    buffer, on_rollouts = config.buffer, config.algorithm.schema_type == "experience"
    explores, trains = config.mode in ("both", "explore"), config.mode in ("both", "train")
    if on_rollouts:
        sizes = {taskset.name: _count_tasks(taskset) for taskset in buffer.explorer_input.train_tasksets}
    else:
        rows = buffer.trainer_input.experience_buffer
        sizes = {"dataset": count_rows(rows.path, rows.split, {}, rows.subset_name) if rows.path else None}
    num_tasks = _sum([*sizes.values()])
    explore_steps = train_steps = made = None
    # With total_steps the sizes do not matter.
    if (num_tasks is not None or buffer.total_steps is not None) and (explores or not on_rollouts):
        work = plan_work(config, {name: size or 0 for name, size in sizes.items()})
        train_steps = work.train_steps if trains else None
        if on_rollouts:
            explore_steps = work.explore_steps
            made = explore_steps * buffer.batch_size * config.algorithm.repeat_times
    publishes = config.evaluates_training or (on_rollouts and (explores or trains))
    weights = _describe_weights(config) if publishes else None
    roles = tuple(_role_plans(config, num_ranks))
    return StagePlan(config, roles, weights, num_tasks, explore_steps, train_steps, made)


def _count_tasks(taskset: TasksetConfig) -> int | None:
    return count_rows(taskset.path, taskset.split, taskset.dataset_args, taskset.subset_name)


def _describe_weights(config: Config) -> str:
    method, why = config.sync_choice
    how = "files of the run"
    if method != "checkpoint":
        between = "Dask" if method == "memory" else "gloo"
        how = f"held in /dev/shm, by {between} between machines"
        if config.cluster.is_one_machine:
            how = "held in /dev/shm" if method == "memory" else "held in /dev/shm, as by memory on one machine"
    return f"{method}: {how}, since {why}"


def _role_plans(config: Config, num_ranks: int) -> list[RolePlan]:
    sync, trains = config.synchronizer, config.mode in ("both", "train")
    roles = []
    if config.has_explorer:
        engine = config.explorer.rollout_model
        what = f"{engine.engine_type} engine, {engine.dtype}, {config.model.model_path}"
        if config.is_external:
            what = f"{config.model.external_model.model_name}, behind an API"
        roles.append(RolePlan(config.explorer.name, engine.engine_num, what))
        for model in () if config.algorithm.needs_teacher else config.explorer.auxiliary_models:
            number, what = 1, f"{model.model_path}, behind an API{_limits(model)}"
            if not model.traits.is_external:
                number = model.engine_num or engine.engine_num
                split = f" over {model.num_gpus} GPUs" if model.num_gpus > 1 else ""
                where = (
                    "on separate workers, for all explorers"
                    if model.is_apart
                    else "with the policy in each explorer worker"
                )
                what = f"{model.engine_type} engine{split}, {model.model_path}, {where}"
            roles.append(RolePlan(model.name or "auxiliary model", number, what))
    if trains:
        what = f"{config.trainer.trainer_type} rank, {config.model.model_path}"
        if config.algorithm.compares_reference:
            what += ", with a frozen reference model unless its coefficient is 0"
        what += ", with a critic" if config.algorithm.trains_critic else ""
        if config.algorithm.needs_teacher:
            teachers = " and ".join(model.model_path or "" for model in config.explorer.auxiliary_models)
            what += f", with the teacher{'s' * (len(config.explorer.auxiliary_models) > 1)} {teachers}"
        left = 1 if config.trainer.trainer_strategy == "single" else num_ranks
        roles.append(RolePlan(config.trainer.name, config.trainer.num_ranks or left, what))
    if config.mode == "both":
        intervals = f"explorer {sync.explorer_sync_interval}, trainer {sync.trainer_sync_interval}"
        what = f"{sync.sync_style}; intervals: {intervals}; offset {sync.sync_offset}"
        roles.append(RolePlan("synchronizer", 1, what))
    return roles


def _limits(model: InferenceModelConfig) -> str:
    """Rate limits of a model behind an API, after a comma; "": none."""
    limits = {"requests": model.requests_per_minute, "tokens": model.tokens_per_minute}
    texts = [f"{limit:,} {what}" for what, limit in limits.items() if limit is not None]
    return f", at most {' and '.join(texts)} a minute" if texts else ""


def _render(stage: StagePlan) -> str:
    def number(count: int | None) -> str:
        return _UNKNOWN if count is None else str(count)

    config, algorithm = stage.config, stage.config.algorithm
    on_rollouts = algorithm.schema_type == "experience"
    rows = [("stage", config.name), ("mode", config.mode), ("algorithm", algorithm.algorithm_type)]
    rows.append(("folder", config.checkpoint_job_dir))
    rows += [(role.name, f"{role.num_workers} x {role.what}") for role in stage.roles]
    if stage.weights is not None:
        rows.append(("weights", stage.weights))
    if config.mode in ("both", "explore"):
        rows.append(("tasks per epoch", number(stage.num_tasks)))
        rows.append(("explore steps", number(stage.explore_steps)))
        rows.append(("experiences", number(stage.experiences)))
    elif config.mode == "train" and not on_rollouts:
        rows.append(("rows per epoch", number(stage.num_tasks)))
    if config.mode in ("both", "train"):
        groups = f"experiences = {config.num_own_rollouts // algorithm.repeat_times} groups"
        rows.append(("train batch", f"{config.buffer.train_batch_size} {groups if on_rollouts else 'rows'}"))
        # Unknown if the experience log decides the number of batches.
        steps, limit = str(stage.train_steps), config.trainer.total_steps
        if stage.train_steps is None:
            steps = "" if limit is None else f"at most {limit}, "
            steps += "until the experience log ends" if config.mode == "train" and on_rollouts else _UNKNOWN
        rows.append(("train steps", steps))
    evals = config.buffer.explorer_input.eval_tasksets
    for taskset in evals:
        count, times = _count_tasks(taskset), taskset.repeat_times
        tasks = _UNKNOWN if count is None else f"{count} tasks"
        rows.append((f"eval {taskset.name}", tasks + (f" x {times} rollouts" if times > 1 else "")))
    if evals and (config.mode in ("both", "explore") or config.evaluates_training):
        every = f"{config.eval_interval} {'train' if config.mode == 'train' else 'explore'} steps"
        rows.append(("eval interval", every if config.eval_interval else "before the first step and after the last"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


# ---- the size of a dataset: local files and generated ones

GENERATED = "reasoning-gym:"
"""Prefix of a generated dataset; its size is `dataset_args.size`."""
_SEEDS = "seeds:"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_GENERATED_SIZE = 1000
"""Default size of a reasoning-gym dataset, as in data/datasets.py."""


def count_rows(path: str, split: str, dataset_args: dict[str, object], subset_name: str | None = None) -> int | None:
    """Return the rows of the dataset at `path`; None: it is not local or cannot be counted. In a folder, the subfolder
    `subset_name` counts if one is given.
    """
    if path.startswith(GENERATED):
        size = dataset_args.get("size", _GENERATED_SIZE)
        return size if isinstance(size, int) else None
    if path.startswith(_SEEDS):
        count = path.removeprefix(_SEEDS)
        return int(count) if count.isdecimal() else None
    place = Path(path).expanduser()
    if place.is_file():
        return _count_file(place)
    place /= subset_name or ""
    if not place.is_dir():
        return None
    files = sorted(file for file in place.iterdir() if file.suffix in _SUFFIXES)
    # File names begin with their split; if none does, all files belong to it.
    return _sum([_count_file(file) for file in [f for f in files if f.name.startswith(split)] or files])


def _sum(counts: list[int | None]) -> int | None:
    """Return the sum; None: no counts, or one is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count_file(file: Path) -> int | None:
    try:
        if file.suffix == ".csv":
            # Rows, not lines: a quoted field may contain line ends. The first row has the column names.
            with file.open(newline="", encoding="utf-8") as text:
                return max(sum(1 for row in csv.reader(text) if row) - 1, 0)
        if file.suffix == ".parquet":
            import pyarrow as pa  # late: heavy, and only Parquet files need it
            import pyarrow.parquet as pq

            try:
                return int(pq.read_metadata(file).num_rows)
            except pa.ArrowException:
                return None
        if file.suffix not in _SUFFIXES:
            return None
        with file.open("rb") as lines:
            # JSON lines may be named .json; datasets reads them as well.
            if file.suffix == ".json" and lines.read(64).lstrip().startswith(b"["):
                lines.seek(0)
                return len(json.load(lines))
            lines.seek(0)
            return sum(1 for line in lines if line.strip())
    except (OSError, ValueError, csv.Error, ImportError):
        return None  # reading the data reports the error
