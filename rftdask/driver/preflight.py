"""Checks everything that a config refers to before a run starts: data, models, plug-ins, storage.

The checks raise UserErrors with the problem, its key and a remedy. They change nothing, except for a probe file that
they remove again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rftdask.algorithm.selectors import make_selector
from rftdask.buffer.batches.replay_priority import make_replay
from rftdask.buffer.batches.selection import make_sample_strategy
from rftdask.buffer.log import open_log
from rftdask.config import Config, check_plugins
from rftdask.config.plugins import load_plugin_folders, module_of, trait
from rftdask.config.schema.buffer import ExperienceBufferConfig
from rftdask.data.datasets import Dataset, Say, find_bad_rows, open_dataset
from rftdask.data.hub import cached_folder, has_tokenizer, is_model_name, local_model, require_model
from rftdask.data.images import check_reads_images, check_reads_videos
from rftdask.data.supervised import check_columns, check_row, make_rows, schema_of
from rftdask.data.task import Task
from rftdask.data.task_pipeline import check_pipeline, standing_in
from rftdask.data.tasksets import Taskset
from rftdask.data.tokenizer import Tokenizer, load_tokenizer
from rftdask.engines.spec import remote_models
from rftdask.errors import ConfigError, DataError, NotInstalledError, StorageError, UserError, lacks_training
from rftdask.models.model_shape import WITH_ADAPTER, check_folder
from rftdask.models.tinker_service import require_key
from rftdask.processes.zygote import TORCH, call
from rftdask.rollouts import try_workflow
from rftdask.rollouts.policy.recording import check_prompt
from rftdask.rollouts.policy.remote_model import check_service
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.sandbox.bubblewrap import check_bubblewrap
from rftdask.rollouts.workflows.registry import find_workflow
from rftdask.run.input_fingerprints import MODEL_FILES, Inputs
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object
from rftdask.synchronizer.styles import make_sync_rules

log = logging.getLogger(__name__)

_PROBE = "control/probe"
_CHECKPOINT_FACTOR = 4
"""Size of weights, two AdamW moments and published weights, as a multiple of the model's size."""
_SPARE_BYTES = 64 << 20


def check_inputs(
    stages: list[Config], *, elsewhere: bool = False, tried: bool = False, say: Say = log.info
) -> list[Inputs]:
    """Check all stages of a run, and return the inputs of each.

    elsewhere: True if the run uses other machines. Packages missing on this machine then only log a warning, and are
    checked where the run starts.
    tried: True if workflows, rewards and algorithms of the same code have already been tried here.
    say: receives lines on the progress, if the rows take more than some seconds.
    Raises: ConfigError: lists all problems of the data; UserError: a problem of the storage.
    """
    problems: list[str] = []
    unchecked: list[str] | None = [] if elsewhere else None
    for stage in stages:
        with _noted(problems, unchecked):
            check_pipeline(stage)
    # Until a task pipeline has made its dataset, the checks read the rows of its input.
    with standing_in(stages) as stand_ins:
        all_inputs = _check_inputs(stand_ins, problems, unchecked, tried=tried, say=say)
    for stage, stand_in, inputs in zip(stages, stand_ins, all_inputs, strict=True):
        if stage is not stand_in and (dataset := stage.pipeline_dataset) is not None:
            inputs.fingerprints.pop("dataset" if stage.mode == "train" else str(dataset.name), None)
    return all_inputs


