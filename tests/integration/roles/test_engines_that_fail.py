"""Promise: if two engines fail for the same reason, the run ends with the reason in the terminal and exit code 1, and
no task is blamed.
"""

from pathlib import Path

import pytest

from tests.integration.run_cases import RunProcess, run_folder, status_of
from tests.unit.engines.plugins.broken_engine import AT, CAUSE, HOW

pytestmark = pytest.mark.slow
ENGINE = "tests.unit.engines.plugins.broken_engine.BrokenEngine"


# One engine reports the reason at its first request after loading weights; of the other only its end is known.
@pytest.mark.parametrize(("how", "at"), [("says", "loaded"), ("ends", "long")])
def test_two_engines_failing_for_one_reason_end_the_run(config: Path, how: str, at: str) -> None:
    broken = (f"explorer.rollout_model.engine_type={ENGINE}", f"explorer.env_vars={{{HOW}: {how}, {AT}: {at}}}")
    with RunProcess("run", str(config), *broken, "--progress", "plain") as run:
        ended = run.end()
        run.wait_for_no_survivors()
    assert ended.code == 1, ended
    assert CAUSE in ended.err and "two failed for the same reason" in ended.err
    assert "Traceback" not in ended.err
    notes = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert len([note for note in notes if "runs again (1 of" in note]) == 1 == len(notes), notes
    assert "poisoned" not in status_of(run_folder(config))["experiences"]
