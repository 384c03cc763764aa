"""Run folder: opening it, owning it, and refusing what does not belong in it.

`run.json` holds the config as the run began; `control/config-<fingerprint>.json` one as a later start resolved it, for
its workers; `control/lease-<role>-<n>.json` says which process works on a role. Leases are numbered and create-only, so
of two that start at once one wins, and an owner that sees a higher number than its own stops. Explorers of different
names have roles of their own, `explorer.<name>`, and are beside each other only in mode explore.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rftdask.config import Config, fill_from_environment, load_config, names_environment, replace
from rftdask.config.base import plain
from rftdask.errors import DamagedError, DataError, FencedError, NotFoundError, UserError
from rftdask.run.lease import (
    _excludes,
    _held,
    _is_alive,
    _parse_lease,
    _this_process,
    lease_holders,
    lease_role,
    roles_of,
)
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object
from rftdask.storage.safe_text import mask

RUN_FILE = "run.json"
STOP_FILE = "control/STOP"
END_FILE = "control/END.json"
_BEGUN = "begun"
"""In place of how the run ended, while it has not."""
CONFIG_FILE = "control/config-{}.json"
"""Of a config, by its fingerprint."""
_CONFIG_EDITION = 2
"""Of what the words of a config mean, as `run.json` says it. 1, where it says nothing: plaintext said what raw says
now, and supervised rows looked at neither `system_prompt_key` nor `reply_prefix`."""
_PACKAGES = ("rftdask", "torch", "transformers", "dask", "distributed", "pyarrow", "fsspec", "vllm")

_FREE_KEYS = {
    "checkpoint_root_dir",
    "cluster",
    "continue_from_checkpoint",
    "log",
    "mode",
    "monitor",
    "private",
    "service",
    "stages",
    "buffer.explorer_input.eval_tasksets",
    "data_processor.task_pipeline.num_process",
    "buffer.total_epochs",
    "buffer.total_steps",
    "buffer.trainer_input.eval_buffer",
    "buffer.trainer_input.experience_buffer.capacity",
    "buffer.trainer_input.experience_buffer.max_read_timeout",
    "buffer.trainer_input.experience_buffer.max_unread_bytes",
    "explorer.bench_on_latest_checkpoint",
    "explorer.env_vars",
    "explorer.eval_interval",
    "explorer.eval_on_startup",
    "explorer.max_retry_times",
    "explorer.max_timeout",
    "explorer.max_workers",
    "explorer.min_workers",
    "explorer.name",
    "explorer.rollout_model.data_parallel_size",
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.gpu_memory_utilization",
    "explorer.rollout_model.pipeline_parallel_size",
    "explorer.rollout_model.tensor_parallel_size",
    "synchronizer.poll_interval_s",
    "synchronizer.sync_timeout",
    "synchronizer.full_publish_interval",
    "trainer.eval_interval",
    "trainer.gradient_checkpointing",
    "trainer.max_checkpoints_to_keep",
    "trainer.max_restarts",
    "trainer.num_ranks",
    "trainer.offload_policy",
    "trainer.prefetch_layers",
    "trainer.reshard_after_forward",
    "trainer.save_hf_checkpoint",
    "trainer.save_interval",
    "trainer.save_minutes",
    "trainer.save_strategy",
    "trainer.tensor_parallel_size",
    "trainer.total_steps",
    "trainer.trainer_strategy",
    "trainer.ulysses_sequence_parallel_size",
}
"""What a later start may change: it decides how far, how fast or how loud a run goes, not what its steps are."""

_FREE_OF_MODELS = (
    *("engine_num", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "gpu_memory_utilization"),
    *("requests_per_minute", "tokens_per_minute", "max_retries", "prompt_price", "response_price"),
)
"""The same of each auxiliary model: where it is, how fast it is asked, and what that costs."""

_TRAINED_KEYS = {"buffer.explorer_input.taskset", "buffer.explorer_input.tasksets"}
"""What a later start in mode bench may leave out."""


def allocate_run_name(config: Config) -> Config:
    """Return the config of this start, with the time appended to its name if `continue_from_checkpoint` is false and
    its folder is not empty. A later start of the returned config continues its run. Makes no folder.

    Raises: UserError: the mode runs only one of two roles that must share a folder, so it cannot take a new name.
    """
    if config.continue_from_checkpoint or config.mode in ("bench", "serve"):
        return config
    changes: dict[str, Any] = {"continue_from_checkpoint": True}
    if open_storage(config.checkpoint_job_dir).list():
        alone = config.mode == "train" and config.algorithm.schema_type != "experience"
        if not (config.stages or config.has_both_roles or alone):
            raise UserError(
                f"continue_from_checkpoint: {config.checkpoint_job_dir} is not empty, and mode {config.mode} finds the "
                "other role of its run there; leave it out to go on with that run, or choose another name for both"
            )
        changes["name"] = f"{config.name}_{time.strftime('%Y%m%d%H%M%S', time.gmtime())}"
    return replace(config, changes)


def check_run(storage: Storage, config: Config, free: Collection[str] = (), explore_steps: int | None = None) -> None:
    """Whether the folder could be opened for `config` now; changes nothing.

    Args: free: keys that are not known yet, and so not compared. explore_steps: as of `Lease`.
    Raises: DataError: it is of another config; FencedError: a living process works on a role of it, or is an explorer
        that this one cannot be beside.
    """
    if storage.exists(RUN_FILE):
        _check_same(storage, config, free)
    held = lease_holders(storage)
    for role in roles_of(config):
        own = lease_role(config, role)
        for other, holder in held.items():
            if other == own or (role == "explorer" and _excludes(other, holder, explore_steps)):
                raise FencedError(_held(storage, other, holder, own, explore_steps))


def open_run(
    storage: Storage,
    config: Config,
    made_of: Mapping[str, Any] | None = None,
    placement: str | None = None,
    *,
    on_gpus: bool = False,
) -> Config:
    """Open the run folder for `config`, making it at the first start; the config to run with.

    For the first start to write down: made_of: what the run is made of beside its config (made_of.py); placement: where
    its roles are, as `Layout.describe` says it. on_gpus: whether the trainer is, which decides what `deterministic`
    leaves open.
    Raises: DataError: the folder is of another config, naming every key that differs, or is not a run folder.
    """
    # What the config leaves open is settled from here on: how large work units are, and whether bits repeat.
    settled = config.deterministic is None
    first = _settled(replace(config, {"deterministic": not on_gpus}) if settled else config, config)
    # Of two first starts one makes the file; the other is compared with it like any later start.
    if not storage.exists(RUN_FILE) and storage.put_new(RUN_FILE, _run_json(first, made_of, placement)):
        return first
    return _check_same(storage, config)


def _check_same(storage: Storage, config: Config, free: Collection[str] = ()) -> Config:
    """`config` with what it takes over from the run's. Raises: DataError: they differ in what matters."""
    was = read_run_config(storage)
    if was.pipeline_place is not None:  # what it makes is where the run is now
        was = replace(was, {"checkpoint_root_dir": config.checkpoint_root_dir})
    # Before the comparison: what the first start chose by itself is not something that the user has changed.
    config = _settled(config, was)
    free = {*_FREE_KEYS, *free}
    if config.mode == "bench" and not config.buffer.explorer_input.train_tasksets:
        free |= _TRAINED_KEYS  # an evaluation reads none of them
    differing = [
        mask(f"{key}: was {old!r}, is {new!r}")
        for key, old, new in _differences(_compared(was), _compared(config))
        if not (key == "model.model_path" and _is_of_the_run(storage, old, new))
        and not any(key == other or key.startswith(f"{other}.") for other in free)
    ]
    if differing:
        raise DataError(
            f"{storage.url} holds a run of another configuration; set these back, or choose another name:\n"
            + "\n".join(f"  - {line}" for line in differing)
        )
    return config