def _check_inputs(
    stages: list[Config], problems: list[str], unchecked: list[str] | None, *, tried: bool, say: Say
) -> list[Inputs]:
    for stage in stages:
        with _noted(problems):
            check_plugins(stage, unchecked)
        with _noted(problems, unchecked):
            check_bubblewrap(stage.explorer.sandbox)
    with _noted(problems, unchecked):
        _check_engines(stages)
    with _noted(problems):
        first = stages[0]  # later stages take their model from the stage before
        if first.has_explorer:
            for model in remote_models(first).values():
                name = model.model_path or first.model.external_model.model_name or ""
                check_service(name, first.model.external_model)
        has_model = first.explorer.rollout_model.traits.has_model or first.trainer.has_model
        if first.trainer.is_hosted:
            _check_hosted(stages, elsewhere=unchecked is not None)
        elif has_model and not first.is_external:
            _check_model_folder(first.model.model_path, "model.model_path")
            if any(stage.reads_images for stage in stages):
                check_reads_images(first.model.model_path, first.explorer.rollout_model.traits.image_models)
            if any(stage.reads_videos for stage in stages):
                check_reads_videos(first.model.model_path)
    with _noted(problems):
        _check_adapter(stages)
    _check_auxiliary(stages, problems)
    # Concurrently, and algorithms in another process, because building one imports torch.
    with ThreadPoolExecutor(1, "algorithms") as thread:
        tokenizers = [
            thread.submit(load_tokenizer, stage) if not problems and _needs_tokenizer(stage) else None
            for stage in stages
        ]
        algorithms = [] if tried else [thread.submit(call, _check_algorithm, stage, needs=[TORCH]) for stage in stages]
        for stage in stages:
            with _noted(problems, unchecked):
                _check_staleness(stage)
        all_inputs = [
            _check_data(stage, tokenizer, problems, unchecked, tried=tried, say=say)
            for stage, tokenizer in zip(stages, tokenizers, strict=True)
        ]
        for checked in algorithms:
            with _noted(problems, unchecked):
                checked.result()
    storage = _check_storage(stages[0])
    for stage in stages:
        with _noted(problems):
            check_owners(storage, stage)
        with _noted(problems):
            try:
                if stage.algorithm.schema_type == "experience":
                    open_log(open_storage(stage.checkpoint_job_dir), stage).check()
            except StorageError as error:
                raise UserError(f"buffer.trainer_input.experience_buffer.path: {error}") from error
    if problems:  # without repetitions: each taskset that uses a wrong plug-in reports it again
        texts = list(dict.fromkeys(problems))
        raise ConfigError([text for text in texts if sum(text in other for other in texts) == 1])
    for text in dict.fromkeys(unchecked or ()):
        log.warning("not checked here, and checked where the run starts: %s", text)
    return all_inputs


def _check_adapter(stages: list[Config]) -> None:
    """Raises: UserError: later stages would add an adapter that is already part of their model."""
    trained = next((stage for stage in stages[:-1] if stage.mode in ("both", "train")), None)
    if trained is not None and any(lora.path is not None for lora in trained.model.lora_configs or ()):
        raise UserError(
            f"model.lora_configs[0].path: the stage after {trained.name} would add the adapter to a model that already "
            "includes it; merge the adapter into the model of model.model_path first, or make each stage a run"
        )


def _check_auxiliary(stages: list[Config], problems: list[str]) -> None:
    """Check the folders of models that explorers or separate workers load; `_check_algorithm` checks those of ranks."""
    for stage in stages:
        loaded = (*stage.models_beside, *stage.models_apart)
        for path, model in stage.explorer.engines()[1:]:
            if model in loaded and model.traits.has_model and not model.traits.is_hosted:
                with _noted(problems):
                    _check_model_folder(model.model_path or "", f"{path}.model_path")


def rewards_of_truths(stages: list[Config]) -> list[str]:
    """Return a line about the rewards of the expected answers of each taskset that is rolled out.

    The stages have been checked by `check_inputs`. No line about a taskset whose plug-ins need packages that only the
    machines of the run have.
    """
    lines = {}
    with standing_in(stages) as stand_ins:
        for stage in stand_ins:
            source = stage.buffer.explorer_input
            for config in (*source.train_tasksets, *source.eval_tasksets) if stage.has_explorer else ():
                with suppress(NotInstalledError):  # `check_inputs` has warned about it
                    text = asyncio.run(try_workflow.rewards_of_truths(Taskset(config), stage.explorer))
                    if text:
                        lines[config.name] = f"taskset {config.name}: {text}"
    return list(lines.values())


