"""Translation: moves the keys of a Trinity-RFT file to their places in a Config.

Works on the tree as it was read, before its keys are checked. Every move gives a note with the new place. Keys without
a place stay, and the checks report them (reference_keys.py). Pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rftdask.config.trinity.reference_keys import REFERENCE_KEYS, TABLE

Note = tuple[str, str]
"""(path of a key, message about it)."""

MEGATRON: Mapping[str, str] = TABLE["megatron"]
"""Megatron's keys below `trainer.megatron` -> keys here."""
VERL: Mapping[str, str] = TABLE["verl"]
"""veRL's keys below `trainer.trainer_config` -> keys here."""
NEEDLESS: Mapping[str, str] = TABLE["needless"]
"""veRL's keys without effect -> why."""
REFUSED = [key for key in REFERENCE_KEYS["TrainerConfig"] if key.startswith("trainer_config.")]
"""veRL's keys that the checks refuse, below `trainer`."""
OF_THE_POLICY: Mapping[str, str] = TABLE["policy"]
"""Keys of `explorer.rollout_model` -> keys of `model`."""
TINKER = ("trainer.trainer_type", "explorer.rollout_model.engine_type")
"""Keys that `model.tinker.enable` sets."""
_DATABASE = re.compile(r"(?:sqlite|postgresql)[+a-z0-9]*://")
_SQLITE, _ABSOLUTE = "sqlite:///", "sqlite:////"