@contextmanager
def private_files(storage: Storage, config: Config) -> Iterator[None]:
    """What this process writes in the block, and every process that it starts there, only its owner may read, if the
    config says so; the run folder first of all.
    """
    if not config.private:
        yield
        return
    storage.make_private()
    before = os.umask(0o077)  # for what goes by no storage: logs, databases, trackers
    try:
        yield
    finally:
        os.umask(before)


def record_run(storage: Storage, config: Config) -> None:
    """Make the folder of a run with stages known as a run; the folder of each stage is what refuses another config."""
    # Renewed at each start: further stages may be added to a run.
    if config.stages and not storage.put_new(RUN_FILE, _run_json(config)):
        storage.put(RUN_FILE, _run_json(config))


def read_run(storage: Storage) -> dict[str, Any]:
    """`run.json` of an existing run, its config in the words of today. Raises: DataError: there is none."""
    try:
        tree = parse_object(storage.get(RUN_FILE))
        if not isinstance(tree.get("config"), Mapping):
            raise ValueError("it holds no config")
        if "config_edition" not in tree:
            tree["config"] = _as_meant(tree["config"])
    except NotFoundError:
        raise DataError(
            f"{storage.url} is not a run folder: it has no {RUN_FILE}; give <checkpoint_root_dir>/<project>/<name>, "
            "the folder that rftdask validate tells"
        ) from None
    except ValueError as error:
        raise DamagedError(f"{storage.url}/{RUN_FILE} is damaged: {error}") from error
    return tree


