"""Checks of what a config points to: data, models, plug-ins, storage. Everything is looked at before anything starts.

Raises UserErrors that say what, where and what to do; changes nothing but a probe file that it removes again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from rftdask.data.datasets import Dataset, open_dataset
from rftdask.data.hub import cached_folder, has_tokenizer, is_model_name, local_model, require_model
from rftdask.data.images import check_reads_images, check_reads_videos
from rftdask.data.supervised import check_columns, read_examples, schema_of
from rftdask.data.task import Task
from rftdask.data.task_pipeline import check_pipeline, standing_in
from rftdask.data.tasksets import Taskset
from rftdask.data.tokenizer import load_tokenizer
from rftdask.errors import ConfigError, DataError, NotInstalledError, StorageError, UserError, lacks_training
from rftdask.models.model_shape import check_folder
from rftdask.models.tinker_service import require_key
from rftdask.processes.zygote import TORCH, call
from rftdask.rollouts.policy.remote_model import check_service
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.sandbox.bubblewrap import check_bubblewrap
from rftdask.rollouts.try_workflow import trial_problems
from rftdask.rollouts.workflows.registry import find_workflow
from rftdask.run.input_fingerprints import MODEL_FILES
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object
from rftdask.synchronizer.styles import make_sync_rules

log = logging.getLogger(__name__)

_PROBE = "control/probe"
_CHECKPOINT_FACTOR = 4
"""Weights, two AdamW moments and published weights, in sizes of the model."""
_SPARE_BYTES = 64 << 20


_ROWS_READ_AHEAD = 100
"""Rows of a dataset that are looked at before anything starts."""


@dataclass(frozen=True)
class Inputs:
    """What a stage reads, as far as its checks found it."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Rows by the name of the taskset; of a supervised dataset as "dataset"."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Content hashes by the same names, with "eval/" before what only evaluates."""
    modules: set[str] = field(default_factory=set)
    """Names of those that have the workflows and rewards."""


def check_inputs(stages: list[Config], *, elsewhere: bool = False, tried: bool = False) -> list[Inputs]:
    """Check all stages of a run; for each, what it reads.

    elsewhere: the run will be on other machines, which may have what is not installed on this one: it is said to be
    unchecked, and is checked where the run starts.
    tried: workflows, rewards and algorithms of the same code have been, here, and are not again.
    Raises: ConfigError with all problems of the data at once; UserError for storage.
    """
    problems: list[str] = []
    unchecked: list[str] | None = [] if elsewhere else None
    for stage in stages:
        with _noted(problems, unchecked):
            check_pipeline(stage)
    # Until a pipeline has made a dataset, its rows are checked as they go in.
    with standing_in(stages) as read:
        found = _check_inputs(read, problems, unchecked, tried=tried)
    for stage, now, inputs in zip(stages, read, found, strict=True):
        if stage is not now and (dataset := stage.pipeline_dataset) is not None:
            inputs.fingerprints.pop("dataset" if stage.mode == "train" else str(dataset.name), None)
    return found


def _check_inputs(
    stages: list[Config], problems: list[str], unchecked: list[str] | None, *, tried: bool
) -> list[Inputs]:
    for stage in stages:
        with _noted(problems):
            check_plugins(stage, unchecked)
        with _noted(problems, unchecked):
            check_bubblewrap(stage.explorer.sandbox)
    with _noted(problems, unchecked):
        _check_engines(stages)
    with _noted(problems):
        first = stages[0]  # later stages train what the one before makes
        if first.has_explorer:
            # Late: it loads Dask, which a fork that checks an algorithm does without.
            from rftdask.engines.spec import remote_models

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
    _check_auxiliary(stages, problems)
    # Elsewhere, and meanwhile, since it takes torch, which nothing else needs in this process.
    with ThreadPoolExecutor(1, "algorithms") as thread:
        algorithms = [] if tried else [thread.submit(call, _check_algorithm, stage, needs=[TORCH]) for stage in stages]
        for stage in stages:
            with _noted(problems, unchecked):
                _check_staleness(stage)
        found = [_check_data(stage, problems, unchecked, tried=tried) for stage in stages]
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
    if problems:  # each once: what is wrong with a key's plug-in is found again in the tasksets that use it
        told = list(dict.fromkeys(problems))
        raise ConfigError([text for text in told if sum(text in other for other in told) == 1])
    for text in dict.fromkeys(unchecked or ()):
        log.warning("not checked here, and checked where the run starts: %s", text)
    return found


def _check_auxiliary(stages: list[Config], problems: list[str]) -> None:
    """The folders of the auxiliary models that explorers or workers of their own load; teachers are looked at with the
    algorithm.
    """
    for stage in stages:
        loaded = (*stage.models_beside, *stage.models_apart)
        for path, model in stage.explorer.engines()[1:]:
            if model in loaded and model.traits.has_model and not model.traits.is_hosted:
                with _noted(problems):
                    _check_model_folder(model.model_path or "", f"{path}.model_path")


@contextmanager
def _noted(problems: list[str], unchecked: list[str] | None = None) -> Iterator[None]:
    """Adds the mistake that the block finds to `problems`, so that the next check still runs. unchecked: takes what is
    not installed here; None: that is a mistake.
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


