"""A config for the tests of run folders."""

from functools import lru_cache
from typing import Any

from rftdask.config import Config, load_config


@lru_cache  # reading a config is the slow part of these tests
def config(*overrides: str) -> Config:
    tree: dict[str, Any] = {
        "model": {"model_path": "tiny", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    return load_config(tree, overrides)
