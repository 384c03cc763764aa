"""Learning rate as a function of the optimizer step. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `lr`, then constant, linear or cosine decay to `lr * min_lr_ratio` at `total_steps`.

    Example: LearningRate(1e-6, warmup_steps=10, schedule="cosine", total_steps=100).at(1) == 1e-7
    """

    lr: float
    warmup_steps: int = 0
    schedule: str = "constant"
    """constant, linear or cosine."""
    total_steps: int | None = None
    """Where the decay ends; needed unless constant."""
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"lr_scheduler_type {self.schedule!r}: must be constant, linear or cosine")
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(
                f"lr_scheduler_type {self.schedule} needs a known number of steps: set trainer.total_steps"
            )

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        assert self.total_steps is not None
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        shape = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape)
