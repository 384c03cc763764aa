"""Run folder: opens it and refuses configurations that do not belong to its run.

`run.json` has the config of the first start, `control/config-<fingerprint>.json` the resolved config of a later start
for its workers, and `control/END.json` the driver, or how the run ended.
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
from rftdask.config.base import MayChange, plain
from rftdask.errors import DamagedError, DataError, FencedError, NotFoundError, UserError
from rftdask.run.lease import (
    conflict,
    driver_role,
    excludes,
    is_alive,
    lease_holder,
    lease_holders,
    lease_role,
    parse_lease,
    roles_of,
    this_process,
)
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object
from rftdask.storage.safe_text import mask

RUN_FILE = "run.json"
STOP_FILE = "control/STOP"
END_FILE = "control/END.json"
_BEGUN = "begun"
CONFIG_FILE = "control/config-{}.json"
"""Path of a config, by its fingerprint."""
_CONFIG_EDITION = 2
"""Edition of the meaning of config values, in `run.json`. In edition 1, without a number, plaintext meant raw, and
supervised rows ignored `system_prompt_key` and `reply_prefix`."""
_PACKAGES = ("rftdask", "torch", "transformers", "dask", "distributed", "pyarrow", "fsspec", "vllm")

_TRAINED_KEYS = {"buffer.explorer_input.taskset", "buffer.explorer_input.tasksets"}
"""Keys that a later start in mode bench may leave out."""


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
    """Check that the folder can be opened for `config` now, without changes.

    Args: free: further keys that are not compared. explore_steps: see `Lease`.
    Raises: DataError: it has a run of another config; FencedError: a living process holds a role of the run, or is an
        explorer that excludes this one.
    """
    if storage.exists(RUN_FILE):
        _check_same(storage, config, free)
    holders = lease_holders(storage)
    for role in roles_of(config):
        new_role = lease_role(config, role)
        for other, holder in holders.items():
            if other == new_role or (role == "explorer" and excludes(other, holder, explore_steps)):
                raise FencedError(conflict(storage, other, holder, new_role, explore_steps))


def check_driver(storage: Storage, config: Config) -> None:
    """Check that no living process drives this command of the run. Raises: FencedError: one does."""
    role = driver_role(config)
    if (holder := lease_holder(storage, role)) is not None:
        raise FencedError(conflict(storage, role, holder, role))


def open_run(
    storage: Storage,
    config: Config,
    fingerprints: Mapping[str, Any] | None = None,
    placement: str | None = None,
    *,
    on_gpus: bool = False,
) -> Config:
    """Open the run folder for `config`, creating it at the first start. Returns: the config to run with.

    Args: fingerprints: those of the run's other inputs, and placement: `Layout.describe`, both stored by the first
    start. on_gpus: True if the trainer uses GPUs, which decides the default of `deterministic`.
    Raises: DataError: the folder has a run of another config (names all different keys), or is not a run folder.
    """
    is_open = config.deterministic is None
    first = _with_defaults_of(replace(config, {"deterministic": not on_gpus}) if is_open else config, config)
    # If two first starts race, the second compares itself with the first like any later start.
    if not storage.exists(RUN_FILE) and storage.put_new(RUN_FILE, _run_json(first, fingerprints, placement)):
        return first
    return _check_same(storage, config)


def _check_same(storage: Storage, config: Config, free: Collection[str] = ()) -> Config:
    """Complete `config` with values of the run. Raises: DataError: keys that may not change differ."""
    was = read_run_config(storage)
    if was.pipeline_place is not None:  # the run may have moved
        was = replace(was, {"checkpoint_root_dir": config.checkpoint_root_dir})
    # Before the comparison, since the user has not changed what the first start chose.
    config = _with_defaults_of(config, was)
    if config.mode == "bench" and not config.buffer.explorer_input.train_tasksets:
        free = {*free, *_TRAINED_KEYS}  # an evaluation does not read them
    differing = [
        mask(f"{key}: was {old!r}, is {new!r}")
        for key, old, new in _differences(plain(was, MayChange()), plain(config, MayChange()))
        if not (key == "model.model_path" and _is_of_the_run(storage, old, new))
        and not any(key == other or key.startswith(f"{other}.") for other in free)
    ]
    if differing:
        raise DataError(
            f"{storage.url} has a run with another configuration; restore these values, or choose another name:\n"
            + "\n".join(f"  - {line}" for line in differing)
        )
    return config


@contextmanager
def private_files(storage: Storage, config: Config) -> Iterator[None]:
    """Within the block, make new files of this process and its children readable only by their owner, if the config is
    `private`; also the run folder.
    """
    if not config.private:
        yield
        return
    storage.make_private()
    before = os.umask(0o077)  # for files that are not written through the storage: logs, databases, trackers
    try:
        yield
    finally:
        os.umask(before)


def record_run(storage: Storage, config: Config) -> None:
    """Write `run.json` of a run with stages. The folders of the stages refuse other configs."""
    # Each start may add stages.
    if config.stages and not storage.put_new(RUN_FILE, _run_json(config)):
        storage.put(RUN_FILE, _run_json(config))


def read_run(storage: Storage) -> dict[str, Any]:
    """Content of `run.json`, its config in the current edition. Raises: DataError: not a run folder."""
    try:
        tree = parse_object(storage.get(RUN_FILE))
        if not isinstance(tree.get("config"), Mapping):
            raise ValueError("it has no config")
        if "config_edition" not in tree:
            tree["config"] = _upgraded(tree["config"])
    except NotFoundError:
        raise DataError(
            f"{storage.url} is not a run folder: it has no {RUN_FILE}; give <checkpoint_root_dir>/<project>/<name>, "
            "the folder that rftdask validate reports"
        ) from None
    except ValueError as error:
        raise DamagedError(f"{storage.url}/{RUN_FILE} is damaged: {error}") from error
    return tree


def read_run_config(storage: Storage) -> Config:
    """Config of the first start of a run. Raises: DataError: not a run folder."""
    return load_config({**read_run(storage)["config"], "continue_from_checkpoint": True}, was_checked=True)


def record_config(storage: Storage, config: Config) -> str:
    """Write the config of this start for its workers. Returns: its fingerprint, which names the file.

    The config may differ from that in `run.json`, and commands for one role each have different configs.
    """
    data = json.dumps(config.to_dict(), sort_keys=True).encode()
    fingerprint = hashlib.sha256(data).hexdigest()[:32]
    path = CONFIG_FILE.format(fingerprint)
    # Repairs a file that a crash left incomplete.
    if not storage.put_new(path, data) and storage.get(path) != data:
        storage.put(path, data)
    return fingerprint


def read_config(storage: Storage, fingerprint: str) -> Config:
    """Read the config with this fingerprint. Raises: DataError: not in this folder; DamagedError."""
    path = CONFIG_FILE.format(fingerprint)
    try:
        data = storage.get(path)
    except NotFoundError:
        raise DataError(
            f"{storage.url} has no {path}, which the driver wrote; check that this machine sees the run folder of the "
            "driver (checkpoint_root_dir)"
        ) from None
    if hashlib.sha256(data).hexdigest()[:32] != fingerprint:
        raise DamagedError(f"{storage.url}/{path} is damaged: its content does not match its name; start the run again")
    return load_config(json.loads(data), was_checked=True)


def folders_of(storage: Storage) -> dict[str, Storage]:
    """Storage of the run under "", then of its stages by name, all below `storage` even if the run has moved."""
    stages = read_run_config(storage).stages if storage.exists(RUN_FILE) else ()
    root = storage.url.rstrip("/")
    return {"": storage} | {stage.stage_name: open_storage(f"{root}/{stage.stage_name}") for stage in stages}


def note_begin(storage: Storage) -> None:
    """Record this process as the driver, until `note_end`. Replaces an earlier end."""
    storage.put(END_FILE, json.dumps({**this_process(time.time()), "status": _BEGUN, "error": ""}).encode())


def read_driver(storage: Storage) -> dict[str, Any] | None:
    """Process that drives the run now: {"host", "pid", ...}. On other machines it is known only for half a minute."""
    try:
        driver = parse_lease(storage.get(END_FILE))
    except (NotFoundError, ValueError):  # the run has ended
        return None
    return driver if is_alive(driver, time.time()) else None


def note_end(storage: Storage, status: str, error: str) -> None:
    """Record how the run ended. A killed run has no such record."""
    storage.put(END_FILE, json.dumps({"status": status, "error": mask(error), "time_s": time.time()}).encode())


def read_end(storage: Storage) -> str | None:
    """How the run ended: "failed: RoleError: ...". None: not recorded."""
    try:
        end = parse_object(storage.get(END_FILE))
        if end["status"] == _BEGUN:
            return None
        return f"{end['status']}: {end['error']}" if end["error"] else str(end["status"])
    except (NotFoundError, ValueError, KeyError):
        return None


def package_versions() -> dict[str, str]:
    """Versions of Python and of the main packages of a run."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _with_defaults_of(config: Config, first: Config) -> Config:
    """Complete unset keys with the values of the first start: the size of work units, and `deterministic`."""
    settled: dict[str, Any] = {}
    # Slots of groups depend on it, and its default depends on the number of engines, which may change.
    if config.explorer.tasks_per_batch is None:
        settled["explorer.tasks_per_batch"] = first.tasks_per_unit
    if config.deterministic is None and first.deterministic is not None:
        settled["deterministic"] = first.deterministic
    return replace(config, settled) if settled else config


