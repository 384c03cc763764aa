"""Promises of all clusters."""

import pytest

from rftdask.cluster.base import close_in_turn, control_workers
from tests.unit.cluster.worker_cases import workers


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
