"""RecordingModel: the policy as one attempt at a rollout sees it. Text on the workflow's side, token ids beyond.

It keeps every call with the exact tokens that went in and came out, so that what is trained is what was sampled: text
is never tokenized again. Seeds depend on the run's seed and on who asks, not on the attempt or the order of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

from rftdask.explorer.batcher import Batcher, RolloutKey
from rftdask.explorer.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.explorer.workflows.base import Response


class PromptTooLongError(ValueError):
    """A prompt has more tokens than `model.max_prompt_tokens`, and prompts are not to be truncated."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class PromptLimits:
    """How long a prompt may be, in tokens; None: any."""

    max_prompt_tokens: int | None = None
    enable_prompt_truncation: bool = True
    """Too long a prompt loses its beginning; else its rollout fails."""


@dataclass(frozen=True)
class Call:
    """One call of the policy, complete."""

    prompt_text: str
    """As rendered, before any truncation."""
    prompt_truncated: bool
    request: GenerateRequest
    generation: Generation
    response: Response


def rollout_seed(run_seed: int, group_id: str, rollout: int, turn: int) -> int:
    """Seed of one request, 0 <= seed < 2**63; the same for every attempt."""
    identity = f"{run_seed}/{group_id}/{rollout}/{turn}".encode()
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "big") >> 1


class RecordingModel:
    """A `PolicyModel` for one attempt; `calls` are the calls answered so far, in the order they were made."""

    def __init__(
        self,
        batcher: Batcher,
        tokenizer: Tokenizer,
        *,
        key: RolloutKey,
        group_id: str,
        run_seed: int,
        sampling: SamplingParams,
        limits: PromptLimits,
    ) -> None:
        self._batcher = batcher
        self._tokenizer = tokenizer
        self._key = key
        self._group_id = group_id
        self._run_seed = run_seed
        self._sampling = sampling
        self._limits = limits
        self._calls: dict[int, Call] = {}
        self._num_turns = 0
        self._closed = False

    @property
    def calls(self) -> list[Call]:
        return [self._calls[turn] for turn in sorted(self._calls)]

    async def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Response:
        """See PolicyModel. If the last message is the assistant's, the policy continues it."""
        continues = messages[-1]["role"] == "assistant"
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        return await self.generate(text, **sampling)

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        """See PolicyModel. Raises: PromptTooLongError; RuntimeError: the attempt has ended."""
        if self._closed:
            raise RuntimeError("this attempt at the rollout has ended; its model answers no more")
        turn = self._num_turns
        self._num_turns += 1
        tokens, truncated = self._encode(prompt)
        request = GenerateRequest(
            prompt_tokens=tuple(tokens),
            sampling=replace(self._sampling, **sampling),
            seed=rollout_seed(self._run_seed, self._group_id, self._key.rollout, turn),
        )
        generation = await self._batcher.generate(self._key, turn, request)
        response = Response(
            text=self._tokenizer.decode(list(generation.tokens), skip_special_tokens=True),
            prompt_tokens=request.prompt_tokens,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
        )
        self._calls[turn] = Call(prompt, truncated, request, generation, response)
        return response

    def close(self) -> None:
        """Answer no further calls: an attempt that will not stop must not go on beside its retry."""
        self._closed = True

    def _encode(self, prompt: str) -> tuple[list[int], bool]:
        # A chat template has written the special tokens already, and a plain text is meant as it stands.
        tokens = self._tokenizer.encode(prompt, add_special_tokens=False)
        limit = self._limits.max_prompt_tokens
        if limit is None or len(tokens) <= limit:
            return tokens, False
        if not self._limits.enable_prompt_truncation:
            raise PromptTooLongError(
                f"prompt of {len(tokens)} tokens exceeds max_prompt_tokens {limit}; raise it, or set "
                f"model.enable_prompt_truncation"
            )
        return tokens[-limit:], True
