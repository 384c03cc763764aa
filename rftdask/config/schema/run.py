"""Configuration of a run, `Config`, with its small sections: monitor, log, data processing, stages.

Create it with rftdask.config.load; a Config made otherwise is unchecked. Invariant: a Config never changes, and
`load_config(config.to_dict())` equals it.
"""

import math
import os.path
import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import AfterValidator, Field, PrivateAttr

from rftdask.config.base import (
    Computed,
    Count,
    MayChange,
    OpenDict,
    PluginName,
    Problem,
    Section,
    empty_dict,
    is_number,
    plain,
    reading,
    show,
)
from rftdask.config.plugins import read_parts, trait
from rftdask.config.schema.algorithm import AlgorithmConfig, registered_parts, takes_demonstrations
from rftdask.config.schema.buffer import BufferConfig, ExperienceBufferConfig, TasksetConfig
from rftdask.config.schema.cluster import ClusterConfig
from rftdask.config.schema.explorer import ExplorerConfig, InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.config.schema.trainer import SynchronizerConfig, TrainerConfig
from rftdask.config.yaml_source import escape, fill_from_environment, to_yaml

MAX_TASKS_PER_UNIT = 64
"""Default maximum size of a work unit: some seconds of work, which is also the maximum loss with a worker."""
EXPERT_BUFFER = "sft_dataset"
"""Default auxiliary buffer of demonstrations, if it exists and sample_strategy_args name no other."""

MADE_ROWS = "dataset/rows.jsonl"
"""Dataset that `data_processor.task_pipeline` writes, relative to the run folder."""

Mode = Literal["both", "explore", "train", "bench", "serve", "colocate"]


_LONGEST_NAME = 200
"""Maximum bytes of a folder name. File systems allow 255, and longer names are derived from it."""


def _relative(name: str) -> str:
    if not name.isprintable():
        raise ValueError("not a folder name: it holds a character that cannot be printed")
    if any(len(part.encode()) > _LONGEST_NAME for part in name.split("/")):
        raise ValueError(f"not a folder name: longer than {_LONGEST_NAME} bytes")
    if "\\" in name or (name and any(part in ("", ".", "..") for part in name.split("/"))):
        raise ValueError("not a folder name, or folder names joined by /")
    return name


Name = Annotated[str, AfterValidator(_relative)]
"""A folder name or several joined by /, without . and .."""


def count_demonstrations(batch_size: int, ratio: float) -> int:
    """Return the demonstrations in a batch of `batch_size` with at least the share `ratio`."""
    return math.ceil(ratio * batch_size - 1e-9)  # less the rounding of 0.1 * 30


_WEIGHTS = ("quality", "difficulty", "usage_frequency", "diversity")


class MonitorConfig(Section):
    """`monitor`: destinations of metrics in addition to the run folder."""

    monitor_type: Annotated[
        str,
        PluginName(
            "monitor", partial(read_parts, "rftdask.monitor.trackers", "monitor_type"), "monitor_args", supplied=1
        ),
    ] = "tensorboard"
    """Tracker: tensorboard, wandb, mlflow, swanlab, trackio, none (only files in the run folder), or your own."""
    monitor_args: OpenDict = empty_dict()
    """Arguments of the tracker. It reads keys and tokens from its environment variables."""
    extra_monitors: Annotated[
        tuple[OpenDict, ...],
        PluginName("monitor", partial(read_parts, "rftdask.monitor.trackers", "monitor_type"), supplied=1),
    ] = ()
    """Additional trackers: [{name, args}, ...], each name once."""
    detailed_stats: bool = False
    """Log maximum, minimum and standard deviation of evaluation metrics: <metric>/max, /min, /std."""

    @reading("monitor_type", "extra_monitors")
    def _trackers_are_named_once(self) -> Iterator[Problem]:
        """Check that no tracker is listed twice: the position of each is stored under its name."""
        seen = {self.monitor_type}
        for number, tracker in enumerate(self.extra_monitors):
            name = str(tracker.get("name", ""))
            if name in seen:
                yield f"extra_monitors[{number}].name", f"{name} is listed twice; list each tracker once"
            seen.add(name)


