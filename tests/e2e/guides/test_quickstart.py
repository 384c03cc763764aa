"""Promises of the README about the quickstart: the unchanged script, its last line, and what the model learns.

If RFTDASK_QUICKSTART names a folder, `make quickstart` has already run: its output is quickstart.out there, and its run
is in runs/.
"""

import os
import re
from pathlib import Path

from rftdask import Experiment
from tests.integration.run_cases import RunProcess

ROOT = Path(__file__).parents[3]
DEADLINE_S = 900.0
LAST_LINE = re.compile(r"quickstart: accuracy (\d\.\d\d) -> (\d\.\d\d) in (\d+) s, run: (\S+)")


def test_the_quickstart_learns_as_promised(tmp_path: Path) -> None:
    if done := os.environ.get("RFTDASK_QUICKSTART"):
        out, runs = (Path(done) / "quickstart.out").read_text(), Path(done) / "runs"
    else:
        runs = tmp_path
        env = {"RFTDASK_RUNS": str(runs)}
        with RunProcess(program=(str(ROOT / "examples" / "quickstart.py"),), env=env) as run:
            ended = run.end(DEADLINE_S, code=0)
        out = ended.out
    last = LAST_LINE.fullmatch(out.splitlines()[-1])
    assert last is not None, out[-500:]
    print(last[0])
    before, after = float(last[1]), float(last[2])
    assert after >= 0.80 and after >= 2 * before, last[0]

    assert Path(last[4]) == runs / "rftdask" / "quickstart"
    assert (Path(last[4]) / "report.html").is_file()
    assert status_of_stages(Path(last[4])) == {"warmup": [], "grpo": []}
    experiment = Experiment.open(last[4])
    report = re.sub(r"<script>.*?</script>", "", Path(experiment.report()).read_text(), flags=re.DOTALL)
    assert "http://" not in report and "https://" not in report, "it needs nothing from elsewhere"


def status_of_stages(folder: Path) -> dict[str, list[str]]:
    """Return the problems of each stage."""
    from rftdask.reports.status import read_status

    return {stage.name: list(stage.problems) for stage in read_status(str(folder))}