@contextmanager
def _noted(problems: list[str], unchecked: list[str] | None = None) -> Iterator[None]:
    """Append the errors of the block to `problems`, so that the next check still runs.

    unchecked: list for packages that are not installed here. None: they are problems too.
    """
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except UserError as error:
        (problems if unchecked is None or not isinstance(error, NotInstalledError) else unchecked).append(str(error))
    except ImportError as error:
        if (remedy := lacks_training(error)) is None:
            raise
        (problems if unchecked is None else unchecked).append(remedy)


def _needs_tokenizer(stage: Config) -> bool:
    """Return True if rows of the stage may be too long, and the model is on this machine."""
    is_dataset = stage.mode == "train" and stage.algorithm.schema_type != "experience"
    refuses = stage.has_explorer and not stage.model.enable_prompt_truncation and not stage.is_external
    if not (is_dataset or refuses or _demonstrations(stage)):
        return False
    path = stage.model.model_path
    if not stage.explorer.rollout_model.traits.has_model or Path(local_model(path)).expanduser().is_dir():
        return True
    log.warning("%s is not on this machine yet, so the lengths of rows are not checked before the start", path)
    return False


def _demonstrations(stage: Config) -> ExperienceBufferConfig | None:
    """Return the dataset of demonstrations that the stage trains with its rollouts; None: there is none."""
    if not stage.num_demonstrations or stage.mode not in ("both", "train"):
        return None
    return stage.buffer.trainer_input.auxiliary_buffers[stage.demonstrations]


def _check_data(
    stage: Config,
    tokenizer: Future[Tokenizer] | None,
    problems: list[str],
    unchecked: list[str] | None,
    *,
    tried: bool,
    say: Say,
) -> Inputs:
    inputs = Inputs()
    sizes = inputs.sizes
    source, folders = stage.buffer.explorer_input, stage.explorer.plugin_dirs
    batch_size, epochs = stage.buffer.batch_size, stage.buffer.total_epochs
    explores = stage.mode in ("both", "explore") and stage.algorithm.schema_type == "experience"
    tasks: list[Task] = []
    with _noted(problems, unchecked):
        load_plugin_folders(folders)  # first, because a plug-in may provide the tasks
    for config in (*(source.train_tasksets if explores else ()), *(source.eval_tasksets if stage.has_explorer else ())):
        # Until it is read, so that later checks find every name.
        sizes[config.name] = 0
        with _noted(problems, unchecked):
            taskset = Taskset(config)
            check_tokens = None
            if tokenizer is not None and not stage.model.enable_prompt_truncation and not stage.is_external:
                check_tokens = partial(check_prompt, tokenizer.result(), stage.model)
            taskset.check(stage.buffer.max_bad_rows, check_tokens, say)
            if make_selector(config.data_selector, tuple(folders)).features:
                taskset.numbers(config.data_selector.feature_keys)
            sizes[config.name] = len(taskset)
            kind = "" if config in source.train_tasksets else "eval/"
            inputs.fingerprints[f"{kind}{config.name}"] = taskset.fingerprint
            load_plugin_folders(folders)  # again, to raise instead of reporting missing workflows
            samples = taskset.samples()
            modules = {f"workflow {name}": find_workflow(name).module for name in {task.workflow for task in samples}}
            rewards = {task.reward_fn for task in samples} - {""}
            modules |= {f"reward function {name}": module_of(get_reward(name)) for name in rewards}
            for name in sorted(name for name, module in modules.items() if module == "__main__"):
                raise UserError(
                    f"{name} is defined in a script or notebook, which workers cannot import; move it to a module on "
                    "PYTHONPATH or in a folder of explorer.plugin_dirs"
                )
            inputs.modules.update(modules.values())
            tasks += samples
    if not problems and not tried:  # trials need all parts
        with _noted(problems, unchecked):
            # Each workflow and reward once, on the first row that names it. In a separate thread, because a notebook
            # has an event loop in this one.
            with ThreadPoolExecutor(1, "trial") as thread:
                trial = thread.submit(lambda: asyncio.run(try_workflow.trial_problems(tasks, stage.explorer)))
                mistakes, imports, doubts = trial.result()
            problems += mistakes
            (problems if unchecked is None else unchecked).extend(imports)
            for text in doubts:
                log.warning("a rollout that ends like this one counts as failed and is not trained: %s", text)
    if stage.algorithm.schema_type != "experience" and stage.mode == "train":
        with _noted(problems, unchecked):
            section, needed = stage.buffer.trainer_input.experience_buffer, stage.buffer.train_batch_size
            dataset = _checked_rows(stage, section, stage.algorithm.schema_type, tokenizer, say)
            inputs.fingerprints["dataset"] = dataset.fingerprint
            sizes["dataset"] = rows = len(dataset)
            if (held_out := stage.buffer.trainer_input.eval_buffer) is not None:
                rows_apart = _checked_rows(stage, held_out, stage.algorithm.schema_type, tokenizer, say)
                inputs.fingerprints["eval/dataset"] = rows_apart.fingerprint
            if stage.buffer.total_steps is None and rows * epochs < needed:
                raise DataError(
                    f"dataset {section.path} has {rows} rows; {epochs} epochs do not fill one batch of {needed}; "
                    "lower buffer.train_batch_size or raise buffer.total_epochs"
                )
    if (demonstrations := _demonstrations(stage)) is not None:
        with _noted(problems, unchecked):
            _checked_rows(stage, demonstrations, "sft", tokenizer, say)
    if not explores or problems:  # sizes of unreadable tasksets are meaningless
        return inputs
    # A learning selector draws the tasks of each step without replacement.
    for config in source.train_tasksets:
        if trait(config.data_selector.selector, "learns") and sizes[config.name] < batch_size:
            problems.append(
                f"buffer.batch_size {batch_size} exceeds the {sizes[config.name]} tasks that "
                f"{config.data_selector.selector_type} chooses from for each step; lower it"
            )
            return inputs
    available = sum(sizes[config.name] for config in source.train_tasksets) * epochs
    if stage.buffer.total_steps is None and available < batch_size:
        problems.append(
            f"buffer.batch_size {batch_size} exceeds the {available} tasks of all epochs ({epochs}); lower it or raise "
            "buffer.total_epochs"
        )
    return inputs


