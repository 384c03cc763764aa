"""Promise: workers of a role can be added and removed while the cluster runs, and the others stay."""

import time

from rftdask.cluster.layout import EXPLORER_RESOURCE, TRAINER_RESOURCE, Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster

DEADLINE_S = 120.0
PLANS = (WorkerPlan("trainer-0", (TRAINER_RESOURCE,), 1), WorkerPlan("explorer-0", (EXPLORER_RESOURCE,), 1))


def wait_for(cluster: LocalCluster, names: set[str]) -> None:
    found: set[str] = set()
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = {info["name"] for info in cluster.client.scheduler_info(n_workers=-1)["workers"].values()}
        if found == names:
            return
        time.sleep(0.05)
    raise AssertionError(f"workers {found}, not {names}")


def test_explorers_join_and_leave_a_local_cluster() -> None:
    with LocalCluster(Layout(PLANS)) as cluster:
        cluster.scale(EXPLORER_RESOURCE, 2)
        wait_for(cluster, {"trainer-0", "explorer-0", "explorer-2"})
        assert cluster.num_asked(EXPLORER_RESOURCE) == 2
        cluster.scale(EXPLORER_RESOURCE, 0)
        wait_for(cluster, {"trainer-0"})
