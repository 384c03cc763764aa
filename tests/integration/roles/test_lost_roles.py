"""Roles that are gone for a while, with real processes."""

import signal
import time
from pathlib import Path

import pytest

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import done_units
from rftdask.config import load_config
from rftdask.storage import open_storage
from rftdask.synchronizer.styles import make_sync_rules
from tests.integration import run_cases as runs
from tests.integration.run_cases import RunProcess, run_folder, status_of
from tests.unit.engines.plugins.broken_engine import AT, CAUSE, HOW

pytestmark = pytest.mark.slow

BATCHES_PER_STEP = 2
SETTINGS = ("trainer.total_steps=12", "trainer.save_interval=4", "explorer.eval_interval=100")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without losses."""
    config = runs.write_config(tmp_path_factory.mktemp("plain"))
    runs.finish(config, *SETTINGS)
    return runs.run_folder(config)


def assert_same_end(config: Path, plain: Path) -> None:
    runs.finish(config, *SETTINGS)
    runs.assert_same_run(runs.run_folder(config), plain)


def explored(folder: Path) -> tuple[int, int]:
    """Return the number of committed work units and the last explore step among them."""
    done = done_units(ParquetLog(open_storage(folder)).shards())
    return len(done), max((step for step, _ in done), default=0)


def test_explorers_without_a_trainer_stop_at_the_staleness_bound(config: Path, folder: Path) -> None:
    settings = ("synchronizer.sync_style=fully_async", "synchronizer.max_staleness=3", "trainer.total_steps=20")
    settings = (*settings, "explorer.eval_interval=100")
    rules = make_sync_rules(load_config(config, settings))
    with runs.RunProcess("run", str(config), *settings, "--progress", "plain") as run:
        pointer = folder / "latest_state_dict_iteration.txt"
        run.wait_until(lambda: runs.num_steps(folder) >= 2 and pointer.exists())
        (trainer,) = run.children(runs.TRAINER)
        trainer.send_signal(signal.SIGSTOP)  # it hangs, with whatever it has published
        tasks = Path(f"/proc/{trainer.pid}/task")  # once all its threads hang; one of them publishes
        run.wait_until(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()))
        published = runs.read_number(pointer)
        last = max(step for step in range(1, 21) if rules.weights_for(step).version <= published)
        run.wait_until(lambda: explored(folder)[0] >= last * BATCHES_PER_STEP)
        time.sleep(2.0)  # for the next step to begin, if it could
        assert explored(folder) == (last * BATCHES_PER_STEP, last), (published, rules)
        steps = runs.num_steps(folder)
        trainer.kill()
        run.wait_until(lambda: runs.num_steps(folder) > steps)
        run.end(code=0)
    assert runs.assert_sound(folder)["step"] == 20


def test_orphans_of_a_killed_driver_end_and_the_run_resumes(config: Path, folder: Path, plain: Path) -> None:
    with runs.RunProcess("run", str(config), *SETTINGS) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 5)
        run.process.kill()  # only the driver: nobody notifies the workers
        run.process.wait()
        run.wait_for_no_survivors(120.0)
    assert_same_end(config, plain)


def test_a_run_whose_storage_vanished_stops_and_resumes_later(config: Path, folder: Path, plain: Path) -> None:
    away = folder.with_name("away")
    with runs.RunProcess("run", str(config), *SETTINGS) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 5)
        folder.rename(away)
        folder.touch()  # every path below it is now an error
        ended = run.end(code=1)
    assert str(folder) in ended.err, ended
    folder.unlink()
    away.rename(folder)
    assert_same_end(config, plain)


ENGINE = "tests.unit.engines.plugins.broken_engine.BrokenEngine"


# One engine reports the reason at its first request after loading weights; of the other only its end is known.
@pytest.mark.parametrize(("how", "at"), [("says", "loaded"), ("ends", "long")])
def test_two_engines_failing_for_one_reason_end_the_run(config: Path, how: str, at: str) -> None:
    broken = (f"explorer.rollout_model.engine_type={ENGINE}", f"explorer.env_vars={{{HOW}: {how}, {AT}: {at}}}")
    with RunProcess("run", str(config), *broken, "--progress", "plain") as run:
        ended = run.end(code=1)
    assert CAUSE in ended.err and "two failed for the same reason" in ended.err
    assert "Traceback" not in ended.err
    notes = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert len([note for note in notes if "runs again (1 of" in note]) == 1 == len(notes), notes
    assert "poisoned" not in status_of(run_folder(config))["experiences"]
