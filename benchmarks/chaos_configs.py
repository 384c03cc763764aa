"""Configurations of the runs that benchmarks/chaos.py compares: a fake model, or the GRPO stage of the quickstart."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"
WORKFLOW = """
import asyncio

async def long_tailed(task, model):
    answer = await model.generate(task.prompt)
    await asyncio.sleep({rollout_s} if task.index % 8 else {longest_s})
    return float(len(answer.tokens) % 3)
"""

Tree = dict[str, Any]


def fake_tree(folder: Path, explorers: int, rollout_s: float) -> Tree:
    """Configuration whose rollouts sleep and whose optimizer counts. rollout_s: of seven rollouts in eight; the eighth
    sleeps ten times as long.
    """
    (folder / "chaos_workflow.py").write_text(WORKFLOW.format(rollout_s=rollout_s, longest_s=10 * rollout_s))
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(64)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"}
    return {
        "model": {"model_path": "none", "max_prompt_tokens": 16, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "kl_loss_fn": "none"},
        "buffer": {
            "batch_size": 4 * explorers,
            "explorer_input": {
                "taskset": {"path": str(folder / "tasks.jsonl"), "format": columns},
                "default_workflow_type": "chaos_workflow.long_tailed",
                "default_reward_fn_type": "exact_reward",
            },
        },
        "explorer": {"tasks_per_batch": 4, "rollout_model": {"engine_type": "fake"}},
        "trainer": {"trainer_type": "fake", "save_interval": 5},
    }


def quickstart_tree(folder: Path, explorers: int) -> Tree:
    """Configuration of the GRPO stage of config/quickstart.yaml. Runs its first stage here to get the model."""
    sys.path.insert(0, str(EXAMPLES))
    import quickstart

    quickstart.make_toy(folder / "toy")
    tree = yaml.safe_load(quickstart.CONFIG.read_text())
    stages, common = tree.pop("stages"), {**tree, "checkpoint_root_dir": str(folder), "seed": 0}
    warmup = folder / "warmup.yaml"
    warmup.write_text(yaml.safe_dump({**common, "name": "warmup", "stages": stages[:1]}))
    command = [sys.executable, "-m", "rftdask", "run", str(warmup), "--progress", "none"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    from rftdask import Experiment

    stage = stages[1]
    tasks = stage["buffer"]["explorer_input"]
    tasks["taskset"]["path"] = str(folder / "toy" / "train.jsonl")
    del tasks["eval_tasksets"], stage["stage_name"], stage["explorer"]["eval_interval"]
    # Two work units per explorer, so that a kill finds a step partly done.
    stage["explorer"]["tasks_per_batch"] = max(1, stage["buffer"]["batch_size"] // (2 * explorers))
    stage["trainer"]["save_interval"] = 2
    return {**common, **stage, "model": {**tree["model"], "model_path": Experiment.from_yaml(warmup).model_path()}}


def apply_settings(tree: Tree, settings: Sequence[str]) -> None:
    """Set KEY=VALUE in the configuration; a dot separates the parts of a key."""
    for setting in settings:
        key, _, value = setting.partition("=")
        *sections, last = key.split(".")
        reduce(lambda section, name: section.setdefault(name, {}), sections, tree)[last] = yaml.safe_load(value)


def write_config(folder: Path, name: str, tree: Tree, steps: int, explorers: int, ahead: int, on_slurm: bool) -> Path:
    """Write the configuration and return its path. ahead: steps off policy."""
    sections = {section: dict(tree[section]) for section in ("buffer", "explorer", "trainer")}
    sections["buffer"]["total_epochs"] = 100_000
    sections["explorer"]["rollout_model"] = {**tree["explorer"].get("rollout_model", {}), "engine_num": explorers}
    sections["trainer"] |= {"total_steps": steps, "max_restarts": 100_000}
    made = {
        **tree,
        **sections,
        "name": name,
        "project": "chaos",
        "checkpoint_root_dir": str(folder / "runs"),
        "cluster": slurm_section(folder) if on_slurm else {"num_cpus": 1 + explorers},
        "synchronizer": {**tree.get("synchronizer", {}), "sync_style": "fixed", "sync_offset": ahead},
        "monitor": {"monitor_type": "none"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def slurm_section(folder: Path) -> Tree:
    path = shlex.quote(os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    common = {"walltime": "01:00:00", "memory": "1GB", "prologue": [f"export OMP_NUM_THREADS=1 PYTHONPATH={path}"]}
    # chaos_runs.read_recoveries parses this line.
    began = 'echo "job $SLURM_JOB_ID begins at $(date +%s.%N)"'
    return {
        "type": "slurm",
        "interface": "lo",
        "slurm": {
            "controller": {"partition": "main", **common},
            "trainer": {"partition": "main", "gres": "gpu:1", **common},
            "explorer": {"partition": "spot", "gres": "gpu:1", **common, "prologue": [*common["prologue"], began]},
        },
    }
