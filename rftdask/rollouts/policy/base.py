"""Model handles: the interface that a workflow's model offers, in the worker and in a sandbox.

`ModelHandle` is one model, `PolicyHandle` the policy together with its auxiliary models. RecordingModel implements both
over engines; the Forwarding classes send each call as one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from rftdask.engines.base import POLICY
from rftdask.rollouts.loop_watchdog import BlockedLoopError
from rftdask.rollouts.policy.answer_stream import OnText
from rftdask.rollouts.policy.endpoint import BLOCKED, AnswerFn, close_client, open_client
from rftdask.rollouts.policy.openai_api import OpenAIAnswer
from rftdask.rollouts.workflows.base import AuxiliaryModel, PolicyModel, Response

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")
Method = Literal["chat", "generate", "logprobs", "openai"]


class ModelHandle(AuxiliaryModel):
    """A model that a workflow can call. Options of a chat override SamplingParams, except `tools`."""

    def __init__(self) -> None:
        self._clients: list[AsyncOpenAI | OpenAI] = []

    @abstractmethod
    async def openai(self, path: str, body: Any, on_text: OnText | None = None) -> OpenAIAnswer:
        """Answer a POST of `body` to `path` of OpenAI's API. on_text: receives the text while it is sampled."""

    async def call(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        """Make a call that arrived as a message. Raises: KeyError: unknown method."""
        if method not in get_args(Method):
            raise KeyError(method)
        return await getattr(self, method)(**arguments)

    def openai_client(self) -> AsyncOpenAI:
        """See AuxiliaryModel; called on an event loop. Raises: UserError: the package is not installed."""
        return cast("AsyncOpenAI", self.client_of(self.openai))

    def client_of(self, answer: AnswerFn, *, blocking: bool = False) -> AsyncOpenAI | OpenAI:
        """Like `openai_client`, for requests answered by `answer`. blocking: an `openai.OpenAI` for another thread."""
        self._clients.append(open_client(answer, blocking=blocking))
        return self._clients[-1]

    def close_clients(self) -> None:
        """Close the clients. Idempotent."""
        while self._clients:
            close_client(self._clients.pop())


class PolicyHandle(ModelHandle, PolicyModel):
    """A `PolicyModel`. `times` holds seconds spent, by `timer` name; "generate" is the time spent in models."""

    def __init__(self, auxiliary: Mapping[str, ModelHandle]) -> None:
        super().__init__()
        self.times: dict[str, float] = {}
        self.auxiliary_names = tuple(auxiliary)
        self._auxiliary = dict(auxiliary)
        self._state: dict[str, Any] = {}

    @property
    def state(self) -> Mapping[str, Any]:
        """A copy; only `set_state` changes the state."""
        return dict(self._state)

    def set_state(self, **values: Any) -> None:
        """Record the progress of the rollout, such as turn=3; later values replace earlier ones."""
        self._state.update(values)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to `times`, even if it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began

    def auxiliary(self, name: str = "") -> ModelHandle:
        """Return the auxiliary model `name`; "": the only one. Raises: ValueError."""
        if not name and len(self._auxiliary) == 1:
            [name] = self._auxiliary
        if name not in self._auxiliary:
            names = ", ".join(self._auxiliary) or "none"
            raise ValueError(f"auxiliary model {name!r} does not exist; explorer.auxiliary_models has: {names}")
        return self._auxiliary[name]

    def model(self, name: str) -> ModelHandle:
        """Return the policy if `name` is POLICY, else an auxiliary model. Raises: ValueError."""
        return self if name == POLICY else self.auxiliary(name)

    def close_clients(self) -> None:
        super().close_clients()
        for model in self._auxiliary.values():
            model.close_clients()

    def blocking(self) -> BlockingModel:
        """This handle for code in another thread. Called on the event loop that answers."""
        return BlockingModel(self, asyncio.get_running_loop())


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise ValueError("chat() needs at least one message {role, content}")


class _ForwardedModel(ModelHandle):
    """A model whose calls go to the `ask` of a policy, as a method name and arguments."""

    def __init__(self, policy: ForwardingPolicy, name: str) -> None:
        super().__init__()
        self._policy, self._name = policy, name

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        check_messages(messages)
        arguments = {"messages": [dict(message) for message in messages], **options}
        return cast(Response, await self._policy.ask(self._name, "chat", arguments))

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        return cast(Response, await self._policy.ask(self._name, "generate", {"prompt": prompt, **sampling}))

    async def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        arguments = {"prompt": prompt, "response": response}
        return tuple(await self._policy.ask(self._name, "logprobs", arguments))

    async def openai(self, path: str, body: Any, on_text: OnText | None = None) -> OpenAIAnswer:
        streaming = {} if on_text is None else {"on_text": on_text}
        arguments = {"path": path, "body": body, **streaming}
        return cast(OpenAIAnswer, await self._policy.ask(self._name, "openai", arguments))


class ForwardingPolicy(_ForwardedModel, PolicyHandle):
    """A policy handle whose calls, and those of its auxiliary models, all go to `ask`: for sandboxes and fakes."""

    def __init__(self, auxiliary_names: Sequence[str] = ()) -> None:
        PolicyHandle.__init__(self, {name: _ForwardedModel(self, name) for name in auxiliary_names})
        self._policy, self._name = self, POLICY

    @abstractmethod
    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        """Call model `name`. Returns: a Response, a tuple of logprobs, or an OpenAIAnswer."""


class BlockingModel:
    """PolicyModel for blocking code that runs in another thread than the event loop `loop`."""

    def __init__(self, handle: PolicyModel, loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._loop = handle, loop

    def wait(self, answer: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and return its result. Raises: BlockedLoopError: called on that loop."""
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread, as intended
            # The blocked loop could never produce the answer.
            if asyncio.get_running_loop() is self._loop:
                answer.close()
                raise BlockedLoopError(BLOCKED)
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        return self.wait(self._handle.chat(messages, **options))

    def generate(self, prompt: str, **sampling: Any) -> Response:
        return self.wait(self._handle.generate(prompt, **sampling))

    def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        return self.wait(self._handle.logprobs(prompt, response))

    @property
    def state(self) -> Mapping[str, Any]:
        return self._handle.state

    def set_state(self, **values: Any) -> None:
        """Schedule the change on the loop, which owns the state, without waiting for it."""
        # The state is a note for error messages; a busy loop must not delay the workflow for it.
        self._loop.call_soon_threadsafe(lambda: self._handle.set_state(**values))

    def timer(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._handle.timer(name)

    def auxiliary(self, name: str = "") -> BlockingModel:
        """Blocking PolicyModel.auxiliary; only its model calls are usable."""
        return BlockingModel(cast(PolicyModel, self._handle.auxiliary(name)), self._loop)

    def openai_client(self) -> OpenAI:
        async def open_on_loop() -> OpenAI:  # on the loop that will answer
            handle = cast(ModelHandle, self._handle)
            return cast("OpenAI", handle.client_of(handle.openai, blocking=True))

        return self.wait(open_on_loop())
