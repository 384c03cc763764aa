"""`Experiment` in a program: created from keywords, run in a thread, stopped and continued, inspected afterwards;
`validate`.
"""

import os
import re
from functools import partial
from pathlib import Path

import matplotlib.figure
import matplotlib.pyplot as plt
import pytest
import yaml

from rftdask import Experiment
from rftdask.driver.stall_watch import StallWatch
from rftdask.errors import FencedError, UserError
from rftdask.reports.metric_table import explain
from rftdask.run.lease import Lease, driver_role
from rftdask.storage import open_storage
from tests.integration.run_cases import BATCH_SIZE, DEADLINE_S, REPEAT_TIMES, assert_sound, run_folder, write_config
from tests.living import wait_until

STEPS = 6


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """An experiment started from keywords in a thread, which has ended."""
    sections = yaml.safe_load(write_config(tmp_path_factory.mktemp("api")).read_text())
    sections["trainer"]["total_steps"] = STEPS
    sections |= {"project": "p", "group": "g", "log": {"level": "WARNING"}}
    experiment = Experiment(**sections).start()
    assert experiment.wait(timeout_s=0.01) is None, "it is still running"
    summary = experiment.wait(timeout_s=DEADLINE_S)
    assert summary is not None and summary.status == "finished"
    return experiment


def test_a_second_driver_starts_no_cluster_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands started in the same moment both find that no role is held."""
    monkeypatch.setattr("rftdask.driver.experiment.start_cluster", lambda *_: pytest.fail("it has started a cluster"))
    second = Experiment(**yaml.safe_load(write_config(tmp_path).read_text()))
    storage = open_storage(second.url)
    with Lease(storage, driver_role(second.config)):
        held = storage.list("")
        with pytest.raises(FencedError, match=f"its driver is process {os.getpid()} on"):
            second.run("none")
        assert storage.list("") == held


def test_a_slow_run_reports_in_each_phase_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    always = partial(StallWatch, 0.0)
    monkeypatch.setattr("rftdask.driver.experiment.StallWatch", always)
    monkeypatch.setattr("rftdask.driver.stall_watch._POLL_S", 0.01)
    sections = yaml.safe_load(write_config(tmp_path).read_text())
    sections["trainer"]["total_steps"] = 2
    assert Experiment(**sections).run("none").status == "finished"
    waits = [line.partition("the run waits for ")[2] for line in caplog.messages if line.startswith("no progress for")]
    log = (tmp_path / "runs/rftdask/fake/log/driver.log").read_text()
    for phase in ("the check of the configuration", "the start of cluster.type", "the trainer to", "the end of the"):
        assert any(phase in text for text in waits), (phase, waits)
    assert "the run waits for the trainer to" in log and "threads of the driver meanwhile" in log


def test_metrics_are_a_frame_with_a_row_for_each_role_and_step(experiment: Experiment) -> None:
    metrics = experiment.metrics()
    assert metrics[metrics.role == "trainer"].step.tolist() == list(range(1, STEPS + 1))
    assert sorted(metrics[metrics.role == "eval"].step) == [0, 5, STEPS]
    assert set(experiment.metrics("explorer").role) == {"explorer"}


def test_folder_and_log_level_follow_the_configuration(
    experiment: Experiment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "api0" / "runs"
    assert [path.relative_to(root) for path in root.rglob("run.json")] == [Path("p/g/fake/run.json")]
    logs = {path.name: path.read_text() for path in (root / "p/g/fake/log").glob("*.log")}
    assert {name for name, text in logs.items() if " INFO " in text} == set()
    assert "driver.log" in logs


def test_every_metric_is_explained(experiment: Experiment) -> None:
    tags = {"role", "step", "time_s", "taskset", "host", "process"}
    names = {str(name) for name in experiment.metrics().columns} - tags
    assert {name for name in names if explain(name) is None} == set()


def test_experiences_are_a_pandas_or_a_dask_frame(experiment: Experiment) -> None:
    frame = experiment.experiences()
    assert len(frame) >= STEPS * BATCH_SIZE * REPEAT_TIMES
    assert frame.uid.is_unique
    lazy = experiment.experiences(dask=True)
    assert lazy.reward.count().compute() == len(frame)


def test_progress_renders_in_a_notebook(experiment: Experiment) -> None:
    progress = experiment.progress()
    assert (progress.step, progress.total_steps) == (STEPS, STEPS)
    assert f"{STEPS}" in progress._repr_html_()


def test_plot_and_report_show_the_run(experiment: Experiment) -> None:
    figure = experiment.plot()
    assert isinstance(figure, matplotlib.figure.Figure)
    plt.close(figure)
    report = Path(experiment.report()).read_text()
    assert "<html" in report and experiment.config.name in report
    without = re.sub(r"<script>.*?</script>", "", report, flags=re.DOTALL)  # a comment there names its origin
    assert "http://" not in without and "https://" not in without, "self-contained"


def test_an_opened_run_reports_the_same(experiment: Experiment) -> None:
    opened = Experiment.open(experiment.url)
    assert opened.url == experiment.url
    assert opened.metrics().equals(experiment.metrics())
    progress = opened.progress()
    assert (progress.step, progress.total_steps, progress.reward) == (STEPS, STEPS, experiment.progress().reward)
    assert repr(opened) == f"<Experiment {experiment.url}: finished, step {STEPS} of {STEPS}>"
    assert f"rftdask studio {experiment.url}" in opened._repr_html_()


def test_a_mistake_is_reported_when_the_run_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("no JSON\n")
    experiment = Experiment.from_yaml(config)
    assert repr(experiment).endswith("runs/rftdask/fake: not started, step 0>")
    with pytest.raises(UserError, match=r"tasks\.jsonl") as caught:
        experiment.start()
    assert caught.value._render_traceback_() == [f"{type(caught.value).__name__}: {caught.value}"]


def test_a_path_instead_of_a_config_is_an_error_with_advice() -> None:
    with pytest.raises(UserError, match=r"Experiment\('run.yaml'\): .*; use Experiment.from_yaml for a file"):
        Experiment("run.yaml")  # type: ignore[arg-type]


def test_a_stopped_experiment_continues_to_its_end(config: Path) -> None:
    experiment = Experiment.from_yaml(config, "trainer.total_steps=30", "explorer.eval_on_startup=false").start()
    wait_until(lambda: experiment.progress().step, "the first step", deadline_s=DEADLINE_S)
    experiment.stop()
    summary = experiment.wait(timeout_s=DEADLINE_S)
    assert summary is not None and summary.status == "stopped"
    stopped_at = assert_sound(run_folder(config))["checkpoint"]
    assert 0 < stopped_at < 30
    summary = experiment.run("none")
    assert summary.status == "finished"
    assert assert_sound(run_folder(config))["checkpoint"] == 30
    # Not at 0 (eval_on_startup: false); at each eval_interval, and, if there was time, at the step where the trainer
    # stopped.
    assert {*experiment.metrics("eval").step} | {stopped_at} == {*range(5, 31, 5), stopped_at}
    beside = Experiment.from_yaml(config, "continue_from_checkpoint=false")
    assert re.fullmatch(re.escape(experiment.url) + r"_\d{14}", beside.url)
