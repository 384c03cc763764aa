"""Tokenizer: the interface that the package uses, and loading the policy's tokenizer with the configured chat template.

Invariant of a chat (`hide_special`, then the template, then `encode_hidden`): only the template writes special tokens.
A special token that is spelled in the text of a task, a user or the policy is plain text. Otherwise the ids are those
of `encode`.
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
"""Private-use characters, which no template or vocabulary interprets."""


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that the package uses."""

    def __hash__(self) -> int:
        """By identity."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence; None: there is none."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> Any:
        """Render a chat: as text, or as token ids with `tokenize=True`."""


class ByteTokenizer:
    """The tokenizer of engines without a model: one token per byte, one line per message."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the bytes of the text in UTF-8; there are no special tokens."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode the bytes; invalid UTF-8 becomes replacement characters."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Join the contents, without roles; options such as `tools` are ignored."""
        return "\n".join(str(message["content"]) for message in messages)


def hide_special(tokenizer: Tokenizer, chat: T) -> tuple[T, dict[str, str]]:
    """Replace each special token that is spelled in a text of `chat` (a chat, tools or a text) by a private character.

    Returns: the result, for the template, and what each character stands for. {}: `chat` is unchanged.
    """
    special, known = _special_tokens(tokenizer)
    texts = list(_texts(chat))
    spelled = sorted({token for text in texts for token in special.findall(text)}) if special else []
    if special is None or not spelled:
        return chat, {}
    used = set("".join(texts))
    # Characters that the texts do not contain. A tokenizer otherwise always uses the same one for the same token, so
    # that the turns of a chat can be compared.
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
    """Return True if sampled tokens have no special tokens except at the end."""
    return _special_tokens(tokenizer)[1].keys().isdisjoint(tokens[: _end(tokenizer, tokens)])


def _end(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """Return the number of tokens before the special ones at the end."""
    _, special = _special_tokens(tokenizer)
    end = len(tokens)
    while end and tokens[end - 1] in special:
        end -= 1
    return end


def sampled_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return sampled tokens as the text that a template must render for the chat to continue from exactly these tokens.

    Special tokens at the end, which end the turn, stay special; spelled ones are hidden (`hide_special`).
    """
    end, plain = _end(tokenizer, tokens), is_plain(tokenizer, tokens)
    # A real special token within the text is left as it is: such a text is never part of a prompt.
    body = tokenizer.decode(tokens[:end], skip_special_tokens=plain)
    tail = tokenizer.decode(tokens[end:], skip_special_tokens=False) if end < len(tokens) else ""
    return (hide_special(tokenizer, body)[0] if plain else body) + tail


def show_hidden(text: str, hidden: Mapping[str, str]) -> str:
    """Put back into a rendered text what `hide_special` replaced."""
    return text.translate({ord(character): spelled for character, spelled in hidden.items()})


@lru_cache(maxsize=128)
def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    # The rollouts of a group have the same prompt, and transformers takes 0.1 ms per word.
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode_hidden(tokenizer: Tokenizer, text: str, hidden: Mapping[str, str]) -> list[int]:
    """Return the token ids of a rendered text: special tokens are special, but those that were hidden are text."""
    if not hidden:
        return list(_encoded(tokenizer, text)) if text else []
    special, ids = _special_tokens(tokenizer)
    # Text between two special tokens is tokenized separately anyway, so such a stretch can be encoded differently.
    parts = re.split(f"({special.pattern})", text) if special else [text]
    tokens: list[int] = []
    for is_hostile, stretch in groupby(parts, lambda part: not hidden.keys().isdisjoint(part)):
        joined = show_hidden("".join(stretch), hidden)
        if not is_hostile:
            tokens += tokenizer.encode(joined, add_special_tokens=False) if joined else []
            continue
        assert special is not None
        split = cast(Any, tokenizer).encode(joined, add_special_tokens=False, split_special_tokens=True)
        if not ids.keys().isdisjoint(split):
            # A vocabulary of whole words still has the special token, so it is cut in two.
            cuts = [0, *(match.start() + 1 for match in special.finditer(joined)), len(joined)]
            pieces = [joined[start:end] for start, end in pairwise(cuts)]
            split = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        tokens += split
    return tokens


def render_marked(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat; return it with the (begin, end) of each {% generation %} block of its template, in order."""
    from transformers import PreTrainedTokenizerBase  # late: importing transformers takes most of a second
    from transformers.utils.chat_template_utils import render_jinja_template

    hf_tokenizer = cast(PreTrainedTokenizerBase, tokenizer)
    # Including the options that `with_thinking` binds.
    options = {**hf_tokenizer.special_tokens_map, **getattr(tokenizer.apply_chat_template, "keywords", {})}
    tool_list = None if tools is None else list(tools)
    # Its annotation is str, but with the mask it returns the texts, and the positions of the blocks in each.
    rendered = render_jinja_template(
        [[dict(message) for message in messages]],
        tools=tool_list,
        chat_template=hf_tokenizer.get_chat_template(None, tool_list),
        return_assistant_tokens_mask=True,
        **options,
    )
    texts, blocks = cast(tuple[list[str], list[list[tuple[int, int]]]], rendered)
    return texts[0], blocks[0]


def with_first_token(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Prepend the first token of a sequence to the ids of raw text, if the tokenizer adds one and it is not there."""
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or tokens[:1] == [first] or tokenizer.encode("", add_special_tokens=True)[:1] != [first]:
        return tokens
    return [first, *tokens]


def with_end_token(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Append the end token to the ids of raw text, unless it is there."""
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
    """Return a pattern of the special tokens, longest first, and their texts by id. None: there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = {number: str(token.content) for number, token in added if token.special}
    if not special:
        return None, {}
    return re.compile("|".join(map(re.escape, sorted(special.values(), key=len, reverse=True)))), special


def load_tokenizer(config: Config) -> Tokenizer:
    """Load the policy's tokenizer. Raises: DataError: the model folder has none, or the template file is missing."""
    if not config.explorer.rollout_model.traits.has_model:
        return ByteTokenizer()
    path = config.model.model_path
    try:
        tokenizer = read_tokenizer(path, config.model.trust_remote_code)
    except ImportError:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"model.model_path {path!r} has no usable tokenizer: {reason}") from error
    if (template := configured_template(config)) is not None:
        tokenizer.chat_template = template
    return with_thinking(tokenizer, config.model.enable_thinking)


def configured_template(config: Config) -> str | None:
    """Chat template that replaces the tokenizer's; None: no replacement. Raises: DataError: its file is missing."""
    if config.model.custom_chat_template is not None or config.model.chat_template_path is None:
        return config.model.custom_chat_template
    file = Path(config.model.chat_template_path)
    if not file.is_file():
        raise DataError(f"model.chat_template_path {str(file)!r} does not exist")
    return file.read_text()


def read_tokenizer(model: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model folder or a Hub model with transformers.

    A tokenizer needs no torch, but finding its class imports torch and takes two seconds. So a process that can fork
    delegates this to the zygote that has torch. Raises: OSError, ValueError: there is no tokenizer.
    """
    return call(_read_tokenizer, local_model(model), trust_remote_code, needs=[MODELS])


def _read_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # late: see above

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def with_thinking(tokenizer: Any, enable: bool | None) -> Tokenizer:
    """Set `enable_thinking` for every chat that a transformers tokenizer renders; None: the template's default."""
    if enable is not None:
        render = partial(tokenizer.apply_chat_template, enable_thinking=enable)
        setattr(tokenizer, "apply_chat_template", render)  # noqa: B010 -- mypy forbids assigning to a method
    return cast(Tokenizer, tokenizer)
