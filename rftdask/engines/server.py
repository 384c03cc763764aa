"""The process of an engine: it takes messages from its client and answers each with one of the same number.

Requests enter the engine as they come, and each is answered when it is finished. Anything else that is asked (but for
weights that are to be loaded in flight) waits until those before it are answered, and those after it wait for it. It
knows neither versions' files on storage nor rollouts; what both sides say is defined here.

Invariant: before it says that it is ready, and once more before it says that it has loaded its first weights, the
engine has answered requests of the run's own kind. So one that cannot work ends before it has work.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rftdask.config.plugins import find_part, load_plugin_folders
from rftdask.config.schema.explorer import InferenceModelConfig, registered_engines
from rftdask.config.schema.model import ModelConfig
from rftdask.data.hub import local_model
from rftdask.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from rftdask.processes.child import Channel
from rftdask.processes.device_lock import DeviceLock
from rftdask.processes.gpus import out_of_memory, use_device
from rftdask.processes.messages import Codec
from rftdask.storage.staging import staged
from rftdask.synchronizer.fingerprint import Fingerprint

TARGET = "rftdask.engines.server:serve"
"""Entry of an engine's child process, as `processes.child` takes it."""

_SMOKE_TOKENS = 2
"""Tokens that are sampled to see whether an engine works: one from the prompt, and one from the token before it."""
_LOOK_S = 0.05
"""Between two looks whether a trainer rank wants the device, while there is nothing to do."""
_SHORT_PROMPT = 8
"""Tokens of a prompt whose length does not matter."""

log = logging.getLogger(__name__)


# ---- what the client says


@dataclass(frozen=True)
class NumberedRequest:
    number: int
    """Used once; the answer has it, too."""
    request: GenerateRequest
    streams: bool = False
    """Whether its tokens are told while they come (`Sampled`)."""


@dataclass(frozen=True)
class Generate:
    """These requests enter the engine together."""

    requests: tuple[NumberedRequest, ...]


@dataclass(frozen=True)
class Drop:
    """Nobody wants the answers to these requests any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Answered by `Scored`."""

    number: int
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """(prompt, response), as `Engine.logprobs` takes them."""


@dataclass(frozen=True)
class LoadWeights:
    """Answered by `Loaded`, or by the end of the process."""

    number: int
    version: int
    files: tuple[str, ...]
    """Of the whole; or what has changed since the version that is served, if `is_delta`."""
    fingerprint: Fingerprint | None
    in_flight: bool = False
    """Whether requests that are under way go on with the new weights; else they are answered first."""
    is_delta: bool = False


@dataclass(frozen=True)
class TakeTurn:
    """Answered by `HasTurn`, once the engine is on its device; from then on it stays there."""

    number: int


@dataclass(frozen=True)
class EndTurn:
    """The engine may leave its device, when a trainer rank wants it."""


FromClient: TypeAlias = Generate | Drop | Score | LoadWeights | TakeTurn | EndTurn
FROM_CLIENT: Codec[FromClient] = Codec(Generate, Drop, Score, LoadWeights, TakeTurn, EndTurn)


# ---- what the server says


@dataclass(frozen=True)
class Ready:
    """The model is loaded and has answered; the first message of all."""

    cache_tokens: int | None = None
    """See Engine."""
    name: str = ""
    """Where its asker does not know it."""


@dataclass(frozen=True)
class Answer:
    number: int
    generation: Generation


@dataclass(frozen=True)
class Sampled:
    """Some tokens more of a response that is under way."""

    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """Requests that were finished in one step of the engine, and what is new of others."""

    answers: tuple[Answer, ...]
    sampled: tuple[Sampled, ...] = ()
    """Before the answers."""


@dataclass(frozen=True)
class Scored:
    number: int
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Loaded:
    number: int
    version: int
    needs_whole: bool = False
    """Whether it could not make use of a delta; the whole has to follow before it is asked for anything."""


@dataclass(frozen=True)
class HasTurn:
    number: int


FromServer: TypeAlias = Ready | Generated | Scored | Loaded | HasTurn
FROM_SERVER: Codec[FromServer] = Codec(Ready, Generated, Scored, Loaded, HasTurn)


