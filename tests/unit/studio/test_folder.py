"""Runs of a folder. Promises: every run below it is listed, but not its stages, and no name leads out of the folder; an
unreadable run does not hide others; values are cached briefly, and the end of a run is not missed.
"""

import json
import os
import time

import pytest

from rftdask.errors import DataError
from rftdask.monitor.metrics import MetricsWriter
from rftdask.run.lease import Lease
from rftdask.run.run_folder import END_FILE, note_begin, note_end
from rftdask.storage import open_storage
from rftdask.studio.folder import HERE, Folder
from tests.unit.reports.lineage.lineage_cases import Case, make_config, make_run


@pytest.fixture
def case(tmp_path) -> Case:
    return make_run(str(tmp_path))


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """A clock of one element, which a test can advance."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def slow_down(folder: Folder, now: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each read of a line take this long."""
    read = folder.line

    def read_slowly(name: str):
        now[0] += seconds
        return read(name)

    monkeypatch.setattr(folder, "line", read_slowly)


def test_find_runs_at_any_depth_but_not_their_stages(case, tmp_path):
    make_run("", make_config(str(tmp_path), name="deep", group="g"))
    stage = tmp_path / "p/run/stage"
    stage.mkdir()
    (stage / "run.json").write_text("{}")
    (tmp_path / "a/b/c/d/e/f").mkdir(parents=True)
    assert Folder(tmp_path).runs() == ["p/g/deep", "p/run"]
    assert Folder(tmp_path / "p" / "run").runs() == [HERE]
    assert Folder(tmp_path / "a").runs() == []


def test_find_and_read_runs_on_an_object_store(s3_url):
    make_run("", make_config(s3_url))
    folder = Folder(s3_url)
    assert folder.runs() == ["p/run"]
    assert (folder.line("p/run").state, folder.line("p/run").step) == ("killed", 2)
    assert len(folder.browser("p/run").rows) == 16


@pytest.mark.parametrize("name", ["..", "p/../p/run", "/etc", "", "p", "p/run/", "p/run/../../.."])
def test_names_that_are_not_runs_are_refused(case, tmp_path, name):
    with pytest.raises(DataError, match="has no run"):
        Folder(tmp_path).stages(name)


def test_a_line_shows_the_status_of_a_run(case, tmp_path):
    line = Folder(tmp_path).line("p/run")
    assert (line.state, line.step, line.total, line.algorithms) == ("killed", 2, None, ("grpo",))
    assert (line.reward, line.first_accuracy, line.accuracy) == (pytest.approx(1 / 3), 0.1, 0.9)
    assert (line.began_s, line.last_number_s, line.seconds) == (1000.0, 1006.0, 6.0)
    note_end(case.storage, "failed", "RoleError: no memory")
    line = Folder(tmp_path).line("p/run")
    assert (line.state, line.why, line.progress) == ("failed", "RoleError: no memory", None)
    note_end(case.storage, "finished", "")
    line = Folder(tmp_path).line("p/run")
    assert (line.state, line.step, line.total, line.progress) == ("finished", 2, 2, 1.0)


def test_progress_is_relative_to_the_configured_steps(tmp_path):
    make_run("", make_config(str(tmp_path), trainer={"total_steps": 8}))
    line = Folder(tmp_path).line("p/run")
    assert (line.total, line.progress) == (8, 0.25)


def test_live_runs_are_listed_first(case, tmp_path):
    other = make_run("", make_config(str(tmp_path), name="other"))
    make_run("", make_config(str(tmp_path), name="last"))
    with Lease(other.storage, "trainer"):
        lines = Folder(tmp_path).lines()
    assert (lines[0].name, lines[0].state) == ("p/other", "running")
    assert {line.state for line in lines[1:]} == {"killed"}


def test_a_damaged_run_does_not_hide_others(case, tmp_path):
    bad = tmp_path / "p" / "bad"
    bad.mkdir()
    for damage in ("{", "[]", json.dumps({"config": {"mode": "nonsense"}}), "[" * 5000):
        (bad / "run.json").write_text(damage)
        lines = {line.name: line.state for line in Folder(tmp_path).lines()}
        assert lines == {"p/bad": "not read", "p/run": "killed"}, damage


