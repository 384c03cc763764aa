"""PolicyHandle: what a workflow's model offers, over one way to ask. The same in this process and in a sandbox's.

A subclass says how a question reaches a model (`ask`), and where state goes. Nothing here knows engines or pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from rftdask.engines.base import POLICY
from rftdask.rollouts.loop_watchdog import BlockedLoopError
from rftdask.rollouts.policy.answer_stream import EventStream
from rftdask.rollouts.policy.endpoint import Answering, close_client, open_client
from rftdask.rollouts.policy.openai_api import OpenAIAnswer
from rftdask.rollouts.workflows.base import AuxiliaryModel, PolicyModel, Response

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")
Method = Literal["chat", "generate", "logprobs", "openai"]


class _Asking(ABC):
    """A model that can be asked: questions in, `Response`s out."""

    def __init__(self) -> None:
        self._clients: list[AsyncOpenAI | OpenAI] = []

    @abstractmethod
    async def _ask(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        """The answer of this model; see PolicyHandle.ask."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        """See PolicyModel. `tools` are given to the chat template; the other options override SamplingParams."""
        if not messages:
            raise ValueError("chat() was given no messages; give it at least one {role, content}")
        answer: Response = await self._ask("chat", {"messages": [dict(message) for message in messages], **options})
        return answer

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        """Continue a text as it is, without a chat template."""
        answer: Response = await self._ask("generate", {"prompt": prompt, **sampling})
        return answer

    async def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        """Log p of each token of `response` after `prompt`, in nats."""
        return tuple(await self._ask("logprobs", {"prompt": prompt, "response": response}))

    async def openai(self, path: str, body: Any, stream: EventStream | None = None) -> OpenAIAnswer:
        """The answer to a request of OpenAI's API: the body of a POST to `path`, such as "chat/completions". stream: is
        told its text while it is sampled."""
        told = {} if stream is None else {"tell": stream.tell}
        answer: OpenAIAnswer = await self._ask("openai", {"path": path, "body": body, **told})
        return answer

    def openai_client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` whose calls are this model's; for other programs its base_url and api_key do. Called
        on an event loop. Raises: UserError: the package is not installed.
        """
        return self.async_client_of(self)

    def async_client_of(self, asked: Answering) -> AsyncOpenAI:
        """As `openai_client`, of another that answers; closed with this one's."""
        client = open_client(asked, blocking=False)
        self._clients.append(client)
        return client

    def blocking_client_of(self, asked: Answering) -> OpenAI:
        """An `openai.OpenAI`, otherwise as `async_client_of`; its calls are made in another thread."""
        client = open_client(asked, blocking=True)
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        """Close the clients. Idempotent."""
        while self._clients:
            close_client(self._clients.pop())


class PolicyHandle(_Asking):
    """A `PolicyModel`; `times` are the seconds spent by what `timer` named, and in the models ("generate")."""

    def __init__(self, auxiliary_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.times: dict[str, float] = {}
        self.auxiliary_names = tuple(auxiliary_names)
        self._auxiliary = {name: _Auxiliary(self, name) for name in self.auxiliary_names}
        self._state: dict[str, Any] = {}

    @abstractmethod
    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        """The answer of the model called `name`: a Response, a tuple of logprobs, or an OpenAIAnswer."""

    async def _ask(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        return await self.ask(POLICY, method, arguments)

    @property
    def state(self) -> Mapping[str, Any]:
        """A copy; changed by `set_state` alone."""
        return dict(self._state)

    def set_state(self, **values: Any) -> None:
        """Name what the rollout is at, such as turn=3; later values replace earlier ones."""
        self._state.update(values)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the wall seconds of its block to `times`, also where it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began

    def auxiliary(self, name: str = "") -> AuxiliaryModel:
        """The auxiliary model of that name; "" where there is one alone. Raises: ValueError."""
        names = self.auxiliary_names
        if not name and len(names) == 1:
            name = names[0]
        if name not in names:
            there = ", ".join(names) or "none"
            raise ValueError(f"no auxiliary model is called {name!r}; explorer.auxiliary_models has: {there}")
        return self._auxiliary[name]

    def close_clients(self) -> None:
        super().close_clients()
        for each in self._auxiliary.values():
            each.close_clients()

    def blocking(self) -> BlockingModel:
        """This handle for code in another thread; called on the event loop that answers."""
        return BlockingModel(self, asyncio.get_running_loop())


class _Auxiliary(_Asking):
    """An auxiliary model of a handle."""

    def __init__(self, handle: PolicyHandle, name: str) -> None:
        super().__init__()
        self._handle = handle
        self._name = name

    async def _ask(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        return await self._handle.ask(self._name, method, arguments)


class BlockingModel:
    """A handle for code that blocks and runs in another thread than the event loop `loop`."""

    def __init__(self, handle: PolicyModel, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = handle
        self._loop = loop

    def wait(self, answer: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, run on the event loop. Raises: BlockedLoopError: called on the loop itself."""
        with contextlib.suppress(RuntimeError):
            # It would wait for an answer that only the loop it blocks can give. RuntimeError: no loop runs in this
            # thread, as it should be.
            if asyncio.get_running_loop() is self._loop:
                answer.close()
                raise BlockedLoopError("a blocking call on the event loop waits for itself; await the async one")
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        """As PolicyModel.chat, with the answer itself."""
        return self.wait(self._handle.chat(messages, **options))

    def generate(self, prompt: str, **sampling: Any) -> Response:
        """As PolicyModel.generate, with the answer itself."""
        return self.wait(self._handle.generate(prompt, **sampling))

    def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        """As PolicyModel.logprobs, with the answer itself."""
        return self.wait(self._handle.logprobs(prompt, response))

    @property
    def state(self) -> Mapping[str, Any]:
        """As PolicyModel.state."""
        return self._handle.state

    def set_state(self, **values: Any) -> None:
        """Sent to the loop, which owns the state; returns before it is there."""
        # Not waited for: it is a note for errors, and a loop that is busy must not hold up the workflow for it.
        self._loop.call_soon_threadsafe(lambda: self._handle.set_state(**values))

    def timer(self, name: str) -> contextlib.AbstractContextManager[None]:
        """As PolicyModel.timer."""
        return self._handle.timer(name)

    def auxiliary(self, name: str = "") -> BlockingModel:
        """As PolicyModel.auxiliary, for code that blocks."""
        # Of an auxiliary model only the questions are of use.
        return BlockingModel(cast(PolicyModel, self._handle.auxiliary(name)), self._loop)

    def openai_client(self) -> OpenAI:
        """An `openai.OpenAI`; see PolicyModel.openai_client."""

        async def opened() -> OpenAI:  # on the loop, which will answer
            handle = cast(_Asking, self._handle)
            return handle.blocking_client_of(handle)

        return self.wait(opened())
