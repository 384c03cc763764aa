"""Seeds of tests, and tolerances for two computations of one result.

A floating-point result depends on the order of its sums, and so on the processor, its vector width and the number of
threads. A bound is therefore a multiple of the dtype's rounding and of the magnitude of the operands, not an absolute
number that one machine happened to meet.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEED_OFFSET = int(os.environ.get("RFTDASK_TEST_SEED", "0"))


def shifted_seed(number: int) -> int:
    """Return `number` plus RFTDASK_TEST_SEED. Tests of recorded values must not use it."""
    return number + SEED_OFFSET


LOGIT_SIZE = 10.0
"""Magnitude of the largest logits of the tests' models."""


def assert_same_logprobs(actual: Tensor | Sequence[float], expected: Tensor | Sequence[float]) -> None:
    """Assert that logprobs or entropies differ only by rounding; even a value near 0 is a difference of large
    logits.
    """
    assert_close(actual, expected, roundings=16, size=LOGIT_SIZE)


def assert_close(
    actual: Tensor | np.ndarray | Sequence[float],
    expected: Tensor | np.ndarray | Sequence[float],
    *,
    roundings: float = 128,
    size: float | None = None,
) -> None:
    """Assert that two results differ only by rounding: each element by at most `roundings` * eps * `size`.

    Args:
        actual, expected: same shape; plain numbers count as float32, since they come from float32 tensors.
        roundings: how many roundings may add up, each eps of the coarser dtype.
        size: magnitude of the summands; None: the largest in `expected`.

    Raises: AssertionError: with the error, also in roundings.
    """
    one, other = (value if isinstance(value, Tensor) else torch.as_tensor(value) for value in (actual, expected))
    if not (isinstance(actual, Tensor) or isinstance(expected, Tensor)):
        one, other = one.float(), other.float()
    assert one.shape == other.shape, f"{tuple(one.shape)} is not {tuple(other.shape)}"
    if not other.numel():
        return
    eps = max(torch.finfo(value.dtype).eps for value in (one, other))
    size = float(other.detach().abs().max()) if size is None else size
    error = float((one.detach().double() - other.detach().double()).abs().max())
    assert error <= roundings * eps * size, (
        f"they differ by {error:.3g}: {error / (eps * size or 1.0):.1f} roundings of numbers of size {size:.3g}, "
        f"of which {roundings} are allowed"
    )
