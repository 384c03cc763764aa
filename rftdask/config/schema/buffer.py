"""Section `buffer`: tasks in, experiences out. Names of workflows and rewards are checked by rftdask.explorer."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from rftdask.config.base import (
    NAME,
    Computed,
    Count,
    EnvInterpolated,
    Natural,
    OpenDict,
    PluginName,
    Seconds,
    Section,
    absent,
    empty_dict,
)
from rftdask.config.plugins import function_registry, lookup_part, read_parts
from rftdask.config.schema.algorithm import registered_parts

# The two are looked up in one dict each, to which a plug-in adds its own when it is imported.
registered_workflows = partial(function_registry, "rftdask.rollouts.workflows", "workflow")
"""Call for name -> the workflow, or its RegisteredPart; `rollouts.workflows.registry.workflow` adds to it."""
registered_rewards = partial(function_registry, "rftdask.rollouts.rewards", "reward")
"""Call for name -> the reward function, or its RegisteredPart; `rollouts.rewards.registry.reward` adds to it."""

_WORKFLOW = PluginName("workflow", registered_workflows)


class FormatConfig(Section):
    """`format`: which column of a dataset means what."""

    prompt_type: Literal["messages", "plaintext", "raw"] = "messages"
    """messages: a chat in `messages_key`, or else as plaintext. plaintext: texts in `prompt_key` and `response_key`,
    which the chat template renders. raw: the same texts, joined as they are. Of a task the prompt alone; dpo:
    `chosen_key` and `rejected_key` in place of the response; cpt: raw text in `prompt_key`, whatever is set here.
    A special token that a message spells is text; in raw text it is special."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "response"
    """Column of the response or the true answer."""
    system_prompt_key: str | None = None
    """Column of a system prompt for each row; a row without one has `system_prompt`."""
    system_prompt: str | None = None
    """One system prompt for all rows, of tasks and of supervised rows, but for chats with their own and raw text."""
    messages_key: str = "message"
    """Column of the chat, a list of {role, content}."""
    image_key: str | None = None
    """Of tasks: column of the images that come with the prompt, one or a list: files as bytes, or their paths, from the
    dataset's folder on. They stand where a chat of `messages_key` has {"type": "image"}, else before the text. The
    model must read images."""
    video_key: str | None = None
    """Of tasks: column of the videos that come with the prompt: a list of frames (2 a second), each an image as in
    `image_key`, or an image that moves (GIF, APNG, WebP), or a list of these. They stand where a chat has
    {"type": "video"}, else before images and text. With engine_type transformers, Qwen2-VL or Qwen2.5-VL, and
    torchvision."""
    tools_key: str = "tools"
    """sft: column of the tools, a list of JSON schemas or its JSON text; used where the dataset has it."""
    reply_prefix: str | None = None
    """Text the response begins with; it is part of the prompt, and not learned."""
    workflow_key: str = ""
    """Column that names the workflow of a row. Empty: the taskset's workflow."""
    reward_fn_key: str = ""
    """Column that names the reward function of a row. Empty: the taskset's reward function."""
    chosen_key: str = "chosen"
    """dpo, orpo, simpo, reward_model: column of the better response."""
    rejected_key: str = "rejected"
    """dpo, orpo, simpo, reward_model: column of the worse response."""
    label_key: str = "label"
    """kto: column of the verdict on the response, true or 1 for a desirable one. A dataset without it holds pairs, in
    `chosen_key` and `rejected_key`, each of which is a desirable response and an undesirable one."""
    enable_concatenated_multi_turn: bool = False
    """sft: train every assistant message of a chat in one sequence, not only the last."""
    return_assistant_tokens_mask: bool = False
    """sft: train what the chat template itself marks as said by the assistant, in {% generation %} blocks, of every
    message, as the option of transformers does. A template without such blocks is an error."""


class RolloutArgs(Section):
    """`rollout_args`: sampling of one taskset. None: what `model` says."""

    temperature: Annotated[float, Computed("model.temperature")] = absent(ge=0)
    """Sampling temperature; 0 is greedy."""
    final_temperature: float | None = Field(default=None, gt=0)
    """Training tasksets: temperature after `temperature_steps` explore steps, to which it goes from `temperature` in
    equal steps; None: it stays."""
    temperature_steps: Count | None = None
    """Explore steps that the way takes."""
    top_p: Annotated[float, Computed("model.top_p")] = absent(gt=0, le=1)
    """Probability mass sampled from."""
    top_k: Annotated[int, Computed("model.top_k")] = absent(ge=-1)
    """Number of tokens sampled from; -1 is all."""
    max_tokens: Annotated[Count, Computed("model.max_response_tokens")] = absent()
    """Longest response in tokens."""

    def temperature_at(self, explore_step: int) -> float:
        """The temperature of an explore step, counted from 1; `final_temperature` at step `temperature_steps` + 1."""
        if self.final_temperature is None or self.temperature_steps is None:
            return self.temperature
        share = min(1.0, (explore_step - 1) / self.temperature_steps)
        return self.temperature + (self.final_temperature - self.temperature) * share


