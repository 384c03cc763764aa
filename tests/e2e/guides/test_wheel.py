"""Promise: the wheel, installed outside of the checkout, contains everything for the first steps.

pip builds it in a separate environment, for which it downloads hatchling; without a network this test fails with pip's
error.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_wheel_contains_configurations_examples_and_schema(tmp_path: Path) -> None:
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
    # Dependencies are not downloaded again: they are found after the wheel's own packages, without the checkout, whose
    # path file is read only in its environment.
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
    # Pages and their scripts are files next to the code.
    report = "from rftdask.reports.page import report_file; print(report_file.__file__)"
    assert str(site) in call(python, "-c", report)
    page = "reports/page"
    for file in (f"{page}/templates/files/report.html.j2", f"{page}/static/studio.js", "studio/static/configure.js"):
        assert (site / "rftdask" / file).exists(), file
    assert (site / "rftdask/studio/templates/parts/message.html.j2").exists()
    assert (site / "rftdask/reports/metrics.toml").exists()
