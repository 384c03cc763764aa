"""Answer stream: sends an answer while it is sampled. Tokens become final text, and text the events of an API.

    tokens -> StreamedText -> (choice, part, text) -> EventStream -> events of chat completions, responses, messages

Invariant: streamed text is a prefix of the finished answer, so a stream has the events of the whole answer, with its
texts split differently. Text that may still become a stop text, a tool call or a thought is held back until it is
certain, and an incomplete character until it is complete.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from rftdask.data.tokenizer import Tokenizer
from rftdask.rollouts.policy import messages_api, responses_api
from rftdask.rollouts.policy.answer_parsers import before_any
from rftdask.rollouts.policy.openai_api import COMPLETIONS, OpenAIAnswer, TextDelta, chunks_of, pieces

Part = Literal["reasoning", "content"]
Certain: TypeAlias = Callable[[str], tuple[str, str]]
"""Returns the final (reasoning, content) of an answer that begins with a text."""
OnText: TypeAlias = Callable[[int, Part, str], None]
"""Receives (choice, part, text), the next piece of a choice; called on the event loop."""
TRANSLATED: Mapping[str, Any] = {
    responses_api.RESPONSES: responses_api,
    messages_api.MESSAGES: messages_api,
    messages_api.COUNT_TOKENS: messages_api,
}
"""Path -> module that translates its requests to chat completions, and their answers back."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of an incomplete character."""


