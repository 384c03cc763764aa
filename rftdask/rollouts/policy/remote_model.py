"""Remote model: a model behind an OpenAI-compatible API. Text in, text out.

It returns no token ids and no logprobs, so its answers are evaluated but never trained. Requests follow a rate limit
and are retried after 408, 409, 429, 5xx and lost connections. A pause that the service requests applies to all
requests. Address and key are read only from environment variables.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from rftdask.config.schema.model import ExternalModelConfig
from rftdask.engines.base import SamplingParams
from rftdask.errors import UserError
from rftdask.storage.checked_json import parse_portable

if TYPE_CHECKING:
    from openai.resources import AsyncCompletions
    from openai.resources.chat import AsyncCompletions as AsyncChatCompletions
    from openai.types.chat import ChatCompletionMessageFunctionToolCall

_MAX_RETRIES = 8
"""Retries of a request. Their doubling pauses add up to about a minute, the window of rate limits."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""First and longest pause before a retry, if the service requests none."""
_MAY_SUCCEED = frozenset({408, 409, 429})
"""Statuses below 500 after which a retry may succeed."""
MAX_TIMEOUT_S = 600.0
"""Longest timeout of one try, and longest pause that a service may request."""
_CHARS_PER_TOKEN = 3
"""Estimate for token limits until the service reports counts; lower than for most tokenizers."""
_REFUSALS = frozenset({401, 403, 404})
"""Permanent errors: wrong key, rights or name."""
WINDOW_S = 60.0
_FAR = float("inf")


@dataclass
class Reservation:
    at_s: float
    """Time at which it may be sent."""
    num_tokens: float
    counts: bool = True
    """False once it has left the window."""


class RateLimit:
    """Times at which requests may be sent, by requests and tokens per minute. Thread-safe; the caller sleeps.

    No window of one minute, wherever it begins, has more requests or tokens than allowed, unless an answer is longer
    than its reservation.
    """

    def __init__(
        self, requests: float | None = None, tokens: float | None = None, *, clock: Callable[[], float]
    ) -> None:
        """requests, tokens: limits per minute; requests below 1 mean one in more than a minute. None: unlimited."""
        self._limits = requests or _FAR, tokens or _FAR
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved: deque[Reservation] = deque()
        """Reservations of the last minute and of the future, by time."""
        self._num_tokens = 0.0
        """Tokens of all reservations."""
        self._paused_until_s = -_FAR

    @property
    def paused_s(self) -> float:
        return max(0.0, self._paused_until_s - self._clock())

    def reserve(self, num_tokens: float) -> Reservation:
        """Reserve the first time at which a request of so many tokens may be sent, after all earlier reservations."""
        requests, tokens = self._limits
        # Below one request per minute, the window is as long as the interval between two requests.
        window_s = WINDOW_S * max(1.0, 1.0 / requests)
        with self._lock:
            now_s = self._clock()
            last_s = self._reserved[-1].at_s if self._reserved else now_s
            at_s = max(now_s, last_s, self._paused_until_s)
            while self._reserved and self._reserved[0].at_s <= now_s - window_s:
                self._reserved[0].counts = False
                self._num_tokens -= self._reserved.popleft().num_tokens
            num_tokens = min(num_tokens, tokens)  # more count as a full minute's tokens
            # Move the time until enough of the oldest reservations have left the window.
            count, used = len(self._reserved), self._num_tokens
            for earlier in self._reserved:
                is_inside = earlier.at_s > at_s - window_s
                if is_inside and count + 1 <= max(1.0, requests) and used + num_tokens <= tokens:
                    break
                at_s = max(at_s, earlier.at_s + window_s) if is_inside else at_s
                count, used = count - 1, used - earlier.num_tokens
            reservation = Reservation(at_s, num_tokens)
            self._reserved.append(reservation)
            self._num_tokens += num_tokens
            return reservation

    def settle(self, reservation: Reservation, num_tokens: float) -> None:
        with self._lock:
            self._num_tokens += (num_tokens - reservation.num_tokens) * reservation.counts
            reservation.num_tokens = num_tokens

    def pause(self, seconds: float) -> None:
        """Delay all later reservations, because the service requested a pause."""
        with self._lock:
            self._paused_until_s = max(self._paused_until_s, self._clock() + seconds)


class RemoteModelError(Exception):
    """The service refused a request, or did not answer it after all retries."""


def check_service(model_name: str, service: ExternalModelConfig) -> None:
    """Raises: UserError: the package or an environment variable is missing."""
    if importlib.util.find_spec("openai") is None:
        raise UserError("a model behind an API needs the package 'openai'; install it: pip install 'rftdask[openai]'")
    for variable, content in ((service.base_url_env, "address"), (service.api_key_env, "key")):
        if not os.environ.get(variable):
            advice = f"set it to the {content} of the service of model {model_name!r} (model.external_model)"
            text = f"{advice}, or to any text if the service needs none"
            raise UserError(f"environment variable {variable} is not set; {text}")


@dataclass(frozen=True)
class RemoteAnswer:
    text: str
    """Answer text; tool calls are written as <tool_call>{...}</tool_call>."""
    finish_reason: str
    num_prompt_tokens: int
    """Prompt tokens as counted by the service; 0: not reported."""
    num_response_tokens: int