class TaskPipelineConfig(Section):
    """`data_processor.task_pipeline`: Data-Juicer operators applied to a dataset before the run; see docs/data.md."""

    operators: tuple[OpenDict, ...] = ()
    """[{name, args}, ...] of Data-Juicer, in this order."""
    num_process: Annotated[Count, MayChange()] = 4
    """Maximum processes of each operator."""
    config_path: str | None = None
    """Data-Juicer recipe (YAML) instead of `operators`. None: no recipe."""
    inputs: Annotated[tuple[str, ...], Computed("the path of the taskset, or the recipe's dataset_path")] = ()
    """Datasets, concatenated; the `path` of the taskset is not read. The result is in the run folder, and the first
    taskset reads it; in mode train, experience_buffer."""
    target_fields: tuple[str, ...] = ()
    """Columns that every row must have; other rows are dropped. Text operators read the first. (): `format.prompt_key`.
    """
    priority_weights: OpenDict = empty_dict()
    """Weights of quality, difficulty, usage_frequency and diversity in the priority that sorts rows. {}: 1, -0.7, -0.5
    and 0.8."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of rows with the highest priority to keep. -1: all."""

    @reading("operators", "config_path", "priority_weights", "top_k")
    def _operators_are_listed(self) -> Iterator[Problem]:
        """Check the form of the operators. `check_pipeline` reports the problems that Data-Juicer finds in them."""
        if self == TaskPipelineConfig.model_construct():
            return
        if not self.operators and self.config_path is None:
            yield "operators", "required, unless config_path names a recipe of Data-Juicer"
        for number, entry in enumerate(self.operators):
            if set(entry) - {"name", "args"} or not isinstance(entry.get("name"), str):
                yield f"operators[{number}]", "takes name and args: {name: text_length_filter, args: {min_len: 10}}"
            elif not isinstance(entry.get("args"), dict | None):
                yield f"operators[{number}].args", f"{show(entry['args'])} is not {{argument: value}}"
        for name, weight in self.priority_weights.items():
            if name not in _WEIGHTS:
                yield f"priority_weights.{name}", f"unknown; choose from {', '.join(_WEIGHTS)}"
            elif not is_number(weight):
                yield f"priority_weights.{name}", f"{show(weight)} is not a number"
        if self.top_k == 0:
            yield "top_k", "0 keeps no row; use -1 to keep all"


class ExperiencePipelineConfig(Section):
    """`data_processor.experience_pipeline`: filters and transforms experiences between explorer and trainer."""

    operators: Annotated[tuple[OpenDict, ...], PluginName("operator", partial(registered_parts, "operator"))] = ()
    """[{name, args}, ...], in this order; see docs/algorithms.md."""
    stage: Literal["batch", "commit"] = "batch"
    """batch: applied to every train batch before it is recorded. commit: applied by the explorer to every work unit
    before it is committed; dropped experiences are committed as filtered. data_juicer runs only at commit."""

    @reading("operators", "stage")
    def _operators_have_their_stage(self) -> Iterator[Problem]:
        for number, entry in enumerate(self.operators):
            part = registered_parts("operator").get(str(entry.get("name")))
            if self.stage == "batch" and part is not None and trait(part, "only_at_commit"):
                why = "batches have no text, and every start must drop the same rows"
                yield "stage", f"batch: operators[{number}] {entry['name']} runs only at commit ({why}); set commit"


class DataProcessorConfig(Section):
    """`data_processor`: pipelines for tasks and experiences."""

    task_pipeline: TaskPipelineConfig = TaskPipelineConfig.model_construct()
    """Pipeline for the dataset, before the run."""
    experience_pipeline: ExperiencePipelineConfig = ExperiencePipelineConfig.model_construct()
    """Pipeline for experiences, during the run."""


