"""The whole configuration of a run, `Config`, with its small sections: monitor, log, data processing, stages.

Made by rftdask.config.load; a Config made any other way has not been checked. Invariant: a Config never changes, and
`load_config(config.to_dict())` equals it.
"""

import math
import os.path
import re
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import AfterValidator, Field, PrivateAttr

from rftdask.config.base import Computed, Count, OpenDict, PluginName, Section, empty_dict, plain
from rftdask.config.plugins import read_parts
from rftdask.config.schema.algorithm import AlgorithmConfig, registered_parts, takes_demonstrations
from rftdask.config.schema.buffer import BufferConfig, ExperienceBufferConfig, TasksetConfig
from rftdask.config.schema.cluster import ClusterConfig
from rftdask.config.schema.explorer import ExplorerConfig, InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.config.schema.trainer import SynchronizerConfig, TrainerConfig
from rftdask.config.yaml_source import escape, fill_from_environment, to_yaml

MAX_TASKS_PER_UNIT = 64
"""Largest work unit by default: some seconds of work, and what a lost worker costs at most."""
EXPERT_BUFFER = "sft_dataset"
"""Auxiliary buffer of the demonstrations, where there is one of this name and sample_strategy_args name no other."""

MADE_ROWS = "dataset/rows.jsonl"
"""In the run folder: the dataset that `data_processor.task_pipeline` makes."""

Mode = Literal["both", "explore", "train", "bench", "serve", "colocate"]


_LONGEST_NAME = 200
"""Bytes of a folder's name; file systems take 255, and some of what is in it is named after it."""


def _relative(name: str) -> str:
    if not name.isprintable():
        raise ValueError("not a folder name: it holds a character that cannot be printed")
    if any(len(part.encode()) > _LONGEST_NAME for part in name.split("/")):
        raise ValueError(f"not a folder name: longer than {_LONGEST_NAME} bytes")
    if "\\" in name or (name and any(part in ("", ".", "..") for part in name.split("/"))):
        raise ValueError("not a folder name, or folder names joined by /")
    return name


Name = Annotated[str, AfterValidator(_relative)]
"""A folder name or several joined by /, without . and .. in it."""


def count_demonstrations(batch_size: int, ratio: float) -> int:
    """Demonstrations in a batch of `batch_size` of which they are at least the share `ratio`."""
    return math.ceil(ratio * batch_size - 1e-9)  # less the rounding of 0.1 * 30


class MonitorConfig(Section):
    """`monitor`: where metrics go besides the run folder, which always has them."""

    monitor_type: Annotated[
        str,
        PluginName(
            "monitor", partial(read_parts, "rftdask.monitor.trackers", "monitor_type"), "monitor_args", supplied=1
        ),
    ] = "tensorboard"
    """Tracker: tensorboard, wandb, mlflow, swanlab, trackio, none (only the files in the run folder), or one of your
    own."""
    monitor_args: OpenDict = empty_dict()
    """Arguments of the tracker. Keys and tokens are read by the tracker from its environment variables."""
    extra_monitors: Annotated[
        tuple[OpenDict, ...],
        PluginName("monitor", partial(read_parts, "rftdask.monitor.trackers", "monitor_type"), supplied=1),
    ] = ()
    """Further trackers beside it: [{name, args}, ...], each once."""
    detailed_stats: bool = False
    """Maximum, minimum and standard deviation of evaluation metrics beside the mean: <metric>/max, /min, /std."""


class TaskPipelineConfig(Section):
    """`data_processor.task_pipeline`: Data-Juicer's operators over a dataset, once before the run; see docs/data.md."""

    operators: tuple[OpenDict, ...] = ()
    """[{name, args}, ...] of Data-Juicer, run in this order."""
    num_process: Count = 4
    """Processes of each operator, at most."""
    config_path: str | None = None
    """A recipe of Data-Juicer (YAML) in place of `operators`."""
    inputs: Annotated[tuple[str, ...], Computed("the path of the taskset, or the recipe's dataset_path")] = ()
    """Datasets, one after another; whatever the `path` of a taskset may be. The result is in the run folder, and the
    first taskset reads it, or experience_buffer in mode train."""
    target_fields: tuple[str, ...] = ()
    """Columns without which a row is dropped. The first is what operators of text read; none: `format.prompt_key`."""
    priority_weights: OpenDict = empty_dict()
    """Weights of quality, difficulty, usage_frequency and diversity in the priority, by which rows are sorted. None
    given: 1, -0.7, -0.5 and 0.8."""
    top_k: int = Field(default=-1, ge=-1)
    """Rows that stay, of the largest priority. -1: all."""


