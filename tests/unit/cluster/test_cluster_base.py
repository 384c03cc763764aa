"""Promises of all clusters, and of existing Dask clusters."""

import pytest

from rftdask.cluster.base import close_in_turn, control_workers
from rftdask.cluster.existing import ExistingCluster, assign
from rftdask.config import load_config
from rftdask.errors import UserError
from tests.unit.cluster.worker_cases import LAYOUT, workers


def test_rollouts_cannot_kill_the_control_worker() -> None:
    explorer = {"explorer": 1.0}
    assert control_workers(workers({"trainer": 1.0, "control": 1.0}, {"trainer": 1.0}, {})) == ["tcp://0"]
    assert control_workers(workers(explorer, {"trainer": 1.0}, explorer)) == ["tcp://1"]
    assert control_workers(workers(explorer, {}, explorer)) == ["tcp://1"], "one that is not needed"
    assert control_workers(workers(explorer, explorer)) == []


class Slow:
    """A client or cluster of Dask that takes its time."""

    def __init__(self, seconds: float, closed: list[float]) -> None:
        self.seconds, self.closed = seconds, closed

    def close(self, timeout: float) -> None:
        self.closed.append(self.seconds)
        if self.seconds > timeout:
            raise TimeoutError


def test_a_slow_close_fails_no_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    closed: list[float] = []
    close_in_turn(Slow(1e6, closed), Slow(12, closed))
    assert closed == [1e6, 12]
    (message,) = caplog.messages
    assert "too slow to close" in message


def test_workers_without_roles_get_them_in_name_order() -> None:
    assert assign(workers({}, {}, {}, {}), LAYOUT) == {
        "tcp://0": {"trainer": 1.0},
        "tcp://1": {"trainer": 1.0},
        "tcp://2": {"explorer": 1.0},
    }


def test_workers_with_roles_keep_them() -> None:
    assert assign(workers({"trainer": 1}, {"trainer": 1}, {"explorer": 1}, {}), LAYOUT) == {}
    with pytest.raises(UserError, match="2 workers for role trainer are needed, and 1 of the 2 workers hold"):
        assign(workers({"trainer": 1}, {"explorer": 1}), LAYOUT)


def test_too_few_workers_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 trainer \+ 1 explorers = 3 workers are needed, and .* has 2"):
        assign(workers({}, {}), LAYOUT)


def test_an_existing_cluster_needs_exactly_one_address() -> None:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "cluster": {"type": "existing", "options": {"adress": "tcp://x"}},
    }
    with pytest.raises(UserError, match="adress is not an option; use address, scheduler_file"):
        ExistingCluster(load_config(tree), LAYOUT)
    with pytest.raises(UserError, match="needs either address or scheduler_file"):
        ExistingCluster(load_config({**tree, "cluster": {"type": "existing"}}), LAYOUT)
