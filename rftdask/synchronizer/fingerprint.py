"""Fingerprint: what weights say of a few fixed token sequences, by which an engine proves that it serves them.

Checksums prove the files; a fingerprint proves what an engine made of them. The trainer publishes it with each version,
and an engine that does not reproduce it must not serve the version. It knows neither models nor storage. Limit: weights
that differ by less than the tolerance are the same to it. In float32 it sees what moves a logprob by 0.001; in
bfloat16, whose rounding is coarser, damage such as other weights' output head or a missing layer; in 8 bits the former.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUM_SEQUENCES = 4
SEQUENCE_LENGTH = 16
"""Tokens of each: few enough for any model, and a forward pass that costs nothing beside a training step."""


TOLERANCES = {
    # Two float32 implementations of one model differ by 1e-6 (thousands of weights) to 1e-4 (billions).
    "float32": (1e-3, 2e-4),
    "bfloat16": (1.0, 0.15),  # logits near 20 are rounded to 0.06
    "float16": (0.3, 0.05),
    "fp8": (5.0, 1.5),
}
"""By data type, the largest and the largest mean absolute difference of logprobs, in nats.

Measured by benchmarks/tolerances.py against float32 on a Qwen3 of 28 layers with random weights and logits of a spread
of 3, the worst of three draws: float16 0.04 and 0.011, bfloat16 0.36 and 0.085, weights and inputs of 8 bits (e4m3)
with a scale for each tensor, block or channel 2.2 to 3.8 and 0.78 to 0.81. There another output head was 8.2 and 3.0 at
the least, a layer less 1.6 and 0.39: in 8 bits only the former is seen.
"""


@dataclass(frozen=True)
class Fingerprint:
    """Example: Fingerprint(sequences=((3, 1, 4),), logprobs=((-2.5, -0.1),), dtype="float32")"""

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Of every token but the first, given those before it; temperature 1."""
    dtype: str
    """In which the trainer multiplied; sums and softmax are float32."""

    @property
    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(first token, the others) of each sequence, as `Engine.logprobs` takes them."""
        # The first token has nothing before it, so it has no logprob.
        return [(sequence[:1], sequence[1:]) for sequence in self.sequences]

    def problem(self, measured: Sequence[Sequence[float]], dtype: str) -> str:
        """How `measured`, by an engine that computes in `dtype`, differs from these logprobs; "" if only by rounding.

        The coarser of both data types decides.
        """
        if [len(row) for row in measured] != [len(row) for row in self.logprobs]:
            return f"{[len(row) for row in measured]} logprobs, not {[len(row) for row in self.logprobs]}"
        # Pairs compare by their first number; an unknown data type counts as the coarsest.
        max_gap, max_mean = max(TOLERANCES.get(name, TOLERANCES["fp8"]) for name in (self.dtype, dtype))
        # In nats, token by token.
        gaps = [
            abs(own - other)
            for row, others in zip(self.logprobs, measured, strict=True)
            for own, other in zip(row, others, strict=True)
        ]
        largest, mean = max(gaps), sum(gaps) / len(gaps)
        # NaN compares as neither larger nor smaller, so `max` may overlook it.
        if all(map(math.isfinite, gaps)) and largest <= max_gap and mean <= max_mean:
            return ""
        return (
            f"logprobs differ by up to {largest:.2g}, {mean:.2g} in the mean; allowed in {dtype} are "
            f"{max_gap:g} and {max_mean:g}"
        )

    @classmethod
    def from_plain(cls, tree: Mapping[str, Any]) -> Fingerprint:
        """From what JSON makes of `dataclasses.asdict`. Raises: KeyError, TypeError, ValueError: it is none."""
        return cls(
            tuple(tuple(int(token) for token in sequence) for sequence in tree["sequences"]),
            tuple(tuple(float(value) for value in row) for row in tree["logprobs"]),
            str(tree["dtype"]),
        )


def fixed_sequences(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The sequences for a vocabulary: the same on every machine, spread over all of it."""
    # A generator of our own: those of libraries may change with their versions, and every version must draw the same.
    state, sequences = 1, []
    for _ in range(NUM_SEQUENCES):
        sequence = []
        for _ in range(SEQUENCE_LENGTH):
            state = state * 6364136223846793005 + 1442695040888963407 & 2**64 - 1  # the generator of Knuth's MMIX
            sequence.append((state >> 33) % vocab_size)
        sequences.append(tuple(sequence))
    return tuple(sequences)