def _check_algorithm(stage: Config) -> None:
    """Check that the parts of the algorithm fit together, and that its teachers and critic exist.

    Runs in another process. The late imports load torch, which this module's other checks do not need.
    """
    load_plugin_folders(stage.explorer.plugin_dirs)  # this process may not know the user's algorithms
    if stage.data_processor.experience_pipeline.operators:
        from rftdask.buffer.batches.operator_pipeline import operators_of  # late: imports torch

        at_commit = stage.data_processor.experience_pipeline.stage == "commit"
        for operator in operators_of(stage):
            if stage.mode in ("both", "explore" if at_commit else "train"):
                operator.check()
    if stage.algorithm.schema_type == "experience" and stage.mode in ("both", "train"):
        make_sample_strategy(stage)
        make_replay(stage)
    if stage.mode not in ("both", "train") or not (stage.trainer.has_model or stage.trainer.is_hosted):
        return
    from rftdask.algorithm.compose import build_algorithm  # late: it needs torch

    algorithm = build_algorithm(stage)
    if stage.trainer.is_hosted:
        from rftdask.trainer.engines.tinker import check_algorithm  # late: as above

        check_algorithm(stage, algorithm)
    coef, replay = stage.trainer.router_aux_loss_coef, stage.algorithm.enable_router_replay
    if (coef or replay) and _size_of(stage.model.model_path, "num_experts_per_tok") == 0:
        key = f"trainer.router_aux_loss_coef {coef}" if coef else "algorithm.enable_router_replay"
        raise UserError(f"{key}: {stage.model.model_path} has no experts; leave it out")
    if algorithm.use_teacher and not stage.explorer.auxiliary_models:
        raise UserError("explorer.auxiliary_models: algorithm.policy_loss_fn needs a teacher model; add it here")
    for number, model in enumerate(stage.explorer.auxiliary_models if algorithm.use_teacher else ()):
        path, at = model.model_path or "", f"explorer.auxiliary_models[{number}].model_path"
        _check_model_folder(path, at)
        ours, theirs = _size_of(stage.model.model_path, "vocab_size"), _size_of(path, "vocab_size")
        # None: the model is not on this machine yet.
        if None not in (ours, theirs) and ours != theirs:
            raise DataError(
                f"{at}: the vocabulary of {path} has {theirs} tokens, and that of the policy "
                f"{stage.model.model_path} has {ours}; use a teacher with the same tokens"
            )
    if algorithm.use_critic and stage.model.critic_model_path:
        _check_model_folder(stage.model.critic_model_path, "model.critic_model_path")


