"""Every algorithm type learns what it is for: a toy, through engine, workflows, batches and trainer, in this process.

A bound that is crossed names the metric; `python -m tests.learning NAME` prints what was measured. That the bounds see
what is broken is shown by mutants: some of them here, all of them by `python -m tests.learning.mutants`.
RFTDASK_LEARNING_SEEDS ("0") names the seeds, such as "0,1,2".
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rftdask.config.schema.algorithm import registered_parts
from tests.learning.cases import CASES, Case, crossed, learn
from tests.learning.mutants import Mutant, killed_by, mutants

SEEDS = [int(seed) for seed in os.environ.get("RFTDASK_LEARNING_SEEDS", "0").split(",")]
MUTANTS_IN_CI = ("Ppo: sign", "Ppo: clip", "Grpo: baseline", "Sft: mask", "Dpo: sign", "K2: sign")


def test_every_algorithm_type_has_a_case() -> None:
    assert registered_parts("algorithm_type").keys() - {case.algorithm_type for case in CASES} == set()


def test_every_loss_and_every_advantage_has_a_mutant() -> None:
    broken = {mutant.name.partition(":")[0] for mutant in mutants()}
    parts = [*registered_parts("policy_loss_fn").values(), *registered_parts("advantage_fn").values()]
    assert {part.attribute for part in parts} - broken == set()


def test_the_table_of_the_page_has_every_bound_of_every_case() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    missing = [
        f"{case.name}: {name}" for case in CASES for name in case.bounds if f"| `{case.name}` | {name} |" not in page
    ]
    assert missing == [], "measure them: python -m tests.learning NAME --markdown"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_learns(case: Case, seed: int) -> None:
    assert crossed(case, learn(case, seed).after) == []


@pytest.mark.parametrize("mutant", [m for m in mutants() if m.name in MUTANTS_IN_CI], ids=lambda mutant: mutant.name)
def test_a_mutant_crosses_a_bound(mutant: Mutant) -> None:
    assert killed_by(mutant, seed=0) != []
