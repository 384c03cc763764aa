"""Learning rate of each update: the schedules of transformers as pure functions. It does not know the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rftdask.config.schema.optimizer import OptimizerConfig


def learning_rate(section: OptimizerConfig, total_steps: int | None) -> Callable[[int], float]:
    """Return the rate as a function of the update's number, counted from 1.

    The rates equal those of `transformers.get_scheduler`, whose warm-up begins with an update of rate 0.

    Args: total_steps: updates of the run, where a decay ends; later updates keep its last rate. None: unknown.
    Raises: ValueError: the schedule needs `total_steps`, or transformers rejects the arguments.
    """
    name, lr, warmup = section.lr_scheduler_type, section.lr, section.lr_warmup_steps
    if warmup < 0:
        if section.lr_warmup_steps_ratio and total_steps is None:
            raise ValueError("lr_warmup_steps_ratio needs a known number of steps: set trainer.total_steps")
        warmup = int(section.lr_warmup_steps_ratio * (total_steps or 0))
    if name in ("constant", "constant_with_warmup"):
        # The schedulers of transformers count from 0, so update 1 of a warm-up has rate 0.
        return lambda step: lr * min(1.0, (step - 1) / warmup) if warmup else lr
    # Late: the module imports half of transformers, and most runs have a constant rate.
    from transformers.optimization import get_scheduler

    arguments: dict[str, Any] = dict(section.lr_scheduler_args or {})
    if section.min_lr_ratio and name == "linear":
        name, arguments = "polynomial", {"lr_end": lr * section.min_lr_ratio}
    elif section.min_lr_ratio:
        name, arguments = "cosine_with_min_lr", {**arguments, "min_lr_rate": section.min_lr_ratio}
    # A scheduler needs an optimizer; this one is never stepped.
    weightless = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    try:
        # Only the function of the step is used: a scheduler that is stepped would be state to save.
        shape = get_scheduler(name, weightless, warmup, total_steps, arguments).lr_lambdas[0]
    except (TypeError, ValueError) as error:
        if total_steps is None:
            text = f"lr_scheduler_type {section.lr_scheduler_type} needs a known number of steps"
            raise ValueError(f"{text}: set trainer.total_steps") from error
        raise ValueError(f"algorithm.optimizer.lr_scheduler_args: {error}") from error
    # Clamped at the end, beyond which some schedules rise again and others divide by 0.
    return lambda step: lr * shape(min(step, total_steps or step) - 1)
