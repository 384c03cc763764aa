"""Promise of examples/recipes: copied into an empty folder, each runs on the toy as its first lines describe."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rftdask.driver.init_config import bundled, copy_bundled
from rftdask.models.toy import write_toy_tasks
from tests.e2e.clusters.test_slurm_runs import has_slurm
from tests.e2e.toy_runs import build_tiny_model
from tests.integration.run_cases import call_cli, finish
from tests.unit.storage.s3_proxy import S3Process

RECIPES = sorted(
    Path(name).stem for name in bundled() if name.startswith("examples/recipes/") and name.endswith(".yaml")
)
PLAIN = [
    name
    for name in RECIPES
    if name not in ("basic_arithmetic", "episodes", "images", "offline_batch", "s3", "sft_then_grpo", "slurm", "sweep")
]
FEW = "trainer.total_steps=2"


def copy(name: str, folder: Path) -> Path:
    """Copy a recipe into an empty folder and create an untrained toy, since the tests only check that the recipe runs.
    Returns the folder of its run.
    """
    copy_bundled(name, folder)
    write_toy_tasks(folder / "toy")
    build_tiny_model(folder / "toy" / "model")
    return folder / "runs" / "recipes" / name


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`copy` into this test's folder, which becomes the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFTDASK_RUNS", raising=False)
    return partial(copy, folder=tmp_path)


def call(*arguments: str) -> str:
    ended = call_cli(*arguments)
    assert ended.code == 0, ended
    return ended.out


def steps(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize("name", PLAIN)
def test_a_recipe_runs(name: str, copied: Callable[[str], Path]) -> None:
    run = copied(name)
    finish(f"{name}.yaml", FEW)
    assert steps(run) == 2


def test_tasks_of_reasoning_gym(copied: Callable[[str], Path]) -> None:
    pytest.importorskip("reasoning_gym")
    run = copied("basic_arithmetic")
    finish("basic_arithmetic.yaml", FEW)
    assert steps(run) == 2


@pytest.mark.extras
def test_episodes_of_verifiers(copied: Callable[[str], Path]) -> None:
    run = copied("episodes")
    finish("episodes.yaml", FEW)
    assert steps(run) == 2


def test_stages_of_one_run(copied: Callable[[str], Path]) -> None:
    run = copied("sft_then_grpo")
    finish("sft_then_grpo.yaml", *(f"stages[{i}].{FEW}" for i in range(2)))
    assert [steps(run / stage) for stage in ("sft", "grpo")] == [2, 2]


@pytest.mark.long
def test_a_toy_learns_to_look_at_its_images(copied: Callable[[str], Path]) -> None:
    run = copied("images")
    subprocess.run([sys.executable, "images.py"], check=True, timeout=120)
    output = finish("images.yaml").out
    row = re.search(r" grpo +both +grpo +40 +\S+ +([\d.]+)% +([\d.]+)%", output)
    assert row is not None, output[-2000:]
    before, after = float(row[1]), float(row[2])
    assert after >= 70 and after >= before + 40, row[0]
    # The run folder contains the images of all rollouts, and those that were trained.
    assert len(list((run / "grpo" / "media").iterdir())) == 96
    assert (run / "grpo" / "global_step_40/actor/huggingface/preprocessor_config.json").is_file()


def test_explore_first_train_afterwards(copied: Callable[[str], Path]) -> None:
    run = copied("offline_batch")
    for mode in ("explore", "train"):
        finish("offline_batch.yaml", f"mode={mode}", "buffer.total_steps=2", FEW)
    assert steps(run) == 2


@pytest.mark.long  # tests/unit/cli/test_sweep.py also has one
def test_a_sweep_ends_with_a_table(copied: Callable[[str], Path]) -> None:
    copied("sweep")
    output = call("sweep", "sweep.yaml", "algorithm.optimizer.lr=2e-4,4e-4", "trainer.total_steps=1", "--at-most", "2")
    assert "2e-4" in output and "4e-4" in output, output


def test_a_run_in_a_bucket(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    copied("s3")
    service = S3Process(every=25, seed=1)
    try:
        for key, value in {**service.env, "RFTDASK_BUCKET": "s3://bucket/runs"}.items():
            monkeypatch.setenv(key, value)
        finish("s3.yaml", FEW)
        output = call("status", "s3://bucket/runs/recipes/s3")
    finally:
        service.close()
    assert "2" in output, output


def test_scripts_for_slurm(copied: Callable[[str], Path]) -> None:
    copied("slurm")
    if has_slurm():
        assert "#SBATCH --partition=main" in call("submit", "slurm.yaml", "--dry-run")
    else:
        assert "trainer" in call("validate", "slurm.yaml")


def test_every_recipe_explains_how_to_start_and_to_scale_it() -> None:
    for name in RECIPES:
        head = bundled()[f"examples/recipes/{name}.yaml"].read_text().partition("\nproject:")[0]
        assert f"rftdask examples copy {name} " in head and "To scale:" in re.sub(r"\n# ", " ", head), name
        assert len(head.splitlines()[0]) > 20
