"""Remote model: a model behind an OpenAI-compatible API, as workflows ask it. Text in, text out.

It gives no token ids and no logprobs of what it samples, so its answers are measured and read, never trained. Requests
go out as a rate limit allows (rate_limit.py), and again after 408, 409, 429, 5xx and lost connections: after the pause
that the service asks for, which then holds for all, else after a growing one. Address and key come from environment
variables and go nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from rftdask.config.schema.model import ExternalModelConfig
from rftdask.engines.base import SamplingParams
from rftdask.errors import UserError
from rftdask.rollouts.policy.rate_limit import RateLimit, Reservation

if TYPE_CHECKING:
    from openai.resources import AsyncCompletions
    from openai.resources.chat import AsyncCompletions as AsyncChatCompletions
    from openai.types.chat import ChatCompletionMessageFunctionToolCall

_MAX_RETRIES = 8
"""Retries of a request: about a minute of pauses, as they double; a rate limit counts by the minute."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Pauses that grow, where the service asks for none."""
_MAY_SUCCEED = frozenset({408, 409, 429})
"""Statuses below 500 after which another try may succeed."""
MAX_TIMEOUT_S = 600.0
"""Longest deadline of one try, and longest pause that a service may ask for."""
_CHARS_PER_TOKEN = 3
"""Of a prompt, for a limit of tokens, until the service has counted them: fewer than most tokenizers have."""
_REFUSALS = frozenset({401, 403, 404})
"""The key, the rights or the name are wrong, and stay so."""


class RemoteModelError(Exception):
    """The service did not answer one request, also after the retries, or did not take it."""


def check_service(model_name: str, service: ExternalModelConfig) -> None:
    """Raises: UserError: the package or an environment variable is missing; names what to do."""
    if importlib.util.find_spec("openai") is None:
        raise UserError("a model behind an API needs the package 'openai'; install it: pip install 'rftdask[openai]'")
    for variable, what in ((service.base_url_env, "address"), (service.api_key_env, "key")):
        if not os.environ.get(variable):
            raise UserError(
                f"environment variable {variable} is not set: it holds the {what} of the service of model "
                f"{model_name!r} (model.external_model); set it, and any text if the service needs none"
            )


@dataclass(frozen=True)
class RemoteAnswer:
    text: str
    """Calls of tools are written as <tool_call>{...}</tool_call>, as other models write them."""
    finish_reason: str
    num_prompt_tokens: int
    """Prompt tokens as the service counts them; 0 if it does not tell."""
    num_response_tokens: int


