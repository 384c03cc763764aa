"""Messages between the worker, its fork server and the forks. One codec for each channel and direction.

Only the worker is trusted: only its messages may contain pickles. Messages from a fork are decoded as untrusted input.
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
"""Header of each message on a fork's stream: the length in bytes."""
MAX_FRAME_BYTES = 64 << 20
"""Maximum length of a message from a fork. A longer one is an error of its workflow."""


# ---- worker and fork server: one message in each packet of a SEQPACKET socket


@dataclass(frozen=True)
class SandboxSpec:
    """Imports and limits of a fork server. A running fork server is reused for an equal spec."""

    workflows: tuple[str, ...]
    rewards: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """Modules to import: they register workflows, or take long to import."""
    plugin_dirs: tuple[str, ...] = ()
    max_memory_bytes: int | None = 4 << 30
    """Memory of one attempt with its child processes, in addition to that of the imports. None: no limit."""
    env: tuple[tuple[str, str], ...] = ()
    bubblewrap: bool = False
    """The fork server runs under bwrap; see bubblewrap.py."""
    network: bool = True
    """Under bwrap: keep the machine's network."""


@dataclass(frozen=True)
class Setup:
    """First message: imports to do before the first fork."""

    path: tuple[str, ...]
    """The worker's sys.path."""
    spec: SandboxSpec


@dataclass(frozen=True)
class Fork:
    """Start a process. The packet carries the descriptors of its stream and of its output pipe."""


@dataclass(frozen=True)
class Kill:
    pid: int


@dataclass(frozen=True)
class Imported:
    """First message: the imports are done, or their error."""

    problem: str = ""


@dataclass(frozen=True)
class Ended:
    pid: int
    code: int
    """Exit code as of `os.waitstatus_to_exitcode`; negative: the signal that killed it."""
    reason: str = ""
    """Reason why the fork server killed it. "": it did not, or the worker requested it."""


ToForkServer: TypeAlias = Setup | Fork | Kill
TO_FORK_SERVER: Codec[ToForkServer] = Codec(Setup, Fork, Kill)
FromForkServer: TypeAlias = Imported | Ended
FROM_FORK_SERVER: Codec[FromForkServer] = Codec(Imported, Ended)


# ---- worker and fork: frames of LENGTH and msgpack on a stream


@dataclass(frozen=True)
class Run:
    workflow: str
    task: bytes
    """A pickled Task."""
    auxiliary: tuple[str, ...]
    """Names of the auxiliary models."""


@dataclass(frozen=True)
class Answer:
    """Result of the `Ask` with this number: a response, logprobs, a response of OpenAI's API, or an error."""

    number: int
    response: Response | None = None
    openai: OpenAIAnswer | None = None
    logprobs: tuple[float, ...] = ()
    error: str = ""
    """Name of the exception's class. "": no error."""
    text: str = ""


@dataclass(frozen=True)
class TextDelta:
    number: int
    choice: int
    part: Part
    text: str


@dataclass(frozen=True)
class Hello:
    """First message: the fork has begun."""

    pid: int


@dataclass(frozen=True)
class Ask:
    """Call of a model. `Answer` messages come in any order."""

    number: int
    model: str
    method: Method
    arguments: Mapping[str, Any]
    streams: bool = False
    """True: send the text of the response while it is sampled (`TextDelta`)."""


@dataclass(frozen=True)
class SetState:
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    reward: Any
    """A `Reward`, decoded without checks (`read_reward`): the worker reports a value that is not a number."""
    times: Mapping[str, float]
    """Seconds by name of the timer."""


@dataclass(frozen=True)
class Failed:
    error: str
    """Name of the exception's class."""
    text: str
    traceback: str = ""


def read_reward(fields: Any) -> Reward:
    return Reward(**{**fields, "steps": tuple(Step(**step) for step in fields["steps"])})


def _as_plain(value: Any) -> Any:
    # Other objects become their repr, which the check of the reward quotes.
    if isinstance(value, numbers.Real):
        return float(value)
    with contextlib.suppress(Exception):
        return value.item()
    return {"not plain": repr(value)[:200]}


ToFork: TypeAlias = Run | Answer | TextDelta
TO_FORK: Codec[ToFork] = Codec(Run, Answer, TextDelta)
FromFork: TypeAlias = Hello | Ask | SetState | Finished | Failed
# Only plain values: a fork runs untrusted code, whose pickle would run in the worker.
FROM_FORK: Codec[FromFork] = Codec(Hello, Ask, SetState, Finished, Failed, enc_hook=_as_plain)
