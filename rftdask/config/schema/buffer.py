"""Section `buffer`: tasks in, experiences out. rftdask.explorer checks the names of workflows and rewards."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from rftdask.config.base import (
    NAME,
    Computed,
    Count,
    EnvInterpolated,
    Location,
    MayChange,
    Natural,
    OpenDict,
    PluginName,
    Problem,
    Seconds,
    Section,
    Seed,
    absent,
    empty_dict,
    is_number,
    join,
    reading,
)
from rftdask.config.plugins import function_registry, lookup_part, read_parts, trait
from rftdask.config.schema.algorithm import registered_parts

# The two are looked up in one dict each, to which a plug-in adds its own when it is imported.
registered_workflows = partial(function_registry, "rftdask.rollouts.workflows", "workflow")
"""Returns name -> workflow or its RegisteredPart. `rollouts.workflows.registry.workflow` adds to it."""
registered_rewards = partial(function_registry, "rftdask.rollouts.rewards", "reward")
"""Returns name -> reward function or its RegisteredPart. `rollouts.rewards.registry.reward` adds to it."""

DATASET_TYPES = ("file", "sql")
"""Values of storage_type that a dataset may have."""
REMOVING = ("thin", "none")
"""Values of retention.keep that remove results. Compaction loses none."""
_WORKFLOW = PluginName("workflow", registered_workflows)


class FormatConfig(Section):
    """`format`: meaning of the columns of a dataset."""

    prompt_type: Literal["messages", "plaintext", "raw"] = "messages"
    """messages: a chat in `messages_key`, else plaintext. plaintext: texts in `prompt_key` and `response_key`, rendered
    by the chat template. raw: the same texts, concatenated unchanged. Tasks use only the prompt. dpo uses `chosen_key`
    and `rejected_key` instead of the response. cpt always uses raw text in `prompt_key`. Special tokens spelled out in
    a message are text; in raw text they are special."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "response"
    """Column of the response or the true answer."""
    system_prompt_key: str | None = None
    """Column with the system prompt of each row. Rows without one use `system_prompt`."""
    system_prompt: str | None = None
    """System prompt of all tasks and supervised rows, except chats with their own and raw text. None: no system prompt.
    """
    messages_key: str = "message"
    """Column of the chat, a list of {role, content}."""
    image_key: str | None = None
    """Tasks: column with the images of the prompt, one or a list: bytes of files, or paths relative to the folder of
    the dataset. They replace {"type": "image"} in a chat of `messages_key`, else they precede the text. The model must
    read images. None: no images."""
    video_key: str | None = None
    """Tasks: column with the videos of the prompt: a list of frames (2 a second), each an image as in `image_key`; or
    an animated image (GIF, APNG, WebP); or a list of these. They replace {"type": "video"} in a chat, else they precede
    images and text. Requires engine_type transformers, Qwen2-VL or Qwen2.5-VL, and torchvision. None: no videos."""
    tools_key: str = "tools"
    """Column with the tools that the chat template shows, a list of JSON schemas or its JSON text. Used if the dataset
    has the column; "": no tools. Tasks: shown by workflows with one question."""
    reply_prefix: str | None = None
    """Text at the start of the response. It belongs to the prompt and is not trained. None: no prefix."""
    workflow_key: str = ""
    """Column with the workflow of each row. "": the taskset's workflow."""
    reward_fn_key: str = ""
    """Column with the reward function of each row. "": the taskset's reward function."""
    chosen_key: str = "chosen"
    """dpo, orpo, simpo, reward_model: column of the better response."""
    rejected_key: str = "rejected"
    """dpo, orpo, simpo, reward_model: column of the worse response."""
    label_key: str = "label"
    """kto: column with the label of the response; true or 1: desirable. Without the column, the dataset has pairs in
    `chosen_key` and `rejected_key`, and each pair gives a desirable and an undesirable response."""
    enable_concatenated_multi_turn: bool = False
    """sft: train every assistant message of a chat in one sequence. False: only the last message."""
    return_assistant_tokens_mask: bool = False
    """sft: train the tokens that the chat template marks with {% generation %} blocks, in every message, as in
    transformers. A template without such blocks is an error."""


