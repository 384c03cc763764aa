"""Rules that join keys of several sections: what an absent key is filled with, and which values go together.

Pure: a Config in, values or messages out. Each rule names the keys it reads; it is left out when one of them is broken.
Every refusal shows its arithmetic.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rftdask.config.algorithms import ALGORITHMS
from rftdask.config.base import default_of
from rftdask.config.engine_keys import engine_problems, engine_warnings
from rftdask.config.messages import show
from rftdask.config.mixture import (
    EXPERT_RATIO,
    demonstrations,
    expert_ratio,
    is_share,
    num_experts,
    num_own_rollouts,
    with_experts,
)
from rftdask.config.schema_buffer import TasksetConfig
from rftdask.config.schema_explorer import ExplorerConfig
from rftdask.config.schema_run import Config
from rftdask.config.source import Problem, has_password, names_environment

Fills = dict[tuple[str | int, ...], Any]
"""Location -> value for a key that was absent."""


def fill(config: Config) -> Fills:
    """Values for the absent keys marked Filled. `config` has None there; what cannot be computed is left out."""
    fills: Fills = {}
    _fill_lengths(config, fills)
    _fill_batches(config, fills)
    _fill_synchronizer(config, fills)
    _fill_gradient_norm(config, fills)
    response = config.model.max_response_tokens or fills.get(("model", "max_response_tokens"))
    repeat_times = config.algorithm.repeat_times or fills["algorithm", "repeat_times"]
    source = config.buffer.explorer_input
    here: tuple[str | int, ...] = ("buffer", "explorer_input")
    if source.taskset is not None:
        _fill_taskset(config, source.taskset, (*here, "taskset"), "taskset_0", repeat_times, response, fills)
    for i, taskset in enumerate(source.tasksets):
        _fill_taskset(config, taskset, (*here, "tasksets", i), f"taskset_{i}", repeat_times, response, fills)
    for i, taskset in enumerate(source.eval_tasksets):
        _fill_taskset(config, taskset, (*here, "eval_tasksets", i), f"eval_taskset_{i}", 1, response, fills)
    return fills


def _fill_lengths(config: Config, fills: Fills) -> None:
    total, prompt, response = (
        config.model.max_model_len,
        config.model.max_prompt_tokens,
        config.model.max_response_tokens,
    )
    if total is None and prompt is not None and response is not None:
        fills["model", "max_model_len"] = prompt + response
    if total is not None and prompt is None:
        fills["model", "max_prompt_tokens"] = total - response if response is not None else total // 2
    if total is not None and response is None:
        fills["model", "max_response_tokens"] = total - (prompt if prompt is not None else total // 2)


def _fill_batches(config: Config, fills: Fills) -> None:
    info = ALGORITHMS[config.algorithm.algorithm_type]
    repeat_times = config.algorithm.repeat_times
    if repeat_times is None:
        repeat_times = fills["algorithm", "repeat_times"] = info.repeat_times
    strategy = config.algorithm.sample_strategy
    if strategy is None:
        strategy = fills["algorithm", "sample_strategy"] = info.sample_strategy
    if config.buffer.train_batch_size is None:
        rollouts = config.buffer.batch_size * (repeat_times if info.schema == "experience" else 1)
        ratio = expert_ratio(config) if strategy == "mix" else 0.0
        fills["buffer", "train_batch_size"] = with_experts(rollouts, ratio)
    source = config.buffer.trainer_input
    if source.experience_buffer.storage_type is None:
        storage_type = "queue" if info.schema == "experience" else "file"
        fills["buffer", "trainer_input", "experience_buffer", "storage_type"] = storage_type
    for name, buffer in source.auxiliary_buffers.items():
        if buffer.storage_type is None:
            fills["buffer", "trainer_input", "auxiliary_buffers", name, "storage_type"] = "file"


def _fill_synchronizer(config: Config, fills: Fills) -> None:
    for key in ("explorer_sync_interval", "trainer_sync_interval"):
        if getattr(config.synchronizer, key) is None:
            fills["synchronizer", key] = config.synchronizer.sync_interval
    bound = (config.algorithm.sample_strategy_args or {}).get("max_staleness")
    strategy = config.algorithm.sample_strategy or ALGORITHMS[config.algorithm.algorithm_type].sample_strategy
    if strategy in _BOUNDED and config.synchronizer.max_staleness is None:
        fills["synchronizer", "max_staleness"] = bound if _is_natural(bound) else None


def _fill_gradient_norm(config: Config, fills: Fills) -> None:
    ours, reference = config.trainer.grad_clip, config.algorithm.optimizer.clip_grad
    if ours is None:
        fills["trainer", "grad_clip"] = 1.0 if reference is None else reference
    if reference is None:
        fills["algorithm", "optimizer", "clip_grad"] = 1.0 if ours is None else ours


def _fill_taskset(
    config: Config,
    taskset: TasksetConfig,
    loc: tuple[str | int, ...],
    name: str,
    repeat_times: int,
    max_tokens: int | None,
    fills: Fills,
) -> None:
    source = config.buffer.explorer_input
    workflow = source.default_workflow_type
    if "eval_tasksets" in loc:
        workflow = source.default_eval_workflow_type or workflow
    values = {
        ("name",): name,
        ("repeat_times",): repeat_times,
        ("default_workflow_type",): workflow,
        ("default_reward_fn_type",): source.default_reward_fn_type,
        ("rollout_args", "temperature"): config.model.temperature,
        ("rollout_args", "top_p"): config.model.top_p,
        ("rollout_args", "top_k"): config.model.top_k,
        ("rollout_args", "max_tokens"): max_tokens,
    }
    for keys, value in values.items():
        holder = taskset.rollout_args if keys[0] == "rollout_args" else taskset
        if getattr(holder, keys[-1]) is None and value is not None:
            fills[loc + keys] = value


_BOUNDED = ("staleness_control", "mix")
"""Sample strategies that take a max_staleness."""

_DATABASES = ("sqlite:////", "postgresql://", "postgresql+")
"""What the URL of a database begins with."""

_DATASET_TYPES = ("file", "sql")
"""Values of storage_type that a dataset may have."""

_EVAL_INTERVAL = default_of(ExplorerConfig.model_fields["eval_interval"])
"""Moving the default is not worth a warning."""

Rule = Callable[[Config], Iterator[Problem]]
RULES: list[tuple[tuple[str, ...], Rule]] = []
"""(keys it reads, the rule)."""


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Registers a rule that yields (path, message) for every refusal."""

    def register(function: Rule) -> Rule:
        RULES.append((reads, function))
        return function

    return register


