"""Engine: token ids in, token ids and logprobs out. One engine serves one set of weights at a time.

An engine knows nothing of tasks, text, rewards or storage. Its batch is continuous: requests enter while others are
under way, and each is answered when it is finished. Two promises that its users build on:
- a request's tokens depend on the weights, the prompt, the sampling parameters, the seed, and, by the rounding of sums,
  on what it was generated beside; so the same list of requests given at once, twice, gives the same bits.
- `rollout_logprobs` are of softmax(logits / temperature), before top-p, top-k, and what a grammar allows.
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
"""Lowest temperature above 0; below it logits / temperature leaves the range of float32."""
MAX_BATCH_TOKENS = 65_536
"""Tokens of prompts and responses that a transformers engine holds in its key-value cache at once."""
MAX_BAD_WORDS, MAX_BAD_TOKENS = 1024, 8192
"""Most `SamplingParams.bad_tokens`, and tokens in all of them: vLLM on a GPU makes room for them as it starts."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; names and meanings as in vLLM."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; logprobs are then of softmax(logits)."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all."""
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Texts of which the first that is complete ends a response. An engine may go on past it, as vLLM does here, where
    it knows no text: what is beyond is cut off where tokens become text (rollouts/policy/recording.py)."""
    grammar: str = ""
    """Form of a response, a grammar in llguidance's Lark; "": any. Only engines that `guide_sampling` are asked."""
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens in a row that must not come, MAX_BAD_WORDS at most. Of a response whose grammar allows nothing else, it
    ends there."""

    @property
    def is_guided(self) -> bool:
        """Whether what may come next depends on what came."""
        return bool(self.grammar or self.bad_tokens)


OnTokens = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True)
class GenerateRequest:
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """Random seed of this request alone: its tokens do not depend on the seeds of its neighbors."""
    images: tuple[str, ...] = ()
    """Names of the images in the prompt, whose tokens stand in it, in their order (data/images.py). Only engines that
    `read_images` are given any."""
    on_tokens: OnTokens | None = field(default=None, compare=False, repr=False)
    """Takes the tokens of the response while it grows, in their order, some at a time, from any thread; must not block.
    The answer comes after them and holds all of them; an engine may leave the last ones, or all, to it."""


@dataclass(frozen=True)
class Generation:
    tokens: tuple[int, ...]
    """Response token ids; the end token included when finish_reason is "stop"."""
    logprobs: tuple[float, ...]
    """Natural-log probabilities, one for each of `tokens`."""
    finish_reason: Literal["stop", "length"]
    min_policy_version: int
    max_policy_version: int
    """Oldest and newest weights that sampled a token of it."""
    routed_experts: tuple[bytes, ...] = ()
    """Experts that prompt and response took, each token but the last, which was not computed: [routers * experts of a
    token] int16 of each, from the first layer on. Empty: not recorded."""
    version_starts: tuple[tuple[int, int], ...] = ()
    """(place among `tokens`, policy version), in their order: the version sampled the tokens from that place on, to the
    next one. Empty: one version sampled all, or, where the oldest and the newest differ, nobody knows which what."""

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """As `version_starts`, also where one version sampled all; empty: not known."""
        is_one = self.min_policy_version == self.max_policy_version
        return self.version_starts or (((0, self.min_policy_version),) if is_one else ())

    def sampled_by(self, versions: Sequence[tuple[int, int]]) -> Generation:
        """The same, of `versions` as above, at least one; those that begin beyond its last token sampled none of it."""
        starts = [(0, versions[0][1])]
        for place, version in versions[1:]:
            if place < len(self.tokens) and version != starts[-1][1]:
                starts.append((place, version))
        oldest, newest = min(version for _, version in starts), max(version for _, version in starts)
        told = tuple(starts) if len(starts) > 1 else ()
        return replace(self, min_policy_version=oldest, max_policy_version=newest, version_starts=told)


Take = Callable[[], Sequence[tuple[int, GenerateRequest | None]]]
"""Returns the requests that have come since the last call, without waiting: each by a number that is used once, or None
in place of one that came before and that nobody wants any more."""
Give = Callable[[int, Generation], None]
"""Receives the answer to the request of that number."""


class Engine(EngineTraits, ABC):
    """Holds a model and generates with it. Used from one thread.

    Example:
        engine = TransformersEngine(model_path, dtype="float32", device="cpu")
        engine.load_weights(4, [Path("weights/4/model.safetensors")])
        generations = engine.generate(requests)
    """

    policy_version: int = 0
    """Version of the weights it serves; 0 = as in the model folder."""
    dtype: str = "float32"
    """Data type in which it computes."""
    cache_tokens: int | None = None
    """Tokens of prompts and answers whose keys and values it has room for at once; None: not known."""

    @classmethod
    @abstractmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> Engine:
        """The engine that the configuration describes, its model loaded, serving policy version 0.

        Args:
            section: `explorer.rollout_model`, or an item of `explorer.auxiliary_models`: a frozen model beside the
                policy, with a model_path of its own. Its dtype is not "auto" any more.
            model: `model`, whose model_path is the policy.
            device: "cpu" or "cuda".
        Raises: UserError, DataError: why the model cannot be loaded.
        """

    def record_experts(self) -> None:
        """Tell the experts of every generation from here on. Raises: RoleError, DataError: engine or model cannot."""
        raise RoleError(f"engine {type(self).__name__} does not tell the experts that its tokens took")

    @abstractmethod
    def serve(self, take: Take, give: Give) -> None:
        """Answer what `take` gives, each request as soon as it is finished, until none is under way and `take` gives
        none. It is asked before the first step, and between steps as long as something is under way.

        Both are called from the calling thread. Where it `loads_in_flight`, `take` may load weights: what is under way
        goes on with them, and with the keys and values of the old ones. What nobody wants any more leaves its slot, and
        may be answered all the same. Raises: RoleError naming the engine and the cause; then nothing is under way any
        more.
        """

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for each request, in their order; all of them enter at once. Raises: as `serve`."""
        waiting = [list(enumerate(requests))]
        answers: dict[int, Generation] = {}
        self.serve(lambda: waiting.pop() if waiting else [], answers.__setitem__)
        return [answers[number] for number in range(len(requests))]

    @abstractmethod
    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """Replace the weights by the safetensors `files` (their union is the whole state dict; of tied tensors one name
        is enough) and serve `version` from now on.

        Raises: RoleError: a name or shape does not fit; the engine must not be used again.
        """

    def load_verified(self, version: int, files: Sequence[Path], fingerprint: Fingerprint | None) -> None:
        """Load the weights and show that they are served: if the engine does not compute what `fingerprint` says, it
        loads once more in the surest way it has. None: nobody made one (a fake trainer), so nothing is compared.

        Raises: WeightsError: it computes something else after both; RoleError: it cannot load. It must not be used
            again after either.
        """
        # Engines fail to load without saying so: vLLM 0.32 on a CPU kept the old output head of models whose embeddings
        # are tied.
        # The quick way first; the sure one costs a minute with some engines.
        for load in (self.load_weights, self.load_anew):
            load(version, files)
            if fingerprint is None or not self.has_model:
                return
            problem = fingerprint.problem(self.logprobs(fingerprint.pairs), self.dtype)
            if not problem:
                return
            log.warning("version %d does not compute as it did in the trainer: %s", version, problem)
        # No engine that cannot prove its weights goes on: its rollouts would train the policy by another's mistakes.
        raise WeightsError(
            f"{self} does not compute what the trainer computed with version {version}, also after loading it anew: "
            f"{problem}. Its rollouts would be another policy's; is the model's code the same on both sides?"
        )

    def try_load_changes(self, version: int, files: Sequence[Path], fingerprint: Fingerprint | None) -> bool:
        """Make the weights of `version` of those that are served, in place, by the deltas in `files`, one for each file
        that was loaded last. False: this engine cannot, or they are of other weights, or what it computes then is not
        what `fingerprint` says: it has to load the whole before it goes on.
        """
        if not self.try_change_weights(files):
            return False
        self.policy_version = version
        if fingerprint is None or not self.has_model:
            return True
        problem = fingerprint.problem(self.logprobs(fingerprint.pairs), self.dtype)
        if problem:
            log.warning("version %d, made of the one before, does not compute as in the trainer: %s", version, problem)
        return not problem

    def try_change_weights(self, files: Sequence[Path]) -> bool:
        """Apply deltas to the weights, all of them, or none and return False."""
        return False

    def load_anew(self, version: int, files: Sequence[Path]) -> None:
        """Load weights in the surest way this engine has, however long it takes. Otherwise as `load_weights`."""
        self.load_weights(version, files)

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """Compute the natural-log probability, at temperature 1, of each token of the second of a pair after the first
        and those before it; both hold at least one token. Raises: RoleError: this engine cannot tell, or fails.
        """
        raise RoleError(f"engine {type(self).__name__} gives no logprobs of given tokens")

    def leave_device(self) -> None:
        """Free the memory of the device until `return_to_device`, while others have it. Nothing is under way."""

    def return_to_device(self) -> None:
        """Go on where `leave_device` was called, with the same weights."""

    def close(self) -> None:
        """Free the model. Idempotent."""


POLICY = ""
"""Name of the policy among the models that can be asked."""