class RolloutArgs(Section):
    """`rollout_args`: sampling parameters of one taskset. None: the value in `model`."""

    temperature: Annotated[float, Computed("model.temperature")] = absent(ge=0)
    """Sampling temperature. 0: greedy."""
    final_temperature: float | None = Field(default=None, gt=0)
    """Training tasksets: temperature after `temperature_steps` explore steps, approached linearly from `temperature`.
    None: the temperature is constant."""
    temperature_steps: Count | None = None
    """Explore steps until `final_temperature`."""
    top_p: Annotated[float, Computed("model.top_p")] = absent(gt=0, le=1)
    """Sample among the most likely tokens with this total probability. 1: all."""
    top_k: Annotated[int, Computed("model.top_k")] = absent(ge=-1)
    """Sample among this many most likely tokens. -1: all."""
    max_tokens: Annotated[Count, Computed("model.max_response_tokens")] = absent()
    """Maximum response length in tokens."""

    def temperature_at(self, explore_step: int) -> float:
        """Return the temperature of an explore step, counted from 1. Step `temperature_steps` + 1 has
        `final_temperature`."""
        if self.final_temperature is None or self.temperature_steps is None:
            return self.temperature
        share = min(1.0, (explore_step - 1) / self.temperature_steps)
        return self.temperature + (self.final_temperature - self.temperature) * share


class DataSelectorConfig(Section):
    """`data_selector`: order in which rows are taken."""

    selector_type: Annotated[
        str, PluginName("selector", partial(registered_parts, "selector"), arguments="kwargs", needed=True)
    ] = "sequential"
    """sequential: stored order. shuffle: a new order in each epoch. random: drawn with replacement. offline_easy2hard,
    for training tasksets: by `feature_keys`, largest first, the same in each epoch. difficulty_based, for one training
    taskset: tasks whose estimated pass rate is close to a target. Or a class of your own (docs/extending.md). Tasksets
    may have different selectors, except random."""
    seed: Annotated[Seed, Computed("seed")] = absent()
    """Seed of shuffle, random and difficulty_based. All training tasksets share one."""
    feature_keys: tuple[str, ...] = ()
    """offline_easy2hard: numeric columns, larger is easier; ties are resolved by the next column, then later rows come
    first. difficulty_based: two columns, the pass rates of a weak and of a strong model."""
    kwargs: OpenDict = empty_dict()
    """Arguments of the selector. difficulty_based: target_reward, tau, do_sample, m, lamb, rho, adaptive_rho,
    cap_discount, seed."""

    @property
    def selector(self) -> Any:
        """Class of the selector, or its `RegisteredPart`; both have its traits."""
        return lookup_part("selector", self.selector_type, registered_parts("selector"))


