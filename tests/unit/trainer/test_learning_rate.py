"""Promises of the learning rate: linear warm-up to the rate, then the shape that was asked for, down to its floor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from rftdask.trainer.lr_schedule import LearningRate


def test_warm_up_is_linear_and_ends_at_the_rate() -> None:
    rate = LearningRate(1.0, warmup_steps=4)
    assert [rate.at(step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert LearningRate(0.5).at(1) == 0.5


def test_linear_decay_ends_at_its_floor_and_stays() -> None:
    rate = LearningRate(1.0, warmup_steps=1, schedule="linear", total_steps=5, min_lr_ratio=0.2)
    assert [rate.at(step) for step in range(1, 8)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    rate = LearningRate(2.0, schedule="cosine", total_steps=4)
    assert [rate.at(step) for step in range(1, 6)] == pytest.approx([2 * 0.8535534, 1.0, 2 * 0.1464466, 0.0, 0.0])


@given(
    st.floats(0, 1),
    st.integers(0, 9),
    st.sampled_from(("constant", "linear", "cosine")),
    st.integers(1, 20),
    st.floats(0, 1),
)
def test_the_rate_stays_between_zero_and_itself_and_only_warm_up_rises(
    lr: float, warmup: int, schedule: str, total: int, floor: float
) -> None:
    rates = [LearningRate(lr, warmup, schedule, total, floor).at(step) for step in range(1, 30)]
    assert all(0 <= rate <= lr * (1 + 1e-12) for rate in rates)
    after = rates[max(0, warmup - 1) :]
    assert all(later <= now * (1 + 1e-12) for now, later in pairwise(after))


def test_a_decay_without_an_end_and_an_unknown_shape_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"lr_scheduler_type cosine needs a known number of steps: set trainer.total_steps"
    ):
        LearningRate(1.0, schedule="cosine")
    with pytest.raises(ValueError, match="lr_scheduler_type 'step': must be constant, linear or cosine"):
        LearningRate(1.0, schedule="step")


@given(
    st.integers(0, 20),
    st.integers(1, 60),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1, exclude_max=True),
)
def test_the_shapes_are_those_of_transformers(warmup: int, decay: int, schedule: str, floor: float) -> None:
    """Its number s sets the rate of step s + 1, so that its first step has rate 0; ours starts with its second."""
    total = warmup + decay
    more: dict[str, Any] = {"cosine": {"min_lr_rate": floor}}.get(schedule, {})
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine_with_min_lr"}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    theirs = get_scheduler(
        names[schedule], optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=more
    )
    ours = LearningRate(0.1, warmup, schedule, total, floor if more else 0.0)
    for step in range(1, total + 1):
        optimizer.step()
        theirs.step()
        assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
