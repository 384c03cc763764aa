"""Trackers. Promises: they receive each row of the files at least once, and their failure never ends a run."""

import logging
import sys
from pathlib import Path

import pytest

from rftdask.errors import UserError
from rftdask.monitor.metrics import MetricsWriter
from rftdask.monitor.trackers import NoTracker, RolloutRow, Tracker, TrackerFeed, make_tracker


class ListTracker(Tracker):
    def __init__(self) -> None:
        self.logged: list[tuple[str, int, dict[str, float]]] = []
        self.is_broken = False

    def log(self, role, step, metrics, time_s=None):
        if self.is_broken:
            raise ConnectionError("no route")
        self.logged.append((role, step, dict(metrics)))


def tensorboard_values(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = [event for file in sorted(folder.iterdir()) for event in LegacyEventFileLoader(str(file)).Load()]
    return [(value.tag, event.step, value.simple_value) for event in events for value in event.summary.value]


def test_the_next_driver_continues_a_tracker(storage, clock):
    writer = MetricsWriter(storage, "trainer", clock=clock)
    writer.write(1, {"loss": 1.0}, stage="rl")
    first, second = ListTracker(), ListTracker()
    assert TrackerFeed(storage, first, "wandb").poll() == 1  # then this driver dies
    writer.write(2, {"loss": 0.5}, stage="rl")
    writer.close()
    TrackerFeed(storage, second, "wandb").close()
    assert first.logged == [("trainer", 1, {"loss": 1.0})]
    assert second.logged == [("trainer", 2, {"loss": 0.5})]


def test_other_tags_than_the_stage_become_part_of_the_name(storage, clock):
    with MetricsWriter(storage, "eval", clock=clock) as writer:
        writer.write(4, {"accuracy": 0.5}, taskset="gsm8k", stage="rl")
    tracker = ListTracker()
    TrackerFeed(storage, tracker, "wandb").poll()
    assert tracker.logged == [("eval", 4, {"gsm8k/accuracy": 0.5})]


def test_a_tracker_without_history_receives_all_rows_again(storage, clock):
    MetricsWriter(storage, "trainer", clock=clock).write(1, {"loss": 1.0})
    TrackerFeed(storage, ListTracker(), "tensorboard").poll()
    fresh = ListTracker()
    fresh.keeps_history = False
    assert TrackerFeed(storage, fresh, "tensorboard").poll() == 1


def test_a_failed_tracker_is_disabled_and_the_next_loses_nothing(storage, clock, caplog):
    MetricsWriter(storage, "trainer", clock=clock).write(1, {"loss": 1.0})
    broken = ListTracker()
    broken.is_broken = True
    feed = TrackerFeed(storage, broken, "wandb")
    with caplog.at_level(logging.WARNING, logger="rftdask"):
        assert feed.poll() == 0
        feed.close()
    assert "ListTracker failed and is disabled: no route" in caplog.text
    assert isinstance(feed.error, ConnectionError)
    assert TrackerFeed(storage, ListTracker(), "wandb").poll() == 1


def test_tensorboard_files_equal_the_metrics_files(storage, clock, tmp_path):
    with MetricsWriter(storage, "trainer", clock=clock) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 0.5, "kl": 0.25})
    tracker = make_tracker("tensorboard", folder=tmp_path, project="p", name="n")
    TrackerFeed(storage, tracker, "tensorboard").close()
    values = tensorboard_values(tmp_path / "tensorboard" / "trainer")
    assert sorted(values) == [("kl", 2, 0.25), ("loss", 1, 1.0), ("loss", 2, 0.5)]


def test_without_a_local_folder_warn_of_a_temporary_one(caplog, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="rftdask"):
        tracker = make_tracker("tensorboard", folder=None, project="p", name="n")
    assert not tracker.keeps_history
    assert str(tmp_path) in caplog.text


def test_none_is_a_tracker_that_shows_nothing():
    assert isinstance(make_tracker("none", folder=None, project="p", name="n"), NoTracker)


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_missing_package_is_reported_with_its_extra(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf'pip install "rftdask\[{kind}\]"'):
        make_tracker(kind, folder=tmp_path, project="p", name="n")


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(UserError, match="there are mlflow, none, swanlab, tensorboard, trackio, wandb"):
        make_tracker("neptune", folder=tmp_path, project="p", name="n")


class TableTracker(ListTracker):
    def log_rollouts(self, step, rollouts):
        self.logged.append(("rollouts", step, [rollout.response for rollout in rollouts]))


def test_rollouts_are_read_only_for_trackers_with_tables(storage, clock):
    with MetricsWriter(storage, "explorer", clock=clock) as writer:
        writer.write(3, {"reward": 1.0})
    steps_read = []

    def read_rollouts(step):
        steps_read.append(step)
        return [RolloutRow("sums/0/1", 0, "1+1=", "2", "2", 1.0, "ok")]

    with_tables, without_tables = TableTracker(), ListTracker()
    for tracker in (with_tables, without_tables):
        TrackerFeed(storage, tracker, type(tracker).__name__, read_rollouts).poll()
    assert with_tables.logged == [("explorer", 3, {"reward": 1.0}), ("rollouts", 3, ["2"])]
    assert without_tables.logged == [("explorer", 3, {"reward": 1.0})]
    assert steps_read == [3]