class TasksetConfig(Section):
    """`taskset`, an item of `tasksets` or of `eval_tasksets`: where tasks come from and how they run."""

    name: Annotated[str, Computed("taskset_<i>, eval_taskset_<i>")] = absent(pattern=NAME)
    """Name in metrics and in the identity of experiences. Unique in a run. None: its position."""
    storage_type: Literal["file", "sql"] = "file"
    """Type of `path`. sql: rows of a table, ordered by its primary key."""
    path: Annotated[str, EnvInterpolated()] = Field(min_length=1)
    """File or folder (.jsonl, .json, .csv, .parquet), dataset name on the Hub, reasoning-gym:<dataset>,
    verifiers:<taskset>, or seeds:<number of rows> for games, which need only a seed. sql: database URL,
    postgresql://user@host/name or sqlite:////folder/file.db. Write a URL with a password as ${oc.env:NAME}; it is never
    stored."""
    dataset_args: OpenDict = empty_dict()
    """Arguments of a generated dataset, for example {size: 500, seed: 1} for reasoning-gym; for verifiers, size and
    settings of the environment."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Configuration of a Hub dataset, for example "main". sql: the table. None: the default; sql: the table named like
    the taskset."""
    format: FormatConfig = FormatConfig.model_construct()
    """Meaning of the columns."""
    default_workflow_type: Annotated[str | None, _WORKFLOW, Computed("explorer_input")] = None
    """Workflow of this taskset. None: `explorer_input.default_workflow_type`, for evaluation
    `default_eval_workflow_type`."""
    default_reward_fn_type: Annotated[
        str | None,
        PluginName("reward function", registered_rewards, arguments="reward_fn_args", supplied=3, complete=False),
        Computed("explorer_input"),
    ] = None
    """Reward function of this taskset. None: `explorer_input.default_reward_fn_type`."""
    rollout_args: RolloutArgs = RolloutArgs.model_construct()
    """Sampling parameters of this taskset."""
    workflow_args: OpenDict = empty_dict()
    """Arguments of the workflow. Here and in the arguments of all other parts, ${oc.env:NAME} is filled in where it is
    used and never stored."""
    reward_fn_args: OpenDict = empty_dict()
    """Arguments of the reward function."""
    data_selector: DataSelectorConfig = DataSelectorConfig.model_construct()
    """Order of the tasks."""
    repeat_times: Annotated[Count, Computed("algorithm.repeat_times; eval: 1")] = absent()
    """Rollouts of each task. Only evaluation tasksets may set it; training uses `algorithm.repeat_times`."""

    @property
    def table(self) -> str | None:
        """Table in the database `path`. None: not a database."""
        return (self.subset_name or self.name) if self.storage_type == "sql" else None


