"""Engine: token ids in, token ids and logprobs out. One engine serves one set of weights at a time.

An engine knows nothing of tasks, text, rewards or storage. It uses continuous batching: requests enter while others
run, and each is answered when it finishes. Two guarantees:
- The tokens of a request depend on the weights, the prompt, the sampling parameters, the seed and, through rounding, on
  the other requests in the batch. The same list of requests submitted together twice gives the same bits.
- `rollout_logprobs` are those of softmax(logits / temperature), before top-p, top-k and grammar constraints.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rftdask.config.schema.explorer import EngineTraits, InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.errors import RoleError, WeightsError
from rftdask.synchronizer.fingerprint import Fingerprint

log = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-5
"""Lowest temperature above 0. Below it logits / temperature overflows float32."""
MAX_BATCH_TOKENS = 65_536
"""Maximum tokens of prompts and responses in the key-value cache of a transformers engine."""
MAX_BAD_WORDS, MAX_BAD_TOKENS = 1024, 8192
"""Maximum number of `SamplingParams.bad_tokens`, and of tokens in all of them; vLLM on a GPU allocates for them."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request, with the names and meanings of vLLM."""

    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature. 0: greedy, with logprobs of softmax(logits)."""
    top_p: float = 1.0
    top_k: int = -1
    """Number of tokens to sample from. -1: all."""
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Texts that end a response. An engine that does not decode text, such as vLLM here, may continue past one; the
    rest is then cut when tokens become text (rollouts/policy/recording.py)."""
    grammar: str = ""
    """Grammar of the response in the Lark syntax of llguidance. "": none. Only for engines that `guide_sampling`."""
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Forbidden token sequences, at most MAX_BAD_WORDS. A response ends if its grammar allows nothing else."""

    @property
    def is_guided(self) -> bool:
        """True if the allowed next tokens depend on the previous ones."""
        return bool(self.grammar or self.bad_tokens)


OnTokens = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True)
class GenerateRequest:
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """Random seed of this request, independent of other requests."""
    images: tuple[str, ...] = ()
    """Names of the images whose tokens are in the prompt, in order (data/images.py). Only for engines that
    `read_images`."""
    on_tokens: OnTokens | None = field(default=None, compare=False, repr=False)
    """Receives new tokens of the response in order, from any thread; must not block. The result follows with all
    tokens; an engine may skip this callback for the last tokens or for all."""


@dataclass(frozen=True)
class Generation:
    tokens: tuple[int, ...]
    """Response token ids, including the end token if finish_reason is "stop"."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each of `tokens`."""
    finish_reason: Literal["stop", "length"]
    min_policy_version: int
    max_policy_version: int
    """Oldest and newest policy versions that sampled a token."""
    routed_experts: tuple[bytes, ...] = ()
    """Experts of each token of prompt and response except the last one, which is not computed: [routers * experts per
    token] int16 per token, from the first layer on. Empty: not recorded."""
    version_starts: tuple[tuple[int, int], ...] = ()
    """(index into `tokens`, policy version) in order: the version that sampled the tokens from that index to the next
    one. Empty: one version sampled all tokens or, if the oldest and newest differ, the split is unknown."""

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """`version_starts`, also if one version sampled all tokens. Empty: unknown."""
        is_one = self.min_policy_version == self.max_policy_version
        return self.version_starts or (((0, self.min_policy_version),) if is_one else ())

    def sampled_by(self, versions: Sequence[tuple[int, int]]) -> Generation:
        """Copy with `versions`, at least one entry. Entries that begin after the last token are dropped."""
        starts = [(0, versions[0][1])]
        for place, version in versions[1:]:
            if place < len(self.tokens) and version != starts[-1][1]:
                starts.append((place, version))
        oldest, newest = min(version for _, version in starts), max(version for _, version in starts)
        told = tuple(starts) if len(starts) > 1 else ()
        return replace(self, min_policy_version=oldest, max_policy_version=newest, version_starts=told)


Take = Callable[[], Sequence[tuple[int, GenerateRequest | None]]]
"""Returns new requests since the last call, without waiting: (unique number, request), or (number, None) if an earlier
request was cancelled."""
Give = Callable[[int, Generation], None]
"""Receives (number, result) of a request."""


