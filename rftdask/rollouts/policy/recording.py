"""RecordingModel: the policy as one attempt at a rollout sees it. Text on the workflow's side, token ids beyond.

It keeps every call of the policy with the exact tokens that went in and came out, so that what is trained is what was
sampled: text is never tokenized again. A prompt whose text goes on where a call ended is that call's tokens, then those
of what was added. So a conversation is one sequence, until a prompt does not go on so (`Branch`). Seeds depend on the
run's seed and on who asks, not on the attempt or the order of events. Auxiliary models are asked, not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

from jinja2 import TemplateError

from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import ImageProcessor, images_in
from rftdask.data.tokenizer import (
    Tokenizer,
    encode_hidden,
    hide_special,
    is_plain,
    sampled_text,
    show_hidden,
    with_first_token,
)
from rftdask.engines.base import (
    MAX_BAD_TOKENS,
    MAX_BAD_WORDS,
    MIN_TEMPERATURE,
    POLICY,
    GenerateRequest,
    Generation,
    OnTokens,
    SamplingParams,
)
from rftdask.errors import DataError, UserError
from rftdask.rollouts.policy import messages_api, responses_api
from rftdask.rollouts.policy.answer_parsers import AnswerParser, ParsedAnswer, parse_tool_calls
from rftdask.rollouts.policy.answer_stream import Part, StreamedText, Tell
from rftdask.rollouts.policy.base import Method, PolicyHandle
from rftdask.rollouts.policy.lockstep_queue import RequestQueue, RolloutKey
from rftdask.rollouts.policy.openai_api import (
    CHAT,
    NOT_GUIDED,
    BadRequestError,
    Form,
    OpenAIAnswer,
    OpenAIRequest,
    Told,
    chat_completion,
    plain_message,
    read_request,
    refusal,
    text_completion,
    texts_of,
    token_usage,
)
from rftdask.rollouts.policy.remote import RemoteModel
from rftdask.rollouts.workflows.base import PromptTooLongError, Response

MAX_CALLS = 1000
"""Most calls of models in one attempt; a workflow that asks on and on ends as a failure, not by filling the memory."""

_THOUGHTS_END = "</think>"

Streamed: TypeAlias = Callable[[Sequence[str]], StreamedText]
"""Makes the text of an answer that is streamed, of the texts that it stops at."""
LogprobsBatch = Callable[[list[tuple[tuple[int, ...], tuple[int, ...]]]], Awaitable[list[tuple[float, ...]]]]
"""Natural-log probabilities of the second tokens of each pair after the first, at temperature 1."""


@dataclass
class ModelUse:
    """What a model was asked for by all attempts of a work unit, also those that failed."""

    calls: int = 0
    """Questions, also those that got no answer."""
    failures: int = 0
    """Those of them that ended with an error."""
    prompt_tokens: int = 0
    """Of the questions that were answered, as are the next."""
    response_tokens: int = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[Callable[[int, int], None]]:
        """Count the block as a call; what it gives takes the tokens of prompt and answer once there is one."""
        self.calls += 1
        try:
            yield self._add_tokens
        except Exception:  # and not who is called off
            self.failures += 1
            raise

    def _add_tokens(self, prompt: int, response: int) -> None:
        self.prompt_tokens += prompt
        self.response_tokens += response

    def sums(self, prompt_price: float | None, response_price: float | None) -> dict[str, float]:
        """By the names that they have in metrics; the cost, too, where a million tokens have prices."""
        counts = {name: float(value) for name, value in vars(self).items()}
        if prompt_price is None and response_price is None:
            return counts
        cost = self.prompt_tokens * (prompt_price or 0.0) + self.response_tokens * (response_price or 0.0)
        return counts | {"cost": cost / 1e6}


@dataclass(frozen=True)
class ServedModel:
    """An engine and what it takes to speak text with it."""

    queue: RequestQueue
    tokenizer: Tokenizer
    sampling: SamplingParams
    limits: ModelConfig
    """Its max_prompt_tokens and enable_prompt_truncation."""
    logprobs_batch: LogprobsBatch | None = None
    """None: the engine cannot score given tokens."""
    parser: AnswerParser | None = None
    """Of its answers, as OpenAI's API tells them; None: the one that its chat template shows."""
    is_guided: bool = False
    """Its engine samples by grammars and what must not come."""
    images: ImageProcessor | None = None
    """Of the images in chats; None: chats have none."""
    use: ModelUse = field(default_factory=ModelUse)
    """Where its calls are counted."""


@dataclass(frozen=True)
class ServedRemote:
    """A remote model and how it samples, unless a workflow says otherwise."""

    model: RemoteModel
    sampling: SamplingParams
    use: ModelUse = field(default_factory=ModelUse)
    """Where its calls are counted."""


