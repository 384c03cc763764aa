"""RecordingModel: the models of one attempt at a rollout. Workflows see text, engines see token ids.

It records every call of the policy with its exact input and output tokens; text is never tokenized twice. A prompt
whose text continues an earlier call consists of that call's tokens followed by the tokens of the added text. A
conversation is therefore one sequence, until a prompt does not continue it (`Branch`). Seeds depend on the run's seed
and the identity of the call, not on the attempt or on timing. Calls of auxiliary models are not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import weakref
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

from jinja2 import TemplateError

from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import ImageProcessor, images_in
from rftdask.data.seeds import derived_seed
from rftdask.data.task import Task
from rftdask.data.tokenizer import (
    Tokenizer,
    encode_hidden,
    hide_special,
    is_plain,
    sampled_text,
    show_hidden,
    with_first_token,
)
from rftdask.engines import base as engines
from rftdask.engines.base import POLICY, GenerateRequest, Generation, OnTokens, SamplingParams
from rftdask.errors import DataError, UserError
from rftdask.rollouts.policy import messages_api, openai_api
from rftdask.rollouts.policy.answer_parsers import AnswerParser, ParsedAnswer, parse_tool_calls
from rftdask.rollouts.policy.answer_stream import TRANSLATED, OnText, StreamedText
from rftdask.rollouts.policy.base import ModelHandle, PolicyHandle, check_messages
from rftdask.rollouts.policy.openai_api import CHAT, BadRequestError, OpenAIAnswer, OpenAIRequest, SampledAnswer
from rftdask.rollouts.policy.remote_model import RemoteModel
from rftdask.rollouts.policy.request_queues import RequestQueue, RolloutKey
from rftdask.rollouts.workflows.base import PromptTooLongError, Response

MAX_CALLS = 1000
"""Most model calls in one attempt: a workflow that never stops fails before it fills the memory."""


class NoMoreCallsError(RuntimeError):
    """The attempt has ended, or made too many calls."""


_THOUGHTS_END = "</think>"
Streamed: TypeAlias = Callable[[Sequence[str]], StreamedText]
"""Creates the StreamedText of an answer for its stop texts."""
LogprobsBatch = Callable[[list[tuple[tuple[int, ...], tuple[int, ...]]]], Awaitable[list[tuple[float, ...]]]]
"""(prompt tokens, response tokens) pairs -> log probability of each response token in nats, at temperature 1."""


@dataclass
class ModelUse:
    """Usage of a model by all attempts of a work unit, including failed ones."""

    calls: int = 0
    """Calls, including failed ones."""
    failures: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of answered calls."""
    response_tokens: int = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[Callable[[int, int], None]]:
        """Count the block as a call. Yields: a function that adds the tokens of prompt and answer."""

        def add_tokens(prompt: int, response: int) -> None:
            self.prompt_tokens += prompt
            self.response_tokens += response

        self.calls += 1
        try:
            yield add_tokens
        except Exception:  # not a cancellation
            self.failures += 1
            raise

    def sums(self, prompt_price: float | None, response_price: float | None) -> dict[str, float]:
        """Return the values by metric name, with the cost if the price of a million tokens is known."""
        counts = {name: float(value) for name, value in vars(self).items()}
        if prompt_price is None and response_price is None:
            return counts
        cost = self.prompt_tokens * (prompt_price or 0.0) + self.response_tokens * (response_price or 0.0)
        return counts | {"cost": cost / 1e6}


@dataclass(frozen=True)
class ServedModel:
    queue: RequestQueue
    tokenizer: Tokenizer
    sampling: SamplingParams
    limits: ModelConfig
    """Source of max_prompt_tokens and enable_prompt_truncation."""
    logprobs_batch: LogprobsBatch | None = None
    """None: the engine cannot score given tokens."""
    parser: AnswerParser | None = None
    """Parser of its answers; None: the one that its chat template suggests."""
    is_guided: bool = False
    """True if the engine supports grammars and bad words."""
    images: ImageProcessor | None = None
    """Processor of images in chats; None: chats have no images."""
    use: ModelUse = field(default_factory=ModelUse)


@dataclass(frozen=True)
class ServedRemote:
    model: RemoteModel
    sampling: SamplingParams
    """Defaults that a workflow may override."""
    use: ModelUse = field(default_factory=ModelUse)


Served: TypeAlias = ServedModel | ServedRemote


class Branch(StrEnum):
    """Reason why a call after the first begins a new sequence."""

    ANSWER = "answer"  # the prompt changes an earlier answer: thinking was stripped or a tool call rewritten
    HISTORY = "history"  # the prompt changes earlier messages (cut or summarized), or another chat began
    FORKED = "forked"  # another call already continues from this point, or the same prompt was sent again
    SAMPLING = "sampling"  # temperature, top_p or top_k changed; a sequence has one value of each
    TRUNCATED = "truncated"  # the beginning of the prompt was cut by max_prompt_tokens


