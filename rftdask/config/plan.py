"""What a configuration would do, without doing it: roles, steps, experiences. Shown by `rftdask validate`.

Reads the sizes of local datasets and nothing else. Numbers that depend on an unknown size are None.
"""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.run import Config

_UNKNOWN = "known when the dataset is read"


@dataclass(frozen=True)
class RolePlan:
    """One role of a stage."""

    name: str
    num_workers: int
    what: str
    """What each of them is, for a person."""


@dataclass(frozen=True)
class EvalPlan:
    """One evaluation taskset of a stage."""

    name: str
    num_tasks: int | None
    repeat_times: int
    """Rollouts of each task."""


@dataclass(frozen=True)
class StagePlan:
    """One stage. Counts are None where the size of a dataset is not known yet, or nothing limits them."""

    name: str
    mode: str
    algorithm: str
    folder: str
    """Where the run lives."""
    roles: tuple[RolePlan, ...]
    num_tasks: int | None
    """Training tasks (sft: rows) of one epoch."""
    explore_steps: int | None
    """None also when the mode does not explore."""
    train_steps: int | None
    """None also when the mode does not train."""
    max_train_steps: int | None
    """`trainer.total_steps`: the data may end before it."""
    experiences: int | None
    """Experiences that will be made (sft: rows of all epochs)."""
    train_batch_size: int
    """Experiences in one train step."""
    groups_per_batch: int | None
    """Groups in one train step; None when the algorithm has no groups."""
    evals: tuple[EvalPlan, ...]
    eval_every: int | None
    """Explore steps between evaluations; None without evaluation while training."""


@dataclass(frozen=True)
class Plan:
    """What a configuration would do. `print(make_plan(config).render())`."""

    mode: str
    stages: tuple[StagePlan, ...]

    def render(self) -> str:
        """A table of text for each stage, at most 100 columns unless a path is longer."""
        return "\n\n".join(_render(stage) for stage in self.stages)


def make_plan(config: Config) -> Plan:
    """The plan of a checked configuration. Counts the lines of local datasets."""
    return Plan(config.mode, tuple(_stage_plan(stage) for stage in config.stage_configs()))


def _stage_plan(config: Config) -> StagePlan:
    on_rollouts = config.algorithm.schema_type == "experience"
    num_tasks = _num_tasks(config) if on_rollouts else _num_rows(config)
    explore_steps = _explore_steps(config, num_tasks) if on_rollouts and config.mode in ("both", "explore") else None
    experiences = _num_experiences(config, num_tasks, explore_steps)
    source = config.buffer.explorer_input
    explores = config.mode in ("both", "explore")
    return StagePlan(
        name=config.name,
        mode=config.mode,
        algorithm=config.algorithm.algorithm_type,
        folder=config.checkpoint_job_dir,
        roles=tuple(_roles(config)),
        num_tasks=num_tasks,
        explore_steps=explore_steps,
        train_steps=_train_steps(config, experiences),
        max_train_steps=config.trainer.total_steps,
        experiences=experiences,
        train_batch_size=config.buffer.train_batch_size,
        groups_per_batch=config.num_own_rollouts // config.algorithm.repeat_times if on_rollouts else None,
        evals=tuple(EvalPlan(t.name, _rows_of(t), t.repeat_times) for t in source.eval_tasksets),
        eval_every=config.eval_interval if source.eval_tasksets and explores else None,
    )


def _roles(config: Config) -> list[RolePlan]:
    engine = config.explorer.rollout_model
    roles = []
    if config.mode in ("both", "explore", "bench"):
        what = f"{engine.engine_type} engine, {engine.dtype}, {config.model.model_path}"
        if config.is_external:
            what = f"{config.model.external_model.model_name}, behind an API"
        roles.append(RolePlan(config.explorer.name, engine.engine_num, what))
    if config.mode in ("both", "train"):
        reference = config.algorithm.compares_reference and config.algorithm.kl_loss_fn != "none"
        what = f"{config.trainer.trainer_type} rank, {config.model.model_path}"
        what += ", with a frozen reference model unless its coefficient is 0" if reference else ""
        what += ", with a critic" if config.algorithm.trains_critic else ""
        what += f", with the teacher {_teacher(config)}" if config.algorithm.needs_teacher else ""
        roles.append(RolePlan(config.trainer.name, config.trainer.num_ranks or 1, what))
    if config.mode == "both":
        sync = config.synchronizer
        what = (
            f"{sync.sync_style}; intervals: explorer {sync.explorer_sync_interval}, "
            f"trainer {sync.trainer_sync_interval}; offset {sync.sync_offset}"
        )
        roles.append(RolePlan("synchronizer", 1, what))
    return roles


def _teacher(config: Config) -> str:
    return config.explorer.auxiliary_models[0].model_path or ""


def _rows_of(taskset: TasksetConfig) -> int | None:
    return count_rows(taskset.path, taskset.split, taskset.dataset_args)


def _num_tasks(config: Config) -> int | None:
    counts = [_rows_of(taskset) for taskset in config.buffer.explorer_input.train_tasksets]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _num_rows(config: Config) -> int | None:
    buffer = config.buffer.trainer_input.experience_buffer
    return count_rows(buffer.path, buffer.split, {}) if buffer.path else None


def _explore_steps(config: Config, num_tasks: int | None) -> int | None:
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    if num_tasks is None:
        return None
    return num_tasks * config.buffer.total_epochs // config.buffer.batch_size


