"""Promises of the commands that documentation and comments of configurations show: on machines of 1, 2, 8 and 4 x 8
GPUs each of them has a plan, or is refused with a change that gives it one; a recipe that names its GPUs has one.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rftdask.cluster.layout import CONTROL_RESOURCE, Layout, plan_machines
from rftdask.commands.estimate import gpu_bytes, what_fits
from rftdask.config import load_config
from rftdask.errors import UserError
from rftdask.models.model_shape import read_shape
from tests.integration.run_cases import call_cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "config").glob("*.yaml"))]
MACHINES = [(1, 1), (1, 2), (1, 8), (4, 8)]
"""(machines, GPUs of each)."""
ONE_GPU = tuple(
    [
        "explorer.rollout_model.engine_num=1",
        "buffer.batch_size=16",
        "trainer.num_ranks=1",
        "trainer.trainer_strategy=single",
        "trainer.max_token_len_per_gpu=4096",
        "trainer.gradient_checkpointing=true",
    ]
)
"""What config/gsm8k-grpo.yaml says for one GPU."""
_ADVICE = re.compile(r"lower (engine_num|num_ranks) to (\d+)")
_KEYS = {"engine_num": "explorer.rollout_model.engine_num", "num_ranks": "trainer.num_ranks"}


def commands() -> list[tuple[str, ...]]:
    """(config, override...) of every `rftdask run`, `validate`, `estimate` or `submit` of a config."""
    found = set()
    for page in PAGES:
        text = re.sub(r"\\\n#? *", " ", page.read_text())
        for line in re.findall(r"rftdask (?:run|validate|estimate|submit) (config/[^\n`]*)", text):
            words = shlex.split(line, comments=True)
            found.add((words[0], *(word for word in words[1:] if re.match(r"[a-z_.]+=", word))))
    return sorted(found)


def plan(command: tuple[str, ...], num_machines: int, num_gpus: int, *changes: str) -> Layout:
    path, *overrides = command
    cluster = [f"cluster.gpu_per_node={num_gpus}", f"cluster.node_num={num_machines}"]
    if num_machines > 1:
        cluster.append("cluster.type=joined")
    return plan_machines(load_config(ROOT / path, [*overrides, *cluster, *changes]))


@pytest.mark.parametrize("machines", MACHINES, ids=lambda machines: "{}x{}".format(*machines))
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_has_a_plan_or_says_how_it_gets_one(command: tuple[str, ...], machines: tuple[int, int]) -> None:
    changes: list[str] = []
    for _ in range(3):
        try:
            layout = plan(command, *machines, *changes)
            break
        except UserError as error:
            advice = _ADVICE.search(str(error))
            assert advice is not None, f"{command} on {machines}: {error}"
            changes.append(f"{_KEYS[advice[1]]}={advice[2]}")
    assert machines[0] > 1 or all(w.gpu is not None for w in layout.workers if w.resources != (CONTROL_RESOURCE,))


def test_a_recipe_that_names_its_gpus_has_a_plan_there() -> None:
    recipes = [command for command in commands() if command[0] == "config/gsm8k-grpo.yaml"]
    assert ("config/gsm8k-grpo.yaml",) in recipes
    assert plan(("config/gsm8k-grpo.yaml",), 1, 8).describe() == "2 ranks on GPUs 0-1, 6 engines on GPUs 2-7"
    one = ("config/gsm8k-grpo.yaml", *ONE_GPU)
    assert one in recipes
    assert plan(one, 1, 1).colocated
    assert not plan(one, 1, 2).colocated


@pytest.mark.parametrize(
    ("changes", "num_gpus", "memory"),
    [((), 8, "80GB"), (ONE_GPU, 1, "80GB"), ((*ONE_GPU, "model.lora_configs=[{lora_rank: 16}]"), 1, "24GB")],
)
def test_a_recipe_fits_the_gpus_that_it_names(changes: tuple[str, ...], num_gpus: int, memory: str) -> None:
    config = load_config(ROOT / "config" / "gsm8k-grpo.yaml", [*changes, f"cluster.gpu_per_node={num_gpus}"])
    lines = what_fits(config, read_shape(config.model.model_path), gpu_bytes(memory), plan_machines(config))
    verdicts = [line for line in lines if not line.startswith(" ")]
    assert len(verdicts) == 2 and all(": fits, " in line for line in verdicts), lines


def test_validate_plans_for_machines_that_are_elsewhere() -> None:
    config, one = str(ROOT / "config" / "gsm8k-grpo.yaml"), "explorer.rollout_model.engine_num=1"
    ended = call_cli("validate", config, one, "trainer.num_ranks=1", "--gpus", "1")
    assert ended.code == 0, ended
    assert ended.out.endswith("placement  1 rank on GPU 0, 1 engine on GPU 0; they take turns on GPU 0 (colocate)\n")
    ended = call_cli("validate", config, "--gpus", "8", "--nodes", "4")
    assert ended.code == 2, ended
    assert "cluster.node_num is 4, and cluster.type local is one machine" in " ".join(ended.err.split())
    ended = call_cli("validate", config, "cluster.type=joined", "--gpus", "8", "--nodes", "4")
    assert ended.out.endswith("placement  2 ranks, 6 engines\n"), ended


def test_the_plan_has_as_many_ranks_as_the_placement() -> None:
    config, engines = str(ROOT / "config" / "gsm8k-grpo.yaml"), "explorer.rollout_model.engine_num=4"
    arguments = ("validate", config, "trainer.num_ranks=null", engines)
    ended = call_cli(*arguments, "--gpus", "8")
    assert "\ntrainer          4 x torch rank" in ended.out, ended
    assert ended.out.endswith("placement  4 ranks on GPUs 0-3, 4 engines on GPUs 4-7\n"), ended
