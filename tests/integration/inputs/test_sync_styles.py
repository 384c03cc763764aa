"""Every sync style, with its intervals and offsets, runs to its end on a real cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.cluster.local import LocalCluster
from rftdask.config import load_config
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from rftdask.synchronizer.styles import make_sync_rules
from tests.integration import run_cases as runs
from tests.integration.local_stage import local_cluster, make_stage

STEPS = 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("layout")) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "style, settings",
    [
        ("fixed", {"sync_offset": 0}),
        ("fixed", {"sync_interval": 2, "sync_offset": 1}),
        ("fixed", {"explorer_sync_interval": 3, "trainer_sync_interval": 2, "sync_offset": 2}),
        ("explorer_driven", {"sync_offset": 0}),
        ("explorer_driven", {"sync_interval": 2, "sync_offset": 1}),
        ("trainer_driven", {"sync_offset": 0}),
        ("trainer_driven", {"sync_interval": 3, "sync_offset": 1}),
        ("fully_async", {"sync_offset": 0}),
        ("fully_async", {"sync_interval": 2, "max_staleness": 1}),
    ],
    ids=str,
)
def test_a_style_runs_to_its_end_within_its_staleness_bound(
    cluster: LocalCluster, config: Path, folder: Path, style: str, settings: dict[str, int]
) -> None:
    keys = [f"synchronizer.{key}={value}" for key, value in settings.items()]
    overrides = [f"synchronizer.sync_style={style}", f"trainer.total_steps={STEPS}", *keys]
    result = make_stage(config, overrides, cluster).run()
    assert (result.step, result.stopped) == (STEPS, False)

    status = runs.assert_sound(folder)
    assert runs.num_steps(folder) == STEPS
    assert status["experiences"]["trained"] > 0
    assert status["experiences"].get("failed", 0) == 0
    assert runs.read_number(folder / "latest_checkpointed_iteration.txt") == STEPS
    assert runs.read_number(folder / "latest_state_dict_iteration.txt") == STEPS
    metrics = read_metrics(open_storage(folder), "trainer")
    assert metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert metrics["staleness_max"].max() <= make_sync_rules(load_config(config, overrides)).staleness_bound
    if style == "fixed":
        assert set(metrics["num_rows"]) == {runs.BATCH_SIZE * runs.REPEAT_TIMES}, "style fixed drops nothing"
