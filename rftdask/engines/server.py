"""Engine process: the messages of client and server, and the loop that replies to each with the same number.

Requests enter the engine on arrival, and each is answered when it finishes. All other messages, except weights to load
in flight, wait until the requests before them are answered, and later messages wait for them.

Invariant: before it reports ready, and again before it reports its first loaded weights, the engine has served requests
like those of the run, so an engine that cannot work fails before it gets work.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
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
from rftdask.errors import DataError, RoleError
from rftdask.processes.child import Channel
from rftdask.processes.device_lock import DeviceLock
from rftdask.processes.gpus import out_of_memory, use_device
from rftdask.processes.messages import Codec
from rftdask.storage.staging import staged
from rftdask.synchronizer.fingerprint import Fingerprint

TARGET = "rftdask.engines.server:serve"
"""Entry point of the engine's child process, for `processes.child`."""

_SMOKE_TOKENS = 2  # tokens to sample in a smoke test: one from the prompt and one from the previous token
_LOOK_S = 0.05  # seconds between checks for a trainer rank that waits for the device, while the engine is idle
_SHORT_PROMPT = 8  # length of a smoke test prompt, in tokens

log = logging.getLogger(__name__)


# ---- messages of the client


@dataclass(frozen=True)
class NumberedRequest:
    number: int
    """Unique number, also in the reply."""
    request: GenerateRequest
    streams: bool = False
    """True if new tokens are sent while it runs (`Sampled`)."""


@dataclass(frozen=True)
class Generate:
    """Generate for requests, which enter the engine together."""

    requests: tuple[NumberedRequest, ...]


@dataclass(frozen=True)
class Drop:
    """Cancel requests."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Compute logprobs of given tokens. The reply is `Scored`."""

    number: int
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """(prompt, response) pairs for `Engine.logprobs`."""


@dataclass(frozen=True)
class LoadWeights:
    """Load weights. The reply is `Loaded`, or the process ends."""

    number: int
    version: int
    files: tuple[str, ...]
    """Complete files, or deltas from the served version if `is_delta`."""
    fingerprint: Fingerprint | None
    in_flight: bool = False
    """True if running requests continue with the new weights. False: they finish first."""
    is_delta: bool = False


@dataclass(frozen=True)
class AcquireDevice:
    """Acquire the device. The reply is `DeviceAcquired`, once the engine is on its device, where it then stays."""

    number: int


@dataclass(frozen=True)
class ReleaseDevice:
    """Allow the engine to leave its device when a trainer rank waits for it."""


FromClient: TypeAlias = Generate | Drop | Score | LoadWeights | AcquireDevice | ReleaseDevice
FROM_CLIENT: Codec[FromClient] = Codec(Generate, Drop, Score, LoadWeights, AcquireDevice, ReleaseDevice)


# ---- messages of the server


@dataclass(frozen=True)
class Ready:
    """The model is loaded and works. The first message."""

    cache_tokens: int | None = None
    """See Engine."""
    name: str = ""
    """Set if the client does not know it."""


@dataclass(frozen=True)
class Answer:
    number: int
    generation: Generation


@dataclass(frozen=True)
class Sampled:
    """New tokens of a running response."""

    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """Requests that finished in one step of the engine, and new tokens of others."""

    answers: tuple[Answer, ...]
    sampled: tuple[Sampled, ...] = ()
    """New tokens, which precede the results."""


@dataclass(frozen=True)
class Scored:
    number: int
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Loaded:
    number: int
    version: int
    needs_whole: bool = False
    """True if the delta could not be applied; the complete version must follow before any other call."""


@dataclass(frozen=True)
class DeviceAcquired:
    number: int


FromServer: TypeAlias = Ready | Generated | Scored | Loaded | DeviceAcquired
FROM_SERVER: Codec[FromServer] = Codec(Ready, Generated, Scored, Loaded, DeviceAcquired)