def test_a_long_list_of_runs_does_not_wait_for_all(tmp_path, now, monkeypatch):
    for number in range(3):
        make_run("", make_config(str(tmp_path), name=f"run-{number}"))
    folder = Folder(tmp_path)
    read = folder.line
    slow_down(folder, now, 5.0, monkeypatch)
    monkeypatch.setattr("rftdask.studio.folder._NUM_READERS", 1)
    assert sorted(line.state for line in folder.lines()) == ["killed", "not read yet", "not read yet"]
    monkeypatch.setattr(folder, "line", read)
    assert [line.state for line in folder.lines()] == ["killed"] * 3


def test_cached_values_expire(case, tmp_path, now):
    folder = Folder(tmp_path)
    assert len(folder.stages("p/run")[0].rows("trainer")) == 2
    with MetricsWriter(case.storage, "trainer") as trainer:
        trainer.write(3, {"loss": 0.1})
    now[0] += 1.9
    assert len(folder.stages("p/run")[0].rows("trainer")) == 2
    now[0] += 0.2
    assert len(folder.stages("p/run")[0].rows("trainer")) == 3


def test_an_ended_run_shows_its_last_metrics(case, tmp_path, now):
    folder = Folder(tmp_path)
    with Lease(case.storage, "trainer"):
        assert folder.line("p/run").is_alive
        now[0] += 2.5
        folder.stages("p/run")  # cached just before the end
    with MetricsWriter(case.storage, "trainer") as trainer:
        trainer.write(3, {"loss": 0.1})
    note_end(case.storage, "finished", "")
    assert folder.line("p/run").step == 3
    assert len(folder.stages("p/run")[0].rows("trainer")) == 3


def test_an_ended_run_is_read_again_only_when_continued(case, tmp_path, now):
    note_end(case.storage, "stopped", "")
    folder = Folder(tmp_path)
    assert (folder.line("p/run").state, folder.line("p/run").step) == ("stopped", 2)
    (tmp_path / "p/run/metrics/trainer").rename(tmp_path / "away")  # a read would now fail
    now[0] += 1e6
    assert folder.line("p/run").step == 2
    (tmp_path / "away").rename(tmp_path / "p/run/metrics/trainer")
    note_begin(case.storage)
    with MetricsWriter(case.storage, "trainer") as trainer:
        trainer.write(3, {"loss": 0.1})
    now[0] += 1e6
    assert (folder.line("p/run").state, folder.line("p/run").step) == ("running", 3)
    assert folder.lines()[0].is_alive


def test_a_new_run_is_listed_at_once(case, tmp_path, now, monkeypatch):
    folder = Folder(tmp_path)
    slow_down(folder, now, 100.0, monkeypatch)
    assert [line.name for line in folder.lines()] == ["p/run"]
    make_run("", make_config(str(tmp_path), name="new"))
    now[0] += 2.5
    assert [line.name for line in folder.lines()] == ["p/new", "p/run"]


def test_queries_write_nothing(case, tmp_path):
    before = {path: os.stat(path).st_mtime_ns for path in tmp_path.rglob("*")}
    folder = Folder(tmp_path)
    folder.lines()
    folder.browser("p/run")
    folder.browser("p/run", evals=True)
    assert {path: os.stat(path).st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not open_storage(tmp_path / "p" / "run").exists(END_FILE)


def test_few_browsers_are_cached(tmp_path):
    for number in range(3):
        make_run("", make_config(str(tmp_path), name=f"run-{number}"))
    folder = Folder(tmp_path)
    first = folder.browser("p/run-0")
    assert folder.browser("p/run-0") is first
    for number in range(3):
        folder.browser(f"p/run-{number}")
        folder.browser(f"p/run-{number}", evals=True)
    assert folder.browser("p/run-0") is not first