class ExperiencePipelineConfig(Section):
    """`data_processor.experience_pipeline`: experiences filtered and shaped between explorer and trainer."""

    operators: Annotated[tuple[OpenDict, ...], PluginName("operator", partial(registered_parts, "operator"))] = ()
    """[{name, args}, ...], run in this order; see docs/algorithms.md."""
    stage: Literal["batch", "commit"] = "batch"
    """batch: on every train batch before it is written down. commit: in the explorer, on every work unit before it
    is committed; what is dropped is committed as filtered. data_juicer runs at commit alone."""


class DataProcessorConfig(Section):
    """`data_processor`: pipelines for tasks and experiences."""

    task_pipeline: TaskPipelineConfig = TaskPipelineConfig()
    """The dataset, before the run."""
    experience_pipeline: ExperiencePipelineConfig = ExperiencePipelineConfig()
    """Experiences, during the run."""


class DataJuicerServiceConfig(Section):
    """`service.data_juicer`: who runs Data-Juicer's operators, before the run and during it."""

    server_url: Annotated[str, Field(pattern=r"^https?://[^/\s]")] | None = None
    """Address, with its port (5005 by itself), of a running service of Data-Juicer (Trinity-RFT's), which whoever has
    operators can reach. None: a process beside them, in an environment of its own (`rftdask data setup`)."""


class ServiceConfig(Section):
    """`service`: what others serve to the run."""

    data_juicer: DataJuicerServiceConfig = DataJuicerServiceConfig()
    """Data-Juicer."""


class LogConfig(Section):
    """`log`: messages for people."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least important message shown."""


