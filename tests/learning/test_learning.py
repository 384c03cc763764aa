"""Every algorithm type learns what it is for: a toy, through engine, workflows, batches and trainer, in this process.

A bound that is crossed names the metric; `python -m tests.learning NAME` prints what was measured.

RFTDASK_LEARNING_SEEDS ("0") names the seeds, such as "0,1,2".
"""

from __future__ import annotations

import os

import pytest

from rftdask.config.schema.algorithm import registered_parts
from tests.learning.cases import CASES, Case, crossed, learn

SEEDS = [int(seed) for seed in os.environ.get("RFTDASK_LEARNING_SEEDS", "0").split(",")]


def test_every_algorithm_type_has_a_case() -> None:
    assert registered_parts("algorithm_type").keys() - {case.algorithm_type for case in CASES} == set()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_learns(case: Case, seed: int) -> None:
    assert crossed(case, learn(case, seed).after) == []
