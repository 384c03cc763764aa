"""Promises of the selectors: the order of tasks, and which tasks a selector that learns takes next."""

import numpy as np
import pytest
import torch

from rftdask.algorithm.learning_selectors import DifficultyBased
from rftdask.algorithm.selectors import EasyToHard


def test_easy_to_hard_orders_by_the_features() -> None:
    features = np.array([[0.1, 0.0], [0.9, 0.1], [0.9, 0.5], [0.9, 0.1]])
    assert EasyToHard().order(features, 0, np.random.Philox(0)).tolist() == [2, 3, 1, 0]


def test_difficulty_selection_prefers_the_target_pass_rate() -> None:
    rule = DifficultyBased(target_reward=0.5, tau=0.0)
    features = torch.tensor([[0.0, 1.0]] * 4)
    state = rule.initial(features)
    state = rule.updated(state, torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.5, 0.0]))
    assert state.rates_N[0] > state.rates_N[1] > state.rates_N[2]
    assert state.rates_N[3].item() == pytest.approx(0.5, abs=0.01)
    assert sorted(rule.select(state, 1, 2).tolist()) == [1, 3]


def test_a_step_selects_no_task_twice_and_steps_differ() -> None:
    rule = DifficultyBased()
    state = rule.initial(torch.zeros(50, 2))
    picks = [rule.select(state, step, 20).tolist() for step in range(4)]
    assert all(len(set(pick)) == 20 for pick in picks) and picks[0] != picks[1]


def test_a_cold_draw_still_fills_the_batch() -> None:
    rule = DifficultyBased(target_reward=1.0, tau=1e-4)
    state = rule.updated(rule.initial(torch.tensor([[0.0, 1.0]] * 6)), torch.arange(6), torch.arange(6) / 5)
    assert sorted(rule.select(state, 1, 6).tolist()) == list(range(6))


def test_every_seed_of_a_run_can_draw() -> None:
    features_NF = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    drawn = []
    for seed in (0, 2**32, 2**63 - 1):
        rule = DifficultyBased(seed=seed)
        drawn.append(tuple(rule.select(rule.initial(features_NF), 1, 8).tolist()))
    assert len(set(drawn)) == 3