class RemoteModel:
    """One model, for the rollouts of one event loop.

    Example:
        model = RemoteModel("a-model", config.model.external_model)
        answer = await model.ask([{"role": "user", "content": "2+2="}], SamplingParams(max_tokens=8), 1)
        await model.close()

    `failure`: why no request can succeed, such as a wrong key, once that is known.
    """

    def __init__(
        self,
        name: str,
        service: ExternalModelConfig,
        timeout_s: float = MAX_TIMEOUT_S,
        max_retries: int = _MAX_RETRIES,
        max_concurrent: int = 64,
        limit: RateLimit | None = None,
    ) -> None:
        """timeout_s: deadline of one try; max_concurrent: requests of one work unit at the same time; limit: of all who
        ask the model in this process; None: there is none.

        Raises: UserError: see check_service.
        """
        check_service(name, service)
        self.failure: UserError | None = None
        self._name = name
        self._max_retries, self._timeout_s = max_retries, timeout_s
        self._limit = limit or RateLimit(clock=time.monotonic)
        self._where = f"model {name!r} of the service at ${service.base_url_env}"
        # A bound of our own: a service that a whole unit asks at once may refuse most of it (429).
        self._places = asyncio.Semaphore(max_concurrent)
        import openai  # late: it takes most of a second, and is installed where it is needed

        self._client = openai.AsyncOpenAI(
            base_url=os.environ[service.base_url_env],
            api_key=os.environ[service.api_key_env],
            timeout=timeout_s,
            max_retries=0,  # here, since a pause is for all who ask
        )

    async def ask(
        self,
        asked: str | Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RemoteAnswer:
        """Continue a text, or answer a chat, given as its messages; a service may know chats only.

        Raises: RemoteModelError; UserError: the service refuses us.
        """
        from openai import APIStatusError, OpenAIError  # late: see __init__

        if self.failure is not None:
            raise self.failure
        request: dict[str, Any] = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p")}
        # Of the parameters that not every service knows those that differ from defaults.
        usual = SamplingParams(max_tokens=1)
        more = {name: getattr(sampling, name) for name in ("top_k", "min_tokens", "repetition_penalty", "ignore_eos")}
        if extra := {name: value for name, value in more.items() if value != getattr(usual, name)}:
            request["extra_body"] = extra
        if sampling.stop:
            request["stop"] = list(sampling.stop)
        endpoint: AsyncCompletions | AsyncChatCompletions
        if isinstance(asked, str):
            endpoint, request["prompt"] = self._client.completions, asked
        else:
            endpoint, request["messages"] = self._client.chat.completions, list(asked)
        if tools:
            request["tools"] = list(tools)
        num_chars = len(asked if isinstance(asked, str) else json.dumps(request["messages"], default=str))
        expected = num_chars / _CHARS_PER_TOKEN + sampling.max_tokens
        try:
            answer = await self._try_until_answered(
                partial(endpoint.create, model=self._name, seed=seed, **request), expected
            )
        # It was tried as often as it may be; what arrives here is final.
        except APIStatusError as error:
            told = f"{self._where} refuses us: {_one_line(error)}"
            if error.status_code in _REFUSALS:
                # Kept: later requests fail at once with it, and do not ask a service that will refuse them, too.
                self.failure = UserError(f"{told}; check its name, address and key")
                raise self.failure from None
            raise RemoteModelError(f"{self._where}: {_one_line(error)}") from None
        except OpenAIError as error:
            raise RemoteModelError(f"{self._where}, {self._max_retries + 1} tries: {_one_line(error)}") from None
        if not getattr(answer, "choices", None):
            raise RemoteModelError(f"{self._where} answered without a choice")
        choice, usage = answer.choices[0], answer.usage
        if isinstance(asked, str):
            text = choice.text
        else:
            text = (choice.message.content or "") + "".join(map(_written, choice.message.tool_calls or ()))
        counts = (0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        return RemoteAnswer(text, choice.finish_reason or "stop", *counts)

    async def _try_until_answered(self, ask: Callable[[], Awaitable[Any]], expected_tokens: float) -> Any:
        """What `ask` gives. Raises: openai.OpenAIError: its last error."""
        from openai import APIConnectionError, APIStatusError  # late: see __init__

        for attempt in range(self._max_retries + 1):
            place = await self._wait_for_place(expected_tokens)
            try:
                async with self._places:
                    answer = await ask()
            except (APIStatusError, APIConnectionError) as error:
                headers = error.response.headers if isinstance(error, APIStatusError) else {}
                status = error.status_code if isinstance(error, APIStatusError) else None
                asked_s = retry_after_s(headers, time.time())
                if attempt == self._max_retries or not _may_succeed(status, headers):
                    raise
                if asked_s is not None and asked_s > MAX_TIMEOUT_S:
                    raise
                if status == 429:
                    self._limit.settle(place, 0.0)  # it was not taken
                if asked_s is not None:
                    # For all: who asks meanwhile would be refused, too.
                    self._limit.pause(asked_s)
                else:
                    # Not all at once again.
                    pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                    await asyncio.sleep(pause_s * random.uniform(0.75, 1.0))
            else:
                if (usage := getattr(answer, "usage", None)) is not None:
                    self._limit.settle(place, float(usage.prompt_tokens + usage.completion_tokens))
                return answer
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _wait_for_place(self, num_tokens: float) -> Reservation:
        while True:
            place = self._limit.reserve(num_tokens)
            await asyncio.sleep(max(0.0, place.at_s - time.monotonic()))
            if not self._limit.paused_s:
                return place
            self._limit.settle(place, 0.0)  # the pause began meanwhile

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.close()


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Seconds for which a service asks to be left alone; None: it does not say. now_s: Unix time.

    >>> retry_after_s({"retry-after": "20"}, 0.0)
    20.0
    """
    for name, seconds in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            told = float(headers[name]) * seconds
            return told if math.isfinite(told) and told >= 0 else None
    with suppress(KeyError, ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - now_s)
    return None


def _may_succeed(status: int | None, headers: Mapping[str, str]) -> bool:
    """Whether another try may succeed. status: None: nobody answered."""
    if status is None:
        return True
    told = headers.get("x-should-retry", "")
    return told == "true" or (told != "false" and (status in _MAY_SUCCEED or status >= 500))


def _written(call: ChatCompletionMessageFunctionToolCall) -> str:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        # It stays the text that it is: whether a broken call is a mistake is for the workflow to say.
        arguments = call.function.arguments
    return f"<tool_call>{json.dumps({'name': call.function.name, 'arguments': arguments})}</tool_call>"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
