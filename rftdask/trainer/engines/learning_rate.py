"""The learning rate of each update: the schedules of transformers as pure functions. It knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rftdask.config.schema.optimizer import OptimizerConfig


def learning_rate(section: OptimizerConfig, total_steps: int | None) -> Callable[[int], float]:
    """The rate of an update, a step of the schedule, counted from 1: that of `transformers.get_scheduler` at every
    step, whose warm-up begins with a step of rate 0.

    total_steps: where a decay ends, and a share of warm-up is taken of; steps beyond it keep its rate. None: not known.
    Raises: ValueError: it has to be known, or transformers refuses the arguments.
    """
    name, lr, warmup = section.lr_scheduler_type, section.lr, section.lr_warmup_steps
    if warmup < 0:
        if section.lr_warmup_steps_ratio and total_steps is None:
            raise ValueError("lr_warmup_steps_ratio needs a known number of steps: set trainer.total_steps")
        warmup = int(section.lr_warmup_steps_ratio * (total_steps or 0))
    if name in ("constant", "constant_with_warmup"):
        # With a warm-up update 1 has rate 0, as with transformers, whose schedulers count from 0.
        return lambda step: lr * min(1.0, (step - 1) / warmup) if warmup else lr
    # Late: its module imports half of transformers, and most runs have a constant rate.
    from transformers.optimization import get_scheduler

    arguments: dict[str, Any] = dict(section.lr_scheduler_args or {})
    if section.min_lr_ratio and name == "linear":
        name, arguments = "polynomial", {"lr_end": lr * section.min_lr_ratio}
    elif section.min_lr_ratio:
        name, arguments = "cosine_with_min_lr", {**arguments, "min_lr_rate": section.min_lr_ratio}
    # A scheduler takes what it needs of an optimizer, and nothing is ever stepped.
    weightless = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    try:
        # Only its function of the step: a scheduler that is stepped would be a state to save.
        shape = get_scheduler(name, weightless, warmup, total_steps, arguments).lr_lambdas[0]
    except (TypeError, ValueError) as error:
        if total_steps is None:
            name = section.lr_scheduler_type
            raise ValueError(
                f"lr_scheduler_type {name} needs a known number of steps: set trainer.total_steps"
            ) from error
        raise ValueError(f"algorithm.optimizer.lr_scheduler_args: {error}") from error
    # Transformers counts from 0. Behind their end some shapes rise again, and others divide by what is left.
    return lambda step: lr * shape(min(step, total_steps or step) - 1)
