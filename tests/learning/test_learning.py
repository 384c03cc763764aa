"""Promise: every algorithm type learns its toy through engine, workflows, batches and trainer, in this process.

A violated bound names the metric; `python -m tests.learning NAME` prints the measurements. Mutants show that the bounds
detect errors: some of them here, all of them in `python -m tests.learning.mutants`. RFTDASK_LEARNING_SEEDS ("0") names
the seeds, such as "0,1,2".
"""

import os
import re
from pathlib import Path

import pytest
import torch

from rftdask.config.schema.algorithm import registered_parts
from tests.learning import exact
from tests.learning.cases import CASES, Case, crossed, learn
from tests.learning.differences import DIFFERENCES
from tests.learning.mutants import Mutant, killed_by, mutants

SEEDS = [int(seed) for seed in os.environ.get("RFTDASK_LEARNING_SEEDS", "0").split(",")]
PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
MUTANTS_IN_CI = ("Ppo: sign", "Ppo: clip", "Grpo: baseline", "Sft: mask", "Dpo: sign", "K2: sign")


def test_every_algorithm_type_has_a_case() -> None:
    assert registered_parts("algorithm_type").keys() - {case.algorithm_type for case in CASES} == set()


@pytest.mark.parametrize("key", ["policy_loss_fn", "advantage_fn", "kl_loss_fn"])
def test_every_part_has_a_mutant(key: str) -> None:
    broken = {mutant.name.partition(":")[0] for mutant in mutants()} | {"NoKl"}
    assert {part.attribute for part in registered_parts(key).values()} - broken == set()


def test_the_table_of_the_page_has_every_bound_of_every_case() -> None:
    missing = [
        f"{case.name}: {name}" for case in CASES for name in case.bounds if f"| `{case.name}` | {name} |" not in PAGE
    ]
    assert missing == [], "measure them: python -m tests.learning NAME --markdown"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_learns(case: Case, seed: int) -> None:
    assert crossed(case, learn(case, seed).after) == []


@pytest.mark.parametrize("mutant", [m for m in mutants() if m.name in MUTANTS_IN_CI], ids=lambda mutant: mutant.name)
def test_a_mutant_crosses_a_bound(mutant: Mutant) -> None:
    assert killed_by(mutant, seed=0) != []


def test_every_difference_from_a_peer_has_a_number() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| differs \|", PAGE, re.MULTILINE)
    assert len(rows) > 10
    assert set(rows) == {difference.row for difference in DIFFERENCES.values()}
    missing = [name for name, each in DIFFERENCES.items() if f"| {name} | {each.metric} |" not in PAGE]
    assert missing == [], "measure them: python -m tests.learning.differences NAME"


def test_the_weight_of_a_row_does_not_depend_on_masked_ones() -> None:
    ours, theirs = exact.step_of_the_masked(seed=0)
    assert ours == pytest.approx(1.0, abs=1e-12)
    assert theirs < 0.6


def test_an_unbounded_kl_is_unbiased_and_a_bounded_one_steadier() -> None:
    (exactly, biased), (more, less) = exact.bias_of_corrected_k3(0), exact.deviation_of_corrected_k3(0)
    assert exactly == pytest.approx(0.0, abs=1e-12)
    assert biased > 0.1
    assert less < more


def test_the_reference_gradient_equals_finite_differences() -> None:
    assert torch.autograd.gradcheck(exact.kl_of_logits, exact.draw_logits(0, exact.FAR)[::2])


def test_a_bounded_estimate_does_not_recover_a_far_policy() -> None:
    ours, theirs = exact.back_from_certainty(seed=0)
    assert ours < 1e-3
    assert theirs > 1.0


@pytest.mark.parametrize("num_rows", (64, 8))
def test_learning_does_not_depend_on_the_division_into_passes(num_rows: int) -> None:
    ours, theirs = DIFFERENCES[f"token-sum-norm: passes of {num_rows} rows"].measure(0)
    assert ours > 0.9
    assert theirs < 0.5
