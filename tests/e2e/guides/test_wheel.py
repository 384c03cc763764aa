"""The wheel, installed outside the checkout, has all that the first steps need.

pip builds it in an environment of its own, for which it fetches hatchling; where it cannot, this test fails with that.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_wheel_alone_has_configurations_examples_and_the_schema(tmp_path: Path) -> None:
    def call(*command: str) -> str:
        env = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False, env=env)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    [wheel] = tmp_path.glob("rftdask-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    call(*pip, "--python", python, "install", "--no-deps", str(wheel))
    # What it needs is not fetched again: it is found behind its own packages, without the checkout, whose path file is
    # read only in the environment that has it.
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    rftdask = str(tmp_path / "venv" / "bin" / "rftdask")
    assert str(site) in call(python, "-c", "import rftdask; print(rftdask.__file__)")
    assert "rftdask 0." in call(rftdask, "--version")
    assert "config/quickstart.yaml" in call(rftdask, "examples")
    call(rftdask, "examples", "copy", "sft.yaml")
    call(rftdask, "validate", "sft.yaml")
    call(rftdask, "init", "--yes", "--slurm", "main")
    assert (tmp_path / "run.yaml").exists() and (tmp_path / "rftdask.schema.json").exists()
    call(rftdask, "validate", "run.yaml")
    # Pages and their scripts are files beside the code.
    report = "from rftdask.reports.page import report_file; print(report_file.__file__)"
    assert str(site) in call(python, "-c", report)
    page = "reports/page"
    for file in (f"{page}/templates/files/report.html.j2", f"{page}/static/studio.js", "studio/static/configure.js"):
        assert (site / "rftdask" / file).exists(), file
    assert (site / "rftdask/studio/templates/parts/message.html.j2").exists()
    assert (site / "rftdask/reports/metrics.toml").exists()
