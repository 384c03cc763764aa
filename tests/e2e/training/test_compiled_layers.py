"""Promise: `trainer.torch_compile` changes only rounding: two steps with compiled layers give the metrics and weights
of two steps without, in float32 on a CPU. The test needs the C++ compiler that PyTorch calls.
"""

import shutil
from pathlib import Path

import pytest

from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import Strategy
from tests.e2e.gloo_ranks import run_ranks
from tests.e2e.training.test_ranks_agree import TOLERANCE, metric_difference, trained, weight_difference


def compare_compiled(gangs: dict[int, Ranks], model: str) -> tuple[float, float, bool]:
    """Return differences of metrics and weights, and whether layers were in fact compiled."""
    plain, _, expected = trained(model, "grpo", Strategy(gangs[1]))
    compiled, _, weights = trained(model, "grpo", Strategy(gangs[1]), trainer__torch_compile=True)
    same_bits = all(weights[name].equal(expected[name]) for name in expected)
    return metric_difference(compiled, plain), weight_difference(weights, expected), same_bits


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler on this machine")
def test_compiled_layers_equal_eager_layers(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=18, intermediate_size=33, num_layers=1, num_heads=3)
    ((metrics, weights, same_bits),) = run_ranks(1, tmp_path, compare_compiled, str(tmp_path / "model"))
    assert max(metrics, weights) <= TOLERANCE
    assert not same_bits, "nothing was compiled: the very same bits"
