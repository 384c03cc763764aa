"""Promises of tests/numerics.py: rounding passes at every size and dtype, and more than rounding does not."""

import pytest
import torch

from tests.numerics import assert_close, assert_same_logprobs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_bound_grows_with_the_size_and_the_rounding(dtype: torch.dtype, size: float) -> None:
    values = size * torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    assert_close((values + 7 * eps * size).to(dtype), values.to(dtype), roundings=8)
    with pytest.raises(AssertionError, match="they differ by"):
        assert_close((values + 10 * eps * size).to(dtype), values.to(dtype), roundings=8)


def test_other_shapes_nan_and_wrong_logprobs_are_not_rounding() -> None:
    for wrong in ([1.0], [1.0, float("nan")]):
        with pytest.raises(AssertionError):
            assert_close(wrong, [1.0, 2.0])
    assert_same_logprobs([-0.001, -9.0], [-0.00101, -9.0])
    with pytest.raises(AssertionError):
        assert_same_logprobs([-0.001, -9.0], [-0.002, -9.0])