Served: TypeAlias = ServedModel | ServedRemote


class Branch(StrEnum):
    """Why a call begins a sequence of its own, though others were before it."""

    ANSWER = "answer"  # an answer is not in the prompt as it was sampled: thinking was stripped, a tool call rewritten
    HISTORY = "history"  # what stood before an answer is not: messages were cut or summarized; or another chat began
    FORKED = "forked"  # another call has gone on from there already, or the same prompt is asked again
    SAMPLING = "sampling"  # the temperature, top_p or top_k is another, and a sequence has one
    TRUNCATED = "truncated"  # the prompt lost its beginning to max_prompt_tokens


@dataclass(frozen=True)
class _Prompt:
    """A prompt as rendered, and what may be known of it."""

    text: str
    source: str = ""
    """Role of its last message; "": a text without roles."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """See `hide_special`."""
    images: tuple[str, ...] = ()
    """Names of those in the chat, each of which the text has a placeholder for."""


@dataclass(frozen=True)
class Call:
    """A call of the policy, with its answer."""

    prompt_text: str
    """The prompt as rendered, before any truncation."""
    prompt_truncated: bool
    request: GenerateRequest
    generation: Generation
    response: Response
    num_prompt_tokens: int
    num_response_tokens: int
    """Tokens of prompt and response; of a remote model, whose token ids are not known, as the service counts."""
    extends: int | None = None
    """Turn of the call on whose tokens this one goes on, as part of the same sequence; None: it begins one."""
    branch: Branch | None = None
    """Why it begins one; None: it is the first, or begins none."""
    added_text: str = ""
    """Of a call that goes on: the prompt's text beyond the sequence so far."""
    source: str = ""
    """Role of the last message of the prompt; "": a text without roles."""
    rendered: str = ""
    """The prompt with special tokens hidden where a text spells one; with the answer it is what later prompts are
    compared with."""
    forced: range = range(0)
    """Tokens of the answer that the policy did not write: they ended its thoughts."""


def rollout_seed(run_seed: int, group_id: str, rollout: int, turn: int) -> int:
    """Seed of one request, 0 <= seed < 2**63; the same for every attempt."""
    identity = f"{run_seed}/{group_id}/{rollout}/{turn}".encode()
    # A hash of the identity, not a running number: it does not depend on who asked before, so a rollout draws the same
    # tokens on any worker and after any restart.
    # Without its last bit: seeds are int64 wherever they go.
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "big") >> 1


