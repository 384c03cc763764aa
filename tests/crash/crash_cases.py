"""Run the crash test as users do, in a separate process because it forks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 560.0


def run_crash_test(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return (exit code, output) of `rftdask crashtest FOLDER --json ARGUMENTS`."""
    command = [sys.executable, "-m", "rftdask", "crashtest", str(folder), "--json", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEADLINE_S)
    assert done.stdout, done.stderr
    assert os.listdir(folder) == [], "it left something behind"
    return done.returncode, json.loads(done.stdout)


def part(report: dict[str, Any], name: str) -> dict[str, Any]:
    (matching,) = (figures for figures in report["parts"] if figures["part"] == name)
    return dict(matching)
