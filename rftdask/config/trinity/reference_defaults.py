"""Defaults of Trinity-RFT 0.6.0: what its files mean where they are silent.

`read_as_reference` writes the defaults into the tree, so that all later code, including a later start of the run, needs
no knowledge of the file's origin. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rftdask.config.base import Computed, Section, child_of, default_of, field_at, marks_of, show
from rftdask.config.schema.algorithm import registered_parts
from rftdask.config.schema.run import Config
from rftdask.config.trinity.reference_keys import TABLE, reference_keys
from rftdask.config.trinity.translate import Note, give, items_of, section

NAME = "Trinity-RFT"

DEFAULTS: Mapping[str, Any] = TABLE["defaults"]
"""Those that differ from ours and can be taken over. Of veRL, only the trainer section can be expressed."""
_AUXILIARY: Mapping[str, Any] = TABLE["auxiliary_defaults"]
"""The same for each auxiliary model, which has its own workers and GPUs in Trinity-RFT."""
_TEACHERS = ("on_policy_distill", "jsd")
"""Algorithms whose auxiliary models are teachers, which no explorer loads."""
_MOST_OF_A_GPU = 0.94


def keys_of_reference(tree: Mapping[str, Any], schema: type[Section] = Config, path: str = "") -> Iterator[str]:
    """Yield the paths of keys in a tree that Trinity-RFT has and no section of ours."""
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
                # A stage has sections of the top level, which its own class lacks.
                yield from keys_of_reference(item, Config if key == "stages" else below, f"{where}{at}")


def read_as_reference(tree: dict[str, Any]) -> tuple[list[Note], list[Note]]:
    """Write what Trinity-RFT means into a translated `tree`.

    Returns: notes on keys that were given, and notes on the defaults that are now in the tree.
    """
    notes: list[Note] = []
    defaults: list[Note] = []
    if tree.get("checkpoint_root_dir") == "":
        del tree["checkpoint_root_dir"]  # the default, written out
    _rename_monitor_args(tree, notes)
    is_external = section(tree, "model.external_model").get("enable") is True
    for path, value in DEFAULTS.items():
        value = "external" if is_external and path.endswith(".engine_type") else value
        if give(tree, path, value):
            defaults.append((path, _default_note(path, value)))
    kind = section(tree, "algorithm").get("algorithm_type")
    kept: Mapping[str, str] = TABLE["our_aggregation"]
    if isinstance(kind, str) and kind in kept and section(tree, "algorithm").get("loss_agg_mode") is None:
        ours = registered_parts("algorithm_type")[kind].traits["loss_agg_mode"]
        defaults.append(("algorithm.loss_agg_mode", f"{ours}, as always here; {kept[kind]}"))
    _convert_experience_buffer(tree, notes)
    _convert_tasksets(tree, notes, defaults)
    stages = tree.get("stages")
    for part in (tree, *(stages if isinstance(stages, list) else ())):
        has_teachers = section(part, "algorithm").get("algorithm_type", kind) in _TEACHERS
        models = items_of(section(part, "explorer"), "auxiliary_models")
        for place, model in models.items():
            for key, value in _AUXILIARY.items():
                # engine_num means nothing for teachers and models behind an API.
                idle = key == "engine_num" and (has_teachers or model.get("engine_type") in ("external", "openai"))
                if not idle and give(model, key, value):
                    note = _default_note(f"explorer.rollout_model.{key}", value)
                    defaults.append((f"explorer.{place}.{key}", note))
            _shorten_prompts(model, f"explorer.{place}", notes)
        if models and not has_teachers:
            _share_gpus(part["explorer"], models, section(tree, "explorer.rollout_model"), notes)
    return notes, defaults


def _shorten_prompts(model: dict[str, Any], at: str, notes: list[Note]) -> None:
    """In Trinity-RFT prompt and response may exceed the model's length together; the prompt gets what is left."""
    longest, prompt, response = (model.get(f"max_{what}") for what in ("model_len", "prompt_tokens", "response_tokens"))
    if isinstance(longest, int) and isinstance(prompt, int) and isinstance(response, int):
        left = longest - response
        if 0 < left < prompt:
            model["max_prompt_tokens"] = left
            notes.append((f"{at}.max_prompt_tokens", f"{left}: what max_model_len and max_response_tokens leave"))