def _checked_rows(
    stage: Config, section: ExperienceBufferConfig, schema: str, tokenizer: Future[Tokenizer] | None, say: Say
) -> Dataset:
    """Open the dataset of a buffer and check its rows, as far as `find_bad_rows` does. A few bad rows are logged.

    tokenizer: None: lengths are not checked.
    Raises: DataError: it does not exist, or more than `buffer.max_bad_rows` rows do not fit its format and the model.
    """
    name, most = f"dataset {section.path}", stage.buffer.max_bad_rows
    loaded = None if tokenizer is None else tokenizer.result()
    dataset = open_dataset(
        section.path or "", split=section.split, subset_name=section.subset_name, table=section.table
    )
    try:
        read_schema, fmt = schema_of(schema, dataset, section.format)
        check_columns(dataset, read_schema, fmt)
        check = partial(check_row, read_schema, fmt, has_label=schema == "kto" and read_schema == "sft")
        rows = None
        if loaded is not None:
            rows = make_rows(schema, dataset, loaded, section.format, stage.model.max_model_len)
        tokenize = None if rows is None else lambda number: rows.read([number])
        num_bad, problem = find_bad_rows(name, len(dataset), lambda n: check(n, dataset[n]), tokenize, say)
        if num_bad > most:
            raise DataError(f"{problem}; fix the data, or raise buffer.max_bad_rows ({most})")
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    if num_bad:
        log.warning("%s: %s; such a row is not trained (buffer.max_bad_rows %d)", name, problem, most)
    return dataset


def _check_staleness(stage: Config) -> None:
    if stage.mode != "both" or stage.algorithm.schema_type != "experience" or stage.synchronizer.max_staleness is None:
        return
    rules = make_sync_rules(stage)
    if stage.synchronizer.max_staleness < rules.smallest_staleness_bound:
        raise DataError(
            f"synchronizer.max_staleness {stage.synchronizer.max_staleness} is too low: in style {rules.style}, "
            f"sync_offset {rules.sync_offset}, intervals {rules.explorer_sync_interval} (explorer) and "
            f"{rules.trainer_sync_interval} (trainer), {rules.experiences_per_step} experiences in an explore step and "
            f"{rules.train_batch_size} in a batch, tokens get {rules.smallest_staleness_bound} steps old; raise it to "
            f"{rules.smallest_staleness_bound}"
        )


