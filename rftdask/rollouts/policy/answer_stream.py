"""Answer stream: an answer that is told while it is sampled. Tokens become text that stays, text the events of an API.

    tokens -> StreamedText -> (choice, part, text) -> EventStream -> events of chat completions, responses, messages

Invariant: what was told is the beginning of what the finished answer says, so the events of a stream are those of the
whole answer, with its texts in other pieces. What may still turn out to be a text to stop at, a call of a tool or a
thought is held back until it cannot any more, and half a character until it is whole.
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
"""What of (reasoning, content) is certain of an answer that begins with a text."""
Tell: TypeAlias = Callable[[int, Part, str], None]
"""Takes the next piece of a choice's reasoning or content; on the event loop."""
_HALF = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no character yet are decoded to."""


class StreamedText:
    """The text of an answer whose tokens come some at a time.

    Args:
        stop: texts of which the first ends it, and is not part of it.
        certain: of an answer, see `Certain`.
        tell: takes what has become certain since, and which part it is of.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], certain: Certain, tell: Callable[[Part, str], None]
    ) -> None:
        self._tokenizer, self._stop, self._certain, self._tell = tokenizer, stop, certain, tell
        self._tokens: list[int] = []
        self._text = ""
        # Tokens whose text is known, and those before them that the text of the next ones may depend on: a long answer
        # is not decoded as a whole for each token.
        self._context = self._known = 0
        self._told: dict[Part, int] = {"reasoning": 0, "content": 0}
        """Characters told."""

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens."""
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._context : self._known], skip_special_tokens=True)
        with_new = self._tokenizer.decode(self._tokens[self._context :], skip_special_tokens=True)
        if len(with_new) <= len(before) or with_new.endswith(_HALF):
            return
        self._text += with_new[len(before) :]
        self._context, self._known = self._known, len(self._tokens)
        parts = self._certain(before_any(self._text, self._stop))
        for part, text in zip(self._told, parts, strict=True):
            if len(text) > self._told[part]:
                self._tell(part, text[self._told[part] :])
                self._told[part] = len(text)


class EventStream:
    """The events of one streamed answer, for who is told its text while it comes; on one event loop.

    Example:
        stream = EventStream("chat/completions", body)
        answering = asyncio.ensure_future(model.openai(path, body, stream.tell))
        async for event in stream.events(answering): ...
    """

    def __init__(self, path: str, asked: Mapping[str, Any]) -> None:
        self._path, self._asked = path, asked
        self.headers: dict[str, str] = {}
        """Of the response, where they are known before the answer is."""
        self.news = asyncio.Event()
        """Set while something was told and is not an event yet."""
        self._told: list[tuple[int, Part, str]] = []
        self._choices: dict[int, _Choice] = {}
        self._name, self._created, self._number = uuid.uuid4().hex, int(time.time()), 0

    def tell(self, choice: int, part: Part, text: str) -> None:
        """See Tell."""
        self._told.append((choice, part, text))
        self.news.set()

    async def events(self, answering: asyncio.Future[OpenAIAnswer]) -> AsyncIterator[Mapping[str, Any]]:
        """The events, as the text comes, until the answer is there and told to its end; an error is one, too."""
        while not answering.done():
            for event in self._news():
                yield event
            told = asyncio.ensure_future(self.news.wait())
            waited: set[asyncio.Future[Any]] = {answering, told}
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                told.cancel()
        if answering.cancelled():  # nobody reads it any more
            return
        for event in self._news():
            yield event
        try:
            answer = answering.result()
            rest = list(self._rest(answer.body)) if answer.status == 200 else [answer.body]
        except Exception as error:  # the model's, or ours: it is too late for a status
            kind = "server_error"
            rest = [{"type": "error", "error": {"message": f"{type(error).__name__}: {error}", "type": kind}}]
        for event in rest:
            yield event

    def _news(self) -> Iterator[Mapping[str, Any]]:
        told, self._told = self._told, []
        self.news.clear()
        for number, part, text in told:
            choice = self._choices.setdefault(number, _Choice())
            is_first = part not in choice.told
            # Only what comes before a part tells the one before it as a whole.
            reasoning = choice.told.get("reasoning", "") if is_first else "."[: len(choice.told.get("reasoning", ""))]
            choice.told[part] = choice.told.get(part, "") + text
            shown = {"reasoning": reasoning, "content": "", part: text}
            events = list(self._events_of(self._partial(number, shown), lambda text: [text] if text else []))
            last = max(place for place, event in enumerate(events) if isinstance(event, TextDelta))
            yield from self._numbered(choice.new_frames(events[:last]) if is_first else ())
            yield from self._numbered([events[last]])

    def _rest(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The events of the whole answer that have not been told. Raises: ValueError: something else was told."""
        # By the same names as those that were told.
        name = body["id"].rpartition("-")[2].rpartition("_")[2]
        body = json.loads(json.dumps(body).replace(name, self._name))
        body = {**body, **{key: self._created for key in ("created", "created_at") if key in body}}
        for each in body.get("choices", [None]):
            choice = self._choices.get(0 if each is None else each["index"], _Choice())
            told = [choice.told[part] for part in ("reasoning", "content") if part in choice.told]

            def untold(text: str, told: list[str] = told) -> list[str]:
                before = told.pop(0) if told and text else ""
                if not text.startswith(before):
                    raise ValueError("the answer's text is another than what was streamed of it; ask without stream")
                return pieces(text[len(before) :])

            whole = list(self._events_of(body if each is None else {**body, "choices": [each]}, untold))
            if told:
                raise ValueError("the answer has less text than was streamed of it; ask without stream")
            yield from self._numbered(choice.new_frames(whole, with_text=True))
        if (self._asked.get("stream_options") or {}).get("include_usage") and "choices" in body:
            yield from list(chunks_of({**body, "choices": []}, True))

    def _partial(self, number: int, shown: Mapping[str, str]) -> dict[str, Any]:
        """A completion of one choice, which says so little; of chats, also for what they become."""
        is_chat = self._path != COMPLETIONS
        common = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._name}", "created": self._created}
        model = self._asked.get("model") or "policy"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        choice: dict[str, Any] = {"index": number, "finish_reason": None, "logprobs": None}
        choice |= {"message": {"role": "assistant", **shown}} if is_chat else {"text": shown["content"]}
        kind = "chat.completion" if is_chat else "text_completion"
        body = {**common, "object": kind, "model": model, "choices": [choice], "usage": usage}
        if self._path == responses_api.RESPONSES:
            return responses_api.as_response(body, self._asked)
        return messages_api.as_message(body) if self._path == messages_api.MESSAGES else body

    def _events_of(self, body: Mapping[str, Any], split: Callable[[str], Sequence[str]]) -> Iterator[Mapping[str, Any]]:
        if body.get("object") == "response":
            return responses_api.events_of(body, split)
        return messages_api.events_of(body, split) if body.get("type") == "message" else chunks_of(body, False, split)

    def _numbered(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for event in events:
            if self._path == responses_api.RESPONSES:
                event = type(event)({**event, "sequence_number": self._number})  # type: ignore[call-arg]
                self._number += 1
            yield event


class _Choice:
    """What was told of a choice."""

    def __init__(self) -> None:
        self.told: dict[Part, str] = {}
        self._num_frames = 0

    def new_frames(self, events: Sequence[Mapping[str, Any]], with_text: bool = False) -> list[Mapping[str, Any]]:
        """Of the events from the first on those that are no text, less those that it returned before; with_text: and
        the texts among them, which are new."""
        found, number = [], 0
        for event in events:
            is_text = isinstance(event, TextDelta)
            if with_text if is_text else number >= self._num_frames:
                found.append(event)
            number += not is_text
        self._num_frames = max(self._num_frames, number)
        return found
