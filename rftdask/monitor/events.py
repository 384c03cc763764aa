"""Events: what the roles of a run tell whoever watches it. Nothing that matters is in them alone: a lost event costs
a line on a screen, never data.

A role emits an event as an object. Between processes it travels as a plain list: rank --msgpack--> supervisor --Dask
topic--> driver. `CODEC` is at the two ends of that way, and nothing in between looks inside.

    emit(Step("trainer", 12, {"loss": 0.3}))
    CODEC.decode(CODEC.encode(Published(12, "ab12"))) == Published(12, "ab12")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rftdask.processes.messages import Codec


@dataclass(frozen=True)
class Started:
    """The trainer has loaded its models and resumed."""

    step: int
    """Optimizer steps done before; 0: from the initial model."""


@dataclass(frozen=True)
class Step:
    """A role has finished a step."""

    role: Literal["trainer", "explorer"]
    step: int
    """Counted from 1: optimizer steps of the trainer, explore steps of the explorer."""
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Published:
    """The pointer to the newest weights has moved."""

    version: int
    """Policy version."""
    content_hash: str


@dataclass(frozen=True)
class CheckpointSaved:
    """The checkpoint of an optimizer step exists: its manifest is written."""

    step: int


@dataclass(frozen=True)
class Evaluated:
    """A policy version was evaluated on a taskset."""

    version: int
    taskset: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Note:
    """A sentence for the person who watches, such as that a worker was lost."""

    text: str


@dataclass(frozen=True)
class Alive:
    """A sign of life of a rank that has nothing else to tell."""


@dataclass(frozen=True)
class Ended:
    """A rank has reached the end of its loop; the last event it sends."""

    step: int
    """The last optimizer step done, which is the newest policy version."""
    stopped: bool
    """Ended on request, with work left."""


Event: TypeAlias = Started | Step | Published | CheckpointSaved | Evaluated | Note | Alive | Ended

CODEC: Codec[Event] = Codec(Started, Step, Published, CheckpointSaved, Evaluated, Note, Alive, Ended)
