"""Workers for the tests of clusters."""

from typing import Any

from rftdask.cluster.layout import Layout, WorkerPlan

LAYOUT = Layout(
    (
        WorkerPlan("trainer-0", ("trainer", "control"), 1, gpu=0),
        WorkerPlan("trainer-1", ("trainer",), 1, gpu=1),
        WorkerPlan("explorer-0", ("explorer",), 1, gpu=2),
    )
)


def workers(*resources: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {f"tcp://{i}": {"name": f"w{i}", "resources": held} for i, held in enumerate(resources)}
