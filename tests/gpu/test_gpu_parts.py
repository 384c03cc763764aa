"""Promise: every part of `make gpu` keeps its bounds on this machine's GPU.

tests/e2e/test_benchmarks.py runs the same parts in tiny form on a CPU.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch cannot use a GPU")


@pytest.mark.parametrize("part", "abcdefghij")
def test_a_part_keeps_its_bounds(part: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--parts", part], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