# ---- the process


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry of the child process. `spec` is what `EngineSpec.to_plain` gives."""
    device = _device(spec)  # first: where its GPUs are shared, it says so to this process
    turn = DeviceLock.from_environment(exclusive=False)
    # Only the policy's engine lets a waiting rank go first: other models are used while that engine has the device.
    waits = {"timeout_s": spec["turn_timeout_s"], "skip_gate": spec["section"]["model_path"] is not None}
    engine = _make_engine(spec, device, None if turn is None else partial(turn.acquire, **waits))
    client = _ClientOf(engine, spec, channel)
    client.send(Ready(engine.cache_tokens))
    again = _smoke_requests(spec, longest=False)
    """What is asked once more, when it has loaded its first weights or adapters."""
    rests = True
    """Whether it may leave the device: nobody has begun what it is to stay for."""

    # One message at a time, in the order sent: so a `LoadWeights` that is not for requests under way waits until every
    # request before it is answered, and no answer mixes two versions.
    # The second argument of iter is what would end the loop, and no message is it: the process
    # ends when its client has gone, see `Channel`.
    for plain in channel if turn is None else iter(partial(channel.try_receive, _LOOK_S), channel):
        client.message = None if plain is None else FROM_CLIENT.decode(plain)
        while (message := client.message) is not None:
            if isinstance(message, EndTurn):
                rests = True
                break
            rests = False
            if turn is not None and not turn.held:
                turn.acquire(**waits)
                with _telling_memory(spec, "the engine returns to its GPU"):
                    engine.return_to_device()
            if isinstance(message, Generate | Drop):
                client.generate()
                continue
            if isinstance(message, TakeTurn):
                client.send(HasTurn(message.number))
            elif isinstance(message, Score):
                client.send(Scored(message.number, tuple(engine.logprobs(message.pairs))))
            else:
                client.send(_load(engine, spec, message, again))
            client.message = None
        # Nothing came for a moment, or a unit has ended: also where the next one follows at once, the rank is next.
        if turn is not None and rests and turn.held and turn.is_wanted:
            engine.leave_device()
            turn.release()


class _ClientOf:
    """The client, as its engine sees it while it generates: what it wants comes between two steps."""

    def __init__(self, engine: Engine, spec: Mapping[str, Any], channel: Channel) -> None:
        self._engine, self._spec, self._channel = engine, spec, channel
        self.message: FromClient | None = None
        """The message that is next."""
        self._finished: list[Answer] = []
        """Not sent yet: those of one step go together, since a message costs both sides more than what is in it."""
        self._sampled: deque[Sampled] = deque()
        """The same of those that stream; filled from any thread."""

    def generate(self) -> None:
        """Answer requests from `message` on until none is under way; leaves the first message of another kind in it."""
        try:
            with _telling_memory(self._spec, "the engine generates"):
                self._engine.serve(self._take, self._give)
        finally:
            self._send_finished()

    def send(self, answer: FromServer) -> None:
        self._channel.send(FROM_SERVER.encode(answer))

    def _take(self) -> list[tuple[int, GenerateRequest | None]]:
        # Up to the first message that waits for the end of all requests; nothing that came after it is taken.
        self._send_finished()
        taken: list[tuple[int, GenerateRequest | None]] = []
        message = self.message or self._receive()
        while True:
            if isinstance(message, Generate):
                taken += [(each.number, self._streamed(each)) for each in message.requests]
            elif isinstance(message, Drop):
                taken += [(number, None) for number in message.numbers]
            elif isinstance(message, LoadWeights) and message.in_flight:
                self.send(_load(self._engine, self._spec, message, []))
            else:
                break
            message = self._receive()
        self.message = message
        return taken

    def _streamed(self, asked: NumberedRequest) -> GenerateRequest:
        if not asked.streams:
            return asked.request
        number = asked.number
        return replace(asked.request, on_tokens=lambda tokens: self._sampled.append(Sampled(number, tokens)))

    def _give(self, number: int, generation: Generation) -> None:
        self._finished.append(Answer(number, generation))

    def _send_finished(self) -> None:
        if self._finished or self._sampled:
            sampled = tuple(self._sampled.popleft() for _ in range(len(self._sampled)))
            self.send(Generated(tuple(self._finished), sampled))
            self._finished.clear()

    def _receive(self) -> FromClient | None:
        plain = self._channel.try_receive()
        return None if plain is None else FROM_CLIENT.decode(plain)


def _load(engine: Engine, spec: Mapping[str, Any], message: LoadWeights, again: list[GenerateRequest]) -> Loaded:
    """Load weights, and answer the requests `again` once: they show that loading leaves an engine that works. Each load
    is compared with the trainer's fingerprint."""
    files = [Path(file) for file in message.files]
    with _telling_memory(spec, f"the engine loads version {message.version}"):
        if not message.is_delta:
            engine.load_verified(message.version, files, message.fingerprint)
        elif not engine.try_load_changes(message.version, files, message.fingerprint):
            return Loaded(message.number, engine.policy_version, needs_whole=True)
    engine.generate(again)
    again.clear()
    log.info("serves policy version %d", engine.policy_version)
    return Loaded(message.number, engine.policy_version)


