"""Small configurations for the tests, and values that a key does not have by default."""

from typing import Any

import pytest

from rftdask.config import Config, load_config
from rftdask.errors import ConfigError


def grpo(**sections: Any) -> dict[str, Any]:
    """The smallest configuration of mode both, with more sections or changed ones."""
    return {
        "model": {"model_path": "tiny", "max_model_len": 64},
        "buffer": {"batch_size": 4, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        **sections,
    }


def sft(**sections: Any) -> dict[str, Any]:
    return {
        "mode": "train",
        "model": {"model_path": "tiny", "max_model_len": 64},
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"batch_size": 4, "trainer_input": {"experience_buffer": {"path": "pairs.jsonl"}}},
        **sections,
    }


def with_key(path: str, value: Any) -> dict[str, Any]:
    """`grpo()` with one dotted key set; an item of a list is written name[]."""
    tree = grpo()
    if path.startswith("buffer.explorer_input.tasksets[]"):
        del tree["buffer"]["explorer_input"]["taskset"]
    node = tree
    *sections, key = path.split(".")
    for section in sections:
        if section.endswith("[]"):
            node = node.setdefault(section[:-2], [{}])[0]
            if "tasksets" in section:
                node.setdefault("path", "more.jsonl")
            if section == "stages[]":
                node.setdefault("stage_name", "one")
        else:
            node = node.setdefault(section, {})
    node[key] = value
    return tree


def reachable(path: str) -> bool:
    """True if a key can be set with grpo, which refuses some lists and dicts of sections as a whole."""
    refused = ("lora_configs[].", "auxiliary_models[].", "auxiliary_buffers.<", "eval_buffer.")
    return not any(part in path for part in refused)


def problems(source: Any, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems


def config(source: Any, *overrides: str) -> Config:
    return load_config(source, overrides)


def another_value(default: Any) -> Any:
    """A value of the type of a key's default that is not the default, as plain data."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return (default / 2 or 0.5) if isinstance(default, float) else default + 1
    return {"a": 1} if isinstance(default, dict) else ["a"] if isinstance(default, list) else "other"
