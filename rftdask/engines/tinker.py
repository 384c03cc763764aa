"""Engine of a model at the Tinker service, which samples there and loads weights by path.

A request keeps the weights with which it began. Logprobs are those that the service returns for its temperature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import Engine, GenerateRequest, Generation, Give, Take
from rftdask.errors import EngineError, RftError, RoleError
from rftdask.models.tinker_service import ANSWER_TIMEOUT_S, SEEDS, TinkerService, read_sampler_path

_LOOK_S = 0.05  # seconds between polls for new requests
_CLOSE_S = 5.0


@dataclass(frozen=True)
class _UnderWay:
    answer: Future[Any]
    policy_version: int
    deadline_s: float


class TinkerEngine(Engine):
    """Args:
        base_model: name at the service.
        timeout_s: seconds to wait for a response.
    Raises: UserError, EngineError: the service cannot sample from the model.
    """

    engine_type = "tinker"
    is_hosted = True
    loads_in_flight = True
    leaves_device = True
    required_package = "tinker"

    def __init__(self, base_model: str, base_url: str | None, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._base_model, self._timeout_s = base_model, timeout_s
        self._service = TinkerService(base_url, timeout_s=timeout_s, lost=EngineError)
        self._sampler = self._service.open_sampler(base_model=base_model)

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> TinkerEngine:
        return cls(section.model_path or model.model_path, model.tinker.base_url)

    def __str__(self) -> str:
        return f"engine 'tinker' of {self._base_model}"

    def serve(self, take: Take, give: Give) -> None:
        under_way: dict[int, _UnderWay] = {}
        try:
            while True:
                for number, request in take():
                    if request is not None:
                        deadline_s = time.monotonic() + self._timeout_s
                        under_way[number] = _UnderWay(self._sample(number, request), self.policy_version, deadline_s)
                    elif (dropped := under_way.pop(number, None)) is not None:
                        dropped.answer.cancel()
                if not under_way:
                    return
                wait([each.answer for each in under_way.values()], _LOOK_S, FIRST_COMPLETED)
                for number, each in list(under_way.items()):
                    if each.answer.done():
                        give(number, self._generation(under_way.pop(number)))
                    elif time.monotonic() > each.deadline_s:
                        raise EngineError(f"{self} did not respond for {self._timeout_s:.0f} s")
        finally:
            for each in under_way.values():
                each.answer.cancel()

    def _sample(self, number: int, request: GenerateRequest) -> Future[Any]:
        from tinker import types  # late: an optional package

        sampling = request.sampling
        unknown = {
            "min_tokens": sampling.min_tokens > 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "a grammar": sampling.is_guided,
            "an empty prompt": not request.prompt_tokens,
            "max_tokens below 1": sampling.max_tokens < 1,
        }
        for what, is_asked in unknown.items():
            if is_asked:
                raise RoleError(f"{self} cannot answer request {number}: the service does not accept {what}")
        params = types.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=request.seed % SEEDS,
            # None: ends at the end tokens of the model. Stop texts are cut when tokens become text.
            stop=[] if sampling.ignore_eos else None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        prompt = types.ModelInput.from_ints(list(request.prompt_tokens))
        answer: Future[Any] = self._sampler.sample(prompt, 1, params).future()
        return answer

    def _generation(self, done: _UnderWay) -> Generation:
        response = self._service.result_of("it samples", done.answer)
        [sequence] = response.sequences
        if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
            raise EngineError(f"{self} returned no logprobs of the sampled tokens")
        return Generation(
            tokens=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.stop_reason,
            min_policy_version=done.policy_version,
            max_policy_version=done.policy_version,
        )

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        self._sampler = self._service.open_sampler(path=read_sampler_path(files))
        self.policy_version = version

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """See Engine."""
        return [tuple(logprobs) for logprobs in self._service.response_logprobs(self._sampler, pairs)]

    def close(self) -> None:
        with suppress(RftError):
            self._service.ask("its session ends", lambda: self._service.client.close("success").result(), _CLOSE_S)
