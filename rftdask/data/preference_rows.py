"""Pairs: rows of a preference dataset as two sequences each, the better response first. It knows no storage and no
batches. Invariant: reading n rows gives 2 n sequences, those of a row next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rftdask.data.datasets import Dataset
from rftdask.data.sft_rows import Row, SupervisedFormat, SupervisedRows, Tokenizer


class PairRows:
    """Tokenizes rows of {prompt, chosen, rejected} on demand.

    Example: PairRows(dataset, tokenizer, fmt, "chosen", "rejected").read([3]) gives [chosen row, rejected row]
    """

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, fmt: SupervisedFormat, chosen_key: str, rejected_key: str
    ) -> None:
        """`fmt` says how prompt and response are joined. Raises: DataError: a column is missing."""
        # The whole chat of a row would leave no place for a second response: prompt and responses have columns.
        self._sides = [
            SupervisedRows(dataset, tokenizer, replace(fmt, messages_key="", response_key=key))
            for key in (chosen_key, rejected_key)
        ]

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Two sequences of each of these rows. Raises: DataError: a row has no text where the format says so."""
        return [row for number in numbers for side in self._sides for row in side.read([number])]