def _check_engines(stages: list[Config]) -> None:
    """Check that ranks and engines have their packages, without importing them: vLLM takes ten seconds."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    for stage in stages:
        for path, section in stage.explorer.engines() if stage.has_explorer else ():
            package = section.traits.required_package
            if package is not None and find_spec(package) is None:
                where = " on a machine with a GPU (for CPUs see docs/engines.md), or use transformers"
                raise NotInstalledError(
                    f"{path}.engine_type: {package} is not installed; pip install 'rftdask[{package}]'"
                    + where * (not section.traits.is_hosted)
                )


def _check_hosted(stages: list[Config], *, elsewhere: bool) -> None:
    """Check what a model at the Tinker service needs on this machine. Raises: UserError: it is missing."""
    if len(stages) > 1:
        raise UserError(
            f"stages: {len(stages)} stages need a model folder from each stage, but the Tinker service creates none; "
            "run one stage"
        )
    path = stages[0].model.model_path
    if is_model_name(path) and not Path(path).exists() and cached_folder(path) is None:
        require_model(path, "model.model_path")
    load_tokenizer(stages[0])
    if not elsewhere:
        require_key()


def _check_model_folder(path: str, key: str) -> None:
    folder = Path(path).expanduser()
    try:
        if not folder.exists():
            if is_model_name(path):
                return require_model(path, key)
            raise DataError(f"{key}: {path!r} does not exist; give a model folder or a name on the Hugging Face hub")
        if not (folder / "config.json").is_file():
            raise DataError(f"{key}: {path!r} is not a model folder: it has no config.json; give a model folder")
        if not has_tokenizer(folder):
            raise DataError(
                f"{key}: {path!r} has no tokenizer; save one there with tokenizer.save_pretrained({path!r})"
            )
        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise DataError(f"{key}: {path!r} has no weights (*.safetensors)")
        if (folder / "adapter_config.json").exists():
            raise DataError(f"{key}: {path!r} {WITH_ADAPTER}")
        for file in folder.iterdir():
            # Opened here; otherwise a worker would find an unreadable file after the cluster has started.
            if file.suffix in MODEL_FILES and file.is_file():
                file.open("rb").close()
        check_folder(folder)
    except PermissionError as error:
        where = error.filename or folder
        raise DataError(f"{key}: {where} cannot be read: {error.strerror}; check the owner and the mode") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # the last three: unexpected JSON structure
        raise DataError(f"{key}: {path!r} is not a complete model: {error}") from error


def _size_of(path: str, key: str) -> int | None:
    """Read a size from the config.json of a model, or the default of the model's class if the file omits it.

    Returns: 0: the model class has no such size. None: not known on this machine.
    """
    file = Path(local_model(path)).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        config = parse_object(file.read_bytes())
        # Multimodal models have the sizes of their language part in a separate section.
        size: Any = (config.get("text_config") or config).get(key)
        if size is None:
            from transformers import AutoConfig  # late: importing transformers takes most of a second

            size = getattr(AutoConfig.from_pretrained(file.parent).get_text_config(), key, 0)
        return int(size)
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # `_check_model_folder` reports a malformed file


def check_owners(storage: Storage, stage: Config) -> None:
    """Check that the storage can lock a run that several processes share. Raises: UserError: it cannot."""
    if storage.has_create_only:
        return
    # One process needs no lock. Two commands on one run need one, and so do several machines that may drive it.
    apart = stage.algorithm.schema_type == "experience" and stage.mode in ("explore", "train")
    if not apart and stage.cluster.is_one_machine:
        log.warning("%s cannot lock this run: start no second command before this one has ended", storage.url)
        return
    setup = f"mode {stage.mode}, which shares a run with another command" if apart else f"cluster {stage.cluster.type}"
    raise UserError(
        f"checkpoint_root_dir: {storage.url} has no conditional writes, without which two processes could own the same "
        f"role or write the same batch. They are required for {setup}; use mode both "
        "on one machine, or a folder on a local or shared file system, s3://, gs:// or abfs://"
    )


def _check_storage(stage: Config) -> Storage:
    url = stage.checkpoint_job_dir
    try:
        storage = open_storage(url)
        if stage.private:
            storage.make_private()  # before it has content
        storage.put(_PROBE, b"probe")
        storage.remove(_PROBE)
    except StorageError as error:
        raise UserError(f"checkpoint_root_dir: cannot write to {url}: {error}") from error
    folder, root = Path(stage.model.model_path).expanduser(), Path(storage.url)
    # Object stores do not report free space.
    if root.is_dir():
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
        needed, free = weights * _CHECKPOINT_FACTOR + _SPARE_BYTES, shutil.disk_usage(root).free
        if free < needed:
            raise UserError(
                f"checkpoint_root_dir: {root} has {free / 1e9:.2f} GB free; a checkpoint and its weights need about "
                f"{needed / 1e9:.2f} GB; free some space or choose another folder"
            )
    return storage
