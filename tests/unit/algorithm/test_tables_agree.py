"""What a configuration knows of an algorithm without torch is what the algorithm is."""

import pytest

from rftdask.algorithm.advantages import ADVANTAGE_FNS
from rftdask.algorithm.compose import ALGORITHMS, DEPRECATED_ALGORITHMS, make_algorithm
from rftdask.config import algorithms as torch_free
from rftdask.config.algorithms import AlgorithmInfo


def test_the_names_are_the_same() -> None:
    assert set(torch_free.ALGORITHMS) == set(ALGORITHMS)
    assert torch_free.ALIASES == DEPRECATED_ALGORITHMS


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_facts_are_those_of_the_composition(name: str) -> None:
    algorithm = make_algorithm(name)
    advantage = algorithm.advantage_fn
    assert torch_free.ALGORITHMS[name] == AlgorithmInfo(
        schema=algorithm.schema,
        repeat_times=algorithm.repeat_times,
        critic=algorithm.use_critic,
        reference=algorithm.use_reference,
        grouped=advantage is not None and advantage.uses_groups,
        sample_strategy=algorithm.sample_strategy,
    )


def test_teachers_and_baselines_are_needed_where_the_table_says() -> None:
    needs = {name: cls.needs for name, cls in ADVANTAGE_FNS.items()}
    assert {name for name in needs if "teacher_logprobs_NT" in needs[name]} == set(torch_free.TEACHER_ADVANTAGES)
    assert {name for name in needs if "baseline_rewards_N" in needs[name]} == set(torch_free.BASELINE_ADVANTAGES)