def _check_data(stage: Config, problems: list[str], unchecked: list[str] | None, *, tried: bool) -> Inputs:
    """All datasets, each of which can be read and has workflows and rewards that exist and work."""
    inputs = Inputs()
    sizes = inputs.sizes
    source, folders = stage.buffer.explorer_input, stage.explorer.plugin_dirs
    wanted, epochs = stage.buffer.batch_size, stage.buffer.total_epochs
    # Tasksets one by one, then their workflows, then a dataset to train on, then whether there is enough for a batch.
    explores = stage.mode in ("both", "explore") and stage.algorithm.schema_type == "experience"
    tasks: list[Task] = []
    with _noted(problems, unchecked):
        load_plugin_folders(folders)  # first: a file of theirs may be what makes the tasks
    for config in (
        *(source.train_tasksets if explores else ()),
        *(source.eval_tasksets if stage.has_explorer else ()),
    ):
        # Until it can be read; so later checks find every name.
        sizes[config.name] = 0
        with _noted(problems, unchecked):
            taskset = Taskset(config)
            taskset.check()
            if make_selector(config.data_selector, tuple(folders)).features:
                taskset.numbers(config.data_selector.feature_keys)
            sizes[config.name] = len(taskset)
            kind = "" if config in source.train_tasksets else "eval/"
            inputs.fingerprints[f"{kind}{config.name}"] = taskset.fingerprint
            load_plugin_folders(folders)  # again: where that failed, nothing of them can be found
            samples = taskset.samples()
            modules = {f"workflow {name}": find_workflow(name).module for name in {task.workflow for task in samples}}
            rewards = {task.reward_fn for task in samples} - {""}
            modules |= {f"reward function {name}": module_of(get_reward(name)) for name in rewards}
            for name in sorted(name for name, module in modules.items() if module == "__main__"):
                raise UserError(
                    f"{name} is defined in a script or notebook, where no worker finds it; move it to a module on "
                    "PYTHONPATH or in a folder of explorer.plugin_dirs"
                )
            inputs.modules.update(modules.values())
            # One row of each workflow and reward is enough to see that they work.
            tasks += samples
    if not problems and not tried:  # what cannot be found cannot be tried
        with _noted(problems, unchecked):
            _try_workflows(stage, tasks, problems, unchecked)
    if stage.algorithm.schema_type != "experience" and stage.mode == "train":
        with _noted(problems):
            section, needed = stage.buffer.trainer_input.experience_buffer, stage.buffer.train_batch_size
            dataset = _checked_rows(section, stage.algorithm.schema_type)
            inputs.fingerprints["dataset"] = dataset.fingerprint
            sizes["dataset"] = rows = len(dataset)
            if (held_out := stage.buffer.trainer_input.eval_buffer) is not None:
                inputs.fingerprints["eval/dataset"] = _checked_rows(held_out, stage.algorithm.schema_type).fingerprint
            if stage.buffer.total_steps is None and rows * epochs < needed:
                raise DataError(
                    f"dataset {section.path} has {rows} rows, {epochs} epochs of it do not "
                    f"fill one batch of {needed} (buffer.train_batch_size)"
                )
    if not explores or problems:  # the sizes of what cannot be read say nothing
        return inputs
    # A selector that learns draws each step without replacement.
    for config in source.train_tasksets:
        if trait(config.data_selector.selector, "learns") and sizes[config.name] < wanted:
            problems.append(
                f"buffer.batch_size {wanted} exceeds the {sizes[config.name]} tasks that "
                f"{config.data_selector.selector_type} chooses from for each step; lower it"
            )
            return inputs
    available = sum(sizes[config.name] for config in source.train_tasksets) * epochs
    if stage.buffer.total_steps is None and available < wanted:
        problems.append(
            f"buffer.batch_size {wanted} exceeds all tasks there are: {available} "
            f"({epochs} epochs); lower it or raise buffer.total_epochs"
        )
    return inputs


