"""Translations: what a file of the reference system (Trinity-RFT) says in one place, and a Config in another.

Run on the tree as it was read, before its keys are checked. What is moved is told, with where it went; what cannot be
said here stays where it is, for the checks to tell (reference_keys.py). Pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

Note = tuple[str, str]
"""(path of a key, what is told of it)."""

_ACTOR = "actor_rollout_ref.actor"
VERL = {
    "trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    "trainer.save_freq": "trainer.save_interval",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    f"{_ACTOR}.optim.lr": "algorithm.optimizer.lr",
    f"{_ACTOR}.optim.lr_warmup_steps": "algorithm.optimizer.lr_warmup_steps",
    f"{_ACTOR}.optim.weight_decay": "algorithm.optimizer.weight_decay",
    f"{_ACTOR}.grad_clip": "trainer.grad_clip",
    f"{_ACTOR}.ppo_epochs": "trainer.ppo_epochs",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
    f"{_ACTOR}.use_dynamic_bsz": "trainer.use_dynamic_bsz",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "trainer.ulysses_sequence_parallel_size",
    f"{_ACTOR}.fsdp_config.param_offload": "trainer.offload_policy",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "trainer.offload_policy",
    "critic.optim.lr": "trainer.critic.lr",
    "critic.cliprange_value": "trainer.critic.cliprange_value",
}
"""veRL's keys below `trainer.trainer_config`, and the ones that take their place."""
MEGATRON = {
    "tensor_model_parallel_size": "trainer.tensor_parallel_size",
    "context_parallel_size": "trainer.ulysses_sequence_parallel_size",
}
"""Megatron's keys below `trainer.megatron`, and the ones that take their place."""
VERL |= {f"{_ACTOR}.megatron.{key}": ours for key, ours in MEGATRON.items()}
NEEDLESS = {
    "actor_rollout_ref.model.use_remove_padding": "rows are always packed",
    "trainer.balance_batch": "rows are always dealt evenly",
    f"{_ACTOR}.checkpoint": "checkpoints have all that a resume needs; trainer.save_hf_checkpoint says when the model",
}
TINKER = ("trainer.trainer_type", "explorer.rollout_model.engine_type")
"""Keys that `model.tinker.enable` sets."""
OF_THE_POLICY = {
    "chat_template": "custom_chat_template",
    **{
        key: key
        for key in (
            "enable_thinking",
            "max_model_len",
            "max_prompt_tokens",
            "max_response_tokens",
            "min_response_tokens",
            "enable_prompt_truncation",
            "repetition_penalty",
            "temperature",
            "top_p",
            "top_k",
        )
    },
}
"""Keys of `explorer.rollout_model`, and those of `model` that take their place."""
_DATABASE = re.compile(r"(?:sqlite|postgresql)[+a-z0-9]*://")
_SQLITE, _ABSOLUTE = "sqlite:///", "sqlite:////"