class DataSelectorConfig(Section):
    """`data_selector`: the order in which rows are taken."""

    selector_type: Annotated[
        str, PluginName("selector", partial(registered_parts, "selector"), arguments="kwargs", needed=True)
    ] = "sequential"
    """sequential: as stored; shuffle: a new order each epoch; random: drawn with replacement; offline_easy2hard, for
    training tasksets: by `feature_keys`, largest first, the same in each epoch; difficulty_based, for one training
    taskset: the tasks whose pass rate, as learned so far, is near a target; or a class of your own (docs/extending.md).
    Selectors may differ between tasksets, but for random."""
    seed: Annotated[int, Computed("seed")] = absent()
    """Seed of shuffle, random and difficulty_based; one for all training tasksets."""
    feature_keys: tuple[str, ...] = ()
    """offline_easy2hard: columns of numbers, larger is easier; ties go by the next column, then later rows first.
    difficulty_based: two columns, the pass rates of a weak and of a strong model."""
    kwargs: OpenDict = empty_dict()
    """Arguments of the selector. difficulty_based: target_reward, tau, do_sample, m, lamb, rho, adaptive_rho,
    cap_discount, seed."""

    @property
    def selector(self) -> Any:
        """The selector's class, or its `RegisteredPart`: both have its traits."""
        return lookup_part("selector", self.selector_type, registered_parts("selector"))


class TasksetConfig(Section):
    """`taskset`, an item of `tasksets` or of `eval_tasksets`: where tasks come from and how they are run."""

    name: Annotated[str, Computed("taskset_<i>, eval_taskset_<i>")] = absent(pattern=NAME)
    """Name in metrics and in the identity of experiences; unique in a run. None: its position."""
    storage_type: Literal["file", "sql"] = "file"
    """What `path` is. sql: the rows of a table, in the order of its primary key."""
    path: Annotated[str, EnvInterpolated()] = Field(min_length=1)
    """File or folder (.jsonl, .json, .csv, .parquet), dataset name on the Hub, reasoning-gym:<dataset>,
    verifiers:<taskset>, or seeds:<number of rows> for games, which are told nothing else. sql: the database,
    postgresql://user@host/name or sqlite:////folder/file.db; a URL with a password is given as ${oc.env:NAME} and
    never written down."""
    dataset_args: OpenDict = empty_dict()
    """Arguments of a generated dataset, for example {size: 500, seed: 1} for reasoning-gym; of verifiers: size and
    the environment's settings."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Configuration of a Hub dataset, for example "main". sql: the table; None: the one named as the taskset."""
    format: FormatConfig = FormatConfig()
    """Meaning of the columns."""
    default_workflow_type: Annotated[str | None, _WORKFLOW, Computed("explorer_input")] = None
    """Workflow of this taskset. None: `explorer_input.default_workflow_type`, for eval `default_eval_workflow_type`."""
    default_reward_fn_type: Annotated[
        str | None,
        PluginName("reward function", registered_rewards, arguments="reward_fn_args", supplied=3, complete=False),
        Computed("explorer_input"),
    ] = None
    """Reward function of this taskset. None: `explorer_input.default_reward_fn_type`."""
    rollout_args: RolloutArgs = RolloutArgs()
    """Sampling of this taskset."""
    workflow_args: OpenDict = empty_dict()
    """Arguments of the workflow. ${oc.env:NAME} in them, and in those of any other part, is completed where they are
    used and never written down."""
    reward_fn_args: OpenDict = empty_dict()
    """Arguments of the reward function."""
    data_selector: DataSelectorConfig = DataSelectorConfig()
    """Order of the tasks."""
    repeat_times: Annotated[Count, Computed("algorithm.repeat_times; eval: 1")] = absent()
    """Rollouts of each task. Only eval tasksets may set it; training uses `algorithm.repeat_times`."""

    @property
    def table(self) -> str | None:
        """Table of the database that `path` is; None for anything else."""
        return (self.subset_name or self.name) if self.storage_type == "sql" else None


class ExplorerInput(Section):
    """`buffer.explorer_input`: the tasks the explorers work on."""

    taskset: TasksetConfig | None = None
    """The training tasks, when there is one taskset."""
    tasksets: tuple[TasksetConfig, ...] = ()
    """The training tasks, when there are several. Not both."""
    eval_tasksets: tuple[TasksetConfig, ...] = ()
    """Tasks for evaluation. Where a dataset is trained (mode train), engines for them run beside the trainer."""
    default_workflow_type: Annotated[str | None, _WORKFLOW] = None
    """Workflow of tasksets that name none. None: the explorer's simple workflow."""
    default_eval_workflow_type: Annotated[str | None, _WORKFLOW] = None
    """The same for evaluation. None: `default_workflow_type`."""
    default_reward_fn_type: Annotated[str | None, PluginName("reward function", registered_rewards)] = None
    """Reward function of tasksets that name none. None: the workflow's own."""

    @property
    def train_tasksets(self) -> tuple[TasksetConfig, ...]:
        """The training tasksets, whichever key they were given in."""
        return (self.taskset,) if self.taskset is not None else self.tasksets


