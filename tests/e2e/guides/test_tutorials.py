"""Promise of the tutorials: typed in an empty folder, they do what they describe. A block with file=NAME is that file,
a bash block is executed, and the lines of a following text block are in its output ("..." matches anything).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.run_cases import call_cli

DOCS = Path(__file__).parents[3] / "docs"
WALKS = (
    ("tutorials/your-data.md", "tutorials/your-reward.md"),  # the second continues in the folder of the first
    ("tutorials/your-agent.md",),
    ("tutorials/your-cluster.md",),
    ("zh/quickstart.md",),
)
SAME_AGAIN = {("zh/quickstart.md",)}
"""Pages that repeat others in another language."""
DEADLINE_S = 600


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (language, file, text) of each block of a page."""
    return re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def test_every_tutorial_is_walked() -> None:
    walked = {page for walk in WALKS for page in walk}
    assert {f"tutorials/{path.name}" for path in DOCS.glob("tutorials/*.md")} <= walked


@pytest.mark.parametrize(
    "walk",
    [
        pytest.param(walk, id=Path(walk[0]).stem, marks=[pytest.mark.long] if walk in SAME_AGAIN else [])
        for walk in WALKS
    ],
)
def test_a_tutorial_works_as_printed(walk: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    # Nothing else, so that a SLURM on this machine is not used.
    for name in ("head", "bash"):
        (commands / name).symlink_to(str(shutil.which(name)))
    (commands / "python").write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    (commands / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for page in walk:
        output = ""
        for language, file, text in blocks(page):
            if file:
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_text(text)
            elif language == "bash":
                output = "".join(typed(line) for line in text.replace("\\\n", "").splitlines())
            elif language == "text":
                for line in text.splitlines():
                    expected = ".*".join(re.escape(part) for part in line.split("..."))
                    assert re.search(f"^{expected}", output, re.MULTILINE), (line, output)
            elif language == "python" and text.startswith(("from ", "import ")):
                exec(text, {"__name__": "__main__"})


def typed(line: str) -> str:
    """Return the output of a line. Commands of rftdask run one after the other in this process, which has imported the
    package; none sees user modules that an earlier one imported.
    """
    if not line.startswith("rftdask "):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout + done.stderr
    before = set(sys.modules)
    ended = call_cli(*shlex.split(line, comments=True)[1:])
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(os.getcwd()):
            del sys.modules[name]
    assert ended.code == 0, (line, ended)
    return ended.out + ended.err