class StreamedText:
    """Text of an answer whose tokens arrive in pieces. stop: texts that end the answer and are not part of it."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], certain: Certain, on_text: Callable[[Part, str], None]
    ) -> None:
        self._tokenizer, self._stop, self._certain, self._on_text = tokenizer, stop, certain, on_text
        self._tokens: list[int] = []
        self._text = ""
        # Only tokens from `_context` on are decoded again: those before `_known`, which the text of new tokens may
        # depend on, and the new ones.
        self._context = self._known = 0
        self._num_sent: dict[Part, int] = {"reasoning": 0, "content": 0}
        """Characters sent."""

    def add_tokens(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._context : self._known], skip_special_tokens=True)
        with_new = self._tokenizer.decode(self._tokens[self._context :], skip_special_tokens=True)
        if len(with_new) <= len(before) or with_new.endswith(_INCOMPLETE):
            return
        self._text += with_new[len(before) :]
        self._context, self._known = self._known, len(self._tokens)
        parts = self._certain(before_any(self._text, self._stop))
        for part, text in zip(self._num_sent, parts, strict=True):
            if len(text) > self._num_sent[part]:
                self._on_text(part, text[self._num_sent[part] :])
                self._num_sent[part] = len(text)


class EventStream:
    """Events of one streamed answer, whose text is added by `add_text`. Used on one event loop."""

    def __init__(
        self, path: str, request: Mapping[str, Any], on_renamed: Callable[[str, str], None] = lambda old, new: None
    ) -> None:
        """on_renamed: receives the id of the complete answer and its id in the events, before the last of them."""
        self._on_renamed = on_renamed
        self._path, self._request, self._api = path, request, TRANSLATED.get(path)
        self.has_text = asyncio.Event()
        """Set while text has been added that is not an event yet."""
        self._pending: list[tuple[int, Part, str]] = []
        self._choices: dict[int, _Choice] = {}
        self._name, self._created, self._number = uuid.uuid4().hex, int(time.time()), 0

    def add_text(self, choice: int, part: Part, text: str) -> None:
        self._pending.append((choice, part, text))
        self.has_text.set()

    async def events(self, answering: asyncio.Future[OpenAIAnswer]) -> AsyncIterator[Mapping[str, Any]]:
        """Yield events as text arrives, and the rest once the answer is complete. An error is an event."""
        while not answering.done():
            for event in self._pending_events():
                yield event
            has_text = asyncio.ensure_future(self.has_text.wait())
            waited: set[asyncio.Future[Any]] = {answering, has_text}
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                has_text.cancel()
        if answering.cancelled():  # the client has disconnected
            return
        rest = list(self._pending_events())
        try:
            answer = answering.result()
            rest += list(self._rest(answer.body)) if answer.status == 200 else [answer.body]
        except Exception as error:  # of the model or a bug; too late for an HTTP status
            details = {"message": f"{type(error).__name__}: {error}", "type": "server_error"}
            rest.append({"type": "error", "error": details})
        for event in rest:
            yield event

    def _pending_events(self) -> Iterator[Mapping[str, Any]]:
        pending, self._pending = self._pending, []
        self.has_text.clear()
        for number, part, text in pending:
            choice = self._choices.setdefault(number, _Choice())
            is_first = part not in choice.sent
            # Frames before a new part repeat the previous part in full; later events need only know that it exists.
            reasoning = choice.sent.get("reasoning", "") if is_first else "."[: len(choice.sent.get("reasoning", ""))]
            choice.sent[part] = choice.sent.get(part, "") + text
            parts = {"reasoning": reasoning, "content": "", part: text}
            events = list(self._events_of(self._partial(number, parts), lambda text: [text] if text else []))
            last = max(index for index, event in enumerate(events) if isinstance(event, TextDelta))
            yield from self._numbered(choice.new_frames(events[:last]) if is_first else ())
            yield from self._numbered([events[last]])

    def _rest(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the events of the whole answer that were not sent yet. Raises: ValueError: other text was sent."""
        # Earlier events had this id and time.
        old = body["id"]
        name = old.rpartition("-")[2].rpartition("_")[2]
        body = json.loads(json.dumps(body).replace(name, self._name))
        self._on_renamed(old, body["id"])
        body = {**body, **{key: self._created for key in ("created", "created_at") if key in body}}
        for body_choice in body.get("choices", [None]):
            choice = self._choices.get(0 if body_choice is None else body_choice["index"], _Choice())
            sent = [choice.sent[part] for part in ("reasoning", "content") if part in choice.sent]

            def unsent(text: str, sent: list[str] = sent) -> list[str]:
                before = sent.pop(0) if sent and text else ""
                if not text.startswith(before):
                    raise ValueError("the answer's text differs from what was streamed; request it without stream")
                return pieces(text[len(before) :])

            events = self._events_of(body if body_choice is None else {**body, "choices": [body_choice]}, unsent)
            frames = choice.new_frames(list(events), with_text=True)
            if sent:
                raise ValueError("the answer has less text than was streamed; request it without stream")
            yield from self._numbered(frames)
        if (self._request.get("stream_options") or {}).get("include_usage") and "choices" in body:
            yield from list(chunks_of({**body, "choices": []}, True))

    def _partial(self, number: int, parts: Mapping[str, str]) -> dict[str, Any]:
        # The body of an unfinished answer with one choice, in the form of the requested API.
        is_chat = self._path != COMPLETIONS
        common = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._name}", "created": self._created}
        model = self._request.get("model") or "policy"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        choice: dict[str, Any] = {"index": number, "finish_reason": None, "logprobs": None}
        choice |= {"message": {"role": "assistant", **parts}} if is_chat else {"text": parts["content"]}
        kind = "chat.completion" if is_chat else "text_completion"
        body = {**common, "object": kind, "model": model, "choices": [choice], "usage": usage}
        return body if self._api is None else self._api.as_answer(body, self._request)

    def _events_of(self, body: Mapping[str, Any], split: Callable[[str], Sequence[str]]) -> Iterator[Mapping[str, Any]]:
        events: Iterator[Mapping[str, Any]]
        events = chunks_of(body, False, split) if self._api is None else self._api.events_of(body, split)
        return events

    def _numbered(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for event in events:
            if self._api is responses_api:
                event = type(event)({**event, "sequence_number": self._number})  # type: ignore[call-arg]
                self._number += 1
            yield event


class _Choice:
    def __init__(self) -> None:
        self.sent: dict[Part, str] = {}
        self._num_frames = 0

    def new_frames(self, events: Sequence[Mapping[str, Any]], with_text: bool = False) -> list[Mapping[str, Any]]:
        """The frames (events without text) that were not returned before. with_text: also the texts, which are new."""
        new, number = [], 0
        for event in events:
            is_text = isinstance(event, TextDelta)
            if with_text if is_text else number >= self._num_frames:
                new.append(event)
            number += not is_text
        self._num_frames = max(self._num_frames, number)
        return new
