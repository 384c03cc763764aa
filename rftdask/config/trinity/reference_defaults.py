"""Defaults of the reference system (Trinity-RFT 0.6.0): what a file written for it means where it says nothing.

`read_as_reference` writes them into the tree, so that everything after it reads a file that says all of this itself:
the checks, the run folder and a later start need not know where the file came from. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rftdask.config.base import Filled, Section, child_of, default_of, marks_of
from rftdask.config.error_text import show
from rftdask.config.schema.algorithm import registered_parts
from rftdask.config.schema.run import Config
from rftdask.config.schema.walk import field_at
from rftdask.config.trinity.reference_keys import reference_keys
from rftdask.config.trinity.translate import Note, give, section

NAME = "Trinity-RFT"

DEFAULTS: Mapping[str, Any] = {
    "project": NAME,
    "checkpoint_root_dir": ".",
    "algorithm.algorithm_type": "ppo",
    # Whatever the algorithm: its own defaults are never read there.
    "algorithm.repeat_times": 1,
    "algorithm.optimizer.min_lr_ratio": 0.01,
    "explorer.rollout_model.engine_type": "vllm",
    "explorer.rollout_model.dtype": "bfloat16",
    # Of veRL, whose section is the only place where it can be said.
    "trainer.gradient_checkpointing": True,
    "trainer.max_checkpoints_to_keep": 0,
}
"""Those that differ from ours and can be taken over."""
_AUXILIARY: Mapping[str, Any] = {"engine_type": "vllm", "dtype": "bfloat16", "engine_num": 1}
"""The same for each auxiliary model, which has workers and GPUs of its own there."""
_TAUGHT = ("on_policy_distill", "jsd")
"""Algorithms whose auxiliary models are teachers, which no explorer loads."""
_MOST_OF_A_GPU = 0.94
_KEPT: Mapping[str, str] = {
    "gspo": "there the mean over all tokens, which its paper has not",
    "sapo": "there the mean over all tokens, which its paper has not",
    "dpo": "there the sum of a whole micro-batch is taken for one pair",
}
"""Algorithms whose aggregation of losses is ours, since the reference's is a mistake; and what it is there."""
_SECRET_ARGS = {
    "api_key": "WANDB_API_KEY",
    "username": "MLFLOW_TRACKING_USERNAME",
    "password": "MLFLOW_TRACKING_PASSWORD",
}
"""Arguments of its monitors that are never written down, and the variables in which the trackers look for them."""


