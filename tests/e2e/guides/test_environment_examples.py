"""Promise of examples/environments: each file runs as it is, but for its model and its size, without a network."""

from pathlib import Path

import pytest

from tests.e2e.toy_runs import finish

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/environments"
ADDITION = ROOT / "tests/unit/rollouts/workflows"  # where the environment of verifiers.yaml is


def test_every_file_is_tried() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {"gymnasium", "textarena", "reasoning_gym", "verifiers"}
    assert all(len(file.read_text().splitlines()) <= 10 for file in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("gymnasium", "gymnasium"),
        pytest.param("textarena", "textarena", marks=pytest.mark.extras),
        pytest.param("reasoning_gym", "reasoning_gym", marks=pytest.mark.extras),
        pytest.param("verifiers", "verifiers", marks=pytest.mark.extras),
    ],
)
def test_a_file_runs_as_it_is(name: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    small = ("model.model_path=none", "explorer.rollout_model.engine_type=fake", "trainer.trainer_type=fake")
    small += ("buffer.batch_size=2", "algorithm.repeat_times=2", "algorithm.kl_loss_fn=none", "trainer.total_steps=1")
    small += ("model.max_response_tokens=8", "model.max_prompt_tokens=4000", "monitor.monitor_type=none")
    small += (f"checkpoint_root_dir={tmp_path}", "cluster.num_cpus=2", "explorer.max_retry_times=0")
    told = finish(str(FOLDER / f"{name}.yaml"), *small, env={"PYTHONPATH": f"{ROOT}:{ADDITION}"})
    assert "failed" not in told.lower() or "failed 0" in told.lower(), told
