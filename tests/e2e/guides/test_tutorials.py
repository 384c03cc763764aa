"""Promise of the tutorials: typed in an empty folder, they do what they say. A block with file=NAME is that file, a
bash block is typed, and the lines of a text block after one are among what it printed ("..." stands for anything).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
WALKS = (
    ("tutorials/your-data.md", "tutorials/your-reward.md"),  # the second goes on where the first ended
    ("tutorials/your-agent.md",),
    ("tutorials/your-cluster.md",),
    ("zh/quickstart.md",),
)
DEADLINE_S = 400


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(language, file, text) of each block of a page."""
    return re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def test_every_tutorial_is_walked() -> None:
    walked = {page for walk in WALKS for page in walk}
    assert {f"tutorials/{path.name}" for path in DOCS.glob("tutorials/*.md")} <= walked


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: Path(walk[0]).stem)
def test_a_tutorial_does_what_it_says(walk: tuple[str, ...], tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in (("rftdask", "-m rftdask"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (commands / name).chmod(0o755)
    # Nothing else, so that this machine's SLURM, if it has one, is not asked.
    (commands / "head").symlink_to(str(shutil.which("head")))
    env = {**os.environ, "PATH": str(commands), "PYTHONPATH": str(DOCS.parent)}
    folder = tmp_path / "empty"
    folder.mkdir()

    def call(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout + done.stderr

    for page in walk:
        said = ""
        for language, file, text in blocks(page):
            if file:
                (folder / file).write_text(text)
            elif language == "bash":
                said = call("/bin/bash", "-euo", "pipefail", "-c", text)
            elif language == "text":
                for line in text.splitlines():
                    expected = ".*".join(re.escape(part) for part in line.split("..."))
                    assert re.search(f"^{expected}", said, re.MULTILINE), (line, said)
            elif language == "python" and text.startswith(("from ", "import ")):
                call(sys.executable, "-c", text)