class Engine(EngineTraits, ABC):
    """A model that generates. Used from one thread."""

    policy_version: int = 0
    """Version of the served weights. 0: those that training begins with."""
    dtype: str = "float32"
    """Data type of the computation."""
    cache_tokens: int | None = None
    """Capacity of the key-value cache, in tokens. None: unknown."""

    @classmethod
    @abstractmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> Engine:
        """Engine of a configuration with its model loaded, serving policy version 0.

        Args:
            section: `explorer.rollout_model`, or an item of `explorer.auxiliary_models` (a frozen model with its own
                model_path). Its dtype is resolved, not "auto".
            model: section `model`, whose model_path is the policy.
            device: "cpu" or "cuda".
        Raises: UserError, DataError: the model cannot be loaded.
        """

    def record_experts(self) -> None:
        """Record the experts of every generation. Raises: RoleError, DataError: unsupported by engine or model."""
        raise RoleError(f"engine {type(self).__name__} cannot record the experts of tokens")

    @abstractmethod
    def serve(self, take: Take, give: Give) -> None:
        """Serve the requests from `take`, each as soon as it finishes, until none runs and `take` returns none.

        `take` is called before the first step and between steps while requests run. Both callbacks run in the calling
        thread. For engines that `loads_in_flight`, `take` may load weights: running requests continue with the new
        weights and the old keys and values. Cancelled requests leave their slot, but may still be answered.
        Raises: RoleError: the engine failed; then no request runs any more.
        """

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for all requests together; results are in order. Raises: as `serve`."""
        waiting = [list(enumerate(requests))]
        answers: dict[int, Generation] = {}
        self.serve(lambda: waiting.pop() if waiting else [], answers.__setitem__)
        return [answers[number] for number in range(len(requests))]

    @abstractmethod
    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """Replace the weights by the safetensors `files` and serve `version`.

        The files together hold the complete state dict; one name per tied tensor is enough.
        Raises: RoleError: a name or shape does not match; the engine must not be used again.
        """

    def load_verified(self, version: int, files: Sequence[Path], fingerprint: Fingerprint | None) -> None:
        """Load the weights and verify that they are served.

        If the engine does not reproduce `fingerprint`, it loads once more with `load_anew`. fingerprint None: nothing
        is compared (a fake trainer).
        Raises: WeightsError: the second attempt does not reproduce it either; RoleError: loading failed. The engine
        must not be used again after either.
        """
        # Engines may fail to load silently: vLLM 0.32 on a CPU kept the old output head of models with tied embeddings.
        # The fast way is tried first, since `load_anew` takes a minute with some engines.
        for load in (self.load_weights, self.load_anew):
            load(version, files)
            if not (problem := self._problem(fingerprint)):
                return
            log.warning("version %d does not reproduce the logprobs of the trainer: %s", version, problem)
        # An engine that cannot prove its weights must not continue: its rollouts would come from another policy.
        raise WeightsError(
            f"{self} does not reproduce the logprobs of the trainer for version {version}, also after loading again: "
            f"{problem}. Check that engine and trainer run the same model code"
        )

    def try_load_changes(self, version: int, files: Sequence[Path], fingerprint: Fingerprint | None) -> bool:
        """Update the served weights to `version` in place with the deltas in `files`, one per file loaded last.

        Returns: False if the engine cannot, the deltas belong to other weights, or the result does not reproduce
        `fingerprint`. The complete version must then be loaded.
        """
        if not self.try_change_weights(files):
            return False
        self.policy_version = version
        if problem := self._problem(fingerprint):
            log.warning("version %d, updated by deltas, differs from the trainer's logprobs: %s", version, problem)
        return not problem

    def _problem(self, fingerprint: Fingerprint | None) -> str:
        if fingerprint is None or not self.has_model:
            return ""
        return fingerprint.problem(self.logprobs(fingerprint.pairs), self.dtype)

    def try_change_weights(self, files: Sequence[Path]) -> bool:
        """Apply all deltas to the weights; or apply none and return False."""
        return False

    def load_anew(self, version: int, files: Sequence[Path]) -> None:
        """Load weights in the most reliable way, however long it takes. Otherwise like `load_weights`."""
        self.load_weights(version, files)

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """Natural-log probabilities at temperature 1 for pairs (context, continuation), one per continuation token.

        Both hold at least one token. Raises: RoleError: unsupported, or the engine failed.
        """
        raise RoleError(f"engine {type(self).__name__} cannot compute logprobs of given tokens")

    def leave_device(self) -> None:
        """Free device memory until `return_to_device`. No request runs."""

    def return_to_device(self) -> None:
        """Restore the state before `leave_device`, with the same weights."""

    def close(self) -> None:
        """Free the model. Idempotent."""


POLICY = ""
"""Name of the policy among the models that workflows can use."""