class ReplayConfig(Section):
    """`replay_buffer`: train by priority, and on a group more than once; see docs/buffer.md."""

    enable: bool = False
    """Use it."""
    priority_fn: Annotated[
        str,
        PluginName(
            "priority function",
            partial(read_parts, "rftdask.buffer.batches.replay_priority", "priority_fn"),
            arguments="priority_fn_args",
        ),
    ] = "linear_decay"
    """Which groups come first: those of the largest policy version - decay x uses; decay_limit_randomization adds noise
    and limits the uses. Or a class of your own (docs/buffer.md)."""
    reuse_cooldown_time: float | None = Field(default=None, ge=0)
    """Seconds between the batches of two uses of a group, by the stamps of the ledger. None: each is used once."""
    priority_fn_args: OpenDict = empty_dict()
    """linear_decay: {decay: 2.0}. decay_limit_randomization: {decay: 2.0, use_count_limit: 3, sigma: 0.0}."""


class RetentionConfig(Section):
    """`retention`: what stays of the shards that were trained. What a kept checkpoint may need always stays."""

    keep: Literal["all", "compact", "thin", "none"] = "all"
    """all: everything. compact: everything, what is not needed any more merged into few large files; for storage_type
    queue. thin: some work units. none: only what is needed, and the last `keep_steps`."""
    keep_steps: Natural = 0
    """Explore steps that stay as they are before those that are needed."""
    keep_fraction: float = Field(default=0.1, gt=0, lt=1)
    """thin: share of the older work units that stay."""


class ExperienceBufferConfig(Section):
    """`buffer.trainer_input.experience_buffer`: what the trainer reads."""

    name: str = "experience_buffer"
    """Name in messages."""
    storage_type: Annotated[Literal["queue", "sql", "file"], Computed("file for a dataset, else queue")] = absent()
    """The form of the experience log, which all algorithms that explore read and write. queue: Parquet shards in the
    run folder. file: the same as JSON lines, for people to read. sql: a database. Of algorithms that learn
    from a dataset, and of auxiliary buffers: file or sql, the dataset at `path`; of sql the rows of a table, in the
    order of its primary key."""
    path: Annotated[str | None, EnvInterpolated()] = None
    """Of a dataset: local file or folder, or a name on the Hub. With storage_type sql: the database,
    postgresql://user@host/name or sqlite:////folder/file.db; None, for a log: experiences.sqlite in the run folder. A
    URL with a password is given as ${oc.env:NAME} and never written down. Logs of queue and file are in the run folder:
    no path."""
    capacity: Count | None = None
    """mode both: explorers begin no work unit while so many experiences lie unread or are under way. None: no limit
    but the lead that `synchronizer` allows. A train batch is always let through."""
    max_unread_bytes: Count | None = None
    """The same in bytes of tokens, logprobs and text, by the mean of what was committed so far. None: no limit."""
    max_read_timeout: Seconds = 1800.0
    """Seconds the trainer waits for a full batch. Then it trains the whole groups that are there; it gives up if there
    are none, and in style fixed, where batches are not formed by time."""
    replay_buffer: ReplayConfig = ReplayConfig()
    """Train by priority, and on a group more than once."""
    retention: RetentionConfig = RetentionConfig()
    """How long trained experiences stay on storage."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Configuration of a Hub dataset. sql: the table of a dataset; None: the one named as the buffer."""
    format: FormatConfig = FormatConfig()
    """Meaning of the columns."""
    data_selector: DataSelectorConfig = DataSelectorConfig()
    """Order of the rows."""

    @property
    def table(self) -> str | None:
        """Table of a dataset in the database that `path` is; None for any other dataset."""
        return (self.subset_name or self.name) if self.storage_type == "sql" else None


class TrainerInput(Section):
    """`buffer.trainer_input`: what the trainer reads."""

    experience_buffer: ExperienceBufferConfig = ExperienceBufferConfig()
    """The main input."""
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = empty_dict()
    """Datasets by name, in the format of sft; sample_strategy mix takes its demonstrations from one of them."""
    eval_buffer: ExperienceBufferConfig | None = None
    """A dataset that is not trained, in the format of the main input: mode train measures the loss on it before the
    first step, every `trainer.eval_interval` steps and after the last. For what learns from a dataset (sft, dpo, cpt
    and their like)."""


class BufferConfig(Section):
    """`buffer`: sizes of batches, length of the run, and its data."""

    batch_size: Count = 1
    """Tasks in one explore step."""
    train_batch_size: Annotated[Natural, Computed("batch_size x repeat_times", zero=True)] = absent()
    """Experiences in one train step; the part of the rollouts is a multiple of `algorithm.repeat_times`. Of
    algorithms that learn from a dataset: its rows, which may be pairs. None or 0: batch_size x repeat_times (of a
    dataset: batch_size), and the demonstrations of mix."""
    total_epochs: Count = 1
    """Passes over the training tasks, or over the dataset."""
    total_steps: Count | None = None
    """Explore steps (sft: train steps). Not None: it decides in place of `total_epochs`."""
    explorer_input: ExplorerInput = ExplorerInput()
    """Tasks."""
    trainer_input: TrainerInput = TrainerInput()
    """Experiences."""
