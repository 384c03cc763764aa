"""Promises of the learning rate: it equals that of `transformers.get_scheduler` at every step."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from rftdask.config.schema.optimizer import SCHEDULES, OptimizerConfig
from rftdask.trainer.engines.optimizer import learning_rate

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"power": 2.0, "lr_end": 0.01}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "cosine_with_min_lr": [{"min_lr": 0.02}, {"min_lr_rate": 0.3, "num_cycles": 0.25}],
    "cosine_warmup_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 0.02, "warmup_lr_rate": 0.2}],
    "warmup_stable_decay": [
        {"num_decay_steps": 3},
        {"num_decay_steps": 2, "num_stable_steps": 4, "warmup_type": "cosine", "decay_type": "1-sqrt"},
        {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.2},
    ],
}
CASES = [(name, arguments) for name in SCHEDULES for arguments in ARGUMENTS.get(name, [{}])]


def rates(steps: int, total_steps: int | None = None, **section: Any) -> list[float]:
    rate = learning_rate(OptimizerConfig(**section), total_steps)
    return [rate(step) for step in range(1, steps + 1)]


def rates_of_transformers(name: str, total: int, warmup: int, arguments: dict[str, Any]) -> list[float]:
    """The rates with which its optimizer steps, of lr 0.1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = get_scheduler(name, optimizer, warmup, total, arguments)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_every_schedule_has_the_rates_of_transformers(name: str, arguments: dict[str, Any], warmup: int) -> None:
    section = {"lr": 0.1, "lr_scheduler_type": name, "lr_warmup_steps": warmup, "lr_scheduler_args": arguments}
    found = rates(12, 12, **section)
    # `constant` warms up where steps of warm-up are given; there it has another name for that.
    theirs = rates_of_transformers("constant_with_warmup" if name == "constant" else name, 12, warmup, arguments)
    assert found == pytest.approx(theirs, abs=1e-12, rel=0)


def test_all_schedules_of_transformers_are_supported() -> None:
    assert {name.value for name in SchedulerType} - set(SCHEDULES) == {"reduce_lr_on_plateau", "greedy"}


@given(st.integers(0, 20), st.integers(1, 60), st.sampled_from(["linear", "cosine"]), st.floats(0, 0.99))
def test_linear_and_cosine_end_at_their_floor(warmup: int, decay: int, name: str, floor: float) -> None:
    total = warmup + decay
    found = rates(total + 3, total, lr=0.1, lr_warmup_steps=warmup, lr_scheduler_type=name, min_lr_ratio=floor)
    twin = {"linear": ("polynomial", {"lr_end": 0.1 * floor}), "cosine": ("cosine_with_min_lr", {"min_lr_rate": floor})}
    assert found[:total] == pytest.approx(rates_of_transformers(twin[name][0], total, warmup, twin[name][1]), abs=1e-12)
    assert found[total:] == [found[total - 1]] * 3  # a run beyond its planned end keeps its last rate


def test_warm_up_may_be_a_share_of_the_steps() -> None:
    assert rates(4, 8, lr=1.0, lr_warmup_steps_ratio=0.25) == [0.0, 0.5, 1.0, 1.0]
    assert rates(1, lr=0.5) == [0.5]
    with pytest.raises(
        ValueError, match=r"lr_warmup_steps_ratio needs a known number of steps: set trainer.total_steps"
    ):
        rates(1, lr_warmup_steps_ratio=0.25)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
def test_a_decay_without_an_end_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"lr_scheduler_type {name} needs a known number of steps: set trainer.total"):
        rates(1, lr_scheduler_type=name)


def test_rejected_schedule_arguments_name_their_key() -> None:
    with pytest.raises(ValueError, match=r"algorithm.optimizer.lr_scheduler_args: .*min_lr"):
        rates(1, 5, lr_scheduler_type="cosine_with_min_lr")
