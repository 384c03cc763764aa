"""Messages of the worker, its fork server and the forks. One codec for each channel and direction.

Only the worker's word is trusted: it alone may send a pickle, and what a fork says is decoded as what anybody may have
written to its stream.
"""

from __future__ import annotations

import contextlib
import numbers
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rftdask.processes.messages import Codec
from rftdask.rollouts.policy.answer_stream import Part
from rftdask.rollouts.policy.base import Method
from rftdask.rollouts.policy.openai_api import OpenAIAnswer
from rftdask.rollouts.workflows.base import Response, Reward, Step

LENGTH = struct.Struct(">I")
"""Header of each message on a fork's stream: its number of bytes."""
MAX_FRAME_BYTES = 64 << 20
"""Longest message from a fork; a longer one is an error of its workflow."""


# ---- worker and fork server: one message in each packet of a SEQPACKET socket


@dataclass(frozen=True)
class SandboxSpec:
    """What a fork server imports and allows; equal specs mean that a running one can be used."""

    workflows: tuple[str, ...]
    rewards: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """Imported for what they register, or to have them ready."""
    plugin_dirs: tuple[str, ...] = ()
    max_memory_bytes: int | None = 4 << 30
    """Memory of one attempt with all it starts, on top of what the imports take; None: no limit."""
    max_output_bytes: int = 16 << 20
    """Most that one process may print."""
    env: tuple[tuple[str, str], ...] = ()
    bubblewrap: bool = False
    """The fork server runs under bwrap; see bubblewrap.py."""
    network: bool = True
    """With bubblewrap: it has the machine's network."""


@dataclass(frozen=True)
class Setup:
    """The first message: what to import before anything is forked."""

    path: tuple[str, ...]
    """The worker's sys.path."""
    spec: SandboxSpec


@dataclass(frozen=True)
class Fork:
    """Start a process; the packet carries its stream and the pipe that it prints to."""


@dataclass(frozen=True)
class Kill:
    """Kill a fork with all it started."""

    pid: int


@dataclass(frozen=True)
class Imported:
    """The first message: everything is imported, or why it cannot be."""

    problem: str = ""


@dataclass(frozen=True)
class Ended:
    """A fork has ended."""

    pid: int
    code: int
    """Exit code as `os.waitstatus_to_exitcode` gives it: below 0 the signal that killed it."""
    reason: str = ""
    """Why the fork server killed it; "": it did not, or was told to."""


ToForkServer: TypeAlias = Setup | Fork | Kill
TO_FORK_SERVER: Codec[ToForkServer] = Codec(Setup, Fork, Kill)
FromForkServer: TypeAlias = Imported | Ended
FROM_FORK_SERVER: Codec[FromForkServer] = Codec(Imported, Ended)


# ---- worker and fork: frames of LENGTH and msgpack on a stream


@dataclass(frozen=True)
class Run:
    """Begin the fork's attempt."""

    workflow: str
    task: bytes
    """A pickled Task."""
    auxiliary: tuple[str, ...]
    """Names of the auxiliary models."""


@dataclass(frozen=True)
class Answer:
    """The answer to the `Ask` of that number: a response, logprobs, an answer of OpenAI's API, or an error."""

    number: int
    response: Response | None = None
    openai: OpenAIAnswer | None = None
    logprobs: tuple[float, ...] = ()
    error: str = ""
    """Name of the exception's class; "": there is none."""
    text: str = ""


@dataclass(frozen=True)
class Told:
    """Some text more of the streamed answer to the `Ask` of that number."""

    number: int
    choice: int
    part: Part
    text: str


@dataclass(frozen=True)
class Hello:
    """The fork has begun; its first message."""

    pid: int


@dataclass(frozen=True)
class Ask:
    """A question to a model; answered by `Answer`, in any order."""

    number: int
    model: str
    method: Method
    arguments: Mapping[str, Any]
    streams: bool = False
    """Whether the text of its answer is told while it is sampled (`Told`)."""


@dataclass(frozen=True)
class SetState:
    """Where the rollout stands; see PolicyModel.set_state."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    """The attempt ended well."""

    reward: Any
    """A `Reward`, decoded without checks (`read_reward`): the worker reports a value that is not a number."""
    times: Mapping[str, float]
    """Seconds by what the workflow timed."""


@dataclass(frozen=True)
class Failed:
    """The attempt ended with an error."""

    error: str
    """Name of the exception's class."""
    text: str
    traceback: str = ""


def read_reward(fields: Any) -> Reward:
    """Raises: TypeError: not the fields of a reward."""
    return Reward(**{**fields, "steps": tuple(Step(**step) for step in fields["steps"])})


def _as_plain(value: Any) -> Any:
    """A number as a float, and any other object as its text, which the check of a reward reports."""
    if isinstance(value, numbers.Real):
        return float(value)
    with contextlib.suppress(Exception):
        return value.item()
    return {"not plain": repr(value)[:200]}


ToFork: TypeAlias = Run | Answer | Told
TO_FORK: Codec[ToFork] = Codec(Run, Answer, Told)
FromFork: TypeAlias = Hello | Ask | SetState | Finished | Failed
# Of plain values alone: a fork runs code of others, and a pickle of theirs would run in the worker.
FROM_FORK: Codec[FromFork] = Codec(Hello, Ask, SetState, Finished, Failed, enc_hook=_as_plain)