@dataclass(frozen=True)
class _Prompt:
    text: str
    source: str = ""
    """Role of its last message; "": a text without roles."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """See `hide_special`."""
    images: tuple[str, ...] = ()
    """Names of the images in the chat; the text has a placeholder for each."""


@dataclass(frozen=True)
class Call:
    prompt_text: str
    """Rendered prompt before any truncation."""
    prompt_truncated: bool
    request: GenerateRequest
    generation: Generation
    response: Response
    num_prompt_tokens: int
    num_response_tokens: int
    """Token counts of prompt and response. For a remote model these are the service's, since ids are unknown."""
    extends: int | None = None
    """Turn of the call that this one continues in the same sequence; None: it begins a sequence."""
    branch: Branch | None = None
    """Reason why it begins a sequence; None: it is the first call, or continues one."""
    added_text: str = ""
    """Prompt text after the continued sequence."""
    source: str = ""
    """Role of the last message of the prompt; "": a text without roles."""
    rendered: str = ""
    """Prompt in which special tokens spelled in messages are hidden. Later prompts are compared with it and the
    answer."""
    forced: range = range(0)
    """Answer tokens that were not sampled but inserted to end the thoughts."""


class _RecordedModel(ModelHandle):
    """One model of an attempt: the policy or an auxiliary model."""

    def __init__(self, attempt: RecordingModel, name: str, served: Served) -> None:
        super().__init__()
        self._attempt, self._name, self._served = attempt, name, served

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        check_messages(messages)
        with self._attempt.begin_call():
            if isinstance(self._served, ServedRemote):
                question = [dict(message) for message in messages]
                return await self._attempt.call_remote(self._name, self._served, question, options)
            tools = options.pop("tools", None)
            try:
                prompt = _render(self._served.tokenizer, messages, {"tools": tools} if tools else {})
            except Exception as error:  # a template may raise anything
                taskset, *_, index = self._attempt.group_id.split("/")
                text = f"the chat template cannot render the messages (taskset {taskset}, row {index})"
                raise ValueError(f"{text}: {type(error).__name__}: {error}") from error
            _check_grammar(options)
            return (await self._attempt.sample(self._name, self._served, prompt, options))[1]

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        with self._attempt.begin_call():
            if isinstance(self._served, ServedRemote):
                return await self._attempt.call_remote(self._name, self._served, prompt, sampling)
            _check_grammar(sampling)
            return (await self._attempt.sample(self._name, self._served, _Prompt(prompt), sampling))[1]

    async def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        with self._attempt.begin_call():
            model = self._served
            if isinstance(model, ServedRemote) or model.logprobs_batch is None:
                kind = "a model behind an API" if isinstance(model, ServedRemote) else "this engine"
                raise RuntimeError(f"{kind} cannot score given tokens")
            # Tokenized separately, as in a rollout, where the response is sampled after the complete prompt.
            prompt_tokens, _ = _limited(model.limits, _encode_raw(model.tokenizer, prompt))
            tokens = encode_hidden(model.tokenizer, *hide_special(model.tokenizer, response))
            if not prompt_tokens or not tokens:
                raise ValueError("logprobs needs a prompt and a response of at least one token each")
            with model.use.counting() as count:
                [scores] = await model.logprobs_batch([(tuple(prompt_tokens), tuple(tokens))])
                count(len(prompt_tokens) + len(tokens), 0)
            return scores

    async def openai(self, path: str, body: Any, on_text: OnText | None = None) -> OpenAIAnswer:
        """Answer a request of OpenAI's or Anthropic's API. An error is an answer as well."""
        name, served, api = self._name, self._served, TRANSLATED.get(path)
        own_names: Mapping[str, str] = {}
        with self._attempt.begin_call():
            try:
                chat = body if api is None else api.as_chat(body)
                own_names = {} if api is None else api.OWN_NAMES
                if path == messages_api.COUNT_TOKENS:
                    return self._attempt.count_tokens(name, served, chat)
                answer = await self._attempt.complete(name, served, path if api is None else CHAT, chat, on_text)
                return answer if api is None else replace(answer, body=api.as_answer(answer.body, body))
            except PromptTooLongError as error:
                return openai_api.refusal(str(error), own_names.get("messages", "messages"), "context_length_exceeded")
            except BadRequestError as error:
                return openai_api.refusal(str(error), own_names.get(error.param or "", error.param))
            except (ValueError, TypeError, TemplateError, UserError) as error:
                return openai_api.refusal(f"{type(error).__name__}: {error}")


