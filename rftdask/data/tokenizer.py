"""Tokenizer: what the package uses of one, and the policy's own with the chat template the configuration gives it.

Invariant of a chat (`hide_special`, then the template, then `encode_hidden`): special tokens are the template's own.
What a task, a user or the policy wrote is text, also where it spells one; else the ids are those of `encode`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from rftdask.config import Config
from rftdask.data.hub import local_model
from rftdask.errors import DataError
from rftdask.processes.zygote import MODELS, call

T = TypeVar("T")

_STAND_INS = range(0xF0000, 0xFFFFE)
"""Private characters: no template and no vocabulary gives them a meaning."""


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that the package uses."""

    def __hash__(self) -> int:
        """By identity."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence; None: there is none."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """The text of token ids."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> Any:
        """A chat as the policy reads it: text, or token ids with `tokenize=True`."""


class _Splitting(Protocol):
    """A transformers tokenizer that has special tokens."""

    def encode(self, text: str, /, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]: ...


class ByteTokenizer:
    """The tokenizer of an engine without a model: one token per byte, a message a line."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The bytes of the text in UTF-8; there are no special tokens."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Never fails: bytes that are no UTF-8 become replacement characters."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The contents alone, without roles; `tools` and the like are ignored."""
        return "\n".join(str(message["content"]) for message in messages)