class RecordingModel(PolicyHandle):
    """A `PolicyModel` for one attempt; `calls` are the calls answered so far, in the order they were made."""

    def __init__(
        self,
        policy: Served,
        auxiliary: Mapping[str, Served] | None = None,
        *,
        key: RolloutKey,
        group_id: str,
        run_seed: int,
    ) -> None:
        super().__init__(tuple(auxiliary or {}))
        self._models: dict[str, Served] = {POLICY: policy, **(auxiliary or {})}
        self._key = key
        self._group_id = group_id
        self._run_seed = run_seed
        self._calls: dict[int, Call] = {}
        # Prompt and answer of calls, as a template renders them; made when a later prompt is compared with them.
        self._sequences: dict[int, str] = {}
        # Prompts of the policy so far, as they are compared; and turns on whose tokens another call goes on.
        self._asked: list[str] = []
        self._extended: set[int] = set()
        self._num_turns = 0
        self._num_asked = 0
        self._closed = False
        # What the policy wrote, by the messages that OpenAI's API made of it.
        self._told: dict[str, str] = {}

    @property
    def calls(self) -> list[Call]:
        """Calls of the policy that were answered, in the order in which they were made."""
        return [self._calls[turn] for turn in sorted(self._calls)]

    @property
    def sequences(self) -> list[list[tuple[int, Call]]]:
        """The calls as sequences, in the order in which these began: each call with its place in `calls`."""
        sequence_of: dict[int, list[tuple[int, Call]]] = {}
        for place, turn in enumerate(sorted(self._calls)):
            call = self._calls[turn]
            sequence = [] if call.extends is None else sequence_of[call.extends]
            sequence.append((place, call))
            sequence_of[turn] = sequence
        # By identity, in order: a sequence stands there once for each of its calls.
        return list({id(sequence): sequence for sequence in sequence_of.values()}.values())

    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        """See PolicyHandle. Raises: PromptTooLongError; RuntimeError: the attempt has ended, or asks too much;
        ValueError, TypeError: arguments that do not fit.
        """
        if self._closed:
            raise RuntimeError("this attempt at the rollout has ended; its model answers no more")
        self._num_asked += 1
        # Counted before the call, auxiliary ones too: a loop that only asks judges ends as well.
        if self._num_asked > MAX_CALLS:
            raise RuntimeError(f"this attempt has called its models more than {MAX_CALLS} times")
        model = self._models[name]
        began = time.perf_counter()
        try:
            if method == "openai":
                translated = {
                    responses_api.RESPONSES: self._responses,
                    messages_api.MESSAGES: self._messages,
                    messages_api.COUNT_TOKENS: self._count_tokens,
                }
                return await translated.get(arguments["path"], self._openai)(name, model, **arguments)
            if isinstance(model, ServedRemote):
                return await self._ask_remote(name, model, method, dict(arguments))
            if method == "logprobs":
                return await _logprobs(model, **arguments)
            # A chat becomes text here, by the model's own template; from there on both kinds of questions are tokens.
            options = dict(arguments)
            if method == "chat":
                messages, tools = options.pop("messages"), options.pop("tools", None)
                prompt = _render(model.tokenizer, messages, {"tools": tools} if tools else {})
                prompt = replace(prompt, images=images_in(messages))
            else:
                prompt = _Prompt(options.pop("prompt"))
            if (grammar := options.get("grammar")) and (problem := _grammar_problem(grammar)):
                raise ValueError(f"no answer can be guided by this grammar: {problem}")
            return (await self._generate(name, model, prompt, options))[1]
        finally:
            self.times["generate"] = self.times.get("generate", 0.0) + time.perf_counter() - began

    async def _responses(
        self, name: str, model: Served, path: str, body: Any, tell: Tell | None = None
    ) -> OpenAIAnswer:
        """As `_openai`, of the Responses API."""
        answer = await self._as_chat(name, model, body, tell, responses_api.as_chat, responses_api.OWN_NAMES)
        if answer.status == 200:
            answer = replace(answer, body=responses_api.as_response(answer.body, body))
        return answer

    async def _messages(self, name: str, model: Served, path: str, body: Any, tell: Tell | None = None) -> OpenAIAnswer:
        """As `_openai`, of Anthropic's Messages API."""
        answer = await self._as_chat(name, model, body, tell, messages_api.as_chat, messages_api.OWN_NAMES)
        return replace(answer, body=messages_api.as_message(answer.body)) if answer.status == 200 else answer

    async def _count_tokens(
        self, name: str, model: Served, path: str, body: Any, tell: Tell | None = None
    ) -> OpenAIAnswer:
        """Tokens of the prompt that a Message would be the answer to."""
        if not isinstance(model, ServedModel):
            return refusal("the tokens of a model behind an API are not known here", status=404)
        try:
            asked = _read_request(CHAT, messages_api.as_chat(body), model)
            prompt = _render(model.tokenizer, self._as_sampled(name, asked.messages), asked.template_options)
            tokens = _encode(model, prompt.text, prompt.hidden, images_in(asked.messages))
        except (ValueError, TemplateError) as error:
            return refusal(f"{error}")
        return OpenAIAnswer(200, {"input_tokens": len(tokens)})

    async def _as_chat(
        self,
        name: str,
        model: Served,
        body: Any,
        tell: Tell | None,
        as_chat: Callable[[Any], dict[str, Any]],
        own_names: Mapping[str, str],
    ) -> OpenAIAnswer:
        """The chat completion of a request in other words; a refusal names its parameter in these."""
        try:
            chat = as_chat(body)
        except BadRequestError as error:
            return refusal(str(error), error.param, error.code)
        answer = await self._openai(name, model, CHAT, chat, tell)
        if answer.status == 200:
            return answer
        told = answer.body["error"]
        own = own_names.get(told["param"], told["param"])
        return replace(answer, body={**answer.body, "error": {**told, "param": own}})

    async def _openai(self, name: str, model: Served, path: str, body: Any, tell: Tell | None = None) -> OpenAIAnswer:
        """The answer to a request of OpenAI's API; what cannot be done is one, too. tell: takes its text while it is
        sampled."""
        parser = None
        if isinstance(model, ServedModel):
            parser = model.parser or AnswerParser(model.tokenizer)
        try:
            asked = _read_request(path, body, model)
            messages = self._as_sampled(name, asked.messages)
            prompts = [_Prompt(text) for text in asked.prompts]
            if asked.path == CHAT:
                prompts = [_Prompt("")]
                if isinstance(model, ServedModel):
                    prompts = [await _prompt_as_sampled(model, messages, asked)]

            async def sample(prompt: _Prompt, number: int, choice: int) -> Told:
                seed = None if asked.seed is None else f"{asked.seed}/{number}"
                if not isinstance(model, ServedModel):
                    return await self._openai_remote(name, model, asked, messages, prompt)
                assert parser is not None
                options = dict(asked.options)
                if asked.form is not None:
                    options["grammar"] = _grammar(model, parser, asked.form, prompt.text, options)
                streamed = tell and _streamed(model.tokenizer, parser, asked, prompt.text, partial(tell, choice))
                turn, response = await self._generate(name, model, prompt, options, seed, streamed)
                if asked.path != CHAT:
                    return Told(response, ParsedAnswer(response.text, None, ()), turn)
                parsed = parser.parse(response.text, response.tokens, prompt.text, asked.tools)
                return Told(response, parsed, turn)

            # All of them begin in this pass of the event loop, in their order: who is which turn is no matter of time.
            choices = [(prompt, number) for prompt in prompts for number in range(asked.n)]
            told = await _all_or_none(sample(*which, choice) for choice, which in enumerate(choices))
        except PromptTooLongError as error:
            return refusal(str(error), "messages", "context_length_exceeded")
        except BadRequestError as error:
            return refusal(str(error), error.param, error.code)
        except (ValueError, TypeError, TemplateError, UserError) as error:
            return refusal(f"{type(error).__name__}: {error}")
        if "openai" not in sys.modules:
            # In a thread: it takes most of a second, and others are answered meanwhile.
            await asyncio.to_thread(importlib.import_module, "openai.types.chat")
        num_prompt = sum(len(each.response.prompt_tokens) for each in told[:: asked.n])
        usage = token_usage(num_prompt, sum(len(each.response.tokens) for each in told))
        tokenizer = model.tokenizer if isinstance(model, ServedModel) else None
        if asked.path != CHAT:
            return text_completion(asked, told, tokenizer, usage)
        answer = chat_completion(asked, told, tokenizer, usage)
        for choice, each in zip(answer.body["choices"], told, strict=True):
            # Marks that are special tokens are in no text: of those the template knows how they are written.
            whole = tokenizer is None or is_plain(tokenizer, each.response.tokens)
            if whole and (each.parsed.calls or each.parsed.reasoning is not None):
                for key in _message_keys([*asked.messages, choice["message"]])[-1]:
                    self._told[f"{name}/{key}"] = each.response.text
        return answer

    def _as_sampled(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages, those that were parsed from an answer of the policy as it wrote them: a template would write
        the calls of tools in its own way, and the thoughts are not in them.
        """
        found: list[Mapping[str, Any]] = []
        for message, keys in zip(messages, _message_keys(messages), strict=True):
            texts = [self._told.get(f"{name}/{key}") for key in keys] if message["role"] == "assistant" else []
            text = next((text for text in texts if text is not None), None)
            found.append(message if text is None else {"role": "assistant", "content": text})
        return found

    async def _openai_remote(
        self, name: str, model: ServedRemote, asked: OpenAIRequest, messages: Sequence[Any], prompt: _Prompt
    ) -> Told:
        given = {**asked.options, **asked.template_options, **({} if asked.seed is None else {"seed": asked.seed})}
        given |= {"logprobs": True} if asked.logprobs else {}
        passed_on = {"tools", "stop", "max_tokens", "temperature", "top_p", "top_k", "min_tokens", "repetition_penalty"}
        if asked.form is not None:
            raise BadRequestError(f"{asked.form.param} is not passed on to a model behind an API", asked.form.param)
        for param in given.keys() - passed_on:
            raise BadRequestError(f"{param} is not passed on to a model behind an API", param)
        is_chat = asked.path == CHAT
        question: dict[str, Any] = {"messages": messages} if is_chat else {"prompt": prompt.text}
        question |= {"tools": asked.tools} if asked.tools else {}
        response = await self._ask_remote(name, model, "chat" if is_chat else "generate", {**question, **asked.options})
        calls = tuple(parse_tool_calls(response.text)) if asked.tools else ()
        return Told(response, ParsedAnswer(None if calls else response.text, None, calls), self._num_asked)

    async def _generate(
        self,
        name: str,
        model: ServedModel,
        asked: _Prompt,
        sampling: Mapping[str, Any],
        own_seed: str | None = None,
        streamed: Streamed | None = None,
    ) -> tuple[int, Response]:
        # own_seed: of the request; else the turn's. streamed: takes the text while it comes. Returns the turn, too.
        prompt, hidden, source, images = asked.text, asked.hidden, asked.source, asked.images
        turn, seed = self._next_turn(name, own_seed)
        parent = self._parent(prompt) if name == POLICY else None
        # Special tokens that stood in a message are text again: only the template may write real ones.
        if parent is not None:
            before = self._calls[parent]
            added = prompt[len(self._sequence(parent)) :]
            kept = (*before.request.prompt_tokens, *before.generation.tokens)
            tokens = [*kept, *_encode(model, added, hidden, images[len(before.request.images) :])]
        elif source:
            tokens = _encode(model, prompt, hidden, images)
        else:
            tokens = _encode_raw(model.tokenizer, prompt)
        tokens, truncated = _limited(model, tokens)
        if truncated and images:
            raise PromptTooLongError(
                f"a prompt with images exceeds max_prompt_tokens {model.limits.max_prompt_tokens}, and cannot be cut; "
                "raise it"
            )
        if not tokens:
            raise ValueError("the prompt is empty")
        options = dict(sampling)
        budget = options.pop("thinking_token_budget", None)
        if words := texts_of("bad_words", options.pop("bad_words", ())):
            options["bad_tokens"] = _bad_tokens(model.tokenizer, words)
        if model.images is not None:
            # It would stand for an image that is not there, also where the next turn of a chat shows the first one.
            options["bad_tokens"] = (*options.get("bad_tokens", ()), *((token,) for token in model.images.placeholders))
        request = GenerateRequest(tuple(tokens), _sampling(model.sampling, options), seed, images)
        if request.sampling.is_guided and not model.is_guided:
            raise BadRequestError(f"bad_words, and answers of a form, are not supported: {NOT_GUIDED}", "bad_words")
        branch = self._branch(parent, prompt, request.sampling, truncated) if name == POLICY else None
        extends = parent if branch is None else None
        # Before it is answered: which of two calls side by side goes on must not depend on which is answered first.
        if name == POLICY:
            self._asked.append(prompt)
        if extends is not None:
            self._extended.add(extends)
        try:
            with model.use.counting() as count:
                if budget is None:
                    asking = request
                    if streamed is not None:
                        asking = replace(request, on_tokens=_on_this_loop(streamed(request.sampling.stop).take))
                    generation, forced = await model.queue.generate(self._key, turn, asking), range(0)
                else:
                    generation, forced = await self._think(model, turn, request, prompt, budget)
                count(len(request.prompt_tokens), len(generation.tokens))
        except BaseException:
            # It was never answered, so another may go on from there.
            if name == POLICY:
                self._asked.remove(prompt)
                self._extended.discard(-1 if extends is None else extends)
            raise
        generation, text = _cut_at_stop(model.tokenizer, generation, request.sampling.stop)
        response = Response(
            text=text,
            prompt_tokens=request.prompt_tokens,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
        )
        if name == POLICY:
            # By turn and not appended: a workflow may ask several things at once, and they are answered in any order.
            self._calls[turn] = Call(
                show_hidden(prompt, hidden),
                truncated,
                request,
                generation,
                response,
                len(request.prompt_tokens),
                len(generation.tokens),
                extends,
                branch,
                "" if extends is None else show_hidden(added, hidden),
                source,
                prompt,
                forced,
            )
        return turn, response

    async def _think(
        self, model: ServedModel, turn: int, request: GenerateRequest, prompt: str, budget: int
    ) -> tuple[Generation, range]:
        """An answer whose thoughts have at most `budget` tokens, and which of its tokens ended them in place of the
        policy. It is asked in two: to the end of the thoughts, and from there on.
        """
        if not isinstance(budget, int) or budget < 0:
            raise ValueError(f"thinking_token_budget must be a number of tokens, not {budget!r:.60}")
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
        least = max(0, sampling.min_tokens - len(begun))
        rest = await model.queue.generate(
            self._key,
            turn,
            GenerateRequest(
                (*request.prompt_tokens, *begun),
                replace(sampling, max_tokens=sampling.max_tokens - len(begun), min_tokens=least),
                # By the same seed it would draw the very numbers by which the thoughts were drawn.
                rollout_seed(request.seed, "after thoughts", 0, 0),
                request.images,
            ),
        )
        first = rest if thoughts is None else thoughts
        logprobs = (*(() if thoughts is None else thoughts.logprobs), *([0.0] * len(forced)), *rest.logprobs)
        oldest, tokens = min(first.min_policy_version, rest.min_policy_version), (*begun, *rest.tokens)
        whole = replace(rest, tokens=tokens, logprobs=logprobs, min_policy_version=oldest, version_starts=())
        later = [(len(begun) + place, version) for place, version in rest.versions]
        if later and first.versions:
            whole = whole.sampled_by([*(() if thoughts is None else thoughts.versions), *later])
        return whole, forced

    def _parent(self, prompt: str) -> int | None:
        """Turn of the call whose prompt and answer, of all, are the longest beginning of this prompt, of equal ones one
        that nothing goes on from yet; None: of none."""
        longest_first = sorted(self._calls, key=lambda turn: (-len(self._sequence(turn)), turn in self._extended, turn))
        return next((turn for turn in longest_first if prompt.startswith(self._sequence(turn))), None)

    def _sequence(self, turn: int) -> str:
        """Prompt and answer of a call of the policy, as a template renders them."""
        if turn not in self._sequences:
            policy, call = self._models[POLICY], self._calls[turn]
            assert isinstance(policy, ServedModel)
            self._sequences[turn] = call.rendered + sampled_text(policy.tokenizer, call.generation.tokens)
        return self._sequences[turn]

    def _branch(self, parent: int | None, prompt: str, sampling: SamplingParams, truncated: bool) -> Branch | None:
        """Why a call does not go on where `parent` ended; None: it does, or there was none before."""
        if parent is not None:
            before = self._calls[parent].request.sampling
            if parent in self._extended:
                return Branch.FORKED
            if truncated:
                return Branch.TRUNCATED
            same = all(getattr(before, name) == getattr(sampling, name) for name in ("temperature", "top_p", "top_k"))
            return None if same else Branch.SAMPLING
        if not self._asked:
            return None
        if prompt in self._asked:
            return Branch.FORKED
        return Branch.ANSWER if any(map(prompt.startswith, self._asked)) else Branch.HISTORY

    async def _ask_remote(self, name: str, served: ServedRemote, method: Method, options: dict[str, Any]) -> Response:
        if method == "logprobs":
            raise RuntimeError("a model behind an API gives no logprobs of given tokens")
        asked = [dict(m) for m in options.pop("messages")] if method == "chat" else options.pop("prompt")
        tools = options.pop("tools", None) or ()
        turn, seed = self._next_turn(name)
        if options.get("grammar"):
            raise ValueError("a model behind an API is not guided by a grammar")
        request = GenerateRequest((), _sampling(served.sampling, options), seed)
        with served.use.counting() as count:
            answer = await served.model.ask(asked, request.sampling, seed, tools)
            count(answer.num_prompt_tokens, answer.num_response_tokens)
        response = Response(answer.text, (), (), (), answer.finish_reason)
        if name == POLICY:
            prompt = asked if isinstance(asked, str) else "\n".join(f"{m['role']}: {m.get('content')}" for m in asked)
            # No tokens and version 0: what a remote model says is read and measured, and cannot be trained on.
            generation = Generation((), (), "length" if answer.finish_reason == "length" else "stop", 0, 0)
            counts = answer.num_prompt_tokens, answer.num_response_tokens
            self._calls[turn] = Call(prompt, False, request, generation, response, *counts)
        return response

    def _next_turn(self, name: str, own_seed: str | None = None) -> tuple[int, int]:
        # Turns of the policy are numbered without gaps, whatever judges were asked in between: they are in the uid.
        turn = self._num_turns if name == POLICY else self._num_asked
        self._num_turns += name == POLICY
        # A judge of the same rollout and turn must not draw by the very numbers by which the policy drew.
        identity = self._group_id if name == POLICY else f"{self._group_id}/{name}"
        if own_seed is not None:
            # The same seed gives the same answer again, in this rollout: its siblings are to differ.
            return turn, rollout_seed(self._run_seed, f"{identity}/seed {own_seed}", self._key.rollout, 0)
        return turn, rollout_seed(self._run_seed, identity, self._key.rollout, turn)

    def close(self) -> None:
        """Answer no further calls: an attempt that will not stop must not go on beside its retry."""
        self._closed = True
        self.close_clients()


def _read_request(path: str, body: Any, model: Served) -> OpenAIRequest:
    if not isinstance(model, ServedModel):
        return read_request(path, body, None)
    images = model.images

    def name_image(told: str) -> str:
        assert images is not None
        try:
            return images.named(told)
        except DataError as error:
            raise BadRequestError(str(error), "messages") from error

    return read_request(path, body, model.tokenizer, None if images is None else name_image)


def _streamed(
    tokenizer: Tokenizer, parser: AnswerParser, asked: OpenAIRequest, prompt: str, tell: Callable[[Part, str], None]
) -> Streamed:
    """How an answer to a request becomes text while it comes; of completions all of it is certain."""

    def certain(text: str) -> tuple[str, str]:
        return parser.certain(text, prompt, asked.tools) if asked.path == CHAT else ("", text)

    return partial(StreamedText, tokenizer, certain=certain, tell=tell)


def _on_this_loop(take: OnTokens) -> OnTokens:
    """`take`, for other threads: called on the event loop that runs now, in their order."""
    loop = asyncio.get_running_loop()

    def take_later(tokens: tuple[int, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who asked
            loop.call_soon_threadsafe(take, tokens)

    return take_later


async def _all_or_none(work: Iterable[Coroutine[Any, Any, Told]]) -> list[Told]:
    """The results, in their order. Where one fails, the others are called off: nothing of them is told or recorded."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _grammar(model: ServedModel, parser: AnswerParser, form: Form, prompt: str, options: Mapping[str, Any]) -> str:
    """The grammar of a form, tried. Raises: BadRequestError: the engine, or the form, does not allow it."""
    if not model.is_guided:
        raise BadRequestError(f"{form.param} is not supported: {NOT_GUIDED}", form.param)
    for name in ("min_tokens", "stop"):
        if options.get(name):
            raise BadRequestError(f"{name} does not go with {form.param}: an answer ends where its form does", name)
    try:
        are_calls = form.param == "tool_choice"
        grammar = parser.grammar(form.schema, prompt, are_calls=are_calls, max_calls=form.max_calls)
    except UserError as error:
        raise BadRequestError(f"{form.param} is not supported: {error}", form.param) from error
    if problem := _grammar_problem(grammar):
        raise BadRequestError(f"{form.param}: no answer can be guided by this schema: {problem}", form.param)
    return grammar


def _grammar_problem(grammar: str) -> str:
    """Why no engine is guided by a grammar; "": one that guides is. Asked before: an engine would end by it."""
    try:
        import llguidance  # late: only an answer of a form needs it
    except ImportError:
        return "it needs llguidance: pip install 'rftdask[train]' where engines run"
    return str(llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar)))[:500]


