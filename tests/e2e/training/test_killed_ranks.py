"""Gangs of several ranks in real Dask workers, one of them killed with signal 9 at random moments."""

import random
import re
import time
from pathlib import Path

import pytest

from tests.integration import run_cases as runs
from tests.living import lives

STEPS = 30
SETTINGS = (f"trainer.total_steps={STEPS}", "trainer.save_interval=4", "cluster.num_cpus=6")
GONE_S = 120.0
"""Seconds for a gang to end after one of its ranks died, on a busy machine; otherwise it takes seconds."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = runs.write_config(tmp_path_factory.mktemp("undisturbed"))
    runs.finish_alone(config, *SETTINGS)
    return runs.run_folder(config)


@pytest.mark.parametrize(
    ("num_ranks", "kills"), [(2, ("worker", "rank")), pytest.param(4, ("rank",), marks=pytest.mark.long)]
)
def test_a_gang_outlives_its_workers(tmp_path: Path, undisturbed: Path, num_ranks: int, kills: tuple[str, ...]) -> None:
    config = runs.write_config(tmp_path)
    folder = runs.run_folder(config)
    dice = random.SystemRandom()
    seen = []
    ranks = f"trainer.num_ranks={num_ranks}"
    with runs.RunProcess("run", str(config), *SETTINGS, ranks, "trainer.max_restarts=9", "--progress", "plain") as run:
        for what in kills:
            done = runs.num_steps(folder)
            # Choose the victims before they train, so that nothing slow happens between the step and the kill.
            run.wait_until(lambda: len(run.children(runs.TRAINER)) == num_ranks)
            gang = run.children(runs.TRAINER)
            victim = dice.choice(gang)
            target = victim if what == "rank" else runs.worker_of(victim)
            assert target is not None
            run.wait_until(lambda done=done: runs.num_steps(folder) >= min(STEPS - 3, done + 2))
            time.sleep(dice.uniform(0.0, 0.1))  # anywhere within a step
            target.kill()
            seen.append((what, gang.index(victim), runs.num_steps(folder)))
            run.wait_until(lambda gang=gang: not any(map(lives, gang)), GONE_S)
        ended = run.end()
        run.wait_for_no_survivors()
    assert ended.code == 0, (seen, ended)
    notes = [line for line in ended.out.splitlines() if line.startswith("note: trainer restarts")]
    assert len(notes) == len(kills), (seen, ended.out)
    for (what, _, _), note in zip(seen, notes, strict=True):
        assert re.search(r"rank \d( on worker trainer-\d|'s task| was meant)", note), note
        assert "another rank does not answer" not in note, note
        assert what == "worker" or "ended with code -9" in note, note
    status = runs.assert_same_run(folder, undisturbed)
    assert status["checkpoint"] == status["published"] == status["step"] == STEPS
