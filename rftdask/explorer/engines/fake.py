"""The fake at the engine seam: no model, tokens from the seed, constant logprobs. For tests and benchmarks of the loop.

It keeps the promises of `Engine` that need no model: order, lengths, versions, determinism, errors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rftdask.errors import RoleError
from rftdask.explorer.engines.base import Engine, GenerateRequest, Generation, Give, Take


class FakeEngine(Engine):
    """Answers every request with `tokens_per_request` uniform tokens, or as many as its max_tokens allows.

    Args:
        model_path: ignored.
        tokens_per_request: length of a response that is not cut off; such a response ends with "stop".
        vocab_size: tokens are in [0, vocab_size); each has logprob -log(vocab_size).
        seconds_per_call: what it takes to answer all that came at once, to stand for a slow model.
    """

    has_weights = False

    def __init__(
        self, model_path: str = "", *, tokens_per_request: int = 4, vocab_size: int = 100, seconds_per_call: float = 0.0
    ) -> None:
        self.tokens_per_request = tokens_per_request
        self.vocab_size = vocab_size
        self.seconds_per_call = seconds_per_call
        self.loaded_files: list[Path] = []
        self._closed = False

    def serve(self, take: Take, give: Give) -> None:
        if self._closed:
            raise RoleError("engine 'fake' was closed; make a new one")
        while came := take():
            time.sleep(self.seconds_per_call)
            for number, request in came:
                if request is not None:
                    give(number, self._answer(request))

    def _answer(self, request: GenerateRequest) -> Generation:
        length = min(self.tokens_per_request, request.sampling.max_tokens)
        random = np.random.Generator(np.random.Philox(key=request.seed & (2**64 - 1)))
        return Generation(
            tokens=tuple(random.integers(self.vocab_size, size=length).tolist()),
            logprobs=(-math.log(self.vocab_size),) * length,
            finish_reason="stop" if length == self.tokens_per_request else "length",
            min_policy_version=self.policy_version,
            max_policy_version=self.policy_version,
        )

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return [(-math.log(self.vocab_size),) * len(response) for _, response in pairs]

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """Reads nothing; the files must be there."""
        missing = [str(file) for file in files if not Path(file).is_file()]
        if missing:
            raise RoleError(f"engine 'fake' cannot load version {version}: no such file: {', '.join(missing)}")
        self.loaded_files = [Path(file) for file in files]
        self.policy_version = version

    def close(self) -> None:
        self._closed = True
