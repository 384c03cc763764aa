"""An event arrives as an equal object, over the pipe of a child (msgpack) and over a Dask topic."""

from typing import Any, get_args

import msgpack
import pytest
from distributed import Client

from rftdask.monitor import events
from rftdask.monitor.events import Alive
from tests.living import wait_until

EVENTS: list[events.Event] = [
    events.Started(0),
    events.StepFinished("trainer", 12, {"loss": 0.25, "num_rows": 8.0}),
    events.WeightsPublished(12, "ab12"),
    events.CheckpointSaved(12),
    events.Evaluated(12, "gsm8k", {"accuracy": 0.5}),
    events.Note("worker 3 was lost"),
    Alive(),
    events.Ended(12, stopped=True),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_arrives_as_it_was_emitted(event: events.Event) -> None:
    assert events.CODEC.decode(msgpack.unpackb(msgpack.packb(events.CODEC.encode(event)))) == event


def test_every_kind_of_event_is_tested() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(events.Event))


def test_an_event_arrives_over_a_topic_of_dask() -> None:
    with Client(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as client:
        client.run(
            lambda dask_worker: [dask_worker.log_event("events", events.CODEC.encode(event)) for event in EVENTS]
        )
        wait_until(lambda: len(client.get_events("events")) >= len(EVENTS))
        assert [events.CODEC.decode(message) for _, message in client.get_events("events")] == EVENTS


@pytest.mark.parametrize("message", [[], ["Alive", {"mood": "good"}], ["Step", {}], ["Gone", {}], {"event": "Alive"}])
def test_an_invalid_message_raises(message: Any) -> None:
    with pytest.raises(ValueError, match=r"not (one of the messages|the fields of)"):
        events.CODEC.decode(message)
