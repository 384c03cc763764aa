"""Promises of the commands that documentation and comments of configurations show: with --gpus, --nodes and --gpu for
1, 2, 8 and 4 x 8 GPUs each of them has a plan with the memory it needs, or is refused with a change that gives it one;
one that names its GPUs runs as printed; a recipe that names them has a plan there. Those in examples/ are toys for a
laptop, which tests/e2e/guides runs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rftdask.cluster.layout import Layout, plan_machines
from rftdask.commands.estimate import gpu_bytes, what_fits
from rftdask.config import load_config
from rftdask.models.model_shape import read_shape
from tests.integration.run_cases import call_cli

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "config").rglob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *CONFIGS]
MACHINES = [(1, 1), (1, 2), (1, 8), (4, 8)]
"""(machines, GPUs of each)."""
ONE_GPU = (
    "explorer.rollout_model.engine_num=1",
    "buffer.batch_size=16",
    "trainer.num_ranks=1",
    "trainer.trainer_strategy=single",
    "trainer.max_token_len_per_gpu=4096",
    "trainer.gradient_checkpointing=true",
)
"""What config/gsm8k-grpo.yaml says for one GPU."""
_ADVICE = re.compile(r"(engine_num|num_ranks|tensor_parallel_size)\D* (\d+)")
_KEYS = {
    "engine_num": "explorer.rollout_model.engine_num",
    "num_ranks": "trainer.num_ranks",
    "tensor_parallel_size": "explorer.rollout_model.tensor_parallel_size",
}
_FILES = {path.name: str(path.relative_to(ROOT)) for path in CONFIGS}


def commands() -> dict[tuple[str, ...], tuple[str, ...]]:
    """(config, override...) of every `rftdask run`, `validate`, `estimate` or `submit` of a config -> the words of one
    such command as printed. Configs of the reader, such as run.yaml, are not there to be tried.
    """
    found = {}
    for page in PAGES:
        text = re.sub(r"\\\n#? *", " ", page.read_text())
        for line in re.findall(r"rftdask ((?:run|validate|estimate|submit) [^\n`|&;]*\.yaml[^\n`|&;]*)", text):
            words = [_FILES.get(Path(word).name, word) for word in shlex.split(line, comments=True)]
            if config := next((word for word in words if word in _FILES.values()), None):
                made_of = (config, *(word for word in words if re.match(r"[a-z_.]+=", word)))
                if made_of not in found or "--gpu" in words:
                    found[made_of] = tuple(words)
    return found


def plan(command: tuple[str, ...], num_machines: int, num_gpus: int) -> Layout:
    path, *overrides = command
    cluster = [f"cluster.gpu_per_node={num_gpus}", f"cluster.node_num={num_machines}"]
    return plan_machines(load_config(ROOT / path, [*overrides, *cluster]))


@pytest.mark.parametrize("machines", MACHINES, ids=lambda machines: "{}x{}".format(*machines))
@pytest.mark.parametrize("command", sorted(commands()), ids=" ".join)
def test_a_command_has_a_plan_or_says_how_it_gets_one(
    command: tuple[str, ...], machines: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    there = ("--nodes", str(machines[0]), "--gpus", str(machines[1]), "--gpu", "H100 80GB")
    changes: list[str] = []
    for _ in range(3):
        ended = call_cli("estimate", *command, *changes, *there)
        if ended.code == 0:
            break
        said = " ".join(ended.err.split())
        advised = [f"{_KEYS[key]}={number}" for key, number in _ADVICE.findall(said.rpartition("; ")[2])]
        advised += ["cluster.type=joined"] if "use slurm or another batch system, or joined" in said else []
        advised += ["cluster.type=local", "mode=colocate"] if "cluster.type local, mode colocate" in said else []
        assert ended.code == 2 and advised, f"{command} on {machines}: {said}"
        changes += advised
    assert ended.code == 0, f"{command} on {machines}, changed by {changes}: {ended.err}"
    assert "placement  " in ended.out and "host of a machine" in ended.out
    assert re.search(r": (fits|does not fit), \d", ended.out)


@pytest.mark.parametrize("command", [words for words in commands().values() if "--gpu" in words], ids=" ".join)
def test_a_command_that_names_its_gpus_runs_as_it_is_printed(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ended = call_cli(*command)
    assert ended.code == 0, ended
    assert ": fits, " in ended.out and "does not fit" not in ended.out, ended.out


def test_every_configuration_for_gpus_samples_with_vllm() -> None:
    for_gpus = [path for path in CONFIGS if path.parent.name in ("gpus", "slurm") or path.name.startswith("gsm8k")]
    assert len(for_gpus) >= 9
    for path in for_gpus:
        stages = load_config(path).stage_configs()
        assert {each.explorer.rollout_model.engine_type for each in stages if each.has_explorer} == {"vllm"}, path


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