def _bad_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The words as tokens, as they begin a text and as they go on in one. Raises: BadRequestError: too many."""
    spelled = (text for word in words for text in (word, f" {word.lstrip()}"))
    found = tuple(dict.fromkeys(tuple(encode_hidden(tokenizer, text, {})) for text in spelled))
    if len(found) >= MAX_BAD_WORDS or sum(map(len, found)) >= MAX_BAD_TOKENS:
        most = f"{MAX_BAD_WORDS // 2} words and {MAX_BAD_TOKENS // 2} tokens at most"
        raise BadRequestError(
            f"bad_words, each as it begins a text and after a space, are too many: {most}", "bad_words"
        )
    return found


async def _logprobs(model: ServedModel, prompt: str, response: str) -> tuple[float, ...]:
    if model.logprobs_batch is None:
        raise RuntimeError("this engine gives no logprobs of given tokens")
    # The two are tokenized apart, as they are in a rollout, where the response was sampled after the whole prompt.
    prompt_tokens, _ = _limited(model, _encode_raw(model.tokenizer, prompt))
    tokens = encode_hidden(model.tokenizer, *hide_special(model.tokenizer, response))
    if not prompt_tokens or not tokens:
        raise ValueError("logprobs needs a prompt and a response, of at least one token each")
    with model.use.counting() as count:
        [logprobs] = await model.logprobs_batch([(tuple(prompt_tokens), tuple(tokens))])
        count(len(prompt_tokens) + len(tokens), 0)
    return logprobs


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any]
) -> _Prompt:
    # A last message of the assistant is continued.
    (chat, options), hidden = hide_special(tokenizer, ([dict(message) for message in messages], dict(template_options)))
    continues = chat[-1]["role"] == "assistant"
    text: str = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues, **options
    )
    return _Prompt(text, str(messages[-1].get("role", "")), hidden)


async def _chat_prompt(
    model: ServedModel, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any]
) -> _Prompt:
    """A chat as rendered, whose images the run keeps by then."""
    names = images_in(messages)
    if names and model.images is not None:
        # In a thread: it writes to storage what is new, and makes tokens of it.
        await asyncio.to_thread(model.images.keep, names)
    return replace(_render(model.tokenizer, messages, template_options), images=names)


async def _prompt_as_sampled(model: ServedModel, sampled: Sequence[Mapping[str, Any]], asked: OpenAIRequest) -> _Prompt:
    """The chat as rendered with its answers as the policy wrote them (`sampled`), so that it goes on from their tokens;
    as the request has them where the template then fails, or leaves out what a tool said: it reads calls of tools, and
    what the policy wrote has none.
    """
    if list(sampled) == list(asked.messages):
        return await _chat_prompt(model, sampled, asked.template_options)
    said = [str(each["content"]).strip() for each in sampled if each["role"] == "tool"]
    prompt = None
    with contextlib.suppress(TemplateError):  # that of the messages as given is raised
        prompt = await _chat_prompt(model, sampled, asked.template_options)
        said = [text for text in said if text not in prompt.text]
        if not said:
            return prompt
    given = await _chat_prompt(model, asked.messages, asked.template_options)
    # A template may write it in other words, such as JSON, whichever way calls are told.
    return given if prompt is None or any(text in given.text for text in said) else prompt


def _message_keys(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Of each message what tells it from others: among all that stood before it, and by itself alone."""
    keys, before = [], blake2b(digest_size=16)
    for message in messages:
        plain = plain_message(message)
        own = json.dumps([plain["role"], plain["content"], plain.get("tool_calls") or ()], sort_keys=True, default=str)
        before.update(own.encode())
        keys.append((before.hexdigest(), own))
    return keys