def hide_special(tokenizer: Tokenizer, chat: T) -> tuple[T, dict[str, str]]:
    """A chat, its tools or a text, for the template: with a private character in place of each special token that a
    text in it spells, and what those characters stand for. {}: nothing spells one, and `chat` is as it was.
    """
    special, known = _special_tokens(tokenizer)
    texts = list(_texts(chat))
    spelled = sorted({found for text in texts for found in special.findall(text)}) if special else []
    if special is None or not spelled:
        return chat, {}
    used = set("".join(texts))
    # Characters of Unicode's private use, none of which the texts use themselves; else of one tokenizer always the
    # same for the same token, so that the turns of a chat can be compared.
    free = (chr(code) for code in _STAND_INS if chr(code) not in used)
    stand_ins = dict(zip(sorted(known.values()), free, strict=False))

    def hide(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {hide(key): hide(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return type(part)(hide(item) for item in part)
        if isinstance(part, np.ndarray):  # a list in a row of Parquet
            return hide(part.tolist())
        return special.sub(lambda match: stand_ins[match[0]], part) if isinstance(part, str) else part

    return hide(chat), {stand_ins[text]: text for text in spelled}


def is_plain(tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    """Whether what a policy wrote has no special tokens but those that end it."""
    return _special_tokens(tokenizer)[1].keys().isdisjoint(tokens[: _end(tokenizer, tokens)])


def _end(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """Number of tokens before the special ones at the end."""
    _, special = _special_tokens(tokenizer)
    end = len(tokens)
    while end and tokens[end - 1] in special:
        end -= 1
    return end


def sampled_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """What a policy wrote, as a template has to render it for the chat to go on from these very tokens: special tokens
    are special at the end alone, where they end the turn, and hidden (`hide_special`) where they are spelled.
    """
    end, plain = _end(tokenizer, tokens), is_plain(tokenizer, tokens)
    # A real one within the text stays bare: nobody is told of it, so no prompt has it there.
    body = tokenizer.decode(tokens[:end], skip_special_tokens=plain)
    tail = tokenizer.decode(tokens[end:], skip_special_tokens=False) if end < len(tokens) else ""
    return (hide_special(tokenizer, body)[0] if plain else body) + tail


def show_hidden(text: str, hidden: Mapping[str, str]) -> str:
    """A rendered text as it reads, with what `hide_special` took out of it."""
    return text.translate({ord(character): spelled for character, spelled in hidden.items()})


@lru_cache(maxsize=128)
def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    # Siblings are asked the same, one after another, and transformers takes a tenth of a millisecond for a word.
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode_hidden(tokenizer: Tokenizer, text: str, hidden: Mapping[str, str]) -> list[int]:
    """The token ids of a rendered text: special tokens in it are special, what `hide_special` took out is text."""
    if not hidden:
        return list(_encoded(tokenizer, text)) if text else []
    special, ids = _special_tokens(tokenizer)
    # Text between two special tokens is tokenized by itself anyway, so such a stretch can be encoded in another way.
    parts = re.split(f"({special.pattern})", text) if special else [text]
    tokens: list[int] = []
    for is_hostile, stretch in groupby(parts, lambda part: not hidden.keys().isdisjoint(part)):
        joined = show_hidden("".join(stretch), hidden)
        if not is_hostile:
            tokens += tokenizer.encode(joined, add_special_tokens=False) if joined else []
            continue
        assert special is not None
        found = cast(_Splitting, tokenizer).encode(joined, add_special_tokens=False, split_special_tokens=True)
        if not ids.keys().isdisjoint(found):
            # A vocabulary of whole words finds it all the same; cut in two, nobody does.
            cuts = [0, *(match.start() + 1 for match in special.finditer(joined)), len(joined)]
            pieces = [joined[start:end] for start, end in pairwise(cuts)]
            found = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        tokens += found
    return tokens


def render_marked(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[str, list[tuple[int, int]]]:
    """A rendered chat, and where in it the {% generation %} blocks of its template begin and end, in order."""
    from transformers import PreTrainedTokenizerBase  # late: importing transformers takes most of a second
    from transformers.utils.chat_template_utils import render_jinja_template

    own = cast(PreTrainedTokenizerBase, tokenizer)
    # Also what `load_tokenizer` lets every rendering begin with.
    options = {**own.special_tokens_map, **getattr(tokenizer.apply_chat_template, "keywords", {})}
    given = None if tools is None else list(tools)
    # Its annotation says str; it returns the texts and, asked for the mask, the places of the blocks in each.
    found = render_jinja_template(
        [[dict(message) for message in messages]],
        tools=given,
        chat_template=own.get_chat_template(None, given),
        return_assistant_tokens_mask=True,
        **options,
    )
    texts, blocks = cast(tuple[list[str], list[list[tuple[int, int]]]], found)
    return texts[0], blocks[0]


def with_first_token(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """The ids of a text that no template rendered, after the token with which its tokenizer begins a sequence: none if
    it adds none, and not a second one.
    """
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or tokens[:1] == [first] or tokenizer.encode("", add_special_tokens=True)[:1] != [first]:
        return tokens
    return [first, *tokens]


def with_end_token(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """The ids of a text that no template rendered, with the token that ends a sequence once at the end."""
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, list | tuple | np.ndarray):
        yield from (text for part in value for text in _texts(part))


@lru_cache(maxsize=16)
def _special_tokens(tokenizer: Tokenizer) -> tuple[re.Pattern[str] | None, dict[int, str]]:
    """What finds the special tokens in a text, the longest first, and their texts by id; None: there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = {number: str(token.content) for number, token in added if token.special}
    if not special:
        return None, {}
    return re.compile("|".join(map(re.escape, sorted(special.values(), key=len, reverse=True)))), special


def load_tokenizer(config: Config) -> Tokenizer:
    """Load the policy's tokenizer. Raises: DataError: the model folder has none, or the template file is not there."""
    if not config.explorer.rollout_model.traits.has_model:
        return ByteTokenizer()
    path = config.model.model_path
    try:
        tokenizer = read_tokenizer(path, config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(f"model.model_path {path!r} gives no tokenizer: {error}".splitlines()[0]) from error
    if config.model.custom_chat_template is not None:
        tokenizer.chat_template = config.model.custom_chat_template
    elif config.model.chat_template_path is not None:
        file = Path(config.model.chat_template_path)
        if not file.is_file():
            raise DataError(f"model.chat_template_path {str(file)!r} does not exist")
        tokenizer.chat_template = file.read_text()
    # In one place, for all that render chats: rollouts, rows of datasets, demonstrations.
    return with_thinking(tokenizer, config.model.enable_thinking)


def read_tokenizer(model: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a model folder or a model of the Hub, as transformers makes it.

    Of its class, which does without torch; to find that class takes torch and two seconds, so a process that can fork
    asks one that has it. Raises: OSError, ValueError: there is none.
    """
    return call(_read_tokenizer, local_model(model), trust_remote_code, needs=[MODELS])


def _read_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # late: see above

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def with_thinking(tokenizer: Any, enable: bool | None) -> Tokenizer:
    """A tokenizer of transformers whose chat template thinks, or does not; None: as the template says."""
    if enable is not None:
        render = partial(tokenizer.apply_chat_template, enable_thinking=enable)
        setattr(tokenizer, "apply_chat_template", render)  # noqa: B010 -- a method, which mypy does not let go
    return cast(Tokenizer, tokenizer)