def translate(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    """The tree with everything in the place that it has here, and what is to be told of that."""
    notes: list[Note] = []
    result = _copied(tree)
    _colocate(result)
    _megatron(result, notes)
    _trainer_config(result, notes)
    _policy(result, notes)
    _tinker(result, notes)
    _eval_names(result, notes)
    _queues_of_tasks(result, notes)
    _data_juicer(result, notes)
    return _absolute(result), notes


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def section(tree: Any, path: str) -> dict[str, Any]:
    """The section at a path; an empty one, which is not in the tree, where there is none."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def give(tree: dict[str, Any], path: str, value: Any) -> bool:
    """Set a key that has no value yet. Returns: False: it has one, or what is above it is no section."""
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


def _colocate(tree: dict[str, Any]) -> None:
    """A mode that stands for another one and a setting."""
    if tree.get("mode") == "colocate" and isinstance(tree.get("cluster", {}), dict):
        tree["mode"] = "both"
        tree["cluster"] = {**tree.get("cluster", {}), "colocate": True}


def _megatron(tree: dict[str, Any], notes: list[Note]) -> None:
    """Megatron's sizes, by those that cut and split the same here. What has none stays for the checks to refuse."""
    given = section(tree, "trainer.megatron")
    if given.get("expert_model_parallel_size", 1) in (1, given.get("tensor_model_parallel_size", 1)):
        given.pop("expert_model_parallel_size", None)  # experts go to the ranks that cut layers
    if given.get("tensor_model_parallel_size", 1) == 1 and "expert_model_parallel_size" in given:
        given["tensor_model_parallel_size"] = given.pop("expert_model_parallel_size")
    for key, ours in MEGATRON.items():
        if (size := given.pop(key, 1)) != 1:
            taken = give(tree, ours, size)
            notes.append(
                (f"trainer.megatron.{key}", f"taken as {ours}" if taken else f"ignored: {ours} is given and wins")
            )


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a tree that is no section."""
    for key, value in tree.items():
        where = f"{path}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, where)
        else:
            yield where, value


def _trainer_config(tree: dict[str, Any], notes: list[Note]) -> None:
    """veRL's own section, leaf by leaf."""
    given = section(tree, "trainer.trainer_config")
    for path, value in leaves(given):
        at = f"trainer.trainer_config.{path}"
        # With the dot at the end a key is never taken for another one that begins alike.
        needless = next((why for key, why in NEEDLESS.items() if f"{path}.".startswith(f"{key}.")), None)
        if (ours := VERL.get(path)) is not None:
            if give(tree, ours, value):
                notes.append((at, f"taken as {ours}"))
            else:
                notes.append((at, f"ignored: {ours} is given and wins"))
        elif needless is not None:
            notes.append((at, f"ignored: {needless}"))
        else:
            notes.append((at, "ignored: it configures veRL, which is not used, and nothing here takes its place"))
    if given:
        del tree["trainer"]["trainer_config"]


def _policy(tree: dict[str, Any], notes: list[Note]) -> None:
    """The policy's engine may have lengths, sampling and a chat template of its own there; here engine, trainer and
    datasets have one of each, the model's."""
    engine, at = section(tree, "explorer.rollout_model"), "explorer.rollout_model"
    for key, ours in OF_THE_POLICY.items():
        value = engine.get(key)
        # Where the two differ nothing is moved, and the checks tell it.
        if value is not None and section(tree, "model").get(ours) in (None, value):
            del engine[key]
            if give(tree, f"model.{ours}", value):
                notes.append((f"{at}.{key}", f"taken as model.{ours}"))


def _tinker(tree: dict[str, Any], notes: list[Note]) -> None:
    """The service both trains and samples, whatever the two keys say that choose who does."""
    if section(tree, "model.tinker").get("enable") is not True:
        return
    said = []
    for path in TINKER:
        place, _, key = path.rpartition(".")
        said.append(section(tree, place).pop(key, None))
        give(tree, path, "tinker")
    if said != ["tinker", "tinker"]:
        notes.append(("model.tinker.enable", f"true: {' and '.join(TINKER)} are tinker"))


def _eval_names(tree: dict[str, Any], notes: list[Note]) -> None:
    """A taskset may be trained on and evaluated under one name there; here a name is a part of metrics and files."""
    source = section(tree, "buffer.explorer_input")
    lists = {key: source[key] if isinstance(source.get(key), list) else [] for key in ("tasksets", "eval_tasksets")}
    trained = [source.get("taskset"), *lists["tasksets"]]
    names = {taskset.get("name") for taskset in trained if isinstance(taskset, dict)}
    evals = [taskset for taskset in lists["eval_tasksets"] if isinstance(taskset, dict)]
    taken = names | {taskset.get("name") for taskset in evals}
    for number, taskset in enumerate(evals):
        name = taskset.get("name")
        # Where the new name is taken, too, both keep theirs, and the checks tell that they clash.
        if isinstance(name, str) and name in names and f"{name}_eval" not in taken:
            taskset["name"] = f"{name}_eval"
            taken.add(f"{name}_eval")
            at = f"buffer.explorer_input.eval_tasksets[{number}].name"
            notes.append((at, f"{name} is a taskset that is trained on; this one is called {name}_eval"))


def _queues_of_tasks(tree: dict[str, Any], notes: list[Note]) -> None:
    """Tasks of type queue, which there is a default that nobody means: their rows are where `path` says."""
    source, at = section(tree, "buffer.explorer_input"), "buffer.explorer_input"
    named = {"taskset": source.get("taskset")}
    for key in ("tasksets", "eval_tasksets"):
        items = source.get(key)
        named |= {f"{key}[{number}]": each for number, each in enumerate(items if isinstance(items, list) else ())}
    for place, taskset in named.items():
        if isinstance(taskset, dict) and taskset.get("storage_type") == "queue":
            taskset["storage_type"] = "sql" if _DATABASE.match(str(taskset.get("path"))) else "file"
            notes.append((f"{at}.{place}.storage_type", f"taken as {taskset['storage_type']}, which its path is"))


def _data_juicer(tree: dict[str, Any], notes: list[Note]) -> None:
    """Its service, where the run starts it itself: here a process, which nobody has to name. Its operators over
    experiences, which run before the commit, as all do there. And the place of what a pipeline makes, where the
    taskset reads it: here the run folder.
    """
    service, at = section(tree, "service.data_juicer"), "service.data_juicer.server_url"
    if service.get("auto_start") is True and service.pop("server_url", None) is not None:
        notes.append((at, "ignored: with auto_start no other service is asked"))
    experiences, at = section(tree, "data_processor.experience_pipeline"), "data_processor.experience_pipeline"
    operators = experiences.get("operators")
    for number, entry in enumerate(operators if isinstance(operators, list) else ()):
        if not isinstance(entry, dict) or entry.get("name") != "data_juicer":
            continue
        if experiences.get("stage") is None:
            experiences["stage"] = "commit"
            notes.append((f"{at}.stage", "commit, where data_juicer can run; batch has no text of experiences"))
        args = entry.get("args")
        if isinstance(args, dict) and "np" in args and "num_process" not in args:
            args["num_process"] = args.pop("np")
            notes.append((f"{at}.operators[{number}].args.np", "is num_process here"))
    pipeline, source = section(tree, "data_processor.task_pipeline"), section(tree, "buffer.explorer_input")
    output, several = pipeline.get("output"), source.get("tasksets")
    first = source.get("taskset") or (several[0] if isinstance(several, list) and several else None)
    if isinstance(output, dict) and isinstance(first, dict) and output.get("path") in (None, first.get("path")):
        del pipeline["output"]
        at = "data_processor.task_pipeline.output"
        notes.append((at, "ignored: the dataset is made in the run folder, where the taskset reads it"))


def _absolute(value: Any) -> Any:
    """With databases of relative paths where they are now, since processes may have other working directories."""
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    if isinstance(value, str) and value.startswith(_SQLITE) and not value.startswith(_ABSOLUTE):
        path = value.removeprefix(_SQLITE)
        # An absolute path brings the fourth slash along.
        return f"{_SQLITE}{os.path.abspath(path)}" if path else value
    return value
