"""ModelWrapper: the policy or an auxiliary model, with the interface of Trinity-RFT for workflows.

It wraps the handle of a rollout (rollouts/policy/base.py), which records every call of the policy with its tokens.
Answers are kept again as experiences, to know which of them a workflow returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rftdask.compat.trinity.experience import Experience
from rftdask.rollouts.policy.answer_stream import OnText
from rftdask.rollouts.policy.base import ModelHandle
from rftdask.rollouts.policy.openai_api import OpenAIAnswer
from rftdask.rollouts.workflows.base import AuxiliaryModel, Response

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "repetition_penalty", "tools")
_WITHOUT_EFFECT = {"logprobs", "n", "seed"}
"""Logprobs are always recorded, seeds belong to the rollout, and n is the number of calls."""


def _blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that waits for the result of an asynchronous one."""

    @wraps(method)
    def wait(self: ModelWrapper, *args: Any, **options: Any) -> Any:
        return self._wait(method(self, *args, **options))

    wait.__name__ = method.__name__.removesuffix("_async")
    wait.__qualname__ = method.__qualname__.removesuffix("_async")
    return wait


class ModelWrapper:
    """A model. Methods without _async are for blocking code in another thread than the event loop's."""

    enable_history = True
    """Always True, because every call is recorded."""
    api_key = "EMPTY"
    model_version = 0
    """Always 0; the recorded experiences have the policy version of each call."""

    def __init__(self, asked: AuxiliaryModel, wait: Callable[[Any], Any], name: str) -> None:
        """wait: returns the result of a coroutine, for blocking code."""
        self._asked = asked
        self._wait = wait
        self.model_path = self.model_name = name
        self.generate_kwargs: dict[str, Any] = {}
        self.config = SimpleNamespace(model_path=name, enable_history=True, enable_thinking=None)
        self.history: list[Experience] = []
        self.answers: list[Experience] = []
        """All of this attempt, in the order in which they came."""
        self._state: dict[str, Any] = {}

    # ---- text

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[Experience]:
        """Return `n` answers to a chat."""
        times, sampling = _options(options)
        asked = [self._recorded(await self._asked.chat(messages, **sampling), messages) for _ in range(times)]
        return asked

    async def generate_async(self, prompts: Sequence[str] | str, **options: Any) -> list[Experience]:
        """Return `n` continuations of each text."""
        times, sampling = _options(options)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return [
            self._recorded(await self._asked.generate(text, **sampling), text) for text in texts for _ in range(times)
        ]

    async def logprobs_async(self, tokens: Sequence[int], temperature: float | None = None) -> Any:
        """Raises: NotImplementedError: workflows have no tokenizer here; see PolicyModel.logprobs."""
        raise NotImplementedError(
            "logprobs of token ids are not available here; those of sampled tokens are in each experience"
        )

    async def convert_messages_to_experience_async(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, temperature: float | None = None
    ) -> Experience:
        """Return the conversation as one experience: sampled tokens, and those between. Raises: ValueError: the policy
        was not called."""
        if not self.answers:
            raise ValueError("there is no conversation to convert: the policy was not called")
        last = self.answers[-1]
        tokens = last.tokens.tolist()
        sampled = [False] * len(tokens)
        logprobs = [0.0] * len(tokens)
        for answer in self.answers:
            own = answer.tokens.tolist()
            if tokens[: len(own)] == own:  # the conversation went on from here
                for place, value in zip(range(answer.prompt_length, len(own)), answer.logprobs.tolist(), strict=False):
                    sampled[place], logprobs[place] = True, value
        first = sampled.index(True)
        converted = Experience(
            tokens=tokens,
            prompt_length=first,
            action_mask=sampled[first:],
            logprobs=logprobs[first:],
            messages=[dict(message) for message in messages],
            truncate_status=last.truncate_status,
            response_text=last.response_text,
        )
        converted.is_conversation = True
        return converted

    chat = _blocking(chat_async)
    generate = _blocking(generate_async)
    logprobs = _blocking(logprobs_async)
    convert_messages_to_experience = _blocking(convert_messages_to_experience_async)

    # ---- openai's interface

    def get_openai_client(self) -> OpenAI:
        """Return an `openai.OpenAI` with an attribute `model_path`."""
        client: OpenAI = self._on_the_loop(lambda: cast(Any, self._asked).client_of(self._answer_openai, blocking=True))
        vars(client)["model_path"] = self.model_path
        return client

    def get_openai_async_client(self) -> AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` with an attribute `model_path`."""
        client: AsyncOpenAI = self._on_the_loop(lambda: cast(Any, self._asked).client_of(self._answer_openai))
        vars(client)["model_path"] = self.model_path
        return client

    # ---- history and state

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the answers since the history was cleared. Raises: ValueError: there are none."""
        if not self.history:
            raise ValueError("the history is empty: the model was not called since it was cleared")
        answers = list(self.history)
        if clear_history:
            self.history.clear()
        return answers

    def set_workflow_state(self, state: dict[str, Any]) -> None:
        """Record the state of the workflow, which a failed rollout reports."""
        self._state.update(state)
        set_state = getattr(self._asked, "set_state", None)
        if set_state is not None:
            self._on_the_loop(lambda: set_state(**state))

    def clean_workflow_state(self) -> None:
        """Clear the state."""
        self._state.clear()

    def get_workflow_state(self) -> dict[str, Any]:
        """Return the state."""
        return dict(self._state)

    def _on_the_loop(self, call: Callable[[], T]) -> T:
        async def called() -> T:
            return call()

        try:
            asyncio.get_running_loop()
        except RuntimeError:  # in a thread of its own
            result: T = self._wait(called())
            return result
        return call()

    def _recorded(self, response: Response, asked: Any) -> Experience:
        # A model behind an API returns no tokens.
        prompt, tokens = response.prompt_tokens or (0,), response.tokens or (0,)
        text = asked if isinstance(asked, str) else "\n".join(str(message.get("content")) for message in asked)
        experience = Experience(
            tokens=(*prompt, *tokens),
            prompt_length=len(prompt),
            logprobs=response.logprobs or (0.0,) * len(tokens),
            prompt_text=text,
            response_text=response.text,
            messages=None if isinstance(asked, str) else [dict(message) for message in asked],
            truncate_status="response_truncated" if response.finish_reason == "length" else None,
        )
        self.history.append(experience)
        self.answers.append(experience)
        return experience

    async def _answer_openai(self, path: str, body: Any, on_text: OnText | None = None) -> OpenAIAnswer:
        """Answer a request of an OpenAI client and keep each answer as an experience."""
        if isinstance(body, Mapping) and body.get("tool_choice") == "required":
            # Only one format supports forced calls; agents that need a call retry.
            body = {**body, "tool_choice": "auto"}
        answer = await cast(ModelHandle, self._asked).openai(path, body, on_text)
        if answer.responses:  # else the body may be anything
            asked = next(body[name] for name in ("messages", "prompt", "input") if body.get(name) is not None)
            # Each of several prompts has the same number of answers.
            prompts = asked if isinstance(asked, list) and isinstance(asked[0], str) else [asked]
            for number, response in enumerate(answer.responses):
                self._recorded(response, prompts[number * len(prompts) // len(answer.responses)])
        return answer


def _options(given: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return (number of answers, sampling). Raises: TypeError: unknown option."""
    options = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(set(options) - {*_SAMPLING, *_WITHOUT_EFFECT}):
        raise TypeError(f"chat and generate take {', '.join((*_SAMPLING, 'n'))}, not {', '.join(unknown)}")
    return int(options.get("n", 1)), {key: value for key, value in options.items() if key in _SAMPLING}
