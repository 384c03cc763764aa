"""Promise of examples/recipes: copied into an empty folder, each does on the toy what its first lines say. Those that
are one run go one after the other in one process, as cells of a notebook do, which imports what they need once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rftdask.commands.first_steps import bundled, copy_bundled
from rftdask.models.toy import write_toy_tasks
from tests.e2e.clusters.test_slurm_runs import has_slurm
from tests.e2e.toy_runs import build_tiny_model
from tests.integration.run_cases import Ended, RunProcess
from tests.unit.storage.s3_proxy import S3Process

ROOT = Path(__file__).parents[3]

RECIPES = sorted(
    Path(name).stem for name in bundled() if name.startswith("examples/recipes/") and name.endswith(".yaml")
)
PLAIN = [
    name
    for name in RECIPES
    if name not in ("basic_arithmetic", "offline_batch", "s3", "sft_then_grpo", "slurm", "sweep")
]
NUM_PROCESSES = 3
DEADLINE_S = 400.0
FEW = "trainer.total_steps=2"


ONE_AFTER_THE_OTHER = """
import os, sys
from rftdask import Experiment
for folder in sys.argv[2:]:
    os.chdir(folder)
    name = os.path.basename(folder)
    print("recipe", name, flush=True)
    Experiment.from_yaml(f"{name}.yaml", sys.argv[1]).run()
"""


def copy(name: str, folder: Path) -> Path:
    """Copies a recipe into an empty folder, and makes a toy that is not warm: what is to be seen is that the recipe
    runs. Returns the folder of its run.
    """
    copy_bundled(name, folder)
    write_toy_tasks(folder / "toy")
    build_tiny_model(folder / "toy" / "model")
    return folder / "runs" / "recipes" / name


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`copy` into this test's folder, and goes there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFTDASK_RUNS", raising=False)
    return partial(copy, folder=tmp_path)


def finish(*arguments: str, **env: str) -> Ended:
    with RunProcess(*arguments, env={"PYTHONPATH": str(ROOT), **env}) as run:
        ended = run.end(DEADLINE_S)
        assert ended.code == 0, ended
        return ended


def steps(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize("share", range(NUM_PROCESSES))
def test_recipes_run(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFTDASK_RUNS", raising=False)
    names = PLAIN[share::NUM_PROCESSES]
    runs = {name: copy(name, tmp_path / name) for name in names}
    folders = [str(tmp_path / name) for name in names]
    with RunProcess(FEW, *folders, program=("-c", ONE_AFTER_THE_OTHER), env={"PYTHONPATH": str(ROOT)}) as run:
        ended = run.end(len(names) * DEADLINE_S)
        assert ended.code == 0, ended
    assert {name: steps(folder) for name, folder in runs.items()} == dict.fromkeys(names, 2)


def test_tasks_of_reasoning_gym(copied: Callable[[str], Path]) -> None:
    pytest.importorskip("reasoning_gym")
    run = copied("basic_arithmetic")
    finish("run", "basic_arithmetic.yaml", FEW, "--progress", "none")
    assert steps(run) == 2


def test_stages_of_one_run(copied: Callable[[str], Path]) -> None:
    run = copied("sft_then_grpo")
    finish("run", "sft_then_grpo.yaml", *(f"stages[{i}].{FEW}" for i in range(2)), "--progress", "none")
    assert [steps(run / stage) for stage in ("sft", "grpo")] == [2, 2]


def test_explore_first_train_afterwards(copied: Callable[[str], Path]) -> None:
    run = copied("offline_batch")
    for mode in ("explore", "train"):
        finish("run", "offline_batch.yaml", f"mode={mode}", "buffer.total_steps=2", FEW, "--progress", "none")
    assert steps(run) == 2


def test_a_sweep_ends_with_a_table(copied: Callable[[str], Path]) -> None:
    copied("sweep")
    ended = finish("sweep", "sweep.yaml", "algorithm.optimizer.lr=2e-4,4e-4", "trainer.total_steps=1", "--at-most", "2")
    assert "2e-4" in ended.out and "4e-4" in ended.out, ended


def test_a_run_in_a_bucket(copied: Callable[[str], Path]) -> None:
    copied("s3")
    service = S3Process(every=25, seed=1)
    try:
        finish("run", "s3.yaml", FEW, "--progress", "none", **service.env, RFTDASK_BUCKET="s3://bucket/runs")
        told = finish("status", "s3://bucket/runs/recipes/s3", **service.env).out
    finally:
        service.close()
    assert "2" in told, told


def test_scripts_for_slurm(copied: Callable[[str], Path]) -> None:
    copied("slurm")
    if has_slurm():
        assert "#SBATCH --partition=main" in finish("submit", "slurm.yaml", "--dry-run").out
    else:
        assert "trainer" in finish("validate", "slurm.yaml").out


def test_every_recipe_says_how_it_is_started_and_what_it_takes_to_scale() -> None:
    for name in RECIPES:
        said = bundled()[f"examples/recipes/{name}.yaml"].read_text().partition("\nproject:")[0]
        assert f"rftdask examples copy {name} " in said and "To scale:" in re.sub(r"\n# ", " ", said), name
        assert len(said.splitlines()[0]) > 20