def _num_experiences(config: Config, num_tasks: int | None, explore_steps: int | None) -> int | None:
    if config.algorithm.schema_type == "experience":
        return (
            None if explore_steps is None else explore_steps * config.buffer.batch_size * config.algorithm.repeat_times
        )
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps * config.buffer.train_batch_size
    return None if num_tasks is None else num_tasks * config.buffer.total_epochs


def _train_steps(config: Config, experiences: int | None) -> int | None:
    """min(trainer.total_steps, experiences / train_batch_size rounded down), where the experiences are known."""
    if config.mode not in ("both", "train"):
        return None
    if experiences is None:
        return None
    on_rollouts = config.algorithm.schema_type == "experience"
    steps = experiences // (config.num_own_rollouts if on_rollouts else config.buffer.train_batch_size)
    return steps if config.trainer.total_steps is None else min(steps, config.trainer.total_steps)


def _render(stage: StagePlan) -> str:
    rows = [
        ("stage", stage.name),
        ("mode", stage.mode),
        ("algorithm", stage.algorithm),
        ("folder", stage.folder),
        *((role.name, f"{role.num_workers} x {role.what}") for role in stage.roles),
        *_size_rows(stage),
        *((f"eval {item.name}", _eval_text(item)) for item in stage.evals),
    ]
    if stage.eval_every is not None:
        rows.append(("eval interval", f"{stage.eval_every} explore steps"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _size_rows(stage: StagePlan) -> list[tuple[str, str]]:
    rows = []
    on_rollouts = stage.groups_per_batch is not None
    if stage.mode in ("both", "explore"):
        rows.append(("tasks per epoch", _number(stage.num_tasks)))
        rows.append(("explore steps", _number(stage.explore_steps)))
        rows.append(("experiences", _number(stage.experiences)))
    elif stage.mode == "train" and not on_rollouts:
        rows.append(("rows per epoch", _number(stage.num_tasks)))
    if stage.mode in ("both", "train"):
        batch = f"{stage.train_batch_size} experiences" if on_rollouts else f"{stage.train_batch_size} rows"
        batch += f" = {stage.groups_per_batch} groups" if on_rollouts else ""
        rows.append(("train batch", batch))
        rows.append(("train steps", _train_steps_text(stage, on_rollouts)))
    return rows


def _train_steps_text(stage: StagePlan, on_rollouts: bool) -> str:
    if stage.train_steps is not None:
        return str(stage.train_steps)
    bound = "" if stage.max_train_steps is None else f"at most {stage.max_train_steps}, "
    return bound + ("until the experience log ends" if stage.mode == "train" and on_rollouts else _UNKNOWN)


def _eval_text(item: EvalPlan) -> str:
    times = f" x {item.repeat_times} rollouts" if item.repeat_times > 1 else ""
    return f"{_number(item.num_tasks)}{times}" if item.num_tasks is None else f"{item.num_tasks} tasks{times}"


def _number(count: int | None) -> str:
    return _UNKNOWN if count is None else str(count)


# ---- the size of a dataset, where it can be told quickly: local files and generated ones

GENERATED = "reasoning-gym:"
"""Prefix of a generated dataset; its size is `dataset_args.size`."""
_GENERATED_SIZE = 1000
"""Size of a reasoning-gym dataset when none is given, as the one who reads it has it."""


def count_rows(path: str, split: str, dataset_args: dict[str, object]) -> int | None:
    """Rows of the dataset at `path`, or None when it is not here or cannot be counted."""
    if path.startswith(GENERATED):
        size = dataset_args.get("size", _GENERATED_SIZE)
        return size if isinstance(size, int) else None
    place = Path(path).expanduser()
    if place.is_file():
        return _count_file(place)
    if place.is_dir():
        return _count_folder(place, split)
    return None


def _count_folder(folder: Path, split: str) -> int | None:
    """All files of the split: those named after it, or every data file when none is."""
    files = sorted(file for file in folder.iterdir() if file.suffix in _COUNTERS)
    files = [file for file in files if file.name.startswith(split)] or files
    counts = [_count_file(file) for file in files]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count_file(file: Path) -> int | None:
    counter = _COUNTERS.get(file.suffix)
    try:
        return counter(file) if counter else None
    except (OSError, ValueError, csv.Error):
        return None  # whoever reads the data says what is wrong with it


def _count_jsonl(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _count_json(file: Path) -> int | None:
    with file.open("rb") as text:
        if not text.read(64).lstrip().startswith(b"["):
            return _count_jsonl(file)  # JSON lines under the name .json, as datasets reads them too
        text.seek(0)
        return len(json.load(text))


def _count_csv(file: Path) -> int:
    with file.open(newline="", encoding="utf-8") as text:
        return max(sum(1 for row in csv.reader(text) if row) - 1, 0)


def _count_parquet(file: Path) -> int | None:
    try:
        import pyarrow as pa  # late: only for this, and a plan without it is still a plan
        import pyarrow.parquet as pq
    except ImportError:
        return None
    try:
        return int(pq.read_metadata(file).num_rows)
    except pa.ArrowException:
        return None


_COUNTERS: dict[str, Callable[[Path], int | None]] = {
    ".jsonl": _count_jsonl,
    ".json": _count_json,
    ".csv": _count_csv,
    ".parquet": _count_parquet,
}
