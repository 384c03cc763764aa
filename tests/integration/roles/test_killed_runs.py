"""Runs whose processes are killed with signal 9, with style fixed. The undisturbed run publishes its weights as files;
the killed runs publish most of them as deltas, or hold them in memory and write them only with each checkpoint.
"""

import contextlib
import glob
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.storage import open_storage
from tests.integration import run_cases as runs
from tests.integration.run_cases import RunProcess, assert_same_run, assert_sound, run_folder, write_config
from tests.living import lives

STEPS = 40
SETTINGS = (f"trainer.total_steps={STEPS}", "trainer.save_interval=7", "explorer.eval_interval=20")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = runs.write_config(tmp_path_factory.mktemp("undisturbed"))
    runs.finish(config, *SETTINGS)
    return runs.run_folder(config)


DELTAS, MEMORY = "synchronizer.full_publish_interval=5", "synchronizer.sync_method=memory"


def start(config: Path, method: str) -> runs.RunProcess:
    return runs.RunProcess("run", str(config), *SETTINGS, method, "--progress", "plain")


def assert_same_end(folder: Path, undisturbed: Path) -> None:
    status = runs.assert_same_run(folder, undisturbed)
    assert status["checkpoint"] == status["published"] == status["step"] == STEPS


def random_moments() -> Iterator[int]:
    """Return two random optimizer steps; they differ each time, and a failure message names them."""
    yield from sorted(random.SystemRandom().sample(range(1, STEPS - 5), 2))


@pytest.mark.slow
@pytest.mark.parametrize("method", [DELTAS, pytest.param(MEMORY, marks=pytest.mark.long)])
def test_a_run_killed_whole_ends_as_if_it_had_not(folder: Path, config: Path, undisturbed: Path, method: str) -> None:
    moments = list(random_moments())
    for step in moments:
        with start(config, method) as run:
            run.wait_until(lambda step=step: runs.num_steps(folder) >= step)
            time.sleep(random.SystemRandom().uniform(0.0, 0.03))  # anywhere within a step
            run.kill()
            run.wait_for_no_survivors()
    with start(config, method) as run:
        ended = run.end()
    assert ended.code == 0, (moments, ended)
    assert_same_end(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("method", [DELTAS, pytest.param(MEMORY, marks=pytest.mark.long)])
def test_a_run_survives_losing_each_process(folder: Path, config: Path, undisturbed: Path, method: str) -> None:
    with start(config, method) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 3)
        (engine,) = run.children(runs.ENGINE)
        engine.kill()
        run.wait_until(lambda: engine not in run.children(runs.ENGINE) and bool(run.children(runs.ENGINE)))

        (trainer,) = run.children(runs.TRAINER)
        steps = runs.num_steps(folder)
        trainer.kill()
        run.wait_until(lambda: runs.num_steps(folder) > steps)

        (engine,) = run.children(runs.ENGINE)
        shards = runs.num_shards(folder)
        parent = runs.worker_of(engine)
        parent.kill()
        run.wait_until(lambda: runs.num_shards(folder) > shards + 2)
        assert not lives(engine), "the engine outlived its worker"
        ended = run.end(code=0)
    notes = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert any("engine" in note for note in notes), notes
    assert any("trainer restarts from its newest checkpoint (1 of 3)" in note for note in notes), notes
    assert any("worker explorer-0" in note and "was lost" in note for note in notes), notes
    assert method == MEMORY or list(folder.glob("weights/*/*.delta")), "nothing was published as what has changed"
    assert_same_end(folder, undisturbed)


def test_a_run_whose_deltas_are_damaged_ends_the_same(folder: Path, config: Path, undisturbed: Path) -> None:
    """Each delta has a flipped byte or is removed as soon as it is seen, which may be while an engine uses it."""
    seen = set[Path]()

    def has_ended() -> bool:
        # Unlike pathlib, glob accepts folders that are removed meanwhile.
        for file in {Path(file) for file in glob.iglob(f"{folder}/weights/*/*.delta")} - seen:
            seen.add(file)
            with contextlib.suppress(OSError):  # removed meanwhile
                if len(seen) % 2:
                    file.unlink()
                else:
                    data = bytearray(file.read_bytes())
                    data[len(data) // 2] ^= 1
                    file.write_bytes(data)
        return run.process.poll() is not None or runs.num_steps(folder) == STEPS

    with start(config, DELTAS) as run:
        run.wait_until(has_ended)
        run.end(code=0)
    assert len(seen) > STEPS // 4, "few versions were published as deltas"
    assert_same_end(folder, undisturbed)


PART_STEPS = 8
IN_PARTS = (
    f"trainer.total_steps={PART_STEPS}",
    "trainer.save_interval=3",
    "explorer.eval_interval=100",
    "explorer.tasks_per_batch=4",
    "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.uneven",
    "--progress",
    "plain",
)


def is_paused_half_done(run: RunProcess, folder: Path) -> bool:
    """Pause the run and return True if a batch is half done; otherwise let the run continue."""
    if not runs.num_half_done(folder):
        return False
    run.pause()
    if runs.num_half_done(folder):
        return True
    run.resume()
    return False


def test_a_run_killed_between_parts_of_a_batch_ends_the_same(tmp_path: Path) -> None:
    whole, parts = write_config(tmp_path / "whole"), write_config(tmp_path / "parts")
    with RunProcess("run", str(whole), "explorer.max_commit_delay_s=null", *IN_PARTS) as run:
        run.end(code=0)
    folder = run_folder(parts)
    settings = ("run", str(parts), "explorer.max_commit_delay_s=0.01", *IN_PARTS)
    for _ in range(2):
        with RunProcess(*settings) as run:
            run.wait_until(lambda run=run: is_paused_half_done(run, folder))
            run.kill()
            run.wait_for_no_survivors()
            assert runs.num_half_done(folder) > 0
    with RunProcess(*settings) as run:
        run.end(code=0)
    names = ParquetLog(open_storage(str(folder))).shards()
    assert sum(name.part is not None for name in names) > PART_STEPS
    assert assert_same_run(folder, run_folder(whole))["step"] == assert_sound(run_folder(whole))["step"] == PART_STEPS
