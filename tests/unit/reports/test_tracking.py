"""`rftdask track`. Promise: a tracker receives each row in the files of a run once, whichever process feeds it."""

from pathlib import Path

import pytest

from rftdask.config import check_plugins, load_config
from rftdask.errors import ConfigError
from rftdask.monitor.metrics import MetricsWriter
from rftdask.reports.tracking import open_feeds, track
from rftdask.run.run_folder import note_end
from tests.integration.run_cases import call_cli
from tests.unit.reports.lineage.lineage_cases import Case, make_config, make_run

PLUGIN = """
from rftdask.monitor.trackers import Tracker

class Lines(Tracker):
    def __init__(self, run, file):
        self.file = open(file, "a")

    def log(self, role, step, metrics, time_s=None):
        print(role, step, *metrics, file=self.file)

    def log_rollouts(self, step, rollouts):
        print("rollouts", step, *(row.response for row in rollouts), file=self.file)

    def close(self):
        self.file.close()
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests, because a process imports the module only once."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "lines.py").write_text(PLUGIN)
    return folder


@pytest.fixture
def case(tmp_path: Path, plugins: Path) -> Case:
    explorer = {"tasks_per_batch": 2, "rollout_model": {"engine_type": "fake"}, "plugin_dirs": [str(plugins)]}
    return make_run(str(tmp_path), make_config(str(tmp_path), explorer=explorer))


def explored(case: Case, step: int) -> None:
    with MetricsWriter(case.storage, "explorer") as metrics:
        metrics.write(step, {"reward": 0.5})


def test_the_track_command_sends_each_row_once(case: Case, tmp_path: Path) -> None:
    before = track(case.url, "lines.Lines", {"file": str(tmp_path / "before")})
    explored(case, 1)
    for expected in (1, 0):
        ended = call_cli("track", case.url, "--to", "lines.Lines", f"file={tmp_path / 'lines'}")
        assert (ended.code, ended.out) == (0, f"lines.Lines: {expected} rows of metrics\n"), ended
    assert before == len((tmp_path / "before").read_text().splitlines())
    first, second = (tmp_path / "lines").read_text().splitlines()
    assert first == "explorer 1 reward"
    assert second.startswith("rollouts 1 A0 A1 B0 B1") and len(second.split()) <= 2 + 16


def test_it_follows_a_run_to_its_end(case: Case, tmp_path: Path) -> None:
    looks = []

    def wait() -> bool:
        looks.append(len(looks))
        explored(case, looks[-1] + 5)
        if len(looks) == 3:
            note_end(case.storage, "finished", "")
        return True

    track(case.url, "lines.Lines", {"file": str(tmp_path / "lines")}, wait)
    assert looks == [0, 1, 2]
    steps = [line.split()[1] for line in (tmp_path / "lines").read_text().splitlines() if line.startswith("explorer")]
    assert steps[-3:] == ["5", "6", "7"], "also what came last"


def test_report_unknown_trackers_and_invalid_arguments(case: Case, tmp_path: Path) -> None:
    explored(case, 1)
    ended = call_cli("track", case.url, "--to", "wandbb")
    assert ended.code == 2 and "did you mean wandb" in ended.err, ended
    ended = call_cli("track", case.url, "--to", "lines.Lines", "file")
    assert ended.code == 2 and "'file' is not KEY=VALUE" in ended.err, ended
    ended = call_cli("track", case.url, "--to", "lines.Lines", f"fil={tmp_path}")
    assert ended.code == 2 and "file" in ended.err, ended


def test_several_trackers_at_once(case: Case, tmp_path: Path) -> None:
    explored(case, 1)
    first = {"monitor_type": "lines.Lines", "monitor_args": {"file": str(tmp_path / "lines")}}
    names = {**first, "extra_monitors": [{"name": "tensorboard"}]}
    tree = {**case.config.to_dict(), "monitor": names}
    feeds = open_feeds(load_config(tree), case.storage)
    for feed in feeds:
        feed.close()
        assert feed.error is None
    assert (tmp_path / "lines").read_text() and list(Path(case.url, "monitor", "tensorboard").rglob("events*"))
    for wrong, message in (
        ([{"name": "wandbb"}], "did you mean wandb"),
        ([{"name": "mlflow"}, {"name": "mlflow"}], "mlflow is listed twice"),
        ([{"name": "mlflow", "args": {"no_such": 1}}], "no_such"),
        ([{"name": "tensorboard"}], "tensorboard is listed twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_plugins(load_config({**tree, "monitor": {"extra_monitors": wrong}}))