def translate(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    """Return the tree with every key in its place here, and a note for every move."""
    notes: list[Note] = []
    result = _copy(tree)
    # A mode that stands for another mode and a setting.
    if result.get("mode") == "colocate" and isinstance(result.get("cluster", {}), dict):
        result["mode"] = "both"
        result["cluster"] = {**result.get("cluster", {}), "colocate": True}
    _move_megatron(result, notes)
    _move_trainer_config(result, notes)
    _move_policy(result, notes)
    _set_tinker(result, notes)
    _rename_evals(result, notes)
    _type_tasksets(result, notes)
    _move_data_juicer(result, notes)
    return result, notes


def _copy(value: Any) -> Any:
    """A copy with absolute paths of SQLite databases, because processes may have other working directories."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    if isinstance(value, str) and value.startswith(_SQLITE) and not value.startswith(_ABSOLUTE):
        path = value.removeprefix(_SQLITE)
        return f"{_SQLITE}{os.path.abspath(path)}" if path else value  # an absolute path begins with the fourth slash
    return value


def section(tree: Any, path: str) -> dict[str, Any]:
    """Return the section at a path; if it is absent, an empty one that is not in the tree."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def give(tree: dict[str, Any], path: str, value: Any) -> bool:
    """Set a key that has no value. Returns: False: it has one, or a key above it is not a section."""
    *above, key = path.split(".")
    for part in above:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            return False
    if tree.get(key) is not None:
        return False
    tree[key] = value
    return True


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for everything in a tree that is not a section."""
    for key, value in tree.items():
        where = f"{path}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, where)
        else:
            yield where, value


def items_of(source: Mapping[str, Any], *keys: str) -> dict[str, dict[str, Any]]:
    """Return the sections at `keys`, each a section or a list of them, by their places: "tasksets[0]"."""
    sections: dict[str, Any] = {}
    for key in keys:
        value = source.get(key)
        sections |= {f"{key}[{number}]": item for number, item in enumerate(value)} if isinstance(value, list) else {}
        sections |= {key: value} if isinstance(value, dict) else {}
    return {place: item for place, item in sections.items() if isinstance(item, dict)}


def _move(tree: dict[str, Any], at: str, to: str, value: Any, notes: list[Note]) -> None:
    notes.append((at, f"taken as {to}" if give(tree, to, value) else f"ignored: {to} is given and wins"))


def _move_megatron(tree: dict[str, Any], notes: list[Note]) -> None:
    """Parallel sizes. Those that have no place here stay, and the checks refuse them."""
    sizes = section(tree, "trainer.megatron")
    if sizes.get("expert_model_parallel_size", 1) in (1, sizes.get("tensor_model_parallel_size", 1)):
        sizes.pop("expert_model_parallel_size", None)  # experts go to the ranks that split layers
    if sizes.get("tensor_model_parallel_size", 1) == 1 and "expert_model_parallel_size" in sizes:
        sizes["tensor_model_parallel_size"] = sizes.pop("expert_model_parallel_size")
    for key, ours in MEGATRON.items():
        if (size := sizes.pop(key, 1)) != 1:
            _move(tree, f"trainer.megatron.{key}", ours, size, notes)


def _move_trainer_config(tree: dict[str, Any], notes: list[Note]) -> None:
    """veRL's own section, leaf by leaf. Those that are refused stay, by their whole path."""
    verl, refused = section(tree, "trainer.trainer_config"), dict[str, Any]()
    sizes = section(verl, "actor_rollout_ref.actor.megatron")
    if sizes.get("expert_model_parallel_size") == sizes.get("tensor_model_parallel_size"):
        sizes.pop("expert_model_parallel_size", None)  # experts go to the ranks that split layers
    for path, value in leaves(verl):
        at = f"trainer.trainer_config.{path}"
        # The dot at the end keeps apart keys that begin alike.
        needless = next((why for key, why in NEEDLESS.items() if f"{path}.".startswith(f"{key}.")), None)
        if (ours := VERL.get(path)) is not None:
            _move(tree, at, ours, value, notes)
        elif f"trainer_config.{path}" in REFUSED:
            refused[f"trainer_config.{path}"] = value
        else:
            why = needless or "it configures veRL, which is not used, and no key here replaces it"
            notes.append((at, f"ignored: {why}"))
    if verl:
        del tree["trainer"]["trainer_config"]
        tree["trainer"] |= refused


def _move_policy(tree: dict[str, Any], notes: list[Note]) -> None:
    """Lengths, sampling and chat template of the policy's engine, which are here keys of `model`."""
    engine, at = section(tree, "explorer.rollout_model"), "explorer.rollout_model"
    for key, ours in OF_THE_POLICY.items():
        value = engine.get(key)
        # If both keys have values that differ, the checks report it.
        if value is not None and section(tree, "model").get(ours) in (None, value):
            del engine[key]
            if give(tree, f"model.{ours}", value):
                notes.append((f"{at}.{key}", f"taken as model.{ours}"))


def _set_tinker(tree: dict[str, Any], notes: list[Note]) -> None:
    """The service trains and samples, whatever the keys for trainer and engine are."""
    if section(tree, "model.tinker").get("enable") is not True:
        return
    before = []
    for path in TINKER:
        place, _, key = path.rpartition(".")
        before.append(section(tree, place).pop(key, None))
        give(tree, path, "tinker")
    if before != ["tinker", "tinker"]:
        notes.append(("model.tinker.enable", f"true: {' and '.join(TINKER)} are tinker"))


def _rename_evals(tree: dict[str, Any], notes: list[Note]) -> None:
    """Training and evaluation tasksets may share a name in Trinity-RFT; here a name is a part of metrics and files."""
    source = section(tree, "buffer.explorer_input")
    names = {taskset.get("name") for taskset in items_of(source, "taskset", "tasksets").values()}
    evals = items_of(source, "eval_tasksets")
    taken = names | {taskset.get("name") for taskset in evals.values()}
    for place, taskset in evals.items():
        name = taskset.get("name")
        # If the new name is taken as well, both stay, and the checks report it.
        if isinstance(name, str) and name in names and f"{name}_eval" not in taken:
            taskset["name"] = f"{name}_eval"
            taken.add(f"{name}_eval")
            at = f"buffer.explorer_input.{place}.name"
            notes.append((at, f"{name} is the name of a training taskset; this one is renamed to {name}_eval"))


def _type_tasksets(tree: dict[str, Any], notes: list[Note]) -> None:
    """Tasksets of type queue, Trinity-RFT's default: the type follows from their path."""
    source = section(tree, "buffer.explorer_input")
    for place, taskset in items_of(source, "taskset", "tasksets", "eval_tasksets").items():
        if taskset.get("storage_type") == "queue":
            taskset["storage_type"] = kind = "sql" if _DATABASE.match(str(taskset.get("path"))) else "file"
            notes.append((f"buffer.explorer_input.{place}.storage_type", f"taken as {kind}, the type of its path"))


def _move_data_juicer(tree: dict[str, Any], notes: list[Note]) -> None:
    """A service that the run starts is a process here, without a name. Operators over experiences run before the
    commit, as in Trinity-RFT. The output of a pipeline that the taskset reads is in the run folder."""
    service, at = section(tree, "service.data_juicer"), "service.data_juicer.server_url"
    if service.get("auto_start") is True and service.pop("server_url", None) is not None:
        notes.append((at, "ignored: with auto_start the run uses its own process"))
    experiences, at = section(tree, "data_processor.experience_pipeline"), "data_processor.experience_pipeline"
    for place, entry in items_of(experiences, "operators").items():
        if entry.get("name") != "data_juicer":
            continue
        if experiences.get("stage") is None:
            experiences["stage"] = "commit"
            notes.append((f"{at}.stage", "commit, where data_juicer can run; batches have no text of experiences"))
        args = entry.get("args")
        if isinstance(args, dict) and "np" in args and "num_process" not in args:
            args["num_process"] = args.pop("np")
            notes.append((f"{at}.{place}.args.np", "taken as num_process"))
    pipeline, source = section(tree, "data_processor.task_pipeline"), section(tree, "buffer.explorer_input")
    output, first = pipeline.get("output"), next(iter(items_of(source, "taskset", "tasksets").values()), None)
    if isinstance(output, dict) and first is not None and output.get("path") in (None, first.get("path")):
        del pipeline["output"]
        at = "data_processor.task_pipeline.output"
        notes.append((at, "ignored: the dataset is written to the run folder, where the taskset reads it"))