def _try_workflows(stage: Config, tasks: list[Task], problems: list[str], unchecked: list[str] | None) -> None:
    """Run each workflow and reward once, on the first row that names it. Raises: UserError: one cannot be found."""
    # In a thread: a notebook has an event loop in this one.
    with ThreadPoolExecutor(1, "trial") as thread:
        mistakes, imports, doubts = thread.submit(lambda: asyncio.run(trial_problems(tasks, stage.explorer))).result()
    problems += mistakes
    (problems if unchecked is None else unchecked).extend(imports)
    for text in doubts:
        log.warning("a rollout that ends like this one is failed, and trains nothing: %s", text)


def _check_algorithm(stage: Config) -> None:
    """The parts of the algorithm go together, and what it learns from beside rollouts is there."""
    load_plugin_folders(stage.explorer.plugin_dirs)  # in a process that may not know the user's algorithms
    if stage.data_processor.experience_pipeline.operators:
        # Late, as below: it needs torch, which reading and checking a config does without.
        from rftdask.buffer.batches.operator_pipeline import operators_of

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
    section = stage.buffer.trainer_input.experience_buffer
    if algorithm.schema == "sft" and section.format.return_assistant_tokens_mask:
        from rftdask.trainer.rank import build_reader  # late: as above

        build_reader(section, algorithm.schema, stage, load_tokenizer(stage))  # whether the template can do it
    if algorithm.use_teacher and not stage.explorer.auxiliary_models:
        raise UserError("explorer.auxiliary_models: required for the teacher of algorithm.policy_loss_fn")
    for number, model in enumerate(stage.explorer.auxiliary_models if algorithm.use_teacher else ()):
        path, at = model.model_path or "", f"explorer.auxiliary_models[{number}].model_path"
        _check_model_folder(path, at)
        ours, theirs = _size_of(stage.model.model_path, "vocab_size"), _size_of(path, "vocab_size")
        # It is not known of a model that is not on this machine yet.
        if None not in (ours, theirs) and ours != theirs:
            raise DataError(
                f"{at}: {path} has a vocabulary of {theirs} tokens, the policy "
                f"{stage.model.model_path} one of {ours}; only a model of the same tokens can score its responses"
            )
    if algorithm.use_critic and stage.model.critic_model_path:
        _check_model_folder(stage.model.critic_model_path, "model.critic_model_path")
    if stage.num_demonstrations:
        _checked_rows(stage.buffer.trainer_input.auxiliary_buffers[stage.demonstrations], "sft")


def _checked_rows(section: ExperienceBufferConfig, schema: str) -> Dataset:
    """The dataset of a buffer. Raises: DataError: there is none, or its format does not fit its first rows."""
    path, split = section.path or "", section.split
    dataset = open_dataset(path, split=split, subset_name=section.subset_name, table=section.table)
    try:
        schema, fmt = schema_of(schema, dataset, section.format)
        check_columns(dataset, schema, fmt)
        for number in range(min(len(dataset), _ROWS_READ_AHEAD) if schema != "cpt" else 0):
            read_examples(schema, number, dataset[number], fmt)
    except DataError as error:
        raise DataError(f"dataset {section.path}: {error}") from error
    return dataset


def _check_staleness(stage: Config) -> None:
    if stage.mode != "both" or stage.algorithm.schema_type != "experience" or stage.synchronizer.max_staleness is None:
        return
    rules = make_sync_rules(stage)
    if stage.synchronizer.max_staleness < rules.smallest_staleness_bound:
        raise DataError(
            f"synchronizer.max_staleness {stage.synchronizer.max_staleness} cannot be kept: in style {rules.style}, "
            f"sync_offset {rules.sync_offset}, intervals {rules.explorer_sync_interval} (explorer) and "
            f"{rules.trainer_sync_interval} (trainer), {rules.experiences_per_step} experiences in an explore step and "
            f"{rules.train_batch_size} in a batch, tokens get {rules.smallest_staleness_bound} steps old; "
            "allow that many"
        )


