"""Text: rows of plain text to go on training on, every token of which is learned. It knows no storage, no batches."""

from __future__ import annotations

from collections.abc import Sequence

from rftdask.data.datasets import Dataset
from rftdask.data.sft_rows import Row, Tokenizer
from rftdask.errors import DataError


class TextRows:
    """Tokenizes rows of one text on demand; an end token follows, the first token is what the others are told from."""

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, text_key: str, max_tokens: int) -> None:
        """max_tokens: a longer text loses its end. Raises: DataError: there is no such column."""
        if text_key not in dataset.columns:
            raise DataError(
                f"the dataset has no column {text_key!r}; columns: {', '.join(dataset.columns)} (set format.prompt_key)"
            )
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._key = text_key
        self._max_tokens = max_tokens

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers. Raises: DataError: a row has no text, or too little to learn from."""
        return [self._tokenize(number) for number in numbers]

    def _tokenize(self, number: int) -> Row:
        text = self._dataset[number].get(self._key)
        if not isinstance(text, str):
            raise DataError(f"row {number}: column {self._key!r} holds {type(text).__name__}, text is needed")
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None:
            tokens = [*tokens, self._tokenizer.eos_token_id]
        tokens = tokens[: self._max_tokens]
        if len(tokens) < 2:
            raise DataError(f"row {number}: column {self._key!r} has {len(tokens)} tokens; two are the least")
        return tokens, 1, None
