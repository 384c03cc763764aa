"""What tests/learning shows in one process holds for whole runs: one on rollouts, with a teacher, and one on a dataset.

The same toys and bounds, by the command's own way: processes of engines and ranks, storage between them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rftdask import Experiment
from rftdask.trainer.checkpoint import HF_FOLDER
from tests.learning.cases import Case, config_of, toys_of
from tests.learning.harness import Run
from tests.learning.toys import LETTERS, after

pytestmark = pytest.mark.slow


def finished(case: Case, folder: Path) -> Experiment:
    """The run of the case, in processes of its own, which find the workflow by its dotted path."""
    tree = config_of(case, 0, toys_of(0), workflows="tests.learning.toys.")
    if case.dataset:
        held_out = tree["buffer"]["trainer_input"]["experience_buffer"]
        tree["buffer"]["trainer_input"]["eval_buffer"] = {name: held_out[name] for name in ("path", "format")}
    run = Experiment(**tree | {"checkpoint_root_dir": str(folder), "cluster": {"num_cpus": 2}})
    summary = run.run(progress="none")
    assert summary.status == "finished"
    if case.dataset:
        (first, last), losses = summary.stages[0].eval_losses, run.metrics("eval")["eval_loss"]
        assert (len(losses), losses.iloc[0], losses.iloc[-1]) == (2, first, last) and last < 0.9 * first
    return run


def test_a_student_learns_what_its_teacher_knows(tmp_path: Path) -> None:
    metrics = finished(Case("jsd", toy="echo", steps=16), tmp_path).metrics("trainer").sort_values("step")
    assert metrics["reward"].iloc[0] < 0.5
    assert metrics["reward"].iloc[-1] > 0.8


def test_pairs_teach_what_is_preferred(tmp_path: Path) -> None:
    case = Case("dpo", toy="echo", dataset="pairs", steps=20)
    run = finished(case, tmp_path)
    metrics = run.metrics("trainer").sort_values("step")
    assert metrics["reward_accuracy"].iloc[0] == 0.0, "policy and reference are equal at the first step"
    tree = config_of(case, 0, toys_of(0))
    tree["model"]["model_path"] = str(Path(run.url) / "global_step_20" / HF_FOLDER)
    policy = Run(tree, (), tmp_path / "exported")
    assert all(policy.logprob(f"{letter}:", letter) > policy.logprob(f"{letter}:", after(letter)) for letter in LETTERS)