def _run_json(config: Config, fingerprints: Mapping[str, Any] | None = None, placement: str | None = None) -> bytes:
    tree = config.to_dict()
    folder = config.cluster.private_folder
    if folder is not None and not names_environment(folder):  # other commands run in other folders
        tree["cluster"]["private_folder"] = str(Path(folder).expanduser().absolute())
    run = {"config": tree, "versions": package_versions(), "seed": config.seed, "created_s": time.time()}
    run |= {"cwd": os.getcwd(), "config_edition": _CONFIG_EDITION}
    optional = {"fingerprints": fingerprints, "placement": placement}
    run |= {name: value for name, value in optional.items() if value is not None}
    return json.dumps(run, indent=1).encode()


def _upgraded(tree: Any, key: str = "", supervised: bool = False) -> Any:
    """Convert a part of a config from edition 1. supervised: the part belongs to `trainer_input`."""
    if isinstance(tree, list):
        return [_upgraded(item) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    tree = {name: _upgraded(item, name, supervised or name == "trainer_input") for name, item in tree.items()}
    if key == "format" and tree.get("prompt_type") == "plaintext":
        tree["prompt_type"] = "raw"
    ignored = ("system_prompt_key", "reply_prefix") if key == "format" and supervised else ()
    return tree | {name: None for name in ignored if name in tree}


def _is_of_the_run(storage: Storage, was: str, now: str) -> bool:
    """True if both paths are the same checkpoint of an earlier stage, before and after the run moved."""
    root = storage.url.rstrip("/").rpartition("/")[0]
    inside = now.removeprefix(root)
    return now.startswith(f"{root}/") and "/global_step_" in inside and was.endswith(inside)


def _differences(was: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in sorted({*was, *now}):
            yield from _differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now and not (isinstance(was, list | tuple) and list(was) == list(now or [])):
        # An older version stored the value of an environment variable, not its name.
        is_same_value = names_environment(now) and not names_environment(was) and fill_from_environment(now) == was
        if not is_same_value:
            yield key, was, now