class ExplorerInput(Section):
    """`buffer.explorer_input`: tasks of the explorers."""

    taskset: TasksetConfig | None = None
    """Training tasks, if there is one taskset."""
    tasksets: tuple[TasksetConfig, ...] = ()
    """Training tasks, if there are several tasksets. Excludes `taskset`."""
    eval_tasksets: Annotated[tuple[TasksetConfig, ...], MayChange()] = ()
    """Evaluation tasks. If a dataset is trained (mode train), engines for them run alongside the trainer."""
    default_workflow_type: Annotated[str | None, _WORKFLOW] = None
    """Workflow of tasksets without one. None: the simple workflow."""
    default_eval_workflow_type: Annotated[str | None, _WORKFLOW, MayChange()] = None
    """Workflow of evaluation tasksets without one. None: `default_workflow_type`."""
    default_reward_fn_type: Annotated[str | None, PluginName("reward function", registered_rewards)] = None
    """Reward function of tasksets without one. None: the workflow's own."""

    @reading("taskset", "tasksets", "eval_tasksets")
    def _tasksets_are_distinct(self) -> Iterator[Problem]:
        if self.taskset is not None and self.tasksets:
            yield "tasksets", "taskset is given as well; give only one of them"
        # A name is part of the uid of every experience, so two tasksets must not share one.
        names = [taskset.name for taskset in (*self.train_tasksets, *self.eval_tasksets)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "", f"{names.count(name)} tasksets are named {name!r}; give each a unique name"

    @reading("taskset", "tasksets")
    def _selectors_go_together(self) -> Iterator[Problem]:
        selectors = [taskset.data_selector for taskset in self.train_tasksets]
        types = {selector.selector_type: selector.selector for selector in selectors}
        names = ", ".join(sorted(types))
        for name, part in types.items():
            if trait(part, "epoch_each_step") and len(types) > 1:
                yield "", f"{name} cannot be mixed with other selectors ({names}); use one for all tasksets"
            if trait(part, "learns") and len(selectors) > 1:
                yield "", f"{name} takes one taskset, not {len(selectors)}; merge them or use shuffle"
        # Each taskset has its own number in the seed of its order, so one seed gives them different orders.
        seeds = sorted({selector.seed for selector in selectors if trait(selector.selector, "seeded")})
        if len(seeds) > 1:
            yield "", f"data_selector.seed differs between tasksets ({seeds}); give one seed; the orders differ anyway"
        for selector in selectors:
            features, count = trait(selector.selector, "features"), trait(selector.selector, "num_features")
            what = f"for {selector.selector_type}: {features}"
            if features and count is None and not selector.feature_keys:
                yield "", f"data_selector.feature_keys is required {what}"
            if features and count is not None and len(selector.feature_keys) != count:
                yield "", f"data_selector.feature_keys must be {count} columns {what}"

    @reading("taskset", "tasksets", "eval_tasksets")
    def _temperatures_have_a_way(self) -> Iterator[Problem]:
        for place, taskset in (self.train_places | self.eval_places).items():
            args, at = taskset.rollout_args, f"{join(place[2:])}.rollout_args.final_temperature"
            if place in self.train_places:
                if (args.final_temperature is None) != (args.temperature_steps is None):
                    yield at, "requires temperature_steps as well; give both"
            elif args.final_temperature is not None or args.temperature_steps is not None:
                why = "evaluations are compared across steps, so their temperature must not change"
                yield at, f"{why}; leave it out"

    @property
    def train_tasksets(self) -> tuple[TasksetConfig, ...]:
        """Training tasksets, from either key."""
        return (self.taskset,) if self.taskset is not None else self.tasksets

    @property
    def train_places(self) -> dict[Location, TasksetConfig]:
        """Training tasksets of both keys by their locations, of which a valid configuration has one."""
        places: dict[Location, TasksetConfig] = {}
        if self.taskset is not None:
            places["buffer", "explorer_input", "taskset"] = self.taskset
        for number, taskset in enumerate(self.tasksets):
            places["buffer", "explorer_input", "tasksets", number] = taskset
        return places

    @property
    def eval_places(self) -> dict[Location, TasksetConfig]:
        """Evaluation tasksets by their locations."""
        at = ("buffer", "explorer_input", "eval_tasksets")
        return {(*at, number): taskset for number, taskset in enumerate(self.eval_tasksets)}


class ReplayConfig(Section):
    """`replay_buffer`: train groups by priority, and more than once; see docs/buffer.md."""

    enable: bool = False
    """Use replay."""
    priority_fn: Annotated[
        str,
        PluginName(
            "priority function",
            partial(read_parts, "rftdask.buffer.batches.replay_priority", "priority_fn"),
            arguments="priority_fn_args",
        ),
    ] = "linear_decay"
    """Groups with the highest priority are trained first. linear_decay: policy version - decay x uses.
    decay_limit_randomization: the same with noise and a limit on uses. Or a class of your own (docs/buffer.md)."""
    reuse_cooldown_time: float | None = Field(default=None, ge=0)
    """Minimum seconds between the batches of two uses of a group, by the timestamps in the ledger. None: each group is
    used once."""
    priority_fn_args: OpenDict = empty_dict()
    """linear_decay: {decay: 2.0}. decay_limit_randomization: {decay: 2.0, use_count_limit: 3, sigma: 0.0}."""

    @reading("enable", "priority_fn", "reuse_cooldown_time", "priority_fn_args")
    def _priorities_are_in_range(self) -> Iterator[Problem]:
        # Only the ranges: names and types are held against the function's signature elsewhere.
        for key, value in sorted(self.priority_fn_args.items()):
            if key == "use_count_limit" and is_number(value) and value < 1:
                yield f"priority_fn_args.{key}", f"{value!r} is not a whole number of at least 1"
            elif key in ("decay", "sigma") and is_number(value) and value < 0:
                yield f"priority_fn_args.{key}", f"{value!r} is not a number of at least 0"
        # Without a cooldown each group is used once.
        reuses = self.enable and self.reuse_cooldown_time is not None
        if reuses and self.priority_fn_args.get("decay") == 0 and self.priority_fn == "linear_decay":
            yield "priority_fn_args.decay", "0 would train the newest groups for ever; use more than 0"


class RetentionConfig(Section):
    """`retention`: which trained shards stay on storage. Shards that a kept checkpoint may need always stay."""

    keep: Literal["all", "compact", "thin", "none"] = "all"
    """all: everything. compact: everything; shards no longer needed are merged into few large files (storage_type
    queue). thin: a fraction of the work units. none: only shards still needed, and the last `keep_steps`."""
    keep_steps: Natural = 0
    """Explore steps before the needed ones that stay unchanged."""
    keep_fraction: float = Field(default=0.1, gt=0, lt=1)
    """thin: fraction of the older work units that stays."""


class ExperienceBufferConfig(Section):
    """`buffer.trainer_input.experience_buffer`: input of the trainer."""

    name: str = "experience_buffer"
    """Name in messages."""
    storage_type: Annotated[Literal["queue", "sql", "file"], Computed("file for a dataset, else queue")] = absent()
    """Algorithms that explore: form of the experience log. queue: Parquet shards in the run folder. file: the same as
    JSON lines, readable by people. sql: a database. Algorithms that learn from a dataset, and auxiliary buffers: file
    or sql, the type of `path`; sql reads the rows of a table, ordered by its primary key."""
    path: Annotated[str | None, EnvInterpolated()] = None
    """Dataset: local file or folder, or a name on the Hub. sql: database URL, postgresql://user@host/name or
    sqlite:////folder/file.db; None, for a log: experiences.sqlite in the run folder. Write a URL with a password as
    ${oc.env:NAME}; it is never stored. Logs of queue and file are in the run folder and have no path."""
    capacity: Annotated[Count | None, MayChange()] = None
    """mode both: explorers start no work unit while this many experiences are unread or in progress. A train batch is
    always let through. None: only `synchronizer` limits the lead."""
    max_unread_bytes: Annotated[Count | None, MayChange()] = None
    """The same limit in bytes of tokens, logprobs and text, estimated from the mean of committed experiences. None: no
    limit."""
    max_read_timeout: Annotated[Seconds, MayChange()] = 1800.0
    """Seconds that the trainer waits for a full batch. After that it trains the whole groups that exist; it fails if
    there are none, and always in style fixed, where batches do not depend on time."""
    replay_buffer: ReplayConfig = ReplayConfig.model_construct()
    """Replay by priority."""
    retention: Annotated[RetentionConfig, MayChange()] = RetentionConfig.model_construct()
    """Retention of trained experiences."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Configuration of a Hub dataset. sql: the table of a dataset. None: the default; sql: the table named like the
    buffer."""
    format: FormatConfig = FormatConfig.model_construct()
    """Meaning of the columns."""
    data_selector: DataSelectorConfig = DataSelectorConfig.model_construct()
    """Order of the rows."""

    @reading("max_read_timeout", "replay_buffer", "retention.keep")
    def _replay_has_groups(self) -> Iterator[Problem]:
        if not self.replay_buffer.enable:
            return
        cooldown, timeout = self.replay_buffer.reuse_cooldown_time, self.max_read_timeout
        if cooldown is not None and cooldown >= timeout:
            why = "after which a batch is formed from the available groups; lower it"
            yield "replay_buffer.reuse_cooldown_time", f"{cooldown} s is not below max_read_timeout {timeout} s, {why}"
        if (keep := self.retention.keep) in REMOVING:
            yield "retention.keep", f"{keep} removes experiences that replay_buffer may use again; use all"

    @property
    def table(self) -> str | None:
        """Table of a dataset in the database `path`. None: not a database."""
        return (self.subset_name or self.name) if self.storage_type == "sql" else None


class TrainerInput(Section):
    """`buffer.trainer_input`: inputs of the trainer."""

    experience_buffer: ExperienceBufferConfig = ExperienceBufferConfig.model_construct()
    """The main input."""
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = empty_dict()
    """Datasets by name, in the format of sft; sample_strategy mix takes its demonstrations from one of them."""
    eval_buffer: Annotated[ExperienceBufferConfig | None, MayChange()] = None
    """Held-out dataset in the format of the main input: mode train measures the loss on it before the first step, every
    `trainer.eval_interval` steps and after the last. For algorithms that learn from a dataset (sft, dpo, cpt and
    similar). None: no such evaluation."""

    @reading("auxiliary_buffers")
    def _auxiliary_buffers_are_datasets(self) -> Iterator[Problem]:
        for name, buffer in self.auxiliary_buffers.items():
            at = f"auxiliary_buffers.{name}"
            if buffer.storage_type not in DATASET_TYPES:
                why = f"{buffer.storage_type}: auxiliary buffers are datasets"
                yield f"{at}.storage_type", f"{why}; use file or sql"
            if buffer.replay_buffer.enable:
                why = "rows of a dataset are read in order, epoch after epoch; replay is for experience_buffer"
                yield f"{at}.replay_buffer.enable", why

    @reading("experience_buffer.format", "auxiliary_buffers", "eval_buffer")
    def _rows_are_text(self) -> Iterator[Problem]:
        places = {join(place[2:]): buffer for place, buffer in self.side_places.items()}
        for at, buffer in {**places, "experience_buffer": self.experience_buffer}.items():
            for what in ("image", "video"):
                if getattr(buffer.format, f"{what}_key"):
                    yield f"{at}.format.{what}_key", f"only tasks may have {what}s; leave it out"

    @property
    def side_places(self) -> dict[Location, ExperienceBufferConfig]:
        """Auxiliary and evaluation buffers by their locations. All are datasets."""
        at = ("buffer", "trainer_input")
        places: dict[Location, ExperienceBufferConfig] = {
            (*at, "auxiliary_buffers", name): buffer for name, buffer in self.auxiliary_buffers.items()
        }
        return places if self.eval_buffer is None else {**places, (*at, "eval_buffer"): self.eval_buffer}


class BufferConfig(Section):
    """`buffer`: batch sizes, length of the run, and its data."""

    batch_size: Count = 1
    """Tasks in one explore step."""
    train_batch_size: Annotated[Natural, Computed("batch_size x repeat_times", zero=True)] = absent()
    """Experiences in one train step; its rollouts must be a multiple of `algorithm.repeat_times`. For algorithms that
    learn from a dataset: rows, which may be pairs. None or 0: batch_size x repeat_times (dataset: batch_size), plus the
    demonstrations of mix."""
    total_epochs: Annotated[Count, MayChange()] = 1
    """Passes over the training tasks, or over the dataset."""
    total_steps: Annotated[Count | None, MayChange()] = None
    """Explore steps (sft: train steps). Overrides `total_epochs`. None: `total_epochs` decides."""
    max_bad_rows: Annotated[Natural, MayChange()] = 0
    """Rows of each dataset that may be unusable, or have a prompt that is too long. All rollouts of such a task fail;
    such a row of a dataset to learn from is not trained. Rows are checked before the start (docs/data.md)."""
    explorer_input: ExplorerInput = ExplorerInput.model_construct()
    """Tasks."""
    trainer_input: TrainerInput = TrainerInput.model_construct()
    """Experiences."""

    @reading("explorer_input", "trainer_input")
    def _selectors_suit_their_rows(self) -> Iterator[Problem]:
        source, buffers = self.explorer_input, self.trainer_input
        others = [("eval_tasksets", taskset.data_selector) for taskset in source.eval_tasksets]
        others += [(b.name, b.data_selector) for b in (buffers.experience_buffer, *buffers.auxiliary_buffers.values())]
        for where, selector in others:
            if not trait(selector.selector, "for_datasets"):
                yield "", f"{where}: {selector.selector_type} is for training tasksets; use sequential or shuffle"
        keep = buffers.experience_buffer.retention.keep
        for selector in (taskset.data_selector for taskset in source.train_tasksets):
            if keep in REMOVING and trait(selector.selector, "learns"):
                why = f"{keep} removes results that the selector {selector.selector_type} learns from"
                yield "trainer_input.experience_buffer.retention.keep", f"{why}; use all"
