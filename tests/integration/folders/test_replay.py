"""`rftdask replay`: the batches of a run trained again from its ledger."""

import hashlib
from pathlib import Path

import pytest

from rftdask.buffer.batches.ledger import Ledger
from rftdask.cli.replay import compare, prepare
from rftdask.storage import open_storage
from tests.integration import run_cases as runs

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an asynchronous run that has ended, with checkpoints 2, 4 and 6."""
    config = runs.write_config(tmp_path_factory.mktemp("replay"))
    runs.finish(
        config,
        f"trainer.total_steps={STEPS}",
        "trainer.save_interval=2",
        "synchronizer.sync_style=fully_async",
        "buffer.explorer_input.eval_tasksets=[]",
    )
    return runs.run_folder(config)


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of every file of a run, without its lineages."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).parts[0] != "lineages"]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_replaying_the_same_config_gives_the_same_bits(run: Path) -> None:
    before, step = contents(run), 4
    ended = runs.call_cli("replay", str(run), "--from", str(step), "--progress", "none")
    assert ended.code == 0, ended
    folder = run / "lineages" / f"from-{step}"
    assert ended.out.splitlines()[-2:] == [str(folder), f"bit-equal with lineage main at step {STEPS}"]
    assert runs.final_weights(folder) == runs.final_weights(run)
    assert contents(run) == before
    theirs, ours = Ledger(open_storage(run)), Ledger(open_storage(folder), f"from-{step}")
    for number in range(1, STEPS + 1):
        first, second = theirs.read(number), ours.read(number)
        assert first is not None and second is not None
        assert (first.use, first.drop, first.positions) == (second.use, second.drop, second.positions)
    status = runs.assert_sound(folder)
    assert status["step"] == status["checkpoint"] == STEPS


def test_another_config_is_a_lineage_of_its_own(run: Path) -> None:
    before = contents(run)
    arguments = ("replay", str(run), "--from", "2", "--lineage", "short", "--progress", "none")
    ended = runs.call_cli(*arguments, "trainer.total_steps=4", "algorithm.optimizer.lr=1e-3")
    assert ended.code == 0, ended
    folder = run / "lineages" / "short"
    assert Ledger(open_storage(folder), "short").last_step() == 4
    assert contents(run) == before
    other = runs.call_cli(*arguments, "algorithm.optimizer.lr=2e-3")
    assert other.code == 2 and "algorithm.optimizer.lr: was 0.001, is 0.002" in other.err
    experiences = runs.call_cli("experiences", str(folder), "--csv", "--sql", "select count(*) as n from experiences")
    assert experiences.code == 0 and int(experiences.out.splitlines()[1]) >= STEPS * 8


def test_weights_that_differ_are_reported(run: Path, tmp_path: Path) -> None:
    _, ours = prepare(str(run), 4, "differs", [])
    theirs = open_storage(run)
    assert compare(theirs, ours).render() == "no checkpoint to compare with lineage main"
    from rftdask.synchronizer.manifest import Manifest, write_folder

    write_folder(ours, f"global_step_{STEPS}", Manifest("differs", STEPS, {}), {"actor/model.safetensors": b"other"})
    difference = compare(theirs, ours)
    assert not difference.is_equal
    assert difference.render().startswith(f"not equal to lineage main at step {STEPS}: actor/model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "3"), "no checkpoint of that step; use one of 0, 2, 4"),
        (("--from", "6"), "has trained steps 1 to 6; start below 6"),
        (("--from", "2", "seed=3"), "needs its own name; add --lineage NAME"),
        (("--from", "2", "--lineage", "main", "seed=3"), "take a new name"),
        (("--from", "2", "--lineage", "x/y"), "take a new name"),
        (("--from", "2", "--lineage", "b", "buffer.batch_size=8"), "a replay trains the recorded batches"),
        (("--from", "2", "--lineage", "c", "algorithm.algorithm_type=sft"), "sft learns from a dataset"),
    ],
)
def test_a_run_that_cannot_be_replayed_is_refused(run: Path, arguments: tuple[str, ...], message: str) -> None:
    ended = runs.call_cli("replay", str(run), *arguments)
    assert ended.code == 2 and message in ended.err, ended
    assert runs.ledger_of(run), "the run is as it was"