def read_run_config(storage: Storage) -> Config:
    """The config with which an existing run began. Raises: DataError: there is none."""
    # Once begun it is continued, whatever was asked for when it began.
    return load_config({**read_run(storage)["config"], "continue_from_checkpoint": True}, was_checked=True)


def record_config(storage: Storage, config: Config) -> str:
    """Write the config of this start down for the workers that are sent its fingerprint, which is returned.

    `run.json` holds the config of the first start; a later one may differ from it in the free keys, and the two roles
    of a run may be two commands, each with its own. So each config has a file of its own, named by its content.
    """
    data = json.dumps(config.to_dict(), sort_keys=True).encode()
    # Of the bytes as written, keys sorted, so that equal configs share a file whoever wrote it.
    fingerprint = hashlib.sha256(data).hexdigest()[:32]
    path = CONFIG_FILE.format(fingerprint)
    # What a crash or a disk left of it is put right: who knows the config can write the very same bytes again.
    if not storage.put_new(path, data) and storage.get(path) != data:
        storage.put(path, data)
    return fingerprint


def read_config(storage: Storage, fingerprint: str) -> Config:
    """The config that `record_config` gave this fingerprint.

    Raises: DataError: the folder has none such; DamagedError: the file is not what was written.
    """
    path = CONFIG_FILE.format(fingerprint)
    try:
        data = storage.get(path)
    except NotFoundError:
        raise DataError(
            f"{storage.url} has no {path}, which the driver of the run wrote: does this machine see the driver's "
            "run folder (checkpoint_root_dir)?"
        ) from None
    if hashlib.sha256(data).hexdigest()[:32] != fingerprint:
        raise DamagedError(f"{storage.url}/{path} is damaged: its content does not fit its name; start the run again")
    return load_config(json.loads(data), was_checked=True)


def folders_of(storage: Storage) -> dict[str, Storage]:
    """The folder of a run, "", then those of its stages by name: all below `storage`, wherever the run began."""
    stages = read_run_config(storage).stages if storage.exists(RUN_FILE) else ()
    names = [stage.stage_name for stage in stages]
    return {"": storage} | {name: open_storage(f"{storage.url.rstrip('/')}/{name}") for name in names}


def note_begin(storage: Storage) -> None:
    """Say who drives the run, from before it has a role until `note_end`; an earlier end is not told any more."""
    storage.put(END_FILE, json.dumps({**_this_process(time.time()), "status": _BEGUN, "error": ""}).encode())