class RecordingModel(_RecordedModel, PolicyHandle):
    """A `PolicyModel` for one attempt.

    Its calls raise PromptTooLongError; NoMoreCallsError; ValueError, TypeError: invalid arguments.
    """

    def __init__(
        self,
        policy: Served,
        auxiliary: Mapping[str, Served] | None = None,
        *,
        key: RolloutKey,
        group_id: str,
        run_seed: int,
    ) -> None:
        models = {name: _RecordedModel(self, name, served) for name, served in (auxiliary or {}).items()}
        PolicyHandle.__init__(self, models)
        # A weak reference, so that an attempt is freed at its end.
        self._attempt, self._name, self._served = weakref.proxy(self), POLICY, policy
        self._key, self.group_id, self._run_seed = key, group_id, run_seed
        self._calls: dict[int, Call] = {}
        # Rendered prompt and answer by turn, computed when a later prompt is compared with them.
        self._sequences: dict[int, str] = {}
        # Rendered prompts of the policy so far, and the turns that another call continues.
        self._prompts: list[str] = []
        self._extended: set[int] = set()
        self._num_turns = self._num_calls = 0
        self._closed = False
        # Text that the policy sampled, by the parsed message that was made of it.
        self._sampled_texts: dict[str, str] = {}

    @property
    def calls(self) -> list[Call]:
        """Answered calls of the policy, in the order in which they were made."""
        return [self._calls[turn] for turn in sorted(self._calls)]

    @property
    def sequences(self) -> list[list[tuple[int, Call]]]:
        """The calls grouped into sequences, ordered by first call; each call comes with its index in `calls`."""
        sequences: list[list[tuple[int, Call]]] = []
        sequence_of: dict[int, list[tuple[int, Call]]] = {}
        for index, (turn, call) in enumerate(sorted(self._calls.items())):
            if call.extends is None:
                sequences.append([])
            sequence_of[turn] = sequences[-1] if call.extends is None else sequence_of[call.extends]
            sequence_of[turn].append((index, call))
        return sequences

    def begin_call(self) -> contextlib.AbstractContextManager[None]:
        """Count a call of any model and return its timer. Raises: NoMoreCallsError."""
        if self._closed:
            raise NoMoreCallsError("this attempt at the rollout has ended; its model takes no more calls")
        self._num_calls += 1
        # Auxiliary calls count as well, so that a loop that calls only a judge also ends.
        if self._num_calls > MAX_CALLS:
            raise NoMoreCallsError(f"this attempt has called its models more than {MAX_CALLS} times")
        return self.timer("generate")

    def count_tokens(self, name: str, model: Served, body: Any) -> OpenAIAnswer:
        if not isinstance(model, ServedModel):
            return openai_api.refusal("token counts are not available for a model behind an API", status=404)
        request = _read_request(CHAT, body, model)
        prompt = _render(model.tokenizer, self._as_sampled(name, request.messages), request.template_options)
        tokens = _encode(model, prompt.text, prompt.hidden, prompt.images)
        return OpenAIAnswer(200, {"input_tokens": len(tokens)})

    async def complete(self, name: str, model: Served, path: str, body: Any, on_text: OnText | None) -> OpenAIAnswer:
        """Answer a request for completions of chats or texts. Raises: the errors that `openai` answers."""
        request = _read_request(path, body, model)
        is_chat = request.path == CHAT
        messages = self._as_sampled(name, request.messages)
        prompts = [_Prompt(text) for text in request.prompts]
        if is_chat:
            prompts = [await _prompt_as_sampled(model, messages, request)]

        async def sample(prompt: _Prompt, number: int, choice: int) -> SampledAnswer:
            if isinstance(model, ServedRemote):
                return await self._complete_remote(name, model, request, messages, prompt)
            parser, options = model.parser or AnswerParser(model.tokenizer), dict(request.options)
            if request.form is not None:
                options["grammar"] = _grammar(model, parser, request.form, prompt.text, options)

            def certain(text: str) -> tuple[str, str]:
                return parser.certain(text, prompt.text, request.tools) if is_chat else ("", text)

            streamed: Streamed | None = None
            if on_text is not None:
                streamed = partial(StreamedText, model.tokenizer, certain=certain, on_text=partial(on_text, choice))
            seed = None if request.seed is None else f"{request.seed}/{number}"
            turn, response = await self.sample(name, model, prompt, options, seed, streamed)
            parsed = ParsedAnswer(response.text, None, ())
            if is_chat:
                parsed = parser.parse(response.text, response.tokens, prompt.text, request.tools)
            return SampledAnswer(response, parsed, turn)

        # All begin in this pass of the event loop, in order, so that their turns do not depend on timing.
        choices = [(prompt, number) for prompt in prompts for number in range(request.n)]
        tasks = [asyncio.ensure_future(sample(*which, choice)) for choice, which in enumerate(choices)]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            # If one fails, the others are not recorded.
            for task in tasks:
                task.cancel()
        num_prompt_tokens = sum(len(answer.response.prompt_tokens) for answer in answers[:: request.n])
        tokenizer = model.tokenizer if isinstance(model, ServedModel) else None
        answered = openai_api.completion(request, answers, tokenizer, num_prompt_tokens)
        for choice, answer in zip(answered.body["choices"], answers, strict=True):
            # A text lacks marks that are special tokens; only the template can write those again.
            is_whole = tokenizer is None or is_plain(tokenizer, answer.response.tokens)
            if is_chat and is_whole and (answer.parsed.calls or answer.parsed.reasoning is not None):
                for key in _message_keys([*request.messages, choice["message"]])[-1]:
                    self._sampled_texts[f"{name}/{key}"] = answer.response.text
        return answered

    def _as_sampled(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        # Replace messages that were parsed from an answer by the answer as sampled. A template would write tool calls
        # in its own way, and the messages lack the thoughts.
        sampled: list[Mapping[str, Any]] = []
        for message, keys in zip(messages, _message_keys(messages), strict=True):
            texts = [self._sampled_texts.get(f"{name}/{key}") for key in keys] if message["role"] == "assistant" else []
            text = next((text for text in texts if text is not None), None)
            sampled.append(message if text is None else {"role": "assistant", "content": text})
        return sampled

    async def _complete_remote(
        self, name: str, model: ServedRemote, request: OpenAIRequest, messages: Sequence[Any], prompt: _Prompt
    ) -> SampledAnswer:
        requested = {*request.options, *request.template_options}
        requested |= {"seed"} if request.seed is not None else set()
        requested |= {"logprobs"} if request.logprobs else set()
        requested |= {request.form.param} if request.form is not None else set()
        passed_on = {"tools", "stop", "max_tokens", "temperature", "top_p", "top_k", "min_tokens", "repetition_penalty"}
        for param in sorted(requested - passed_on):
            raise BadRequestError(f"{param} is not supported for a model behind an API", param)
        options = {**request.options, **({"tools": request.tools} if request.tools else {})}
        question = [dict(message) for message in messages] if request.path == CHAT else prompt.text
        response = await self.call_remote(name, model, question, options)
        calls = tuple(parse_tool_calls(response.text)) if request.tools else ()
        return SampledAnswer(response, ParsedAnswer(None if calls else response.text, None, calls), self._num_calls)

    async def sample(
        self,
        name: str,
        model: ServedModel,
        rendered: _Prompt,
        sampling: Mapping[str, Any],
        request_seed: str | None = None,
        streamed: Streamed | None = None,
    ) -> tuple[int, Response]:
        """Sample an answer and record it if `name` is the policy. Returns: the turn and the response.

        Args: request_seed: seed given by the request; None: the turn decides. streamed: receives the text.
        """
        prompt, hidden, source, images = rendered.text, rendered.hidden, rendered.source, rendered.images
        turn, seed = self._next_turn(name, request_seed)
        parent = self._parent(prompt) if name == POLICY else None
        # Special tokens spelled in a message are encoded as text; only the template may write real ones.
        if parent is not None:
            before = self._calls[parent]
            added = prompt[len(self._sequence(parent)) :]
            kept = (*before.request.prompt_tokens, *before.generation.tokens)
            tokens = [*kept, *_encode(model, added, hidden, images[len(before.request.images) :])]
        elif source:
            tokens = _encode(model, prompt, hidden, images)
        else:
            tokens = _encode_raw(model.tokenizer, prompt)
        tokens, truncated = _limited(model.limits, tokens)
        if truncated and images:
            limit = f"max_prompt_tokens {model.limits.max_prompt_tokens}"
            raise PromptTooLongError(f"a prompt with images exceeds {limit} and cannot be truncated; raise it")
        if not tokens:
            raise ValueError("the prompt is empty")
        options = dict(sampling)
        budget = options.pop("thinking_token_budget", None)
        if words := openai_api.texts_of("bad_words", options.pop("bad_words", ())):
            options["bad_tokens"] = _bad_tokens(model.tokenizer, words)
        if model.images is not None:
            # A sampled placeholder would refer to an image that does not exist.
            options["bad_tokens"] = (*options.get("bad_tokens", ()), *((token,) for token in model.images.placeholders))
        request = GenerateRequest(tuple(tokens), _sampling(model.sampling, options), seed, images)
        if request.sampling.is_guided and not model.is_guided:
            text = f"bad_words and required forms are not supported: {openai_api.NOT_GUIDED}"
            raise BadRequestError(text, "bad_words")
        branch = self._branch(parent, prompt, request.sampling, truncated) if name == POLICY else None
        extends = parent if branch is None else None
        # Recorded before the answer: which of two concurrent calls continues must not depend on timing.
        if name == POLICY:
            self._prompts.append(prompt)
        if extends is not None:
            self._extended.add(extends)
        try:
            with model.use.counting() as count:
                if budget is None:
                    submitted = request
                    if streamed is not None:
                        on_tokens = _on_this_loop(streamed(request.sampling.stop).add_tokens)
                        submitted = replace(request, on_tokens=on_tokens)
                    generation, forced = await model.queue.generate(self._key, turn, submitted), range(0)
                else:
                    generation, forced = await self._think(model, turn, request, prompt, budget)
                count(len(request.prompt_tokens), len(generation.tokens))
        except BaseException:
            # Without an answer, another call may continue from here.
            if name == POLICY:
                self._prompts.remove(prompt)
                self._extended.discard(-1 if extends is None else extends)
            raise
        generation, text = _cut_at_stop(model.tokenizer, generation, request.sampling.stop)
        sampled, logprobs = generation.tokens, generation.logprobs
        response = Response(text, request.prompt_tokens, sampled, logprobs, generation.finish_reason)
        if name == POLICY:
            shown, num_prompt_tokens = show_hidden(prompt, hidden), len(request.prompt_tokens)
            added_text = "" if extends is None else show_hidden(added, hidden)
            rest = (num_prompt_tokens, len(sampled), extends, branch, added_text, source, prompt, forced)
            # By turn, because concurrent calls are answered in any order.
            self._calls[turn] = Call(shown, truncated, request, generation, response, *rest)
        return turn, response

    async def _think(
        self, model: ServedModel, turn: int, request: GenerateRequest, prompt: str, budget: int
    ) -> tuple[Generation, range]:
        """Sample thoughts of at most `budget` tokens, then the rest of the answer. Returns: the answer, and the range
        of tokens that were inserted to end the thoughts.
        """
        if not isinstance(budget, int) or budget < 0:
            raise ValueError(f"thinking_token_budget must be an integer of at least 0, not {budget!r:.60}")
        sampling, text, thoughts = request.sampling, "", None
        if budget:
            stop = (*sampling.stop, _THOUGHTS_END)
            short = replace(sampling, max_tokens=min(budget, sampling.max_tokens), min_tokens=0, stop=stop)
            thoughts = await model.queue.generate(self._key, turn, replace(request, sampling=short))
            thoughts, _ = _cut_at_stop(model.tokenizer, thoughts, stop)
            text = sampled_text(model.tokenizer, thoughts.tokens)
            has_ended = thoughts.finish_reason == "stop" and _THOUGHTS_END not in text
            if has_ended or len(thoughts.tokens) >= sampling.max_tokens:
                return thoughts, range(0)
        begun = () if thoughts is None else thoughts.tokens
        is_thinking = text.lstrip().startswith("<think>") or prompt.rstrip().endswith("<think>")
        if is_thinking and _THOUGHTS_END not in text:
            end = encode_hidden(model.tokenizer, f"\n{_THOUGHTS_END}\n\n", {})
            begun = (*begun, *end[: sampling.max_tokens - len(begun) - 1])
        forced = range(0 if thoughts is None else len(thoughts.tokens), len(begun))
        least, most = max(0, sampling.min_tokens - len(begun)), sampling.max_tokens - len(begun)
        prompt_tokens, last = (*request.prompt_tokens, *begun), replace(sampling, max_tokens=most, min_tokens=least)
        seed = derived_seed(request.seed, "after thoughts", 0, 0)  # that of the thoughts would repeat random numbers
        following = GenerateRequest(prompt_tokens, last, seed, request.images)
        rest = await model.queue.generate(self._key, turn, following)
        first = rest if thoughts is None else thoughts
        logprobs = (*(() if thoughts is None else thoughts.logprobs), *([0.0] * len(forced)), *rest.logprobs)
        oldest, tokens = min(first.min_policy_version, rest.min_policy_version), (*begun, *rest.tokens)
        whole = replace(rest, tokens=tokens, logprobs=logprobs, min_policy_version=oldest, version_starts=())
        later = [(len(begun) + place, version) for place, version in rest.versions]
        if later and first.versions:
            whole = whole.sampled_by([*(() if thoughts is None else thoughts.versions), *later])
        return whole, forced

    def _parent(self, prompt: str) -> int | None:
        """Turn of the call whose prompt and answer are the longest prefix of this prompt, preferring one that no call
        continues; None: none is a prefix."""
        longest_first = sorted(self._calls, key=lambda turn: (-len(self._sequence(turn)), turn in self._extended, turn))
        return next((turn for turn in longest_first if prompt.startswith(self._sequence(turn))), None)

    def _sequence(self, turn: int) -> str:
        if turn not in self._sequences:
            call = self._calls[turn]
            assert isinstance(self._served, ServedModel)
            self._sequences[turn] = call.rendered + sampled_text(self._served.tokenizer, call.generation.tokens)
        return self._sequences[turn]

    def _branch(self, parent: int | None, prompt: str, sampling: SamplingParams, truncated: bool) -> Branch | None:
        """Return the reason why a call does not continue `parent`; None: it does, or it is the first call."""
        if parent is not None:
            before = self._calls[parent].request.sampling
            if parent in self._extended:
                return Branch.FORKED
            if truncated:
                return Branch.TRUNCATED
            names = ("temperature", "top_p", "top_k")
            is_same = all(getattr(before, name) == getattr(sampling, name) for name in names)
            return None if is_same else Branch.SAMPLING
        if not self._prompts:
            return None
        if prompt in self._prompts:
            return Branch.FORKED
        return Branch.ANSWER if any(map(prompt.startswith, self._prompts)) else Branch.HISTORY

    async def call_remote(
        self, name: str, served: ServedRemote, question: str | list[dict[str, Any]], options: dict[str, Any]
    ) -> Response:
        """Call a remote model with a text or messages; recorded without tokens if `name` is the policy."""
        tools = options.pop("tools", None) or ()
        turn, seed = self._next_turn(name)
        if options.get("grammar"):
            raise ValueError("a model behind an API cannot follow a grammar")
        request = GenerateRequest((), _sampling(served.sampling, options), seed)
        with served.use.counting() as count:
            answer = await served.model.ask(question, request.sampling, seed, tools)
            count(answer.num_prompt_tokens, answer.num_response_tokens)
        response = Response(answer.text, (), (), (), answer.finish_reason)
        if name == POLICY:
            lines = [question] if isinstance(question, str) else [f"{m['role']}: {m.get('content')}" for m in question]
            # No tokens and version 0: answers of a remote model are evaluated but never trained.
            generation = Generation((), (), "length" if answer.finish_reason == "length" else "stop", 0, 0)
            counts = answer.num_prompt_tokens, answer.num_response_tokens
            self._calls[turn] = Call("\n".join(lines), False, request, generation, response, *counts)
        return response

    def _next_turn(self, name: str, request_seed: str | None = None) -> tuple[int, int]:
        # The uid contains the policy's turns, so calls of judges in between leave no gaps.
        turn = self._num_turns if name == POLICY else self._num_calls
        self._num_turns += name == POLICY
        # A judge must not use the random numbers of the policy at the same rollout and turn.
        identity = self.group_id if name == POLICY else f"{self.group_id}/{name}"
        if request_seed is not None:
            # Equal seeds give equal answers within a rollout, but sibling rollouts must differ.
            return turn, derived_seed(self._run_seed, f"{identity}/seed {request_seed}", self._key.rollout, 0)
        return turn, derived_seed(self._run_seed, identity, self._key.rollout, turn)

    def close(self) -> None:
        """Refuse further calls, so that an attempt that does not stop cannot continue alongside its retry."""
        self._closed = True
        self.close_clients()


def _read_request(path: str, body: Any, model: Served) -> OpenAIRequest:
    if isinstance(model, ServedRemote):
        return openai_api.read_request(path, body, None)
    name_image = None if model.images is None else model.images.named
    try:
        return openai_api.read_request(path, body, model.tokenizer, name_image)
    except DataError as error:  # of an image
        raise BadRequestError(str(error), "messages") from error


def _on_this_loop(take: OnTokens) -> OnTokens:
    # Wrap `take` for use in other threads: it is called in order on the running event loop.
    loop = asyncio.get_running_loop()

    def take_later(tokens: tuple[int, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(take, tokens)

    return take_later


def _grammar(
    model: ServedModel, parser: AnswerParser, form: openai_api.Form, prompt: str, options: Mapping[str, Any]
) -> str:
    if not model.is_guided:
        raise BadRequestError(f"{form.param} is not supported: {openai_api.NOT_GUIDED}", form.param)
    for name in ("min_tokens", "stop"):
        if options.get(name):
            raise BadRequestError(f"{name} cannot be combined with {form.param}, whose form ends the answer", name)
    try:
        are_calls = form.param == "tool_choice"
        grammar = parser.grammar(form.schema, prompt, are_calls=are_calls, max_calls=form.max_calls)
    except UserError as error:
        raise BadRequestError(f"{form.param} is not supported: {error}", form.param) from error
    if problem := _grammar_problem(grammar):
        raise BadRequestError(f"{form.param}: this schema cannot guide an answer: {problem}", form.param)
    return grammar


def _grammar_problem(grammar: str) -> str:
    """Reason why a grammar is unusable; "": it is valid. Checked first, because an invalid one would crash engines."""
    try:
        import llguidance  # late: optional, and only forms need it
    except ImportError:
        return "llguidance is missing: pip install 'rftdask[train]' where engines run"
    return str(llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar)))[:500]


def _check_grammar(options: Mapping[str, Any]) -> None:
    if (grammar := options.get("grammar")) and (problem := _grammar_problem(grammar)):
        raise ValueError(f"this grammar cannot guide an answer: {problem}")


def _bad_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words at the start of a text and after a space. Raises: BadRequestError: too many."""
    spelled = (text for word in words for text in (word, f" {word.lstrip()}"))
    sequences = tuple(dict.fromkeys(tuple(encode_hidden(tokenizer, text, {})) for text in spelled))
    if len(sequences) >= engines.MAX_BAD_WORDS or sum(map(len, sequences)) >= engines.MAX_BAD_TOKENS:
        limits = f"{engines.MAX_BAD_WORDS // 2} words or {engines.MAX_BAD_TOKENS // 2} tokens"
        raise BadRequestError(f"bad_words exceeds {limits}; shorten it", "bad_words")
    return sequences


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any]
) -> _Prompt:
    (chat, options), hidden = hide_special(tokenizer, ([dict(message) for message in messages], dict(template_options)))
    continues = chat[-1]["role"] == "assistant"
    text: str = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues, **options
    )
    return _Prompt(text, str(messages[-1].get("role", "")), hidden, images_in(messages))


async def _chat_prompt(
    model: ServedModel, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any]
) -> _Prompt:
    prompt = _render(model.tokenizer, messages, template_options)
    if prompt.images and model.images is not None:
        # In a thread, because it writes new images to storage and tokenizes them.
        await asyncio.to_thread(model.images.keep, prompt.images)
    return prompt


async def _prompt_as_sampled(model: Served, sampled: Sequence[Mapping[str, Any]], request: OpenAIRequest) -> _Prompt:
    """Render a chat with the answers as sampled, so that it continues their tokens; a model behind an API renders it.
    The messages of the request are used instead if the template fails on sampled answers, or drops a tool's result,
    because it reads `tool_calls`.
    """
    if isinstance(model, ServedRemote):
        return _Prompt("")
    if list(sampled) == list(request.messages):
        return await _chat_prompt(model, sampled, request.template_options)
    missing = [str(message["content"]).strip() for message in sampled if message["role"] == "tool"]
    prompt = None
    with contextlib.suppress(TemplateError):  # an error with the messages of the request is raised below
        prompt = await _chat_prompt(model, sampled, request.template_options)
        missing = [text for text in missing if text not in prompt.text]
        if not missing:
            return prompt
    as_requested = await _chat_prompt(model, request.messages, request.template_options)
    # A template may rewrite results, for example as JSON; then both versions lack the text.
    return as_requested if prompt is None or any(text in as_requested.text for text in missing) else prompt


def _message_keys(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return two keys per message: one of the message with all earlier ones, and one of only the message."""
    keys, before = [], blake2b(digest_size=16)
    for message in messages:
        plain = openai_api.plain_message(message)
        key = json.dumps([plain["role"], plain["content"], plain.get("tool_calls") or ()], sort_keys=True, default=str)
        before.update(key.encode())
        keys.append((before.hexdigest(), key))
    return keys


def _cut_at_stop(tokenizer: Tokenizer, generation: Generation, stop: Sequence[str]) -> tuple[Generation, str]:
    """Cut an answer after the token that completes its first stop text. Returns: the answer, the text before that."""

    def decoded(num_tokens: int) -> str:
        return tokenizer.decode(list(generation.tokens[:num_tokens]), skip_special_tokens=True)

    text = decoded(len(generation.tokens))
    if not any(word in text for word in stop):
        return generation, text
    # Binary search for the fewest tokens that contain a stop text.
    sizes = range(1, len(generation.tokens) + 1)
    size = sizes[bisect_left(sizes, True, key=lambda size: any(word in decoded(size) for word in stop))]
    text = decoded(size)
    tokens, logprobs = generation.tokens[:size], generation.logprobs[:size]
    experts = generation.routed_experts[: len(generation.routed_experts) - (len(generation.tokens) - size)]
    cut = replace(generation, tokens=tokens, logprobs=logprobs, finish_reason="stop", routed_experts=experts)
    # All tokens of the newest weights may have been cut.
    cut = cut.sampled_by(generation.versions) if generation.versions else cut
    return cut, text[: min(text.index(word) for word in stop if word in text)]


def _sampling(defaults: SamplingParams, overrides: Mapping[str, Any]) -> SamplingParams:
    """Apply a workflow's sampling parameters, which are checked here, because an error in the engine would fail the
    whole work unit. Raises: ValueError, TypeError: a value or name is invalid.
    """
    if not overrides:
        return defaults
    if unknown := overrides.keys() - {parameter.name for parameter in fields(SamplingParams)}:
        raise TypeError(f"unknown sampling parameters {', '.join(sorted(unknown))}")
    stop = openai_api.texts_of("stop", overrides.get("stop", defaults.stop))
    sampling = replace(defaults, **{**overrides, "stop": stop})
    numbers = (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.temperature, sampling.top_p)
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError(f"sampling parameters must be finite numbers: {dict(overrides)!r:.200}")
    if sampling.max_tokens < 1 or not 0 < sampling.top_p <= 1 or sampling.repetition_penalty <= 0:
        bounds = "max_tokens >= 1, 0 < top_p <= 1 and repetition_penalty > 0"
        raise ValueError(f"{bounds} must hold: {dict(overrides)!r:.200}")
    if sampling.temperature != 0 and sampling.temperature < engines.MIN_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature} must be 0 (greedy) or at least {engines.MIN_TEMPERATURE}")
    # Memory and deadlines are planned for the run's limit. A grammar may end an answer before min_tokens.
    min_tokens = 0 if sampling.grammar else sampling.min_tokens
    return replace(sampling, max_tokens=min(int(sampling.max_tokens), defaults.max_tokens), min_tokens=min_tokens)