@rule("model.max_model_len", "model.max_prompt_tokens", "model.max_response_tokens", "model.min_response_tokens")
def _lengths_fit(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.max_model_len is None:
        yield "model.max_model_len", "required, unless max_prompt_tokens and max_response_tokens are both given"
        return
    needed = model.max_prompt_tokens + model.max_response_tokens
    if needed > model.max_model_len:
        yield (
            "model.max_model_len",
            f"max_prompt_tokens {model.max_prompt_tokens} + max_response_tokens {model.max_response_tokens} = {needed} "
            f"exceeds max_model_len {model.max_model_len}; lower one of them or raise max_model_len",
        )
    if model.min_response_tokens > model.max_response_tokens:
        yield (
            "model.min_response_tokens",
            f"{model.min_response_tokens} exceeds max_response_tokens {model.max_response_tokens}",
        )


@rule("mode", "algorithm.algorithm_type")
def _mode_fits_algorithm(config: Config) -> Iterator[Problem]:
    schema = config.algorithm.schema_type
    if schema != "experience" and config.mode in ("both", "explore"):
        yield (
            "mode",
            f"{config.mode} makes rollouts, and {config.algorithm.algorithm_type} learns from a dataset; "
            "use mode train (bench to evaluate its checkpoints)",
        )


@rule("mode", "algorithm.algorithm_type", "buffer.explorer_input")
def _data_fits_mode(config: Config) -> Iterator[Problem]:
    source = config.buffer.explorer_input
    at = "buffer.explorer_input"
    if source.taskset is not None and source.tasksets:
        yield f"{at}.tasksets", "given beside taskset; give one of them"
    explores = config.mode in ("both", "explore") and config.algorithm.schema_type == "experience"
    if explores and not source.train_tasksets:
        yield f"{at}.taskset.path", f"required in mode {config.mode}: the tasks to explore"
    if config.mode == "bench" and not source.eval_tasksets:
        yield f"{at}.eval_tasksets", "required in mode bench: what to evaluate"
    names = [taskset.name for taskset in (*source.train_tasksets, *source.eval_tasksets)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield at, f"{names.count(name)} tasksets are named {name!r}; each needs a name of its own"


@rule("mode", "algorithm.algorithm_type", "buffer.trainer_input")
def _buffer_fits_algorithm(config: Config) -> Iterator[Problem]:
    if config.mode != "train":
        return
    buffer = config.buffer.trainer_input.experience_buffer
    at = "buffer.trainer_input.experience_buffer"
    algorithm = config.algorithm.algorithm_type
    if config.algorithm.schema_type != "experience" and buffer.storage_type not in _DATASET_TYPES:
        yield f"{at}.storage_type", f"{algorithm} learns from a dataset; use file or sql"
    if config.algorithm.schema_type != "experience" and not buffer.path:
        yield f"{at}.path", f"required for {algorithm}: the dataset to learn from"


@rule("algorithm.algorithm_type", "checkpoint_root_dir", "buffer.trainer_input")
def _log_has_a_place(config: Config) -> Iterator[Problem]:
    """Of the experience log: a path is for databases, and a database has one kind of URL and no password in it."""
    buffer = config.buffer.trainer_input.experience_buffer
    at = "buffer.trainer_input.experience_buffer.path"
    if config.algorithm.schema_type != "experience" or buffer.storage_type != "sql":
        return
    if not buffer.path:
        if "://" in config.checkpoint_job_dir.removeprefix("file://"):
            yield at, "required: a database file cannot lie on remote storage; give postgresql://user@host/name"
    else:
        yield from _no_database(at, buffer.path)


def _no_database(at: str, path: str) -> Iterator[Problem]:
    """What is wrong with the URL of a database."""
    if has_password(path):
        yield (
            at,
            "a password does not belong in a configuration, which is written beside the run: put the URL, or the "
            "password alone, into an environment variable and write ${oc.env:NAME} here",
        )
    elif not names_environment(path) and not path.startswith(_DATABASES):
        yield at, f"{show(path)} is no database; use postgresql://user@host/name or sqlite:////folder/file.db"


@rule("algorithm.algorithm_type", "buffer.explorer_input", "buffer.trainer_input")
def _tables_are_in_a_database(config: Config) -> Iterator[Problem]:
    """Of datasets with storage_type sql."""
    source, at = config.buffer.explorer_input, "buffer.explorer_input"
    tasksets = {
        **({} if source.taskset is None else {f"{at}.taskset": source.taskset}),
        **{f"{at}.tasksets[{number}]": taskset for number, taskset in enumerate(source.tasksets)},
        **{f"{at}.eval_tasksets[{number}]": taskset for number, taskset in enumerate(source.eval_tasksets)},
    }
    for where, taskset in tasksets.items():
        if taskset.storage_type == "sql":
            yield from _no_database(f"{where}.path", taskset.path)
    at = "buffer.trainer_input"
    buffers = {f"{at}.auxiliary_buffers.{n}": b for n, b in config.buffer.trainer_input.auxiliary_buffers.items()}
    if config.algorithm.schema_type != "experience":
        buffers[f"{at}.experience_buffer"] = config.buffer.trainer_input.experience_buffer
    for where, buffer in buffers.items():
        if buffer.storage_type == "sql" and buffer.path:
            yield from _no_database(f"{where}.path", buffer.path)


@rule("buffer.trainer_input.auxiliary_buffers")
def _auxiliary_buffers_are_datasets(config: Config) -> Iterator[Problem]:
    for name, buffer in config.buffer.trainer_input.auxiliary_buffers.items():
        if buffer.storage_type not in _DATASET_TYPES:
            at = f"buffer.trainer_input.auxiliary_buffers.{name}.storage_type"
            yield at, f"{buffer.storage_type}: auxiliary buffers are datasets; use file or sql"


@rule(
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "algorithm.sample_strategy",
    "algorithm.sample_strategy_args",
    "buffer.train_batch_size",
    "buffer.batch_size",
)
def _groups_are_whole(config: Config) -> Iterator[Problem]:
    if config.algorithm.schema_type != "experience":
        return
    size, group = config.buffer.train_batch_size, config.algorithm.repeat_times
    own, experts = num_own_rollouts(config), num_experts(config)
    if experts and (own < group or own % group):
        yield (
            "buffer.train_batch_size",
            f"{size} - {experts} demonstrations (expert_data_ratio {expert_ratio(config)}) = {own} rollouts, which is "
            f"no multiple of algorithm.repeat_times {group}, and groups are never split; leave it out for "
            "the size that fits batch_size",
        )
    elif not experts and size % group:
        below, above = size // group * group, (size // group + 1) * group
        yield (
            "buffer.train_batch_size",
            f"{size} is not a multiple of algorithm.repeat_times {group}, and groups are never split; "
            f"use {f'{below} or {above}' if below else above}",
        )


@rule("trainer.use_dynamic_bsz", "trainer.micro_batch_size")
def _passes_have_a_size(config: Config) -> Iterator[Problem]:
    if not config.trainer.use_dynamic_bsz and config.trainer.micro_batch_size is None:
        yield (
            "trainer.use_dynamic_bsz",
            "false means that trainer.micro_batch_size says how many experiences a pass has; give it or leave this out",
        )


@rule("algorithm.optimizer.clip_grad", "trainer.grad_clip")
def _one_gradient_norm(config: Config) -> Iterator[Problem]:
    ours, reference = config.trainer.grad_clip, config.algorithm.optimizer.clip_grad
    if ours != reference:
        yield (
            "trainer.grad_clip",
            f"{ours} differs from algorithm.optimizer.clip_grad {reference}, and both are the same limit; give one",
        )


@rule("trainer.trainer_strategy", "trainer.num_ranks")
def _ranks_fit_the_strategy(config: Config) -> Iterator[Problem]:
    if config.trainer.trainer_strategy == "single" and (config.trainer.num_ranks or 1) > 1:
        yield (
            "trainer.num_ranks",
            f"{config.trainer.num_ranks} ranks cannot share a model by trainer_strategy single; use ddp or fsdp2",
        )


@rule(
    "trainer.trainer_strategy",
    "trainer.num_ranks",
    "trainer.ulysses_sequence_parallel_size",
    "trainer.tensor_parallel_size",
    "trainer.torch_compile",
    "model.lora_configs",
)
def _ranks_make_whole_groups(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    split, cut = trainer.ulysses_sequence_parallel_size, trainer.tensor_parallel_size
    for key, size, what in (
        ("trainer.ulysses_sequence_parallel_size", split, "split sequences"),
        ("trainer.tensor_parallel_size", cut, "cut layers"),
    ):
        if size > 1 and trainer.trainer_strategy == "single":
            yield key, f"{size} ranks {what}, and trainer_strategy single is one rank; use ddp or fsdp2"
        elif trainer.num_ranks is not None and trainer.num_ranks % size:
            yield (
                key,
                f"groups of {size} ranks {what}, and num_ranks {trainer.num_ranks} is no multiple of {size}; "
                f"use num_ranks {-(-trainer.num_ranks // size) * size}",
            )
    if cut > 1:
        others = {
            "trainer_strategy fsdp2, which cuts weights its own way; use ddp": trainer.trainer_strategy == "fsdp2",
            "ulysses_sequence_parallel_size; use one of them": split > 1,
            "torch_compile": trainer.torch_compile,
            "model.lora_configs": bool(config.model.lora_configs),
        }
        for other, chosen in others.items():
            if chosen:
                yield "trainer.tensor_parallel_size", f"{cut} does not go with {other}"


@rule("algorithm.sample_strategy", "algorithm.sample_strategy_args", "synchronizer.max_staleness")
def _one_staleness(config: Config) -> Iterator[Problem]:
    args = config.algorithm.sample_strategy_args
    if config.algorithm.sample_strategy not in _BOUNDED or not args or "max_staleness" not in args:
        return
    at = "algorithm.sample_strategy_args.max_staleness"
    bound, ours = args["max_staleness"], config.synchronizer.max_staleness
    if not _is_natural(bound):
        yield at, f"{bound!r} is not a whole number of at least 0"
    elif ours is not None and ours != bound:
        yield at, f"{bound} differs from synchronizer.max_staleness {ours}, and both are the same bound; give one"


@rule("algorithm.sample_strategy", "algorithm.sample_strategy_args")
def _strategy_arguments_are_known(config: Config) -> Iterator[Problem]:
    known = {
        "staleness_control": {"max_staleness"},
        "mix": {"max_staleness", "expert_data_ratio", "sft_dataset_name"},
    }.get(config.algorithm.sample_strategy or "default", set())
    for key in sorted(set(config.algorithm.sample_strategy_args or {}) - known):
        takes = ", ".join(sorted(known)) or "no arguments"
        yield (
            f"algorithm.sample_strategy_args.{key}",
            f"unknown key; sample_strategy {config.algorithm.sample_strategy or 'default'} takes {takes}",
        )


_PRIORITY_ARGS: dict[str, set[str]] = {
    "linear_decay": {"decay"},
    "decay_limit_randomization": {"decay", "use_count_limit", "sigma"},
}


@rule("buffer.trainer_input")
def _priorities_are_known(config: Config) -> Iterator[Problem]:
    source = config.buffer.trainer_input
    for name, buffer in source.auxiliary_buffers.items():
        if buffer.replay_buffer.enable:
            at = f"buffer.trainer_input.auxiliary_buffers.{name}.replay_buffer.enable"
            yield at, "rows of a dataset are read in order, epoch after epoch; replay is for experience_buffer"
    section, at = source.experience_buffer.replay_buffer, "buffer.trainer_input.experience_buffer.replay_buffer"
    takes = _PRIORITY_ARGS[section.priority_fn]
    for key, value in sorted(section.priority_fn_args.items()):
        where = f"{at}.priority_fn_args.{key}"
        if key not in takes:
            yield where, f"unknown key; {section.priority_fn} takes {', '.join(sorted(takes))}"
        elif key == "use_count_limit" and not (_is_natural(value) and value > 0):
            yield where, f"{value!r} is not a whole number of at least 1"
        elif key != "use_count_limit" and not (_is_number(value) and value >= 0):
            yield where, f"{value!r} is not a number of at least 0"


@rule("mode", "algorithm", "buffer.trainer_input", "synchronizer")
def _replay_fits(config: Config) -> Iterator[Problem]:
    buffer = config.buffer.trainer_input.experience_buffer
    section, at = buffer.replay_buffer, "buffer.trainer_input.experience_buffer.replay_buffer"
    if not section.enable:
        return
    if config.algorithm.schema_type != "experience":
        yield f"{at}.enable", f"{config.algorithm.algorithm_type} learns from a dataset, which it reads again anyway"
    cooldown = section.reuse_cooldown_time
    if cooldown is None:
        return
    if config.algorithm.greedy_baseline:
        yield (
            f"{at}.reuse_cooldown_time",
            f"{config.algorithm.algorithm_type} compares with a greedy rollout, which is used once; leave it out",
        )
    if config.mode == "both" and config.synchronizer.sync_style == "fixed" and cooldown > 0:
        yield (
            f"{at}.reuse_cooldown_time",
            f"{cooldown} s: style fixed repeats a run bit by bit, and a clock does not; set 0, or choose another "
            "synchronizer.sync_style",
        )
    if cooldown >= buffer.max_read_timeout:
        yield (
            f"{at}.reuse_cooldown_time",
            f"{cooldown} s is not below max_read_timeout {buffer.max_read_timeout} s, after which a batch is made of "
            "what is there",
        )
    if section.priority_fn_args.get("decay") == 0 and section.priority_fn == "linear_decay":
        yield f"{at}.priority_fn_args.decay", "0 would train the newest groups for ever; use more than 0"


@rule("mode", "algorithm", "buffer.trainer_input")
def _demonstrations_are_there(config: Config) -> Iterator[Problem]:
    algorithm, strategy = config.algorithm.algorithm_type, config.algorithm.sample_strategy
    mixes = ALGORITHMS[algorithm].sample_strategy == "mix"
    if mixes != (strategy == "mix"):
        yield (
            "algorithm.sample_strategy",
            f"{strategy} does not go with {algorithm}; "
            + ("leave it out" if mixes else "mix is for the algorithms mix and mix_chord"),
        )
    if strategy != "mix":
        return
    ratio = (config.algorithm.sample_strategy_args or {}).get("expert_data_ratio", EXPERT_RATIO)
    if not is_share(ratio):
        yield "algorithm.sample_strategy_args.expert_data_ratio", f"{ratio!r} is not a number from 0 to below 1"
    buffer = config.buffer.trainer_input.auxiliary_buffers.get(demonstrations(config))
    at = f"buffer.trainer_input.auxiliary_buffers.{demonstrations(config)}"
    if config.mode in ("both", "train") and (buffer is None or not buffer.path):
        yield f"{at}.path", f"required for {algorithm}: the demonstrations, a dataset in the format of sft"


@rule("explorer.rollout_model", "explorer.auxiliary_models", "model.lora_configs")
def _engines_can_do_it(config: Config) -> Iterator[Problem]:
    yield from engine_problems(config)


@rule("mode", "algorithm", "explorer.auxiliary_models")
def _teacher_is_there(config: Config) -> Iterator[Problem]:
    models, at = config.explorer.auxiliary_models, "explorer.auxiliary_models"
    algorithm = config.algorithm.advantage_fn or config.algorithm.algorithm_type
    if config.algorithm.needs_teacher and config.mode in ("both", "train"):
        if len(models) > 1:
            yield at, f"{algorithm} learns from one teacher, and there are {len(models)} models; leave one"
        elif not models or not models[0].model_path:
            yield at, f"required for {algorithm}: its teacher, of the policy's vocabulary; give [{{model_path: ...}}]"
    names = [model.name or model.model_path for model in models]
    for number, model in enumerate(models):
        if not model.model_path and not config.algorithm.needs_teacher:
            yield f"{at}[{number}].model_path", "required: what workflows ask by model.auxiliary(name)"
        elif names.count(names[number]) > 1:
            yield f"{at}[{number}].name", f"{names[number]!r} is the name of another model, too; give each its own"


@rule("mode", "algorithm", "model.external_model", "explorer")
def _external_is_not_trained(config: Config) -> Iterator[Problem]:
    """A model behind an API gives text: no tokens and no logprobs, and nobody can load weights into it."""
    remotes = [model for model in config.explorer.auxiliary_models if model.engine_type == "external"]
    if remotes and config.algorithm.needs_teacher and config.mode in ("both", "train"):
        yield "explorer.auxiliary_models[0].engine_type", "external: a model behind an API gives no teacher's logprobs"
    if not config.is_external:
        return
    at = "model.external_model"
    key = f"{at}.enable" if config.model.external_model.enable else "explorer.rollout_model.engine_type"
    if config.mode != "bench":
        yield key, f"a model behind an API gives no tokens and logprobs to train on; use mode bench, not {config.mode}"
    if not config.model.external_model.model_name:
        yield f"{at}.model_name", "required: the model's name at the service"


@rule("explorer")
def _workers_are_between_limits(config: Config) -> Iterator[Problem]:
    fewest, most = config.explorer.min_workers, config.explorer.max_workers
    if fewest is not None and most is not None and fewest > most:
        yield "explorer.min_workers", f"{fewest}: more than explorer.max_workers, {most}; lower one or raise the other"


@rule("synchronizer.sync_style", "explorer.over_rollout", "explorer.dynamic_timeout", "mode")
def _fixed_is_repeatable(config: Config) -> Iterator[Problem]:
    """In style fixed two runs are equal bit by bit; which rollouts a clock calls off is not."""
    explorer = config.explorer
    if config.synchronizer.sync_style != "fixed" or config.mode != "both":
        return
    remedy = "in sync_style fixed, whose runs are equal bit by bit; choose another style, or leave it out"
    if explorer.over_rollout.ratio > 0:
        yield (
            "explorer.over_rollout.ratio",
            f"{explorer.over_rollout.ratio}: which tasks are late depends on time, {remedy}",
        )
    if explorer.dynamic_timeout.enable:
        yield "explorer.dynamic_timeout.enable", f"true: the limit depends on measured times, {remedy}"


@rule("buffer.explorer_input", "algorithm.algorithm_type", "algorithm.repeat_times")
def _only_eval_repeats(config: Config) -> Iterator[Problem]:
    source = config.buffer.explorer_input
    places = [f"tasksets[{i}]" for i in range(len(source.tasksets))] if source.taskset is None else ["taskset"]
    for place, taskset in zip(places, source.train_tasksets, strict=True):
        if taskset.repeat_times != config.algorithm.repeat_times:
            yield (
                f"buffer.explorer_input.{place}.repeat_times",
                f"{taskset.repeat_times} differs from algorithm.repeat_times {config.algorithm.repeat_times}, "
                "which decides for training; leave it out",
            )


@rule("buffer")
def _selectors_go_together(config: Config) -> Iterator[Problem]:
    source = config.buffer.explorer_input
    at = "buffer.explorer_input"
    selectors = [taskset.data_selector for taskset in source.train_tasksets]
    types = {selector.selector_type for selector in selectors}
    if "random" in types and len(types) > 1:
        yield at, f"random cannot be mixed with other selectors ({', '.join(sorted(types))}); use one for all tasksets"
    seeds = sorted({s.seed for s in selectors if s.selector_type in ("shuffle", "random")})
    if len(seeds) > 1:
        yield at, f"data_selector.seed differs between tasksets ({seeds}); give one, their orders differ anyway"
    for selector in selectors:
        if selector.selector_type == "offline_easy2hard" and not selector.feature_keys:
            yield at, "data_selector.feature_keys is required for offline_easy2hard: columns that tell the difficulty"
        if selector.selector_type == "difficulty_based" and len(selector.feature_keys) != 2:
            yield at, "data_selector.feature_keys must be two columns for difficulty_based: weak and strong pass rates"
        if selector.selector_type != "difficulty_based" and selector.kwargs:
            yield at, f"data_selector.kwargs: {selector.selector_type} takes no arguments"


@rule("buffer")
def _difficulty_is_for_tasks(config: Config) -> Iterator[Problem]:
    source, buffers = config.buffer.explorer_input, config.buffer.trainer_input
    types = [taskset.data_selector.selector_type for taskset in source.train_tasksets]
    if "difficulty_based" in types and len(types) > 1:
        yield (
            "buffer.explorer_input",
            f"difficulty_based is for one taskset, and there are {len(types)}; merge them or use shuffle",
        )
    others = [("eval_tasksets", taskset.data_selector) for taskset in source.eval_tasksets]
    others += [(b.name, b.data_selector) for b in (buffers.experience_buffer, *buffers.auxiliary_buffers.values())]
    for where, selector in others:
        if selector.selector_type in ("offline_easy2hard", "difficulty_based"):
            yield "buffer", f"{where}: {selector.selector_type} is for training tasksets; use sequential or shuffle"


@rule("buffer")
def _removed_results_are_not_needed(config: Config) -> Iterator[Problem]:
    kept = config.buffer.trainer_input.experience_buffer
    tasksets = config.buffer.explorer_input.train_tasksets
    at = "buffer.trainer_input.experience_buffer.retention.keep"
    if kept.retention.keep == "compact":
        if config.algorithm.schema_type == "experience" and kept.storage_type != "queue":
            yield at, f"compact merges Parquet shards, and storage_type {kept.storage_type} has none; use queue, or all"
        return
    if kept.retention.keep != "all" and any(t.data_selector.selector_type == "difficulty_based" for t in tasksets):
        yield at, f"{kept.retention.keep} removes results that the selector difficulty_based learns from; use all"
    if kept.retention.keep != "all" and kept.replay_buffer.enable:
        yield at, f"{kept.retention.keep} removes experiences that replay_buffer may use again; use all"


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def stages_differ(config: Config) -> Iterator[Problem]:
    """(path, message) of stages that would share a folder. Not in RULES: it is about the stages together."""
    names = [stage.stage_name for stage in config.stages]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "stages", f"{names.count(name)} stages are named {name!r}; each needs a name of its own"


def warn(config: Config) -> Iterator[Problem]:
    """(path, message) of what is accepted and may surprise."""
    info = ALGORITHMS[config.algorithm.algorithm_type]
    buffer = config.buffer
    if info.grouped and config.algorithm.repeat_times < 2 and config.mode != "bench":
        yield (
            "algorithm.repeat_times",
            f"{config.algorithm.repeat_times}: {config.algorithm.algorithm_type} compares the rollouts of a task, "
            "so a lone one teaches nothing; use 2 or more",
        )
    if buffer.total_steps is not None and buffer.total_epochs != 1:
        yield "buffer.total_epochs", "ignored: buffer.total_steps is given and decides"
    source = buffer.trainer_input
    if info.schema == "experience" and source.experience_buffer.path and source.experience_buffer.storage_type != "sql":
        yield "buffer.trainer_input.experience_buffer.path", "ignored: rollouts are read from the log of the run"
    read = demonstrations(config) if config.algorithm.sample_strategy == "mix" else None
    for name in sorted(set(source.auxiliary_buffers) - {read}):
        yield f"buffer.trainer_input.auxiliary_buffers.{name}", f"ignored: {_mixes_none(config, read)}"
    interval, wanted = eval_interval(config), config.explorer.eval_interval
    if buffer.explorer_input.eval_tasksets and interval != wanted and wanted != _EVAL_INTERVAL:
        yield (
            "explorer.eval_interval",
            f"{wanted} is not a multiple of explorer_sync_interval "
            f"{config.synchronizer.explorer_sync_interval}: evaluated every {interval} steps",
        )
    yield from _idle_boundaries(config)
    yield from engine_warnings(config)
    if config.model.critic_model_path and not info.critic:
        yield "model.critic_model_path", f"ignored: {config.algorithm.algorithm_type} has no critic"
    if (trainer := config.trainer).trainer_strategy != "fsdp2":
        chosen = {
            "offload_policy": trainer.offload_policy,
            "prefetch_layers": trainer.prefetch_layers > 0,
            "reshard_after_forward": not trainer.reshard_after_forward,
        }
        for name in (name for name, is_chosen in chosen.items() if is_chosen):
            yield f"trainer.{name}", f"ignored: trainer_strategy {trainer.trainer_strategy} keeps all in place"
    if config.model.custom_chat_template and config.model.chat_template_path:
        yield "model.chat_template_path", "ignored: model.custom_chat_template is given and wins"
    if not config.continue_from_checkpoint and config.mode == "bench":
        yield "continue_from_checkpoint", "ignored: bench reads the checkpoints of the run"


def _mixes_none(config: Config, read: str | None) -> str:
    if read is None:
        return f"{config.algorithm.algorithm_type} mixes no data into its own"
    return f"sample_strategy mix reads {read}"


def _idle_boundaries(config: Config) -> Iterator[Problem]:
    """In style fixed no side waits for what the other cannot have made; but then some boundaries bring nothing new."""
    sync = config.synchronizer
    if config.mode != "both" or sync.sync_style != "fixed":
        return
    rollouts = config.buffer.batch_size * config.algorithm.repeat_times
    made = sync.explorer_sync_interval * rollouts
    needed = sync.trainer_sync_interval * num_own_rollouts(config)
    if made < needed:
        yield (
            "synchronizer.explorer_sync_interval",
            "not every synchronization brings new weights: between two of them the explorer makes "
            f"explorer_sync_interval {sync.explorer_sync_interval} x batch_size {config.buffer.batch_size} x "
            f"repeat_times {config.algorithm.repeat_times} = {made} experiences, and new weights need "
            f"trainer_sync_interval {sync.trainer_sync_interval} x train_batch_size {num_own_rollouts(config)} = "
            f"{needed}; with {-(-needed // rollouts)} each would",
        )


def eval_interval(config: Config) -> int:
    """Explore steps between evaluations: a multiple of the explorer's synchronization interval, at least one."""
    every = config.synchronizer.explorer_sync_interval
    return max(config.explorer.eval_interval // every, 1) * every