class StageConfig(Section):
    """An item of `stages`: what it sets is merged, field by field, over the rest of the file; lists are replaced."""

    stage_name: str = Field(pattern=r"^[^/\\.\x00-\x1f\x7f-\x9f][^/\\\x00-\x1f\x7f-\x9f]*$")
    """The stage's run is `<name>/<stage_name>`. Unique."""
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

    mode: Mode = "both"
    """both: explore and train. explore, train: one of them. bench: evaluate checkpoints. colocate: both, with trainer
    and engines taking turns on the same GPUs (it is read as both with cluster.colocate)."""
    project: Name = "rftdask"
    """First part of the run's folder."""
    group: Name = ""
    """Second part of the run's folder; may be empty."""
    name: Name = Field(default="rft", min_length=1)
    """Last part of the run's folder."""
    checkpoint_root_dir: str = Field(default="./runs", min_length=1)
    """Where runs live: a local path or any fsspec URL."""
    private: bool = False
    """Only its owner may read the run: its folder has mode 0700 and its files 0600, whatever the umask. For folders:
    who may read a bucket is said there."""
    continue_from_checkpoint: bool = True
    """True: continue the run found in the folder. False: each start begins a new one beside it when the folder is not
    empty, with the time (UTC) at the end of its name; jobs of `rftdask submit` continue the one that it began."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed of everything that has none of its own."""
    deterministic: bool | None = None
    """Same configuration, same bits. False allows faster kernels. None: True if the trainer runs on CPUs, else False;
    the first start writes which into run.json."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is optimized."""
    model: ModelConfig
    """What is trained."""
    cluster: ClusterConfig = ClusterConfig()
    """Where."""
    buffer: BufferConfig = BufferConfig()
    """Batches and data."""
    explorer: ExplorerConfig = ExplorerConfig()
    """Sampling."""
    trainer: TrainerConfig = TrainerConfig()
    """Training."""
    synchronizer: SynchronizerConfig = SynchronizerConfig()
    """Hand-over of weights."""
    monitor: MonitorConfig = MonitorConfig()
    """Metrics."""
    data_processor: DataProcessorConfig = DataProcessorConfig()
    """Pipelines."""
    service: ServiceConfig = ServiceConfig()
    """What others serve."""
    log: LogConfig = LogConfig()
    """Messages."""
    stages: tuple[StageConfig, ...] = ()
    """Runs one after the other, each on the weights of the one before."""

    _warnings: tuple[str, ...] = PrivateAttr(())
    _origin: str = PrivateAttr("")
    _defaults: tuple[str, ...] = PrivateAttr(())
    _changes: tuple[str, ...] = PrivateAttr(())
    _stages: tuple["Config", ...] = PrivateAttr(())
    _unfilled: dict[str, Any] | None = PrivateAttr(None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was accepted and has no effect, or not the one expected: one line each, beginning with the key."""
        return self._warnings

    @property
    def origin(self) -> str:
        """The system for which the file was read, if not this one, and why: "Trinity-RFT (--from trinity)"."""
        return self._origin

    @property
    def reference_defaults(self) -> tuple[str, ...]:
        """Defaults of that system that now stand here, and differ from ours: one line each, beginning with the key."""
        return self._defaults

    @property
    def changes(self) -> tuple[str, ...]:
        """What was read otherwise than it is written: lines "- key: value" and "+ key: value", by their keys."""
        return self._changes

    @property
    def is_external(self) -> bool:
        """Whether a model behind an API stands in for the policy."""
        return self.model.external_model.enable or self.explorer.rollout_model.traits.is_external

    @property
    def checkpoint_job_dir(self) -> str:
        """Folder of the run: root/project/group/name. Local roots are made absolute; URLs stay as they are."""
        parts = [part for part in (self.project, self.group, self.name) if part]
        # A URL is joined as text: a path on this machine would lose the second slash of s3://.
        url = re.match(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", self.checkpoint_root_dir)
        if url:
            return url[1] + "/".join([url[2].rstrip("/"), *parts] if url[2].rstrip("/") else parts)
        return os.path.join(os.path.abspath(os.path.expanduser(self.checkpoint_root_dir)), *parts)

    @property
    def tasks_per_unit(self) -> int:
        """Tasks of a work unit: as configured, else an even share of an explore step for every engine that there may
        be, at most MAX_TASKS_PER_UNIT.
        """
        if self.explorer.tasks_per_batch is not None:
            return min(self.explorer.tasks_per_batch, self.buffer.batch_size)
        return min(-(-self.buffer.batch_size // self.explorer.most_workers), MAX_TASKS_PER_UNIT)

    @property
    def units_per_step(self) -> int:
        """Work units of an explore step."""
        return -(-self.buffer.batch_size // self.tasks_per_unit)

    @property
    def slots_per_engine(self) -> int:
        """Rollouts that an engine has under way at once: as configured, else those of a work unit. Of `memory` the
        fewest.
        """
        configured = self.explorer.slots_per_engine
        per_task = self.algorithm.repeat_times + self.algorithm.greedy_baseline
        return configured if isinstance(configured, int) else self.tasks_per_unit * per_task

    @property
    def evaluates_training(self) -> bool:
        """Whether a trainer that learns from a dataset has an explorer beside it, which evaluates what it publishes."""
        learns_alone = self.mode == "train" and self.algorithm.schema_type != "experience"
        # A reward model answers no tasks.
        return (
            learns_alone and bool(self.buffer.explorer_input.eval_tasksets) and not self.algorithm.trains_reward_model
        )

    @property
    def reads_images(self) -> bool:
        """Whether tasks of this command may have images, or videos, which are images that move."""
        source = self.buffer.explorer_input
        tasksets = (*source.train_tasksets, *source.eval_tasksets)
        return self.reads_videos or any(taskset.format.image_key for taskset in tasksets)

    @property
    def reads_videos(self) -> bool:
        """Whether tasks of this command may have videos."""
        source = self.buffer.explorer_input
        return any(taskset.format.video_key for taskset in (*source.train_tasksets, *source.eval_tasksets))

    @property
    def command_name(self) -> str:
        """Name of this command among those that work on its run at once, in paths: its mode, and where several
        explorers may, the explorer's name as well.
        """
        named = self.mode == "explore" and self.explorer.name != "explorer"
        return f"{self.mode}.{quote(self.explorer.name, safe='')}" if named else self.mode

    @property
    def has_explorer(self) -> bool:
        """Whether this command has engines."""
        return self.mode != "train" or self.evaluates_training

    @property
    def models_apart(self) -> tuple[InferenceModelConfig, ...]:
        """Auxiliary models of this command that have workers of their own."""
        asked = () if self.algorithm.needs_teacher or not self.has_explorer else self.explorer.auxiliary_models
        return tuple(model for model in asked if model.is_apart)

    @property
    def models_beside(self) -> tuple[InferenceModelConfig, ...]:
        """Auxiliary models that each explorer worker of this command loads beside the policy."""
        asked = () if self.algorithm.needs_teacher or not self.has_explorer else self.explorer.auxiliary_models
        return tuple(model for model in asked if not (model.is_apart or model.traits.is_external))

    @property
    def has_both_roles(self) -> bool:
        """Whether this command has a trainer, and engines that follow it."""
        return self.mode == "both" or self.evaluates_training

    @property
    def sync_method(self) -> Literal["checkpoint", "memory", "nccl"]:
        """How weights travel in this command, whatever `synchronizer.sync_method` leaves open."""
        return self.sync_choice[0]

    @property
    def sync_choice(self) -> tuple[Literal["checkpoint", "memory", "nccl"], str]:
        """How weights travel in this command, and why."""
        chosen = self.synchronizer.sync_method
        # Without a trainer or without engines there is nobody to hold weights, or nobody to hand them to.
        if not self.has_both_roles:
            return "checkpoint", f"mode {self.mode} has one role alone"
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
        """Location of the dataset that `data_processor.task_pipeline` makes: that of the first taskset, or of what is
        learned from. None: there is none. The same in all modes, whose commands may share a run.
        """
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
        """Whether this command makes it: the one that reads it."""
        modes = ("both", "explore") if self.algorithm.schema_type == "experience" else ("train",)
        return self.pipeline_place is not None and self.mode in modes

    @property
    def pipeline_dataset(self) -> TasksetConfig | ExperienceBufferConfig | None:
        """What stands at `pipeline_place`."""
        if (place := self.pipeline_place) is None:
            return None
        trains = place[-1] == "experience_buffer"
        return self.buffer.trainer_input.experience_buffer if trains else self.buffer.explorer_input.train_tasksets[0]

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations of tasks. Explore steps: a multiple of the explorer's synchronization interval, at
        least one; beside training on a dataset train steps, 0: before the first and after the last alone.
        """
        if self.evaluates_training:
            return self.trainer.eval_interval
        every = self.synchronizer.explorer_sync_interval
        return max(self.explorer.eval_interval // every, 1) * every

    @property
    def num_demonstrations(self) -> int:
        """Demonstrations in one train batch; 0 unless the sample strategy is mix."""
        if not takes_demonstrations(self.algorithm.sample_strategy):
            return 0
        return count_demonstrations(self.buffer.train_batch_size, self.algorithm.expert_ratio)

    @property
    def num_own_rollouts(self) -> int:
        """Rollouts in one train batch; the rest of it are demonstrations."""
        return self.buffer.train_batch_size - self.num_demonstrations

    @property
    def num_mini_batches(self) -> int:
        """Updates of one pass over a batch."""
        whole = self.buffer.train_batch_size
        return whole // (self.trainer.ppo_mini_batch_size or whole)

    def trainer_memory_keys(self, *, of_passes: bool = True) -> str:
        """The keys that lower the memory of a rank, of those that are not set so already, as they end a sentence.
        of_passes: those of forward and backward passes, too; else what lies there between them is to be less.
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
        """Name of the auxiliary buffer that strategy mix takes its demonstrations from: as given, else `EXPERT_BUFFER`
        if there is one, else the first there is.
        """
        buffers = self.buffer.trainer_input.auxiliary_buffers
        default = EXPERT_BUFFER if EXPERT_BUFFER in buffers else next(iter(buffers), EXPERT_BUFFER)
        given = (self.algorithm.sample_strategy_args or {}).get("sft_dataset_name", default)
        return str(fill_from_environment(given))

    @property
    def dataset_name(self) -> str:
        """Name of the dataset whose rows are trained: the buffer's, or beside rollouts that of the demonstrations."""
        alone = self.algorithm.schema_type != "experience"
        return self.buffer.trainer_input.experience_buffer.name if alone else self.demonstrations

    def train_step_limit(self, planned: int | None) -> int | None:
        """The last train step; None: the trainer ends when the experiences do.

        planned: steps of whole batches that the experiences fill. Partial batches need more of them, and so may replay.
        """
        if self.algorithm.schema_type != "experience":
            return planned
        if self.buffer.trainer_input.experience_buffer.replay_buffer.enable or self.synchronizer.sync_style != "fixed":
            return self.trainer.total_steps
        return planned

    def stage_configs(self) -> list["Config"]:
        """The stages in order, each a whole Config without stages; [self] when there are none."""
        return list(self._stages) or [self]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `load_config` turns into an equal Config: defaults included, derived values and secrets not.

        With stages, keys computed from others are left to be computed by each stage. A literal "${" comes escaped.
        """
        tree: dict[str, Any] = escape(self._unfilled if self._unfilled is not None else plain(self))
        return tree

    def to_yaml(self) -> str:
        """`to_dict` as YAML."""
        return to_yaml(self.to_dict())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # holds dicts
