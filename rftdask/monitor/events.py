"""Events: messages from the roles of a run to its observers. A lost event costs a line on a screen, never data.

A role emits an event as an object. Between processes it is a plain list: rank --msgpack--> supervisor --Dask topic-->
driver. `CODEC` encodes it at the first and decodes it at the last of them.
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
    """Optimizer steps done earlier. 0: training starts from the initial model."""


@dataclass(frozen=True)
class StepFinished:
    """A role has finished a step."""

    role: Literal["trainer", "explorer"]
    step: int
    """Counted from 1: optimizer steps of the trainer, explore steps of the explorer."""
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class WeightsPublished:
    """The pointer to the newest weights has moved."""

    version: int
    content_hash: str


@dataclass(frozen=True)
class CheckpointSaved:
    """The checkpoint of an optimizer step is complete: its manifest is written."""

    step: int


@dataclass(frozen=True)
class Evaluated:
    """A policy version was evaluated on a taskset."""

    version: int
    taskset: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Note:
    """A sentence for the user, for example about a lost worker."""

    text: str


@dataclass(frozen=True)
class Alive:
    """Heartbeat of a rank without other events."""


@dataclass(frozen=True)
class Ended:
    """A rank has reached the end of its loop; this is its last event."""

    step: int
    """Last optimizer step, which is also the newest policy version."""
    stopped: bool
    """True if it was stopped before all steps were done."""


Event: TypeAlias = Started | StepFinished | WeightsPublished | CheckpointSaved | Evaluated | Note | Alive | Ended

CODEC: Codec[Event] = Codec(Started, StepFinished, WeightsPublished, CheckpointSaved, Evaluated, Note, Alive, Ended)
