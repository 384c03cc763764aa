"""A whole run with each form of the experience log, with style fixed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.driver.experiment import Experiment
from tests.integration.local_stage import local_cluster, make_stage
from tests.integration.run_cases import (
    RunProcess,
    assert_sound,
    call_cli,
    final_weights,
    finish,
    num_steps,
    run_folder,
    write_config,
)

pytestmark = pytest.mark.slow

SETTINGS = ("trainer.total_steps=10", "buffer.total_steps=10")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folder of a run of each kind, on one cluster."""
    folders = {}
    with local_cluster(tmp_path_factory.mktemp("layout")) as cluster:
        for kind in ("queue", "file", "sql"):
            path = write_config(tmp_path_factory.mktemp(kind))
            make_stage(path, [*SETTINGS, f"buffer.trainer_input.experience_buffer.storage_type={kind}"], cluster).run()
            folders[kind] = run_folder(path)
        yield folders


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_the_form_of_the_log_changes_nothing_that_is_trained(runs: dict[str, Path], kind: str) -> None:
    folder, usual = runs[kind], runs["queue"]
    assert final_weights(folder) == final_weights(usual)
    status = assert_sound(folder)
    assert status["experiences"] == assert_sound(usual)["experiences"]
    assert not list(folder.rglob("*.parquet"))
    assert bool(list(folder.glob("experiences/0*/*.jsonl"))) == (kind == "file")
    assert (folder / "experiences.sqlite").exists() == (kind == "sql")


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_readers_of_a_run_find_its_log(runs: dict[str, Path], kind: str) -> None:
    folder = str(runs[kind])
    query = "select count(*) as n from experiences join ledger using (stage, shard, row) where step = 3"
    ended = call_cli("experiences", folder, "--sql", query, "--json")
    assert ended.code == 0 and json.loads(ended.out) == [{"n": 8}], ended
    experiment = Experiment.open(folder)
    frame = experiment.experiences()
    assert len(frame) == len(experiment.experiences(dask=True).compute()) == 80
    assert len(experiment.sql("select * from eval_experiences")) > 0
    ended = call_cli("trace", folder, frame["uid"][0])
    assert ended.code == 0 and "trained" in ended.out, ended
    assert call_cli("report", folder).code == 0


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_a_killed_run_goes_on_and_ends_the_same(config: Path, runs: dict[str, Path], kind: str) -> None:
    settings = (*SETTINGS, f"buffer.trainer_input.experience_buffer.storage_type={kind}")
    with RunProcess("run", str(config), *settings, "--progress", "plain") as run:
        run.wait_until(lambda: num_steps(run_folder(config)) >= 4)
        run.kill()
    finish(config, *settings)
    assert_sound(run_folder(config))
    assert final_weights(run_folder(config)) == final_weights(runs[kind])