def _check_engines(stages: list[Config]) -> None:
    """What ranks and engines need beside this package is installed; found without importing it, which takes vLLM ten
    seconds.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    for stage in stages:
        for path, section in stage.explorer.engines() if stage.has_explorer else ():
            package = section.traits.required_package
            if package is not None and find_spec(package) is None:
                where = " on a machine with a GPU (docs/engines.md says how on a CPU), or use transformers"
                raise NotInstalledError(
                    f"{path}.engine_type: {package} is not installed; pip install 'rftdask[{package}]'"
                    + where * (not section.traits.is_hosted)
                )


def _check_hosted(stages: list[Config], *, elsewhere: bool) -> None:
    """Raises: UserError: what a model at a service needs here is not there."""
    if len(stages) > 1:
        raise UserError(
            "stages: a later stage begins with the model folder that the one before leaves, and a model at the Tinker "
            "service leaves none; run one stage"
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
            raise DataError(f"{key}: {path!r} has no config.json, so it is no model folder")
        if not has_tokenizer(folder):
            raise DataError(
                f"{key}: {path!r} has no tokenizer; save one there with tokenizer.save_pretrained({path!r})"
            )
        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise DataError(f"{key}: {path!r} has no weights (*.safetensors)")
        for file in folder.iterdir():
            # Opened here, because a file that may not be read would else be found by a
            # worker, after the cluster has started.
            if file.suffix in MODEL_FILES and file.is_file():
                file.open("rb").close()
        check_folder(folder)
    except PermissionError as error:
        where = error.filename or folder
        raise DataError(f"{key}: {where} cannot be read: {error.strerror}; check the owner and the mode") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # all but the first: JSON of another shape
        raise DataError(f"{key}: {path!r} is no whole model: {error}") from error


def _size_of(path: str, key: str) -> int | None:
    """What the config.json of a model on this machine says, or means where it leaves out a default of the model's
    class; 0: such a model has no such size; None: it is not known.
    """
    file = Path(local_model(path)).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        config = parse_object(file.read_bytes())
        # A model that reads images, too, has the sizes of its language part in a section of their own.
        said: Any = (config.get("text_config") or config).get(key)
        if said is None:
            from transformers import AutoConfig  # late: importing transformers takes most of a second

            said = getattr(AutoConfig.from_pretrained(file.parent).get_text_config(), key, 0)
        return int(said)
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # of another shape, which its own check tells


def check_owners(storage: Storage, stage: Config) -> None:
    """Raises: UserError: several processes would have to agree on a storage where they cannot."""
    if storage.has_create_only:
        return
    # One process needs no lock; two commands on one run, or machines that each may drive, do.
    apart = stage.algorithm.schema_type == "experience" and stage.mode in ("explore", "train")
    if not apart and stage.cluster.is_one_machine:
        log.warning("%s cannot keep a second command from this run: start none before this one has ended", storage.url)
        return
    setup = f"mode {stage.mode}, which shares a run with another command" if apart else f"cluster {stage.cluster.type}"
    raise UserError(
        f"checkpoint_root_dir: {storage.url} cannot create a file only where there is none (no conditional writes), so "
        f"two processes could both own a role or write the batch of one step: {setup}, is refused there; use mode both "
        "on one machine, or a folder on a local or shared file system, s3://, gs:// or abfs://"
    )


def _check_storage(stage: Config) -> Storage:
    url = stage.checkpoint_job_dir
    try:
        storage = open_storage(url)
        if stage.private:
            storage.make_private()  # before anything is in it
        storage.put(_PROBE, b"probe")
        storage.remove(_PROBE)
    except StorageError as error:
        raise UserError(f"checkpoint_root_dir: cannot write to {url}: {error}") from error
    folder, root = Path(stage.model.model_path).expanduser(), Path(storage.url)
    # Only a folder has a disk that can be full; an object store has no such number.
    if root.is_dir():
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
        needed, free = weights * _CHECKPOINT_FACTOR + _SPARE_BYTES, shutil.disk_usage(root).free
        if free < needed:
            raise UserError(
                f"checkpoint_root_dir: {root} has {free / 1e9:.2f} GB free, a checkpoint and its weights need about "
                f"{needed / 1e9:.2f} GB; free some space or choose another folder"
            )
    return storage