def _share_gpus(
    explorer: dict[str, Any], models: Mapping[str, dict[str, Any]], policy: Mapping[str, Any], notes: list[Note]
) -> None:
    """Scale gpu_memory_utilization: engines of an explorer worker share its GPUs (`engine_num: 0`), and in Trinity-RFT
    each engine has its own.

    explorer: section of the tree or of a stage. policy: the tree's engine of the policy, whose keys a stage inherits.
    """
    key = "gpu_memory_utilization"
    engines = {f"explorer.{place}": model for place, model in models.items() if not _has_own_workers(model)}
    own = explorer.setdefault("rollout_model", {}) if engines else None
    if not isinstance(own, dict):
        return
    shares = {
        path: engine.get(key, 0.9)
        for path, engine in {"explorer.rollout_model": {**policy, **own}, **engines}.items()
        if engine.get("engine_type") == "vllm" and isinstance(engine.get(key, 0.9), int | float)
    }
    if sum(shares.values()) <= 1:
        return
    for path, share in shares.items():
        engine = engines.get(path, own)
        engine[key] = round(_MOST_OF_A_GPU * share / sum(shares.values()), 2)
        message = f"{engine[key]} of a GPU that the engines of an explorer worker share; in {NAME} each has its own"
        notes.append((f"{path}.{key}", message))


def _has_own_workers(model: Mapping[str, Any]) -> bool:
    count = model.get("engine_num")
    return isinstance(count, int) and count > 0


def _default_note(path: str, value: Any) -> str:
    """Message on a default of Trinity-RFT, with ours."""
    _, info = field_at(Config, tuple(path.split(".")))
    rule = next((mark.rule for mark in marks_of(info) if isinstance(mark, Computed)), None)
    return f"{show(value)}, as in {NAME}; the default here is {rule or show(default_of(info))}"


def _rename_monitor_args(tree: dict[str, Any], notes: list[Note]) -> None:
    """Arguments of trackers get our names; secrets are removed."""
    arguments, at = section(tree, "monitor.monitor_args"), "monitor.monitor_args"
    for key, variable in TABLE["secret_arguments"].items():
        value = arguments.get(key)
        if isinstance(value, str) and value and "${" not in value:
            del arguments[key]
            notes.append((f"{at}.{key}", f"not taken: it would be written to the run folder; set {variable} instead"))
    if "uri" in arguments and give(arguments, "tracking_uri", arguments["uri"]):
        del arguments["uri"]
        notes.append((f"{at}.uri", "taken as monitor.monitor_args.tracking_uri"))


def _convert_experience_buffer(tree: dict[str, Any], notes: list[Note]) -> None:
    buffer, at = section(tree, "buffer.trainer_input.experience_buffer"), "buffer.trainer_input.experience_buffer"
    if buffer.get("storage_type") == "file" and tree.get("mode", "both") == "both":
        buffer["storage_type"] = "queue"
        notes.append((f"{at}.storage_type", f"taken as queue, as {NAME} does in mode both"))
    capacity = buffer.get("capacity")
    sizes = [section(tree, "buffer").get("batch_size", 1), section(tree, "algorithm").get("repeat_times", 1)]
    if all(isinstance(number, int) and not isinstance(number, bool) for number in (capacity, *sizes)):
        buffer["capacity"] = capacity * sizes[0] * sizes[1]
        message = f"{buffer['capacity']} experiences: {NAME} counts explore steps, of batch_size x repeat_times each"
        notes.append((f"{at}.capacity", message))


def _convert_tasksets(tree: dict[str, Any], notes: list[Note], defaults: list[Note]) -> None:
    source, at = section(tree, "buffer.explorer_input"), "buffer.explorer_input"
    times, top_k = section(tree, "algorithm").get("repeat_times"), section(tree, "model").get("top_k")
    for place, taskset in items_of(source, "taskset", "tasksets").items():
        if taskset.get("repeat_times") not in (None, times):
            del taskset["repeat_times"]
            notes.append((f"{at}.{place}.repeat_times", f"not taken: algorithm.repeat_times {times} decides"))
    for place, taskset in items_of(source, "taskset", "tasksets", "eval_tasksets").items():
        if top_k not in (None, -1) and give(taskset, "rollout_args.top_k", -1):
            message = f"-1, as in {NAME}, where model.top_k {top_k} is only for requests without top_k"
            defaults.append((f"{at}.{place}.rollout_args.top_k", f"{message}; the default here is model.top_k"))
