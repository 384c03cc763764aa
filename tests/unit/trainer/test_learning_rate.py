"""Promises of the learning rate: linear warm-up to the rate, then the shape that was asked for, down to its floor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from rftdask.config.schema.algorithm import OptimizerConfig
from rftdask.trainer.engines.adam import learning_rate


def rates(steps: int, total_steps: int | None = None, **section: Any) -> list[float]:
    """The rates of the first steps."""
    optimizer = OptimizerConfig(**section)
    return [learning_rate(optimizer, step, total_steps) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_ends_at_the_rate() -> None:
    assert rates(6, lr=1.0, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(1, lr=0.5) == [0.5]
    assert rates(3, 8, lr=1.0, lr_warmup_steps_ratio=0.25) == [0.5, 1.0, 1.0]


def test_decay_ends_at_its_floor_and_stays() -> None:
    found = rates(7, 5, lr=1.0, lr_warmup_steps=1, lr_scheduler_type="cosine", min_lr_ratio=0.2)
    assert found == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    found = rates(5, 4, lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.0)
    assert found == pytest.approx([2 * 0.8535534, 1.0, 2 * 0.1464466, 0.0, 0.0])


@given(
    st.floats(0, 1),
    st.integers(0, 9),
    st.sampled_from(("constant", "cosine")),
    st.integers(1, 20),
    st.floats(0, 1),
)
def test_the_rate_stays_between_zero_and_itself_and_only_warm_up_rises(
    lr: float, warmup: int, schedule: str, total: int, floor: float
) -> None:
    section = {"lr": lr, "lr_warmup_steps": warmup, "lr_scheduler_type": schedule, "min_lr_ratio": floor}
    found = rates(29, total, **section)
    assert all(0 <= rate <= lr * (1 + 1e-12) for rate in found)
    after = found[max(0, warmup - 1) :]
    assert all(later <= now * (1 + 1e-12) for now, later in pairwise(after))


def test_a_decay_without_an_end_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"lr_scheduler_type cosine needs a known number of steps: set trainer.total_steps"
    ):
        rates(1, lr_scheduler_type="cosine")


@given(
    st.integers(0, 20),
    st.integers(1, 60),
    st.sampled_from(["constant", "cosine"]),
    st.floats(0, 1, exclude_max=True),
)
def test_the_shapes_are_those_of_transformers(warmup: int, decay: int, schedule: str, floor: float) -> None:
    """Its number s sets the rate of step s + 1, so that its first step has rate 0; ours starts with its second."""
    total = warmup + decay
    more: dict[str, Any] = {"cosine": {"min_lr_rate": floor}}.get(schedule, {})
    names = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    theirs = get_scheduler(
        names[schedule], optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=more
    )
    ours = OptimizerConfig(
        lr=0.1, lr_warmup_steps=warmup, lr_scheduler_type=schedule, min_lr_ratio=floor if more else 0.0
    )
    for step in range(1, total + 1):
        optimizer.step()
        theirs.step()
        assert learning_rate(ours, step, total) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