def read_driver(storage: Storage) -> dict[str, Any] | None:
    """The process that drives the run now: {"host", "pid", ...}. Of another machine only in its first half minute."""
    try:
        driver = _parse_lease(storage.get(END_FILE))
    except (NotFoundError, ValueError):  # it ended, and said how
        return None
    return driver if _is_alive(driver, time.time()) else None


def note_end(storage: Storage, status: str, error: str) -> None:
    """The last words of a run, for who asks later why it does not run; a run that was killed leaves none."""
    storage.put(END_FILE, json.dumps({"status": status, "error": mask(error), "time_s": time.time()}).encode())


def read_end(storage: Storage) -> str | None:
    """How the run said that it ended: "failed: RoleError: ..."; None: it said nothing."""
    try:
        end = parse_object(storage.get(END_FILE))
        if end["status"] == _BEGUN:
            return None
        return f"{end['status']}: {end['error']}" if end["error"] else str(end["status"])
    except (NotFoundError, ValueError, KeyError):
        return None


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for a run."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _settled(config: Config, first: Config) -> Config:
    """The config with what the run began with where it says nothing: the size of work units, on which slots of groups
    depend, and whether bits repeat."""
    settled: dict[str, Any] = {}
    # Derived from the number of engines at the first start; another number of engines later must not move it.
    if config.explorer.tasks_per_batch is None:
        settled["explorer.tasks_per_batch"] = first.tasks_per_unit
    if config.deterministic is None and first.deterministic is not None:
        settled["deterministic"] = first.deterministic
    return replace(config, settled) if settled else config


def _run_json(config: Config, made_of: Mapping[str, Any] | None = None, placement: str | None = None) -> bytes:
    told = config.to_dict()
    folder = config.cluster.private_folder
    if folder is not None and not names_environment(folder):  # who attaches is elsewhere
        told["cluster"]["private_folder"] = str(Path(folder).expanduser().absolute())
    # Versions and seed are for people; a later start is held against the config and what the run is made of.
    tree = {"config": told, "versions": package_versions(), "seed": config.seed, "created_s": time.time()}
    tree |= {"cwd": os.getcwd(), "config_edition": _CONFIG_EDITION} | ({} if made_of is None else {"made_of": made_of})
    tree |= {} if placement is None else {"placement": placement}
    return json.dumps(tree, indent=1).encode()


def _as_meant(tree: Any, key: str = "", supervised: bool = False) -> Any:
    """A part of a config of the first edition, in the words of this one; `supervised`: it is of `trainer_input`."""
    if isinstance(tree, list):
        return [_as_meant(item) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    tree = {name: _as_meant(item, name, supervised or name == "trainer_input") for name, item in tree.items()}
    if key == "format" and tree.get("prompt_type") == "plaintext":
        tree["prompt_type"] = "raw"
    ignored = ("system_prompt_key", "reply_prefix") if key == "format" and supervised else ()
    return tree | {name: None for name in ignored if name in tree}


def _is_of_the_run(storage: Storage, was: str, now: str) -> bool:
    """Whether both are what an earlier stage of the run made at one step, at its old place and at the new one."""
    root = storage.url.rstrip("/").rpartition("/")[0]
    inside = now.removeprefix(root)
    return now.startswith(f"{root}/") and "/global_step_" in inside and was.endswith(inside)


def _compared(config: Config) -> dict[str, Any]:
    """The config without what a later start may change of its auxiliary models."""
    tree: dict[str, Any] = plain(config)
    for model in tree["explorer"]["auxiliary_models"]:
        for key in _FREE_OF_MODELS:
            del model[key]
    return tree


def _differences(was: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in sorted({*was, *now}):
            yield from _differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now and not (isinstance(was, list | tuple) and list(was) == list(now or [])):
        # What an older start wrote down may be the value of what stands for it now.
        stands_for_it = names_environment(now) and not names_environment(was) and fill_from_environment(now) == was
        yield from [] if stands_for_it else [(key, was, now)]