def _encode(model: ServedModel, text: str, hidden: Mapping[str, str], images: Sequence[str]) -> list[int]:
    """Tokens of a rendered text, with those of its images for placeholders. Raises: ValueError: they do not match."""
    if not images:
        return encode_hidden(model.tokenizer, text, hidden)
    if model.images is None:
        raise ValueError("a chat has images, but no taskset of the run has an image_key")
    # Tokenizers split text at special tokens anyway, and special tokens spelled in messages are hidden.
    placeholders = model.images.placeholders
    text, *parts = re.split(f"({'|'.join(map(re.escape, placeholders.values()))})", text)
    expected = [placeholders[model.images.placeholder_of(name)] for name in images]
    if parts[::2] != expected:
        text = f"the chat template wrote {len(parts) // 2} of {len(images)} images and videos, or reordered them"
        raise ValueError(f"{text}; it must support {{'type': 'image'}} and {{'type': 'video'}} parts")
    tokens = encode_hidden(model.tokenizer, text, hidden)
    for name, part in zip(images, parts[1::2], strict=True):
        tokens += [*model.images.tokens(name), *encode_hidden(model.tokenizer, part, hidden)]
    return tokens


def _encode_raw(tokenizer: Tokenizer, prompt: str) -> list[int]:
    # Chat templates write special tokens themselves; other prompts get the tokenizer's first token, if it has one.
    return with_first_token(tokenizer, encode_hidden(tokenizer, prompt, {})) if prompt else []


