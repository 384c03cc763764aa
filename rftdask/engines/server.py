"""The process of an engine: it takes messages from its client and answers each with one of the same number.

Requests enter the engine as they come, and each is answered when it is finished. Anything else that is asked waits
until those before it are answered, and those after it wait for it. It knows neither versions' files on storage nor
rollouts; what both sides say is defined here.

Invariant: before it says that it is ready, and once more before it says that it has loaded its first weights, the
engine has answered requests of the run's own kind. So one that cannot work ends before it has work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rftdask.config.plugins import find_part, load_plugin_folders
from rftdask.config.schema.explorer import InferenceModelConfig, registered_engines
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from rftdask.processes.child import Channel
from rftdask.processes.messages import Codec
from rftdask.weights.fingerprint import Fingerprint

TARGET = "rftdask.engines.server:serve"
"""Entry of an engine's child process, as `processes.child` takes it."""

_SMOKE_TOKENS = 2
"""Tokens that are sampled to see whether an engine works: one from the prompt, and one from the token before it."""
_SHORT_PROMPT = 8
"""Tokens of a prompt whose length does not matter."""

log = logging.getLogger(__name__)


# ---- what the client says


@dataclass(frozen=True)
class NumberedRequest:
    number: int
    """Used once; the answer has it, too."""
    request: GenerateRequest


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
    fingerprint: Fingerprint | None


FromClient: TypeAlias = Generate | Drop | Score | LoadWeights
FROM_CLIENT: Codec[FromClient] = Codec(Generate, Drop, Score, LoadWeights)


# ---- what the server says


@dataclass(frozen=True)
class Ready:
    """The model is loaded and has answered; the first message of all."""

    pid: int


@dataclass(frozen=True)
class Generated:
    number: int
    generation: Generation


@dataclass(frozen=True)
class Scored:
    number: int
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Loaded:
    number: int
    version: int


FromServer: TypeAlias = Ready | Generated | Scored | Loaded
FROM_SERVER: Codec[FromServer] = Codec(Ready, Generated, Scored, Loaded)


# ---- the process


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry of the child process. `spec` is what `EngineSpec.to_plain` gives."""
    engine = _make_engine(spec)
    # A model beside the policy may have less room than the policy's longest prompt takes.
    engine.generate(_smoke_requests(spec, longest=spec["section"]["model_path"] is None))
    log.info("%s has answered, and is ready", engine)
    channel.send(FROM_SERVER.encode(Ready(os.getpid())))
    again = _smoke_requests(spec, longest=False)
    """What is asked once more, when it has loaded its first weights or adapters."""
    message: FromClient | None = None

    def try_receive() -> FromClient | None:
        plain = channel.try_receive()
        return None if plain is None else FROM_CLIENT.decode(plain)

    def take() -> list[tuple[int, GenerateRequest | None]]:
        # Up to the first message that is no request: it waits, and nothing that came after it is taken.
        nonlocal message
        taken: list[tuple[int, GenerateRequest | None]] = []
        message = message or try_receive()
        while isinstance(message, Generate | Drop):
            if isinstance(message, Generate):
                taken += [(each.number, each.request) for each in message.requests]
            else:
                taken += [(number, None) for number in message.numbers]
            message = try_receive()
        return taken

    def give(number: int, generation: Generation) -> None:
        channel.send(FROM_SERVER.encode(Generated(number, generation)))

    # One message at a time, in the order sent: so a `LoadWeights` waits until every request before it is answered, and
    # no answer mixes two versions.
    for plain in channel:
        message = FROM_CLIENT.decode(plain)
        while message is not None:
            if isinstance(message, Generate | Drop):
                # It ends when nothing is under way; `take` has left the next message of another kind in `message`, or
                # None.
                engine.serve(take, give)
                continue
            answer: FromServer
            if isinstance(message, Score):
                answer = Scored(message.number, tuple(engine.logprobs(message.pairs)))
            else:
                engine.load_verified(message.version, [Path(file) for file in message.files], message.fingerprint)
                # Only after the first load: it shows that the path of loading leaves an engine that works. Each load is
                # compared with the trainer's fingerprint above.
                engine.generate(again)
                again = []
                log.info("serves policy version %d", engine.policy_version)
                answer = Loaded(message.number, engine.policy_version)
            channel.send(FROM_SERVER.encode(answer))
            message = None


def _make_engine(spec: Mapping[str, Any]) -> Engine:
    load_plugin_folders(spec["plugin_dirs"])  # first: a file of theirs may define the engine that the section names
    section = InferenceModelConfig.model_validate(spec["section"])
    kind: type[Engine] = find_part("engine", section.engine_type, registered_engines())
    device = "cpu"
    if kind.has_model:
        # Late: an engine without a model needs no torch.
        import torch

        torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if section.dtype == "auto":
        section = section.model_copy(update={"dtype": "bfloat16" if device == "cuda" else "float32"})
    engine = kind.from_config(section, ModelConfig.model_validate(spec["model"]), device)
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
