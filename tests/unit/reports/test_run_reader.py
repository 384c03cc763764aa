"""Run reader. Promises: a run is read below the given URL, and each part is read once."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from rftdask.buffer.batches.ledger import LedgerEntry, Rows
from rftdask.buffer.log.schema import Experience
from rftdask.config import load_config
from rftdask.errors import DataError
from rftdask.monitor.metrics import MetricsWriter
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.lineage.trace import trace
from rftdask.reports.page.report_file import report_run
from rftdask.reports.run_reader import Accuracy, open_stages
from rftdask.reports.status import read_status
from rftdask.reports.summary import learned, render_summary, summarize
from rftdask.run.run_folder import note_end, open_run
from rftdask.storage import open_storage


def begin_run(root: Path) -> Path:
    """A run folder with three steps of metrics."""
    tree = {
        "checkpoint_root_dir": str(root),
        "model": {"model_path": "tiny", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    config = load_config(tree)
    storage = open_storage(config.checkpoint_job_dir)
    open_run(storage, config)
    with MetricsWriter(storage, "trainer") as metrics:
        for step, reward in ((1, 0.25), (2, float("nan")), (3, 0.75)):
            metrics.write(step, {"reward": reward})
    return Path(storage.url)


def test_a_moved_run_is_read_in_its_new_place(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(begin_run(tmp_path / "runs"), moved)
    (status,) = read_status(str(moved))
    assert (status.folder, status.state, status.reward) == (str(moved), "not running", 0.75)
    assert report_run(moved) == f"{moved}/report.html" and (moved / "report.html").exists()
    assert not list((tmp_path / "runs").rglob("*.json"))


def test_values_of_a_role_have_no_gaps(tmp_path: Path) -> None:
    (stage,) = open_stages(begin_run(tmp_path))
    assert stage.values("trainer", "reward") == [0.25, 0.75]
    assert stage.values("trainer", "loss") == stage.values("eval", "accuracy") == []


def test_the_report_of_an_ended_run_has_its_times_and_error(tmp_path: Path) -> None:
    folder = begin_run(tmp_path)
    (stage,) = open_stages(folder)
    first, last = stage.span
    summary = summarize(stage.config, str(folder), [stage], status="as found")
    assert (summary.started_at_s, summary.seconds) == (first, last - first) and first > 0
    note_end(open_storage(folder), "failed", "RoleError: trainer rank 1 died")
    report_run(folder)
    page = (folder / "report.html").read_text()
    assert '<span class="chip failed">failed</span>' in page and "RoleError: trainer rank 1 died" in page


def test_accuracies_are_over_all_tasksets(tmp_path: Path) -> None:
    folder = begin_run(tmp_path)
    looks = [(0, "easy", 0.5, 10), (0, "hard", 0.0, 30), (4, "easy", 1.0, 10), (4, "hard", 0.2, 30)]
    with MetricsWriter(open_storage(folder), "eval") as metrics:
        # The run stopped before the last version answered the other taskset, which does not lower the accuracy.
        for version, taskset, accuracy, num_rollouts in [*looks, (6, "hard", 0.1, 30)]:
            metrics.write(version, {"accuracy": accuracy, "num_rollouts": num_rollouts}, taskset=taskset)
    (stage,) = open_stages(folder)
    assert stage.accuracies == [Accuracy(pytest.approx(0.125), 40), Accuracy(pytest.approx(0.4), 40)]
    assert stage.accuracies[1].error == pytest.approx(0.0775, abs=1e-4)
    summary = summarize(stage.config, str(folder), [stage], status="finished", began_s=0.0)
    change = "+27.5 points, standard error 9.3, 40 answers each, seed 42 only"
    assert learned(summary) == f"accuracy 12.5% -> 40.0% ({change})"


def test_accuracy_is_over_the_rollouts_that_report_it(tmp_path: Path) -> None:
    folder = begin_run(tmp_path)
    with MetricsWriter(open_storage(folder), "eval") as metrics:
        metrics.write(4, {"accuracy": 1.0, "num_rollouts": 30, "accuracy/count": 10}, taskset="some")
        metrics.write(4, {"accuracy": 0.0, "num_rollouts": 30}, taskset="all")
    (stage,) = open_stages(folder)
    assert stage.accuracies == [Accuracy(0.25, 40)]


def test_each_part_is_read_once(tmp_path: Path) -> None:
    (stage,) = open_stages(begin_run(tmp_path))
    assert stage.metrics is stage.metrics and stage.audit is stage.audit and stage.log is stage.log
    assert stage.counts == {"committed": 0, "trained": 0, "waiting": 0}


def test_opening_a_folder_without_a_run_fails(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        open_stages(tmp_path)


def test_rows_of_an_incomplete_step_are_not_trained(tmp_path: Path) -> None:
    (stage,) = open_stages(begin_run(tmp_path))  # whose metrics end with step 3
    rows = [
        Experience("t", 0, 0, k, 1, tokens=(1, 2), prompt_length=1, rollout_logprobs=(-1.0,), reward=1.0)
        for k in range(2)
    ]
    name = stage.log.commit(rows, explore_step=1, unit=0)
    for step in range(1, 5):
        stage.ledger.write(LedgerEntry(step, "main", use=(Rows(name.text, (0, 1)),) if step == 4 else ()))
    assert stage.counts == {"committed": 2, "trained": 0, "waiting": 2}
    url = stage.storage.url
    assert RunTables(url).table("states")["state"].to_pylist() == ["waiting", "waiting"]
    text = trace(url, "t/0/0/0/0").render()
    assert "  waiting     for step 4, row 1 of 2 (lineage main), which is not complete yet" in text
    assert "trained" not in text
    with MetricsWriter(stage.storage, "trainer") as metrics:
        metrics.write(4, {})
    assert open_stages(url)[0].counts == {"committed": 2, "trained": 2, "waiting": 0}
    assert RunTables(url).table("states")["state"].to_pylist() == ["trained", "trained"]
    assert "  trained     step 4, row 1 of 2 (lineage main)" in trace(url, "t/0/0/0/0").render()


def test_status_summary_and_report_warn_of_a_flat_reward(tmp_path: Path) -> None:
    url = begin_run(tmp_path)
    (status,) = read_status(str(url))
    assert status.warnings == () and "WARNING" not in status.render()
    with MetricsWriter(open_storage(url), "trainer") as metrics:
        for step in range(1, 7):
            metrics.write(step, {"reward": 0.0, "flat_groups": 1.0, "num_rows": 8.0})
    (status,) = read_status(str(url))
    line = "all rewards of the last 5 steps are 0: "
    assert line in status.warnings[0] and f"  WARNING     {line}" in status.render()
    report_run(url)
    assert f"Warning</b> grpo: {line}" in (url / "report.html").read_text()
    stages = open_stages(url)
    summary = summarize(stages[0].config, str(url), stages, status="finished", began_s=0.0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_summary(summary))
    assert f"warning: grpo: {line}" in console.export_text()
