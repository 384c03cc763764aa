"""Promises of the registered parts: facts read from the source without torch match the classes."""

import ast
import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

import rftdask.algorithm
from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.compose import BASES, make_algorithm
from rftdask.config.schema.algorithm import LABELS, AlgorithmConfig, old_names, registered_parts
from tests.unit.algorithm.algorithm_cases import ADVANTAGE_FNS, ALGORITHMS

ROOT = Path(rftdask.algorithm.__file__).parent


def test_names_and_arguments_are_read_without_torch() -> None:
    code = (
        "import sys; from rftdask.config.schema.algorithm import LABELS, registered_parts;"
        "print([len(registered_parts(key)) > 0 for key in LABELS], 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"{[True] * len(LABELS)} False"


@pytest.mark.parametrize("key", sorted(BASES))
def test_source_reading_matches_the_classes(key: str) -> None:
    for name, part in registered_parts(key).items():
        cls = part.load()
        assert issubclass(cls, BASES[key]) and getattr(cls, LABELS[key]) == name
        if dataclasses.is_dataclass(cls):
            assert part.parameters is not None
            assert list(part.parameters) == [field.name for field in dataclasses.fields(cls)]
        for trait, value in part.traits.items():
            assert getattr(cls, trait) == value, (name, trait)


def test_class_names_are_unique_below_the_package() -> None:
    """They are the names of bases when files are read, and of parts in an error."""
    trees = [ast.parse(file.read_text()) for file in ROOT.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_facts_match_the_composed_algorithm(name: str) -> None:
    algorithm = make_algorithm(name)
    advantage = algorithm.advantage_fn
    section = AlgorithmConfig(algorithm_type=name)
    assert section.schema_type == algorithm.schema
    assert section.usual_repeat_times == algorithm.repeat_times
    assert section.usual_sample_strategy == algorithm.sample_strategy
    assert section.trains_critic == algorithm.use_critic
    assert section.compares_reference == algorithm.use_reference
    assert section.needs_teacher == algorithm.use_teacher
    assert section.compares_groups == (advantage is not None and advantage.uses_groups)


def test_needs_of_advantages_are_read_from_source() -> None:
    for name, cls in ADVANTAGE_FNS.items():
        section = AlgorithmConfig(algorithm_type="grpo", advantage_fn=name)
        assert section.needs_teacher == ("teacher_logprobs_Q" in cls.needs)
        assert section.greedy_baseline == ("baseline_rewards_N" in cls.needs)
    assert AlgorithmConfig(algorithm_type="jsd").needs_teacher
    assert AlgorithmConfig(algorithm_type="remax").greedy_baseline
    assert not AlgorithmConfig(algorithm_type="sft").needs_teacher
    assert AlgorithmConfig(algorithm_type="sft", policy_loss_fn="jsd").needs_teacher


def test_old_names_map_to_existing_names() -> None:
    twins = {"grpo_verl": "grpo", "opmd_verl": "opmd", "asymre_verl": "asymre"}
    assert old_names("algorithm_type") == old_names("advantage_fn") == twins


def test_no_gradient_is_written_by_hand() -> None:
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        assert "autograd.Function" not in text and "autograd.grad(" not in text and "save_for_backward" not in text, (
            file
        )


def test_configurable_aggregations_are_the_implemented_ones() -> None:
    annotation = AlgorithmConfig.model_fields["loss_agg_mode"].annotation
    assert set(get_args(get_args(annotation)[0])) == set(AGGREGATIONS)
