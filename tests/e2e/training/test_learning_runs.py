"""Promise: the results of tests/learning in one process also hold for whole runs: one on rollouts with a teacher, and
one on a dataset. Same toys and bounds, through the command: processes of engines and ranks, storage between them.
"""

from pathlib import Path

import pytest

from rftdask import Experiment
from rftdask.trainer.checkpoint import HF_FOLDER
from tests.learning.cases import Case, config_of, mixture_of, toys_of
from tests.learning.harness import Run
from tests.learning.toys import LETTERS, after

pytestmark = pytest.mark.slow


def finished(case: Case, folder: Path, **sections: object) -> Experiment:
    """Run the case in separate processes, which find the workflow by its dotted path."""
    tree = config_of(case, 0, toys_of(0), workflows="tests.learning.toys.")
    if case.dataset:
        held_out = tree["buffer"]["trainer_input"]["experience_buffer"]
        tree["buffer"]["trainer_input"]["eval_buffer"] = {name: held_out[name] for name in ("path", "format")}
    run = Experiment(**tree | {"checkpoint_root_dir": str(folder), "cluster": {"num_cpus": 2}, **sections})
    summary = run.run(progress="none")
    assert summary.status == "finished"
    if case.dataset:
        (first, last), losses = summary.stages[0].eval_losses, run.metrics("eval")["eval_loss"].dropna()
        assert (losses.iloc[0], losses.iloc[-1]) == (first, last) and last < 0.9 * first
    return run


@pytest.mark.long
def test_a_student_with_replayed_experts_learns_from_its_teacher(tmp_path: Path) -> None:
    mixture_of(0)
    case = Case("jsd", toy="echo", steps=16, model="experts")
    section = config_of(case, 0, toys_of(0))["algorithm"] | {"enable_router_replay": True}
    metrics = finished(case, tmp_path, algorithm=section).metrics("trainer").sort_values("step")
    assert metrics["reward"].iloc[0] < 0.5
    assert metrics["reward"].iloc[-1] > 0.8
    agreement = metrics["router_agreement"]
    assert agreement.iloc[0] == 1.0, "the same weights in engine and trainer"
    assert 0.5 < agreement.min() < 1.0


@pytest.mark.long
def test_preference_pairs_teach_while_tasks_are_evaluated(tmp_path: Path) -> None:
    case = Case("dpo", toy="echo", dataset="pairs", steps=20)
    run = finished(case, tmp_path, trainer={"total_steps": 20, "eval_interval": 8})
    evals = run.metrics("eval")
    tasks = evals[evals["taskset"] == "held"].sort_values("step")
    assert tasks["step"].tolist() == [0, 8, 16, 20], "before the first step, at the interval, after the last"
    assert tasks["accuracy"].iloc[-1] > tasks["accuracy"].iloc[0]
    assert sorted(evals[evals["taskset"] == ""]["step"]) == [0, 8, 16, 20], "held-out rows, at the same steps"
    assert run.summary is not None and run.summary.accuracy_after == tasks["accuracy"].iloc[-1]
    metrics = run.metrics("trainer").sort_values("step")
    assert metrics["reward_accuracy"].iloc[0] == 0.0, "policy and reference are equal at the first step"
    tree = config_of(case, 0, toys_of(0))
    tree["model"]["model_path"] = str(Path(run.url) / "global_step_20" / HF_FOLDER)
    policy = Run(tree, (), tmp_path / "exported")
    assert all(policy.logprob(f"{letter}:", letter) > policy.logprob(f"{letter}:", after(letter)) for letter in LETTERS)
