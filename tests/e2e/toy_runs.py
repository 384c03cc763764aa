"""Runs with real engines that a CPU finishes in seconds: a toy model with a few thousand weights, and its tasks."""

import json
from pathlib import Path
from typing import Any

import yaml

from rftdask.models.toy import build_toy_model, write_toy_tasks

DEADLINE_S = 400.0


def build_tiny_model(folder: Path) -> Path:
    build_toy_model(folder, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
    return folder


def write_grpo_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write `config.yaml` of a GRPO run with the transformers engine and the PyTorch trainer; `run_folder` returns its
    folder.
    """
    write_toy_tasks(folder / "toy")
    columns = {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"}
    tree: dict[str, Any] = {
        "name": "tiny",
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {
            "model_path": str(build_tiny_model(folder / "model")),
            "max_prompt_tokens": 16,
            "max_response_tokens": 4,
        },
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1.0e-3}},
        "cluster": {"num_cpus": 2},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {
                "taskset": {"path": str(folder / "toy" / "train.jsonl"), "format": columns},
                "default_reward_fn_type": "tests.e2e.toy_reward.varied_reward",
            },
        },
        "trainer": {"total_steps": 6, "save_interval": 2},
        "synchronizer": {"sync_offset": 1},
        "monitor": {"monitor_type": "none"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run_folder(config: Path) -> Path:
    tree = yaml.safe_load(config.read_text())
    return Path(tree["checkpoint_root_dir"]) / tree.get("project", "rftdask") / tree["name"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