# ---- process


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry point of the child process. spec: from `EngineSpec.to_plain`."""
    device = _device(spec)  # first: it records in this process that the GPUs are shared
    device_lock = DeviceLock.from_environment(exclusive=False)
    # The engine of the policy waits for ranks that need the device; other models are used while it holds the lock.
    waits = {"timeout_s": spec["device_lock_timeout_s"], "skip_gate": spec["section"]["model_path"] is not None}
    if device_lock is not None:
        device_lock.acquire(**waits)
    engine = _make_engine(spec, device)
    client = _ClientOf(engine, spec, channel)
    client.send(Ready(engine.cache_tokens))
    again = _smoke_requests(spec, longest=False)  # repeated after the first weights or adapters are loaded
    rests = True  # the engine may leave the device

    # One message at a time, in order: a `LoadWeights` that is not in flight waits for every request before it, so no
    # result mixes two versions. No message equals the second argument of iter: the process ends with its client.
    for plain in channel if device_lock is None else iter(partial(channel.try_receive, _LOOK_S), channel):
        client.message = None if plain is None else FROM_CLIENT.decode(plain)
        while (message := client.message) is not None:
            if isinstance(message, ReleaseDevice):
                rests = True
                break
            rests = False
            if device_lock is not None and not device_lock.held:
                device_lock.acquire(**waits)
                with _telling_memory(spec, "the engine returns to its GPU"):
                    engine.return_to_device()
            if isinstance(message, Generate | Drop):
                client.generate()
                continue
            if isinstance(message, AcquireDevice):
                client.send(DeviceAcquired(message.number))
            elif isinstance(message, Score):
                client.send(Scored(message.number, tuple(engine.logprobs(message.pairs))))
            else:
                client.send(_load(engine, spec, message, again))
            client.message = None
        # The engine is idle or a unit has ended. A waiting rank gets the device even if another unit follows at once.
        if device_lock is not None and rests and device_lock.held and device_lock.is_wanted:
            engine.leave_device()
            device_lock.release()


class _ClientOf:
    """Connection to the client while the engine generates: messages are handled between steps."""

    def __init__(self, engine: Engine, spec: Mapping[str, Any], channel: Channel) -> None:
        self._engine, self._spec, self._channel = engine, spec, channel
        self.message: FromClient | None = None
        """Next message."""
        self._finished: list[Answer] = []
        """Results to send. Those of one step share a message, which costs more than its content."""
        self._sampled: deque[Sampled] = deque()  # new tokens of streaming requests, added from any thread

    def generate(self) -> None:
        """Serve requests from `message` on until none runs, and store the first message of another kind in it."""
        try:
            with _telling_memory(self._spec, "the engine generates"):
                self._engine.serve(
                    self._take, lambda number, generation: self._finished.append(Answer(number, generation))
                )
        finally:
            self._send_finished()

    def send(self, answer: FromServer) -> None:
        self._channel.send(FROM_SERVER.encode(answer))

    def _take(self) -> list[tuple[int, GenerateRequest | None]]:
        # Reads messages up to the first one that waits for the end of all requests.
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

    def _send_finished(self) -> None:
        if self._finished or self._sampled:
            sampled = tuple(self._sampled.popleft() for _ in range(len(self._sampled)))
            self.send(Generated(tuple(self._finished), sampled))
            self._finished.clear()

    def _receive(self) -> FromClient | None:
        plain = self._channel.try_receive()
        return None if plain is None else FROM_CLIENT.decode(plain)


def _load(engine: Engine, spec: Mapping[str, Any], message: LoadWeights, again: list[GenerateRequest]) -> Loaded:
    """Load weights, verify the trainer's fingerprint, and serve the requests `again` once as a smoke test."""
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
    """Convert an out-of-memory error into one that names the settings to change, since it would repeat."""
    try:
        yield
    except Exception as error:  # from torch or vLLM, at any depth
        change = InferenceModelConfig.model_validate(spec["section"]).traits.memory_keys
        if (told := out_of_memory(error, doing, change)) is not None:
            raise told from error
        raise


def _device(spec: Mapping[str, Any]) -> str:
    """Device of the engine. Raises: UserError: its GPU cannot be used."""
    load_plugin_folders(spec["plugin_dirs"])  # first: a plug-in file may define the engine of the section
    section = InferenceModelConfig.model_validate(spec["section"])
    if not section.traits.has_model or section.traits.is_hosted:
        return "cpu"
    import torch  # late: an engine without a model does not need torch

    torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
    return use_device(section.num_gpus, "engine-" * spec["colocated"])


def _make_engine(spec: Mapping[str, Any], device: str) -> Engine:
    """Create the engine and serve a smoke test request of each kind."""
    with _telling_memory(spec, "the engine loads its model"):
        engine = _load_engine(spec, device)
    # The longest prompt takes the most memory, so a model that does not fit fails here instead of during the run.
    # Other models may have less room than the longest prompt of the policy takes.
    with _telling_memory(spec, "the engine serves a request with the longest prompt of the run"):
        engine.generate(_smoke_requests(spec, longest=spec["section"]["model_path"] is None))
    log.info("%s has served a request and is ready", engine)
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
    if section.traits.has_model and not section.traits.is_hosted and section.model_path is None and model.lora_configs:
        from rftdask.models.lora import initial_files  # late: it needs torch

        # Version 0 is the policy that the trainer begins with.
        if files := initial_files(model.lora_configs[0]):
            try:
                engine.load_weights(0, files)
            except RoleError as error:
                raise DataError(f"model.lora_configs[0].path: {error}") from error
    if spec["records_experts"]:
        engine.record_experts()
    log.info("%s is loaded on %s in %s", engine, device, section.dtype)
    return engine


def _smoke_requests(spec: Mapping[str, Any], longest: bool) -> list[GenerateRequest]:
    """A short request of each kind in the run. longest: with the longest possible prompt."""
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