class DataJuicerServiceConfig(Section):
    """`service.data_juicer`: where Data-Juicer's operators run, before and during the run."""

    server_url: Annotated[str, Field(pattern=r"^https?://[^/\s]")] | None = None
    """URL of a running Data-Juicer service (Trinity-RFT's), with its port (5005 by default), reachable from all
    processes with operators. None: a process next to them, in its own environment (`rftdask data setup`)."""


class ServiceConfig(Section):
    """`service`: external services of the run."""

    data_juicer: DataJuicerServiceConfig = DataJuicerServiceConfig.model_construct()
    """Data-Juicer."""


class LogConfig(Section):
    """`log`: messages for people."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is shown."""


class StageConfig(Section):
    """An item of `stages`: its keys are merged, field by field, over the rest of the file; lists are replaced."""

    stage_name: str = Field(pattern=r"^[^/\\.\x00-\x1f\x7f-\x9f][^/\\\x00-\x1f\x7f-\x9f]*$")
    """Unique name. The stage's run is `<name>/<stage_name>`."""
    mode: Literal["both", "explore", "train", "bench", "serve", "colocate"] | None = None
    """Mode of the stage. None: the file's."""
    algorithm: OpenDict | None = None
    """Part of section algorithm."""
    buffer: OpenDict | None = None
    """Part of section buffer."""
    data_processor: OpenDict | None = None
    """Part of section data_processor."""
    explorer: OpenDict | None = None
    """Part of section explorer."""
    trainer: OpenDict | None = None
    """Part of section trainer."""


