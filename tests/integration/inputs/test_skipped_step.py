"""Promise, with real processes: a run that ends because a batch cannot be trained names the command that skips it."""

import re
from pathlib import Path

import pytest

from rftdask.buffer.batches.ledger import Ledger
from rftdask.storage import open_storage
from tests.integration import run_cases as runs

pytestmark = pytest.mark.slow


def test_the_suggested_command_skips_a_batch_with_a_lost_shard(config: Path, folder: Path) -> None:
    settings = ("trainer.save_interval=100", "trainer.max_restarts=0", "explorer.eval_interval=100")
    with runs.RunProcess("run", str(config), *settings, "--progress", "plain") as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 3)
        run.kill()
        run.wait_for_no_survivors()
    entry = Ledger(open_storage(folder)).read(2)
    assert entry is not None
    for source in {part.source for part in entry.use}:
        next(folder.glob(f"experiences/0*/{source}")).unlink()

    with runs.RunProcess("run", str(config), *settings, "--progress", "plain") as run:
        ended = run.end(code=1)
    assert "Traceback" not in ended.err, ended
    match = re.search(
        r"while training step 2; if that can never be trained: rftdask (skip \S+ 2 --because) WHY", ended.err
    )
    assert match is not None, ended
    assert runs.call_cli(*match[1].split(), "its disk died").code == 0

    runs.finish(config, *settings)
    status = runs.assert_sound(folder)
    assert status["step"] == runs.read_number(folder / "latest_checkpointed_iteration.txt") == 10
    assert status["experiences"]["skipped: its disk died"] == sum(len(part.rows) for part in entry.use)
    assert status["warnings"][0] == "step 2 was skipped: its disk died"