@contextmanager
def _telling_memory(spec: Mapping[str, Any], doing: str) -> Iterator[None]:
    """Turns an error for want of memory into one that says what to change: it would come again."""
    try:
        yield
    except Exception as error:  # of torch's or vLLM's, at any depth
        change = InferenceModelConfig.model_validate(spec["section"]).traits.memory_keys
        if (told := out_of_memory(error, doing, change)) is not None:
            raise told from error
        raise


def _device(spec: Mapping[str, Any]) -> str:
    """What the engine computes on. Raises: UserError: its GPU cannot be used."""
    load_plugin_folders(spec["plugin_dirs"])  # first: a file of theirs may define the engine that the section names
    section = InferenceModelConfig.model_validate(spec["section"])
    if not section.traits.has_model or section.traits.is_hosted:
        return "cpu"
    import torch  # late: an engine without a model needs no torch

    torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
    return use_device(section.num_gpus, "engine-" * spec["colocated"])


def _make_engine(spec: Mapping[str, Any], device: str, wait: Callable[[], None] | None) -> Engine:
    """The engine, which has answered a request of each kind that the run has. wait: for its turn on the device."""
    if wait is not None:
        wait()
    with _telling_memory(spec, "the engine loads its model"):
        engine = _load_engine(spec, device)
    # The longest prompt takes the most memory: one that does not fit fails here, and not in the middle of a run. A
    # model beside the policy may have less room than the policy's longest prompt takes.
    with _telling_memory(spec, "the engine answers a request of the run's longest prompt"):
        engine.generate(_smoke_requests(spec, longest=spec["section"]["model_path"] is None))
    log.info("%s has answered, and is ready", engine)
    return engine


def _load_engine(spec: Mapping[str, Any], device: str) -> Engine:
    section = InferenceModelConfig.model_validate(spec["section"])
    kind: type[Engine] = find_part("engine", section.engine_type, registered_engines())
    section = section.model_copy(update={"dtype": section.dtype_on(device)})
    model = ModelConfig.model_validate(spec["model"])
    if section.traits.has_model and not (section.traits.is_external or section.traits.is_hosted):
        if section.model_path is None:
            model = model.model_copy(update={"model_path": staged(local_model(model.model_path))})
        else:
            section = section.model_copy(update={"model_path": staged(local_model(section.model_path))})
    engine = kind.from_config(section, model, device)
    if spec["records_experts"]:
        engine.record_experts()
    log.info("%s is loaded on %s in %s", engine, device, section.dtype)
    return engine


def _smoke_requests(spec: Mapping[str, Any], longest: bool) -> list[GenerateRequest]:
    """A request of each kind that the run has, for very few tokens; longest: after the longest prompt it may have."""
    model = ModelConfig.model_validate(spec["model"])
    room = min(model.max_prompt_tokens, model.max_model_len - _SMOKE_TOKENS)
    prompt = (0,) * max(1, room if longest else min(room, _SHORT_PROMPT))  # every vocabulary has a token 0
    requests = []
    for plain in spec["sampling"]:
        sampling = SamplingParams(**plain)
        max_tokens = min(sampling.max_tokens, _SMOKE_TOKENS)
        short = replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
        requests.append(GenerateRequest(prompt, short, seed=0))
    return requests