def _cut_at_stop(tokenizer: Tokenizer, generation: Generation, stop: Sequence[str]) -> tuple[Generation, str]:
    """What was sampled until the first of the texts `stop` was complete, and the text before it.

    Exact: an engine that goes on past it has sampled the same tokens up to there.
    """

    def decoded(num_tokens: int) -> str:
        return tokenizer.decode(list(generation.tokens[:num_tokens]), skip_special_tokens=True)

    text = decoded(len(generation.tokens))
    if not any(each in text for each in stop):
        return generation, text
    # The fewest tokens that hold one, by halves: a text that is there stays there.
    least, most = 1, len(generation.tokens)
    while least < most:
        middle = (least + most) // 2
        if any(each in decoded(middle) for each in stop):
            most = middle
        else:
            least = middle + 1
    text = decoded(most)
    tokens, logprobs = generation.tokens[:most], generation.logprobs[:most]
    experts = generation.routed_experts[: len(generation.routed_experts) - (len(generation.tokens) - most)]
    cut = replace(generation, tokens=tokens, logprobs=logprobs, finish_reason="stop", routed_experts=experts)
    # What was left out may be all that the newest weights have sampled.
    cut = cut.sampled_by(generation.versions) if generation.versions else cut
    return cut, text[: min(text.index(each) for each in stop if each in text)]


