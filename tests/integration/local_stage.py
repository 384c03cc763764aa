"""Stages of runs on a local cluster in the test's own process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rftdask.cluster.layout import plan_layout
from rftdask.cluster.local import LocalCluster
from rftdask.config import load_config
from rftdask.driver.preflight import check_inputs
from rftdask.driver.stage import StageRun
from rftdask.monitor.events import Event
from rftdask.run.run_folder import open_run
from rftdask.storage import open_storage
from tests.integration.run_cases import write_config


@contextmanager
def local_cluster(folder: Path, tls: bool = True) -> Iterator[LocalCluster]:
    """A cluster for stages of `write_config` with two cores."""
    with LocalCluster(plan_layout([load_config(write_config(folder))], 2), tls=tls) as cluster:
        yield cluster


def make_stage(
    path: Path, settings: Sequence[str], cluster: LocalCluster, note: Callable[[Event], None] = lambda event: None
) -> StageRun:
    """Return the stage of a run on the cluster; `note` receives the events of its roles."""
    config = load_config(path, settings)
    storage = open_storage(config.checkpoint_job_dir)
    config = open_run(storage, config)
    sizes = check_inputs([config])[0].sizes
    return StageRun(config, storage, cluster, plan_layout([config], 2), sizes, note, f"{storage.url}/log")
