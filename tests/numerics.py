"""Numbers in tests: the seeds they draw from, and how far two computations of one result may be apart.

A floating-point result depends on the order of its sums, and so on the processor, its vector width and the number of
threads. A bound is therefore no absolute number that one machine happened to keep, but a multiple of the dtype's
rounding and of the size of what is compared.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEED_OFFSET = int(os.environ.get("RFTDASK_TEST_SEED", "0"))


def shifted_seed(number: int) -> int:
    """Return the seed to draw with: `number`, plus RFTDASK_TEST_SEED. Tests of recorded values do not ask for it."""
    return number + SEED_OFFSET


LOGIT_SIZE = 10.0
"""Magnitude of the largest logits of the tests' models."""


def assert_same_logprobs(actual: Tensor | Sequence[float], expected: Tensor | Sequence[float]) -> None:
    """Assert that logprobs, or entropies, differ by rounding alone; even one near 0 is a difference of large logits."""
    assert_close(actual, expected, roundings=16, size=LOGIT_SIZE)


def assert_close(
    actual: Tensor | np.ndarray | Sequence[float],
    expected: Tensor | np.ndarray | Sequence[float],
    *,
    roundings: float = 128,
    size: float | None = None,
) -> None:
    """Assert that two results differ by rounding alone: each element by at most `roundings` * eps * `size`.

    Args:
        actual, expected: of one shape; plain numbers count as float32, since they come from tensors of that.
        roundings: how many may add up, each eps of the coarser dtype.
        size: magnitude of the numbers that were added up; None, the largest in `expected`.
    Raises: AssertionError: with the error, in roundings, too.
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
