"""The short form of benchmarks/chaos.py: one kill of everything that can be killed in a run, and the end of it is that
of a run that nobody disturbed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
def test_a_run_whose_every_role_is_killed_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), "--kills", "5", "--steps", "18", "--explorers", "1"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, (done.stdout, done.stderr, (tmp_path / "chaos.log").read_text()[-4000:])
    assert "5 kills (1 x driver, 1 x engine, 1 x explorer worker, 1 x trainer, 1 x trainer worker)" in done.stdout
    assert "0 lost, 0 twice, the same ledger, the same bits of weights" in done.stdout