class Config(Section):
    """A run, complete: every key has its value. Made by `rftdask.config.load_config`.

    >>> config = load_config("config/quickstart.yaml", ["buffer.batch_size=8"])
    >>> config.algorithm.repeat_times, config.checkpoint_job_dir
    """

    mode: Annotated[Mode, MayChange()] = "both"
    """both: explore and train. explore, train: one of them. bench: evaluate checkpoints. colocate: both, with trainer
    and engines taking turns on the same GPUs (it is read as both with cluster.colocate)."""
    project: Name = "rftdask"
    """First part of the run's folder."""
    group: Name = ""
    """Second part of the run's folder; may be empty."""
    name: Name = Field(default="rft", min_length=1)
    """Last part of the run's folder."""
    checkpoint_root_dir: Annotated[str, MayChange()] = Field(default="./runs", min_length=1)
    """Where runs live: a local path or any fsspec URL."""
    private: Annotated[bool, MayChange()] = False
    """Restrict the run to its owner: folders have mode 0700 and files 0600, whatever the umask. Only for local folders;
    buckets have their own access rules."""
    continue_from_checkpoint: Annotated[bool, MayChange()] = True
    """True: continue the run in the folder. False: each start creates a new run next to it if the folder is not empty,
    with the UTC time at the end of its name; jobs of `rftdask submit` continue the one that it created."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed of everything without its own seed."""
    deterministic: bool | None = None
    """Same configuration, same bits. False: allow faster kernels. None: True if the trainer runs on CPUs, else False;
    the first start writes the choice to run.json."""
    algorithm: AlgorithmConfig = AlgorithmConfig.model_construct()
    """The objective."""
    model: ModelConfig
    """The trained model."""
    cluster: Annotated[ClusterConfig, MayChange()] = ClusterConfig.model_construct()
    """The machines."""
    buffer: BufferConfig = BufferConfig.model_construct()
    """Batches and data."""
    explorer: ExplorerConfig = ExplorerConfig.model_construct()
    """Sampling."""
    trainer: TrainerConfig = TrainerConfig.model_construct()
    """Training."""
    synchronizer: SynchronizerConfig = SynchronizerConfig.model_construct()
    """Hand-over of weights."""
    monitor: Annotated[MonitorConfig, MayChange()] = MonitorConfig.model_construct()
    """Metrics."""
    data_processor: DataProcessorConfig = DataProcessorConfig.model_construct()
    """Pipelines."""
    service: Annotated[ServiceConfig, MayChange()] = ServiceConfig.model_construct()
    """External services."""
    log: Annotated[LogConfig, MayChange()] = LogConfig.model_construct()
    """Messages."""
    stages: Annotated[tuple[StageConfig, ...], MayChange()] = ()
    """Runs that follow each other, each on the weights of the previous one."""

    _warnings: tuple[str, ...] = PrivateAttr(())
    _origin: str = PrivateAttr("")
    _defaults: tuple[str, ...] = PrivateAttr(())
    _changes: tuple[str, ...] = PrivateAttr(())
    _stages: tuple["Config", ...] = PrivateAttr(())
    _unfilled: dict[str, Any] | None = PrivateAttr(None)

    @reading("private", "checkpoint_root_dir")
    def _modes_are_of_folders(self) -> Iterator[Problem]:
        if self.private and "://" in self.checkpoint_job_dir.removeprefix("file://"):
            remedy = "set access rules at the storage service"
            yield "private", f"{self.checkpoint_root_dir} is not a local folder; {remedy}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Keys that were accepted but have no effect, or not the expected one: one line each, starting with the key."""
        return self._warnings

    @property
    def origin(self) -> str:
        """System for which the file was read, if not this one, and why: "Trinity-RFT (--from trinity)"."""
        return self._origin

    @property
    def reference_defaults(self) -> tuple[str, ...]:
        """Defaults of that system which differ from ours and are now set: one line each, starting with the key."""
        return self._defaults

    @property
    def changes(self) -> tuple[str, ...]:
        """Differences between the file and what was read: lines "- key: value" and "+ key: value", sorted by key."""
        return self._changes

    @property
    def is_external(self) -> bool:
        """True if a model behind an API replaces the policy."""
        return self.model.external_model.enable or self.explorer.rollout_model.traits.is_external

    @property
    def checkpoint_job_dir(self) -> str:
        """Run folder: root/project/group/name. Local roots are made absolute; URLs are unchanged."""
        parts = [part for part in (self.project, self.group, self.name) if part]
        # A URL is joined as text: a path on this machine would lose the second slash of s3://.
        url = re.match(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", self.checkpoint_root_dir)
        if url:
            return url[1] + "/".join([url[2].rstrip("/"), *parts] if url[2].rstrip("/") else parts)
        return os.path.join(os.path.abspath(os.path.expanduser(self.checkpoint_root_dir)), *parts)

    @property
    def tasks_per_unit(self) -> int:
        """Tasks of a work unit: as configured, else an equal share of an explore step for every possible engine, at
        most MAX_TASKS_PER_UNIT."""
        if self.explorer.tasks_per_batch is not None:
            return min(self.explorer.tasks_per_batch, self.buffer.batch_size)
        return min(-(-self.buffer.batch_size // self.explorer.most_workers), MAX_TASKS_PER_UNIT)

    @property
    def units_per_step(self) -> int:
        """Work units of an explore step."""
        return -(-self.buffer.batch_size // self.tasks_per_unit)

    @property
    def slots_per_engine(self) -> int:
        """Concurrent rollouts of an engine: as configured, else those of a work unit. For `memory`, the minimum."""
        configured = self.explorer.slots_per_engine
        per_task = self.algorithm.repeat_times + self.algorithm.greedy_baseline
        return configured if isinstance(configured, int) else self.tasks_per_unit * per_task

    @property
    def evaluates_training(self) -> bool:
        """True if a trainer that learns from a dataset has an explorer, which evaluates its published weights."""
        learns_alone = self.mode == "train" and self.algorithm.schema_type != "experience"
        # A reward model answers no tasks.
        return (
            learns_alone and bool(self.buffer.explorer_input.eval_tasksets) and not self.algorithm.trains_reward_model
        )

    @property
    def reads_images(self) -> bool:
        """True if tasks of this command may have images, or videos."""
        source = self.buffer.explorer_input
        tasksets = (*source.train_tasksets, *source.eval_tasksets)
        return self.reads_videos or any(taskset.format.image_key for taskset in tasksets)

    @property
    def reads_videos(self) -> bool:
        """True if tasks of this command may have videos."""
        source = self.buffer.explorer_input
        return any(taskset.format.video_key for taskset in (*source.train_tasksets, *source.eval_tasksets))

    @property
    def command_name(self) -> str:
        """Name of this command in paths: its mode, and if several explorers may share the run, the explorer's name."""
        named = self.mode == "explore" and self.explorer.name != "explorer"
        return f"{self.mode}.{quote(self.explorer.name, safe='')}" if named else self.mode

    @property
    def has_explorer(self) -> bool:
        """True if this command has engines."""
        return self.mode != "train" or self.evaluates_training

    @property
    def models_apart(self) -> tuple[InferenceModelConfig, ...]:
        """Auxiliary models of this command with their own workers."""
        asked = () if self.algorithm.needs_teacher or not self.has_explorer else self.explorer.auxiliary_models
        return tuple(model for model in asked if model.is_apart)

    @property
    def models_beside(self) -> tuple[InferenceModelConfig, ...]:
        """Auxiliary models that each explorer worker of this command loads with the policy."""
        asked = () if self.algorithm.needs_teacher or not self.has_explorer else self.explorer.auxiliary_models
        return tuple(model for model in asked if not (model.is_apart or model.traits.is_external))

    @property
    def has_both_roles(self) -> bool:
        """True if this command has a trainer, and engines that follow it."""
        return self.mode == "both" or self.evaluates_training

    @property
    def sync_method(self) -> Literal["checkpoint", "memory", "nccl"]:
        """How weights travel in this command, with auto resolved."""
        return self.sync_choice[0]

    @property
    def sync_choice(self) -> tuple[Literal["checkpoint", "memory", "nccl"], str]:
        """How weights travel in this command, and why."""
        chosen = self.synchronizer.sync_method
        # Without a trainer or without engines there is nobody to hold weights, or nobody to hand them to.
        if not self.has_both_roles:
            return "checkpoint", f"mode {self.mode} has only one role"
        if self.trainer.is_hosted:
            return "checkpoint", "the service keeps them, and files name them"
        if chosen != "auto":
            return chosen, "sync_method says so"
        if "://" not in self.checkpoint_root_dir or self.checkpoint_root_dir.startswith(("file:", "local:")):
            return "checkpoint", "the run is in a folder"
        if self.synchronizer.full_publish_interval > 1:
            return "checkpoint", f"deltas are files (full_publish_interval {self.synchronizer.full_publish_interval})"
        if not self.cluster.is_one_machine:
            return "checkpoint", f"a {self.cluster.type} cluster may be several machines"
        # On one machine nobody has to be asked for them, and an upload of each version is what costs.
        return "memory", "one machine runs on an object store"

    @property
    def pipeline_place(self) -> tuple[str | int, ...] | None:
        """Location of the dataset that `data_processor.task_pipeline` makes: the first taskset, or the dataset that is
        trained. None: there is none. The same in all modes, whose commands may share a run."""
        source = self.buffer.explorer_input
        if not (self.data_processor.task_pipeline.operators or self.data_processor.task_pipeline.config_path):
            return None
        if self.algorithm.schema_type != "experience":
            return "buffer", "trainer_input", "experience_buffer"
        if not source.train_tasksets:
            return None
        at: tuple[str | int, ...] = ("buffer", "explorer_input")
        return (*at, "taskset") if source.taskset is not None else (*at, "tasksets", 0)

    @property
    def makes_dataset(self) -> bool:
        """True if this command makes the dataset, because it reads it."""
        modes = ("both", "explore") if self.algorithm.schema_type == "experience" else ("train",)
        return self.pipeline_place is not None and self.mode in modes

    @property
    def pipeline_dataset(self) -> TasksetConfig | ExperienceBufferConfig | None:
        """Section at `pipeline_place`."""
        if (place := self.pipeline_place) is None:
            return None
        trains = place[-1] == "experience_buffer"
        return self.buffer.trainer_input.experience_buffer if trains else self.buffer.explorer_input.train_tasksets[0]

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations of tasks. Explore steps: a multiple of the explorer's synchronization interval, at
        least one. With training on a dataset: train steps; 0: only before the first and after the last."""
        if self.evaluates_training:
            return self.trainer.eval_interval
        every = self.synchronizer.explorer_sync_interval
        return max(self.explorer.eval_interval // every, 1) * every

    @property
    def num_demonstrations(self) -> int:
        """Demonstrations in one train batch; 0: the sample strategy has none."""
        if not takes_demonstrations(self.algorithm.sample_strategy):
            return 0
        return count_demonstrations(self.buffer.train_batch_size, self.algorithm.expert_ratio)

    @property
    def num_own_rollouts(self) -> int:
        """Rollouts in one train batch; the rest are demonstrations."""
        return self.buffer.train_batch_size - self.num_demonstrations

    @property
    def num_mini_batches(self) -> int:
        """Updates in one pass over a batch."""
        whole = self.buffer.train_batch_size
        return whole // (self.trainer.ppo_mini_batch_size or whole)

    def trainer_memory_keys(self, *, of_passes: bool = True) -> str:
        """Return the keys that lower a rank's memory and are not set already, as the end of a sentence.

        of_passes: include those for forward and backward passes. False: only those for memory in use between passes.
        """
        trainer, keys = self.trainer, list[str]()
        if of_passes:
            if trainer.use_dynamic_bsz:
                keys.append(f"trainer.max_token_len_per_gpu below {trainer.max_tokens_per_micro_batch}")
            rows = trainer.max_rows_per_micro_batch
            keys += [f"trainer.micro_batch_size below {rows}"] if rows is not None and rows > 1 else []
            keys += [] if trainer.gradient_checkpointing else ["trainer.gradient_checkpointing: true"]
        is_spread = trainer.trainer_strategy == "fsdp2"
        keys.append("more trainer.num_ranks" + ("" if is_spread else " with trainer_strategy: fsdp2"))
        keys += [] if trainer.offload_policy else ["trainer.offload_policy: true"]
        keys += [] if self.model.lora_configs else ["model.lora_configs"]
        return ", ".join(keys[:-1]) + f" or {keys[-1]}" if len(keys) > 1 else keys[0]

    @property
    def demonstrations(self) -> str:
        """Auxiliary buffer of strategy mix: as configured, else `EXPERT_BUFFER` if it exists, else the first."""
        buffers = self.buffer.trainer_input.auxiliary_buffers
        default = EXPERT_BUFFER if EXPERT_BUFFER in buffers else next(iter(buffers), EXPERT_BUFFER)
        given = (self.algorithm.sample_strategy_args or {}).get("sft_dataset_name", default)
        return str(fill_from_environment(given))

    @property
    def dataset_name(self) -> str:
        """Name of the dataset that is trained: the buffer's; in mode mix, that of the demonstrations."""
        alone = self.algorithm.schema_type != "experience"
        return self.buffer.trainer_input.experience_buffer.name if alone else self.demonstrations

    def train_step_limit(self, planned: int | None) -> int | None:
        """Return the last train step; None: the trainer ends when the experiences do.

        planned: steps of whole batches that the experiences fill. Partial batches need more steps, and replay may too.
        """
        if self.algorithm.schema_type != "experience":
            return planned
        if self.buffer.trainer_input.experience_buffer.replay_buffer.enable or self.synchronizer.sync_style != "fixed":
            return self.trainer.total_steps
        return planned

    def stage_configs(self) -> list["Config"]:
        """Return the stages in order, each a whole Config without stages; [self] if there are none."""
        return list(self._stages) or [self]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `load_config` turns into an equal Config: with defaults, without derived values and
        secrets.

        With stages, each stage computes its keys that depend on others. A literal "${" is escaped.
        """
        tree: dict[str, Any] = escape(self._unfilled if self._unfilled is not None else plain(self))
        return tree

    def to_yaml(self) -> str:
        """Return `to_dict` as YAML."""
        return to_yaml(self.to_dict())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # holds dicts