def keys_of_reference(tree: Mapping[str, Any], schema: type[Section] = Config, path: str = "") -> Iterator[str]:
    """Paths of the keys in a tree that the reference system has and no section of ours."""
    others = reference_keys(schema)
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in schema.model_fields:
            if key in others:
                yield where
            continue
        child = child_of(schema.model_fields[key])
        if child is None:
            continue
        kind, below = child
        items = {"": value}
        if kind == "list":
            items = {f"[{i}]": item for i, item in enumerate(value)} if isinstance(value, list | tuple) else {}
        elif kind == "dict":
            items = {f".{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {}
        for at, item in items.items():
            if isinstance(item, Mapping):
                # The parts of a stage are sections of the top, which its own class does not know.
                yield from keys_of_reference(item, Config if key == "stages" else below, f"{where}{at}")


def read_as_reference(tree: dict[str, Any]) -> tuple[list[Note], list[Note]]:
    """Write into a translated `tree` what the reference system means by it. Returns: what is told of keys that are
    given, and of the defaults that now stand in the tree.
    """
    notes: list[Note] = []
    defaults: list[Note] = []
    if tree.get("checkpoint_root_dir") == "":
        del tree["checkpoint_root_dir"]  # the default, as a file may spell it out
    _monitor_args(tree, notes)
    is_external = section(tree, "model.external_model").get("enable") is True
    for path, value in DEFAULTS.items():
        value = "external" if is_external and path.endswith(".engine_type") else value
        if give(tree, path, value):
            defaults.append((path, _default_note(path, value)))
    kind = section(tree, "algorithm").get("algorithm_type")
    if isinstance(kind, str) and kind in _KEPT and section(tree, "algorithm").get("loss_agg_mode") is None:
        ours = registered_parts("algorithm_type")[kind].traits["loss_agg_mode"]
        defaults.append(("algorithm.loss_agg_mode", f"{ours}, as always here; {_KEPT[kind]}"))
    _experience_buffer(tree, notes)
    _tasksets(tree, notes, defaults)
    stages = tree.get("stages")
    for part in (tree, *(stages if isinstance(stages, list) else ())):
        is_taught = section(part, "algorithm").get("algorithm_type", kind) in _TAUGHT
        for number, model in enumerate(_auxiliary(part)):
            at = f"explorer.auxiliary_models[{number}]"
            for key, value in _AUXILIARY.items():
                # A teacher's, and those of a model behind an API, mean nothing here.
                idle = key == "engine_num" and (is_taught or model.get("engine_type") in ("external", "openai"))
                if not idle and give(model, key, value):
                    defaults.append((f"{at}.{key}", _default_note(f"explorer.rollout_model.{key}", value)))
            _prompts(model, at, notes)
        if not is_taught:
            _shares(part, section(tree, "explorer.rollout_model"), notes)
    return notes, defaults


def _auxiliary(tree: Any) -> list[dict[str, Any]]:
    models = section(tree, "explorer").get("auxiliary_models")
    return [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []


def _prompts(model: dict[str, Any], at: str, notes: list[Note]) -> None:
    """There a prompt and a response may be longer together than what the model takes: what is left then decides."""
    longest, prompt, response = (model.get(f"max_{what}") for what in ("model_len", "prompt_tokens", "response_tokens"))
    if isinstance(longest, int) and isinstance(prompt, int) and isinstance(response, int):
        left = longest - response
        if 0 < left < prompt:
            model["max_prompt_tokens"] = left
            notes.append((f"{at}.max_prompt_tokens", f"{left}: what max_model_len and max_response_tokens leave"))


def _shares(part: dict[str, Any], policy: Mapping[str, Any], notes: list[Note]) -> None:
    """Each engine has GPUs of its own there; here those of an explorer worker (`engine_num: 0`) share its GPUs. part:
    the tree or a stage; policy: the tree's engine of the policy, whose keys a stage inherits."""
    key, at = "gpu_memory_utilization", "explorer"
    engines = {f"{at}.auxiliary_models[{n}]": model for n, model in enumerate(_auxiliary(part)) if not _is_apart(model)}
    if not engines:
        return
    own = part["explorer"].setdefault("rollout_model", {})
    if not isinstance(own, dict):
        return
    engines = {f"{at}.rollout_model": {**policy, **own}, **engines}
    shares = {
        path: engine.get(key, 0.9)
        for path, engine in engines.items()
        if engine.get("engine_type") == "vllm" and isinstance(engine.get(key, 0.9), int | float)
    }
    if sum(shares.values()) <= 1:
        return
    engines[f"{at}.rollout_model"] = own
    for path, share in shares.items():
        engines[path][key] = round(_MOST_OF_A_GPU * share / sum(shares.values()), 2)
        told = f"{engines[path][key]} of a GPU that the engines of an explorer worker share; there each has its own"
        notes.append((f"{path}.{key}", told))


def _is_apart(model: Mapping[str, Any]) -> bool:
    count = model.get("engine_num")
    return isinstance(count, int) and count > 0


def _default_note(path: str, value: Any) -> str:
    """What is told of a default: it, and ours."""
    _, info = field_at(Config, tuple(path.split(".")))
    rule = next((mark.rule for mark in marks_of(info) if isinstance(mark, Filled)), None)
    return f"{show(value)}, as there; the default here is {rule or show(default_of(info))}"


def _monitor_args(tree: dict[str, Any], notes: list[Note]) -> None:
    """Its trackers' arguments by the names that ours have, and no secret."""
    given, at = section(tree, "monitor.monitor_args"), "monitor.monitor_args"
    for key, variable in _SECRET_ARGS.items():
        value = given.get(key)
        if isinstance(value, str) and value and "${" not in value:
            del given[key]
            notes.append((f"{at}.{key}", f"not taken: it would be written beside the run; set {variable} instead"))
    if "uri" in given and give(given, "tracking_uri", given["uri"]):
        del given["uri"]
        notes.append((f"{at}.uri", "taken as monitor.monitor_args.tracking_uri"))


def _experience_buffer(tree: dict[str, Any], notes: list[Note]) -> None:
    buffer, at = section(tree, "buffer.trainer_input.experience_buffer"), "buffer.trainer_input.experience_buffer"
    if buffer.get("storage_type") == "file" and tree.get("mode", "both") == "both":
        buffer["storage_type"] = "queue"
        notes.append((f"{at}.storage_type", "taken as queue, as there in mode both"))
    capacity = buffer.get("capacity")
    sizes = [section(tree, "buffer").get("batch_size", 1), section(tree, "algorithm").get("repeat_times", 1)]
    if all(isinstance(number, int) and not isinstance(number, bool) for number in (capacity, *sizes)):
        buffer["capacity"] = capacity * sizes[0] * sizes[1]
        told = f"{buffer['capacity']} experiences: there it counts explore steps, of batch_size x repeat_times each"
        notes.append((f"{at}.capacity", told))


def _tasksets(tree: dict[str, Any], notes: list[Note], defaults: list[Note]) -> None:
    source, at = section(tree, "buffer.explorer_input"), "buffer.explorer_input"
    several, evals = source.get("tasksets"), source.get("eval_tasksets")
    trained = {"taskset": source.get("taskset"), **_items("tasksets", several)}
    times = section(tree, "algorithm").get("repeat_times")
    for place, taskset in trained.items():
        if isinstance(taskset, dict) and taskset.get("repeat_times") not in (None, times):
            del taskset["repeat_times"]
            notes.append((f"{at}.{place}.repeat_times", f"not taken: algorithm.repeat_times {times} decides"))
    top_k = section(tree, "model").get("top_k")
    for place, taskset in {**trained, **_items("eval_tasksets", evals)}.items():
        if top_k not in (None, -1) and isinstance(taskset, dict) and give(taskset, "rollout_args.top_k", -1):
            told = f"-1, as there, where model.top_k {top_k} is for engines that are asked without it"
            defaults.append((f"{at}.{place}.rollout_args.top_k", f"{told}; the default here is model.top_k"))


def _items(key: str, value: Any) -> dict[str, Any]:
    return {f"{key}[{number}]": each for number, each in enumerate(value if isinstance(value, list) else ())}