class RemoteModel:
    def __init__(
        self,
        name: str,
        service: ExternalModelConfig,
        timeout_s: float = MAX_TIMEOUT_S,
        max_retries: int = _MAX_RETRIES,
        max_concurrent: int = 64,
        limit: RateLimit | None = None,
    ) -> None:
        """timeout_s: timeout of one try; max_concurrent: requests of one work unit; limit: shared by all requests of a
        process; None: unlimited. Raises: UserError: see check_service.
        """
        check_service(name, service)
        self.failure: UserError | None = None
        """Error that makes all requests fail, such as a wrong key."""
        self._name = name
        self._max_retries, self._timeout_s = max_retries, timeout_s
        self._limit = limit or RateLimit(clock=time.monotonic)
        self._where = f"model {name!r} of the service at ${service.base_url_env}"
        # A service that receives all requests of a unit at once may refuse most of them (429).
        self._slots = asyncio.Semaphore(max_concurrent)
        import openai  # late: optional, and the import takes most of a second

        self._client = openai.AsyncOpenAI(
            base_url=os.environ[service.base_url_env],
            api_key=os.environ[service.api_key_env],
            timeout=timeout_s,
            max_retries=0,  # retried here, because a pause applies to all requests
        )

    async def ask(
        self,
        question: str | Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RemoteAnswer:
        """Continue a text, or answer the messages of a chat. Some services support only chats.

        Raises: RemoteModelError; UserError: the service refuses all requests.
        """
        from openai import APIStatusError, OpenAIError  # late: see __init__

        if self.failure is not None:
            raise self.failure
        request: dict[str, Any] = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p")}
        # Not every service knows these, so only values that differ from the defaults are sent.
        defaults, extra = SamplingParams(max_tokens=1), {}
        for name in ("top_k", "min_tokens", "repetition_penalty", "ignore_eos"):
            if (value := getattr(sampling, name)) != getattr(defaults, name):
                extra[name] = value
        if extra:
            request["extra_body"] = extra
        if sampling.stop:
            request["stop"] = list(sampling.stop)
        endpoint: AsyncCompletions | AsyncChatCompletions
        if isinstance(question, str):
            endpoint, request["prompt"] = self._client.completions, question
        else:
            endpoint, request["messages"] = self._client.chat.completions, list(question)
        if tools:
            request["tools"] = list(tools)
        num_chars = len(question if isinstance(question, str) else json.dumps(request["messages"], default=str))
        expected = num_chars / _CHARS_PER_TOKEN + sampling.max_tokens
        try:
            ask = partial(endpoint.create, model=self._name, seed=seed, **request)
            answer = await self._try_until_answered(ask, expected)
        # All retries are used up, so errors here are final.
        except APIStatusError as error:
            if error.status_code in _REFUSALS:
                # Later requests fail at once with this error, because the service would refuse them as well.
                text = f"{self._where} refuses all requests: {_one_line(error)}; check its name, address and key"
                self.failure = UserError(text)
                raise self.failure from None
            raise RemoteModelError(f"{self._where}: {_one_line(error)}") from None
        except OpenAIError as error:
            raise RemoteModelError(f"{self._where}, {self._max_retries + 1} tries: {_one_line(error)}") from None
        if not getattr(answer, "choices", None):
            raise RemoteModelError(f"{self._where} answered without a choice")
        choice, usage = answer.choices[0], answer.usage
        if isinstance(question, str):
            text = choice.text
        else:
            text = (choice.message.content or "") + "".join(map(_written, choice.message.tool_calls or ()))
        counts = (0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        return RemoteAnswer(text, choice.finish_reason or "stop", *counts)

    async def _try_until_answered(self, ask: Callable[[], Awaitable[Any]], expected_tokens: float) -> Any:
        """Return the result of `ask`, with retries. Raises: openai.OpenAIError: the last error."""
        from openai import APIConnectionError, APIStatusError  # late: see __init__

        for attempt in range(self._max_retries + 1):
            reservation = await self._reserve(expected_tokens)
            try:
                async with self._slots:
                    answer = await ask()
            except (APIStatusError, APIConnectionError) as error:
                headers = error.response.headers if isinstance(error, APIStatusError) else {}
                status = error.status_code if isinstance(error, APIStatusError) else None
                requested_s = retry_after_s(headers, time.time())
                advice = headers.get("x-should-retry", "")
                may_succeed = status is None or status in _MAY_SUCCEED or status >= 500
                may_succeed = advice == "true" or (may_succeed and advice != "false")
                if attempt == self._max_retries or not may_succeed or (requested_s or 0.0) > MAX_TIMEOUT_S:
                    raise
                if status == 429:
                    self._limit.settle(reservation, 0.0)  # the service did not count it
                if requested_s is not None:
                    # For all requests, because the service would refuse those as well.
                    self._limit.pause(requested_s)
                else:
                    # With jitter, so that requests do not all come back at once.
                    pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                    await asyncio.sleep(pause_s * random.uniform(0.75, 1.0))
            else:
                if (usage := getattr(answer, "usage", None)) is not None:
                    self._limit.settle(reservation, float(usage.prompt_tokens + usage.completion_tokens))
                return answer
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _reserve(self, num_tokens: float) -> Reservation:
        while True:
            reservation = self._limit.reserve(num_tokens)
            await asyncio.sleep(max(0.0, reservation.at_s - time.monotonic()))
            if not self._limit.paused_s:
                return reservation
            self._limit.settle(reservation, 0.0)  # a pause began meanwhile

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.close()


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Return the pause in seconds that a service requests; None: none. now_s: Unix time."""
    for name, seconds in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            pause_s = float(headers[name]) * seconds
            return pause_s if math.isfinite(pause_s) and pause_s >= 0 else None
    with suppress(KeyError, ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - now_s)
    return None


def _written(call: ChatCompletionMessageFunctionToolCall) -> str:
    try:
        arguments = parse_portable(call.function.arguments or "{}")
    except ValueError:
        # Passed through as text; the workflow decides how to treat a malformed call.
        arguments = call.function.arguments
    return f"<tool_call>{json.dumps({'name': call.function.name, 'arguments': arguments})}</tool_call>"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
