"""Tokenizer: what the package uses of one, and the policy's own with the chat template the configuration gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rftdask.config import Config
from rftdask.errors import DataError
from rftdask.models.hub import local_model


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that the package uses."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence; None: there is none."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """The text of token ids."""

    def apply_chat_template(self, messages: Any, /, **options: Any) -> Any:
        """A chat as the policy reads it: text, or token ids with `tokenize=True`."""


class ByteTokenizer:
    """The tokenizer of an engine without a model: one token per byte, a message a line."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")

    def apply_chat_template(self, messages: Any, /, **options: Any) -> str:
        return "\n".join(str(message["content"]) for message in messages)


def load_tokenizer(config: Config) -> Tokenizer:
    """Load the policy's tokenizer. Raises: DataError: the model folder has none, or the template file is not there."""
    if not config.explorer.rollout_model.traits.has_model:
        return ByteTokenizer()
    from transformers import AutoTokenizer  # late: importing transformers takes most of a second

    path = config.model.model_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(local_model(path), trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(f"model.model_path {path!r} gives no tokenizer: {error}".splitlines()[0]) from error
    if config.model.custom_chat_template is not None:
        tokenizer.chat_template = config.model.custom_chat_template
    elif config.model.chat_template_path is not None:
        file = Path(config.model.chat_template_path)
        if not file.is_file():
            raise DataError(f"model.chat_template_path {str(file)!r} does not exist")
        tokenizer.chat_template = file.read_text()
    return cast(Tokenizer, tokenizer)