def check_prompt(tokenizer: Tokenizer, limits: ModelConfig, task: Task) -> None:
    """Render and tokenize the prompt of a task without images, as a rollout does.

    Raises: DataError: the chat template fails, or the prompt is empty, or it is too long and must not be truncated.
    """
    where = f"taskset {task.taskset}, row {task.index}"
    try:
        if task.messages:
            prompt = _render(tokenizer, task.messages, {"tools": list(task.tools)} if task.tools else {})
            tokens = encode_hidden(tokenizer, prompt.text, prompt.hidden)
        else:
            tokens = _encode_raw(tokenizer, task.prompt)
        _limited(limits, tokens)
    except PromptTooLongError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # a template may raise anything
        raise DataError(f"{where}: the chat template cannot render it: {type(error).__name__}: {error}") from error
    if not tokens:
        raise DataError(f"{where}: the prompt is empty")


def _limited(limits: ModelConfig, tokens: list[int]) -> tuple[list[int], bool]:
    """Return the allowed tokens of a prompt, and True if some were cut. Raises: PromptTooLongError."""
    limit = limits.max_prompt_tokens
    if limit is None or len(tokens) <= limit:
        return tokens, False
    if not limits.enable_prompt_truncation:
        advice = "raise it, shorten the prompt, or set model.enable_prompt_truncation for rollouts"
        raise PromptTooLongError(f"prompt of {len(tokens)} tokens exceeds max_prompt_tokens {limit}; {advice}")
    # The end is kept, because it usually holds the question.
    return tokens[-limit:], True
