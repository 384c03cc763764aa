"""Fake engine for tests and benchmarks of the loop: tokens from the seed, constant logprobs, no model.

It keeps the guarantees of `Engine` that need no model: continuous batching, lengths, versions, determinism, errors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import Engine, GenerateRequest, Generation, Give, Take
from rftdask.errors import RoleError


class FakeEngine(Engine):
    """Engine that returns `tokens_per_request` uniform tokens per request, limited by its max_tokens.

    Args:
        model_path: ignored.
        tokens_per_request: length of a response that is not cut off, which ends with "stop".
        vocab_size: tokens are in [0, vocab_size); each has logprob -log(vocab_size).
        seconds_per_step: seconds per token of all running requests, to simulate a slow model.
    """

    engine_type = "fake"
    has_model = False
    repeats_bits = True
    loads_in_flight = True
    imports_ahead = ("rftdask.engines.fake",)

    def __init__(
        self, model_path: str = "", *, tokens_per_request: int = 4, vocab_size: int = 100, seconds_per_step: float = 0.0
    ) -> None:
        self.tokens_per_request, self.vocab_size = tokens_per_request, vocab_size
        self.seconds_per_step = seconds_per_step
        self.loaded_files: list[Path] = []
        self._closed = False

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> FakeEngine:
        return cls()

    def serve(self, take: Take, give: Give) -> None:
        if self._closed:
            raise RoleError("engine 'fake' was closed; create a new one")
        under_way: dict[int, tuple[GenerateRequest, int]] = {}  # with the step before which they arrived
        versions = [(0, self.policy_version)]  # (step, policy version that samples from there on)
        ends: dict[int, list[int]] = {}
        coming: dict[int, Iterator[int]] = {}  # tokens of streaming requests
        step = 0
        while True:
            for number, request in take():
                if request is None:
                    under_way.pop(number, None)
                else:
                    under_way[number] = request, step
                    # Known at arrival, since the length is fixed.
                    ends.setdefault(step + max(self._length(request), 1), []).append(number)
            if not under_way:
                return
            if versions[-1][1] != self.policy_version:
                versions.append((step, self.policy_version))
            # The duration of a step does not depend on the number of requests, as on a GPU with free capacity.
            time.sleep(self.seconds_per_step)
            step += 1
            for number in ends.pop(step, ()):
                if number in under_way:
                    request, came = under_way.pop(number)
                    give(number, self._answer(request).sampled_by(_counted_from(came, versions)))
            for number, (request, _) in under_way.items():
                if request.on_tokens is not None:
                    coming.setdefault(number, iter(self._answer(request).tokens))
                    request.on_tokens((next(coming[number]),))

    def _length(self, request: GenerateRequest) -> int:
        return min(self.tokens_per_request, request.sampling.max_tokens)

    def _answer(self, request: GenerateRequest) -> Generation:
        length = self._length(request)
        # Depends only on the seed of the request, as with a real engine.
        random = np.random.Generator(np.random.Philox(key=request.seed & (2**64 - 1)))
        return Generation(
            tokens=tuple(random.integers(self.vocab_size, size=length).tolist()),
            logprobs=(-math.log(self.vocab_size),) * length,
            finish_reason="stop" if length == self.tokens_per_request else "length",
            min_policy_version=self.policy_version,
            max_policy_version=self.policy_version,
        )

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """See Engine: -log(vocab_size) for each token."""
        return [(-math.log(self.vocab_size),) * len(response) for _, response in pairs]

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """Check that the files exist, without reading them."""
        missing = [str(file) for file in files if not Path(file).is_file()]
        if missing:
            raise RoleError(f"engine 'fake' cannot load version {version}: no such file: {', '.join(missing)}")
        self.loaded_files = [Path(file) for file in files]
        self.policy_version = version

    def close(self) -> None:
        self._closed = True


def _counted_from(came: int, versions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Versions that sampled since step `came`, with steps counted from there."""
    before = max(step for step, _ in versions if step <= came)
    return [(max(step - came, 0), version) for step, version in versions if step >= before]