def _sampling(defaults: SamplingParams, asked: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters that a workflow asks for, checked: a mistake must not end everybody's work unit.

    `max_tokens` beyond that of the run is cut to it. Raises: ValueError, TypeError: a value or name that does not fit.
    """
    if not asked:
        return defaults
    if beyond := asked.keys() - {each.name for each in fields(SamplingParams)}:
        raise TypeError(f"this model does not know the sampling parameters {', '.join(sorted(beyond))}")
    sampling = replace(defaults, **{**asked, "stop": texts_of("stop", asked.get("stop", defaults.stop))})
    numbers = (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.temperature, sampling.top_p)
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError(f"sampling parameters must be finite numbers: {dict(asked)!r:.200}")
    if sampling.max_tokens < 1 or not 0 < sampling.top_p <= 1 or sampling.repetition_penalty <= 0:
        raise ValueError(f"max_tokens >= 1, 0 < top_p <= 1 and repetition_penalty > 0 must hold: {dict(asked)!r:.200}")
    if sampling.temperature != 0 and sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    # The run's limit is what memory and deadlines were planned with; what has a form ends where the form does.
    least = 0 if sampling.grammar else sampling.min_tokens
    return replace(sampling, max_tokens=min(int(sampling.max_tokens), defaults.max_tokens), min_tokens=least)


def _encode(model: ServedModel, text: str, hidden: Mapping[str, str], images: Sequence[str]) -> list[int]:
    """Tokens of a rendered text, each placeholder in it those of an image. Raises: ValueError: there are not as many
    of both."""
    if not images:
        return encode_hidden(model.tokenizer, text, hidden)
    if model.images is None:
        raise ValueError("a chat has images, and no taskset of the run has an image_key")
    # Special tokens part a text for its tokenizer anyway, and what spells one in a message is hidden.
    placeholders = model.images.placeholders
    text, *parts = re.split(f"({'|'.join(map(re.escape, placeholders.values()))})", text)
    expected = [placeholders[model.images.placeholder_of(name)] for name in images]
    if parts[::2] != expected:
        raise ValueError(
            f"the chat template wrote {len(parts) // 2} of {len(images)} images and videos, or in another order; does "
            "it know {'type': 'image'} and {'type': 'video'} parts?"
        )
    tokens = encode_hidden(model.tokenizer, text, hidden)
    for name, part in zip(images, parts[1::2], strict=True):
        tokens += [*model.images.tokens(name), *encode_hidden(model.tokenizer, part, hidden)]
    return tokens


def _encode_raw(tokenizer: Tokenizer, prompt: str) -> list[int]:
    # A chat template writes the special tokens itself; a prompt without one gets what its tokenizer begins with.
    return with_first_token(tokenizer, encode_hidden(tokenizer, prompt, {})) if prompt else []


def _limited(model: ServedModel, tokens: list[int]) -> tuple[list[int], bool]:
    """Tokens of a prompt as far as they are allowed, and whether some were left out. Raises: PromptTooLongError."""
    limit = model.limits.max_prompt_tokens
    if limit is None or len(tokens) <= limit:
        return tokens, False
    if not model.limits.enable_prompt_truncation:
        raise PromptTooLongError(
            f"prompt of {len(tokens)} tokens exceeds max_prompt_tokens {limit}; raise it, or set "
            f"model.enable_prompt_truncation"
        )
    # The end of the prompt stays: the question is mostly there.
    return tokens[-limit:], True
