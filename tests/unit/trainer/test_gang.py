"""Promises of the gang. The Dask client is a fake that keeps the script a test gives it; a real cluster is in
tests/integration.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest

from rftdask.errors import (
    DataError,
    EmptyBatchError,
    FencedError,
    OperatorError,
    PeerLostError,
    ProcessLostError,
    RftError,
    RoleError,
    StorageError,
    StorageRefusedError,
    WaitTimeout,
)
from rftdask.monitor.events import Ended
from rftdask.trainer import gang as gang_module
from rftdask.trainer.gang import MAX_TAKEN, TRAINER_RESOURCE, Gang, RankSpec, active_keys, interface_of

ONE, TWO = {"tcp://a": True}, {"tcp://a": True, "tcp://b": True}
"""Workers."""


class FakeFuture:
    """Future that is done from the start, or never."""

    def __init__(self, key: str, outcome: Any) -> None:
        self.key = key
        self.outcome = outcome
        failed = isinstance(outcome, BaseException)
        self.status = outcome if isinstance(outcome, str) else "error" if failed else "finished"

    def done(self) -> bool:
        return self.status != "pending"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)

    def exception(self) -> BaseException | None:
        return self.outcome if isinstance(self.outcome, BaseException) else None

    def result(self) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class FakeClient:
    """Client with workers by address, and the outcome of each rank in each generation: a result, error or status."""

    def __init__(self, workers: dict[str, bool], *generations: list[Any]) -> None:
        self.workers = dict(workers)
        self.generations = list(generations)
        self.submitted: list[tuple[str, str]] = []
        self.keys: list[str] = []
        self.cancelled: list[int] = []
        self.outcomes: list[Any] = []
        self.left: list[str] = []
        """Workers that announced their end."""
        self.lingering = self.looks = 0
        """Number of calls of `active_keys` that still report cancelled ranks, and of all calls."""
        self.starting = 0
        """Number of calls of `scheduler_info` that still report workers that have just joined."""

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        self.starting -= 1
        status = "init" if self.starting >= 0 else "running"
        resources = {address: {TRAINER_RESOURCE: 1} if trains else {} for address, trains in self.workers.items()}
        return {"workers": {address: {"resources": held, "status": status} for address, held in resources.items()}}

    def run(self, function: Any, workers: list[str] | None = None, on_error: str = "raise") -> dict[str, Any]:
        if function is active_keys:
            self.looks += 1
            return {"tcp://x": self.keys if self.looks <= self.lingering else []}
        assert workers is not None
        self.outcomes = self.generations.pop(0)
        if isinstance(self.outcomes[0], OSError):
            raise self.outcomes[0]
        return {workers[0]: "10.0.0.1:4321"}

    def submit(
        self, function: Any, spec: RankSpec, address: str, *, key: str, workers: list[str], **options: Any
    ) -> FakeFuture:
        assert workers == [address]
        assert spec.rendezvous == "10.0.0.1:4321" or address.startswith("tls://127.")
        self.submitted.append((address, f"rank {spec.rank}"))
        self.keys.append(key)
        return FakeFuture(key, self.outcomes[spec.rank])

    def cancel(self, futures: list[FakeFuture], force: bool) -> None:
        self.cancelled.append(len(futures))

    def get_events(self, topic: str) -> list[tuple[float, str]]:
        return [(0.0, address) for address in self.left]


def gang(client: FakeClient, *, world_size: int = 1, notes: list[str] | None = None, **fields: Any) -> Gang:
    defaults = {"max_restarts": 2, "newest_step": lambda: 0, "worker_deadline_s": 0.0, "cancelled": lambda: False}
    return Gang(
        client=client,  # type: ignore[arg-type]  # its futures are fakes too
        spec=RankSpec({}, "memory://x", None, world_size, threads=1, log_folder=None),
        note=(notes if notes is not None else []).append,
        **{**defaults, **fields},
    )


def test_ranks_run_on_trainer_workers_and_rank_0_ends_the_run() -> None:
    client = FakeClient({"tcp://c": True, "tcp://a": False, "tcp://b": True}, [Ended(3, False), Ended(-1, False)])
    assert gang(client, world_size=2).run() == Ended(3, False)
    assert client.submitted == [("tcp://b", "rank 0"), ("tcp://c", "rank 1")]
    assert client.cancelled == [2]


def test_ranks_wait_until_their_workers_are_running() -> None:
    client = FakeClient(ONE, [Ended(3, False)])
    client.starting = 2
    assert gang(client, worker_deadline_s=60.0).run() == Ended(3, False)
    assert client.starting < 0, "the rank was submitted to a worker that was not running yet"


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (ProcessLostError("trainer-rank-0 ended with code -9"), "ended with code -9"),
        (StorageError("disk"), "disk"),
        (ConnectionResetError("by the scheduler"), "rank 1 failed: ConnectionResetError: by the scheduler"),
        (CancelledError("trainer-0"), "rank 1 failed: CancelledError"),
        ("lost", "rank 1's task is lost: its worker or the scheduler was lost"),
        ("cancelled", "rank 1's task is cancelled"),
    ],
)
def test_a_lost_rank_ends_its_gang_and_the_next_one_goes_on(loss: Any, text: str) -> None:
    notes: list[str] = []
    client = FakeClient(TWO, ["pending", loss], [Ended(9, False), Ended(0, False)])
    assert gang(client, world_size=2, notes=notes).run() == Ended(9, False)
    assert client.cancelled == [2, 2], "the rank that still ran was cancelled"
    assert len(set(client.keys)) == 4, "a key is never used again"
    assert len(notes) == 1
    assert notes[0].startswith("trainer restarts from its newest checkpoint (1 of 2): ")
    assert text in notes[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RoleError("trainer-rank-0 failed: ValueError: no such shape\nTraceback ..."), "ValueError: no such shape"),
        (OperatorError("operator mine failed"), "operator mine failed"),
        (WaitTimeout("batch 3 did not come in 9 s"), "batch 3 did not come"),
        (ZeroDivisionError("a bug"), "rank 1 failed: ZeroDivisionError: a bug"),
    ],
)
def test_a_recurring_error_ends_the_run_with_advice(error: Exception, text: str) -> None:
    notes: list[str] = []
    client = FakeClient(TWO, ["pending", error], [Ended(1, False), Ended(1, False)])
    with pytest.raises(RoleError) as caught:
        gang(client, world_size=2, notes=notes).run()
    assert text in str(caught.value)
    assert str(caught.value).splitlines()[-1].endswith("fix its cause, then run the same command again")
    assert len(client.generations) == 1 and notes == [], "nothing was started again"
    assert client.cancelled == [2], "the other rank was cancelled"


def test_a_recurring_error_takes_precedence_over_a_loss() -> None:
    error, lost = RoleError("rank 0 failed: ValueError: nan"), ProcessLostError("rank 1 ended with code 1")
    client = FakeClient(TWO, [lost, error])
    with pytest.raises(RoleError, match="ValueError: nan"):
        gang(client, world_size=2).run()


def test_a_lost_worker_is_the_cause_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    client = FakeClient(
        {"tcp://a": True, "tcp://b": True}, [PeerLostError("noticed"), "pending"], [Ended(9, False)] * 2
    )

    def submit(*args: Any, **options: Any) -> FakeFuture:
        future = FakeClient.submit(client, *args, **options)
        if len(client.keys) == 2:
            del client.workers["tcp://b"]  # after both were submitted
            client.workers["tcp://c"] = True
        return future

    client.submit = submit  # type: ignore[method-assign]
    monkeypatch.setattr(gang_module, "_POLL_INTERVAL_S", -1.0)  # sleep() raises ValueError
    assert gang(client, world_size=2, notes=notes).run() == Ended(9, False)
    assert "rank 1 was lost with its worker tcp://b" in notes[0]


def test_losing_a_worker_before_its_rank_starts_loses_the_rank() -> None:
    notes: list[str] = []
    client = FakeClient(ONE, [OSError("connection refused")], [Ended(1, False)])
    assert gang(client, notes=notes).run() == Ended(1, False)
    assert "tcp://a was lost before its rank started: connection refused" in notes[0]


def test_a_run_that_ends_cancels_its_ranks() -> None:
    client = FakeClient(ONE, ["pending"])
    with pytest.raises(RoleError, match="the run ended while the trainer was at work"):
        gang(client, cancelled=lambda: len(client.submitted) > 0).run()
    assert client.cancelled == [1]


@pytest.mark.parametrize("reason", ["stopping", "cancelled"])
def test_a_run_that_ends_does_not_wait_for_workers(reason: str) -> None:
    waiting = gang(FakeClient({"tcp://a": False}), worker_deadline_s=60.0, **{reason: lambda: True})
    assert waiting.run() is None, "it would raise after the deadline"


def test_a_run_that_stops_is_not_restarted() -> None:
    client = FakeClient(ONE, [ProcessLostError("lost")], [Ended(9, False)])
    assert gang(client, stopping=lambda: len(client.submitted) > 0).run() is None, "the newest checkpoint suffices"


def losses(count: int) -> list[list[ProcessLostError]]:
    return [[ProcessLostError(f"cause {number}")] for number in range(count)]


def test_restarts_without_progress_are_bounded() -> None:
    client = FakeClient(ONE, *losses(9))
    with pytest.raises(RoleError, match=r"failed 3 times without a new step .*at step 0.*; the last time: cause 2"):
        gang(client).run()
    assert client.cancelled == [1, 1, 1]


def test_restarts_between_which_steps_were_taken_are_not_counted() -> None:
    client = FakeClient(ONE, *losses(9), [Ended(9, False)])
    assert gang(client, newest_step=lambda: len(client.submitted)).run() == Ended(9, False)
    stuck = FakeClient(ONE, *losses(9))
    # The fourth loss was the last one with a new step.
    with pytest.raises(RoleError, match=r"at step 4.*; the last time: cause 5"):
        gang(stuck, newest_step=lambda: min(4, len(stuck.submitted))).run()


def test_workers_taken_by_a_batch_system_get_more_restarts() -> None:
    for left, most in (("tcp://elsewhere", 2), ("tcp://a", MAX_TAKEN)):
        client = FakeClient(ONE, *losses(30))
        client.left = [left]
        with pytest.raises(RoleError, match=f"failed {most + 1} times .*; the last time: cause {most}"):
            gang(client).run()


def test_missing_workers_do_not_count_as_taken() -> None:
    client = FakeClient(ONE, [ProcessLostError("preempted")])
    client.left = ["tcp://a"]
    tries: list[str] = []

    def note(text: str) -> None:
        tries.append(text)
        client.workers = {}

    with pytest.raises(RoleError, match=r"failed 3 times .*0 of 1 trainer workers joined"):
        replace(gang(client), note=note).run()
    assert len(tries) == 3, "one for the taken worker, and two for missing workers"


def test_a_gang_restarts_if_the_newest_step_is_unreadable() -> None:
    client = FakeClient(ONE, [StorageError("disk")], [Ended(1, False)])
    answers = iter([0])

    def newest_step() -> int:
        for step in answers:
            return step
        raise StorageError("disk")

    assert gang(client, newest_step=newest_step).run() == Ended(1, False)


@pytest.mark.parametrize(
    "error",
    [
        FencedError("another trainer"),
        DataError("the dataset has changed"),
        StorageRefusedError("it is full"),
        EmptyBatchError("run again under another name"),
    ],
)
def test_an_error_that_a_restart_cannot_fix_ends_the_run(error: RftError) -> None:
    client = FakeClient(ONE, [error], [Ended(1, False)])
    with pytest.raises(type(error), match=f"{error}$"):  # without advice
        gang(client).run()
    assert len(client.generations) == 1, "nothing was started again"


def test_a_run_that_is_over_is_not_restarted() -> None:
    client = FakeClient(ONE, [ProcessLostError("gone")], [Ended(1, False)])
    with pytest.raises(RoleError, match="gone"):
        gang(client, cancelled=lambda: len(client.submitted) > 0).run()


def test_workers_that_do_not_come_are_counted() -> None:
    client = FakeClient({"tcp://a": True, "tcp://b": False})
    with pytest.raises(RoleError, match="1 of 2 trainer workers joined in 0 s"):
        gang(client, world_size=2).run()


def test_a_restart_waits_until_the_old_ranks_have_ended() -> None:
    client = FakeClient({"tcp://b": True}, [ProcessLostError("lost")], [Ended(3, False)])
    client.lingering = 2
    looks_at_second_start: list[int] = []
    runs = replace(gang(client), note=lambda _: looks_at_second_start.append(client.looks))
    assert runs.run() == Ended(3, False)
    assert looks_at_second_start == [3]


def test_the_error_of_the_lost_rank_is_raised() -> None:
    notes: list[str] = []
    noticed, lost = PeerLostError("rank 0: another rank does not answer"), ProcessLostError("rank 1 ended with code -9")
    client = FakeClient(TWO, [noticed, lost], [Ended(9, False), Ended(0, False)])
    assert gang(client, world_size=2, notes=notes).run() == Ended(9, False)
    assert notes == ["trainer restarts from its newest checkpoint (1 of 2): rank 1 ended with code -9"]


def test_an_address_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
