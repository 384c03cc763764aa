"""Promise of `private`: nothing that a whole run leaves, workers, logs and report included, is for anybody else."""

import stat
import sys
from pathlib import Path

import pytest

from tests.integration.run_cases import RunProcess, call_cli, run_folder, write_config

MASKLESS = "import os, sys; os.umask(0); os.execv(sys.executable, [sys.executable, '-m', 'rftdask.cli', *sys.argv[1:]])"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_private_run_leaves_nothing_to_others(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    changes = ("private=true", "trainer.total_steps=2", "monitor.monitor_type=tensorboard")
    words = ("run", str(config), *changes, "--progress", "none")
    with RunProcess(*words, program=(sys.executable, "-c", MASKLESS)[1:]) as run:
        ended = run.end()
    assert ended.code == 0, ended
    folder = run_folder(config)
    assert call_cli("report", str(folder)).code == 0
    wrong = [
        (oct(stat.S_IMODE(path.stat().st_mode)), str(path))
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert not wrong, wrong
    assert stat.S_IMODE(folder.parent.stat().st_mode) & 0o077, "what is above a run is not the run's"
