"""What no installed peer has, written down once more: one token after the other, in float64, from the papers alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from rftdask.testing.conformance.cases import Batch, Case, loss_of


def cases() -> list[Case]:
    """Nothing has to be installed."""
    bounds = {"sequence": 0.04, "batch": 0.3}
    return [
        Case(
            f"m2po loss, second moment of each {scope} at most {bound}",
            loss_of("m2po", policy_loss_fn_args={"scope": scope, "m2_threshold": bound}),
            m2po(scope, bound),
        )
        for scope, bound in bounds.items()
    ]


def m2po(scope: str, bound: float) -> Callable[[Batch], Tensor]:
    """Mean over the tokens of -A r, without those that algorithm 1 of arXiv:2510.01161 masks: while the mean of
    (log r)^2 over the tokens that PPO could clip is above the bound, the largest of them goes.
    """

    def formula(batch: Batch) -> Tensor:
        places = [(int(row), int(column)) for row, column in batch.mask.nonzero()]
        log_r = {place: batch.policy.double()[place] - batch.old.double()[place] for place in places}
        moved = {place: float(value.detach()) for place, value in log_r.items()}
        clippable = {place for place in places if float(batch.advantages[place]) * moved[place] > 0}
        masked: set[tuple[int, int]] = set()
        for row in range(len(batch.mask)) if scope == "sequence" else [None]:
            left = [place for place in clippable if row in (None, place[0])]
            left.sort(key=lambda place: moved[place] ** 2)
            while left and sum(moved[place] ** 2 for place in left) / len(left) > bound:
                masked.add(left.pop())
        gains = [batch.advantages[place] * log_r[place].exp() for place in places if place not in masked]
        return -torch.stack([*gains, batch.policy.sum() * 0.0]).sum() / len(places)

    return formula
