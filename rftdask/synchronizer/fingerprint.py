"""Fingerprint: logprobs of a few fixed token sequences, by which an engine proves which weights it serves.

Checksums verify files; a fingerprint verifies what an engine loaded from them. The trainer publishes one with each
version, and an engine that does not reproduce it must not serve the version. It knows neither models nor storage.

Limit: differences below the tolerance are not detected. In float32 it detects a logprob that moves by 0.001; in
bfloat16, a missing layer or the output head of other weights; in 8 bits, only the latter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_SEQUENCES = 4
SEQUENCE_LENGTH = 16
"""Tokens per sequence: few enough for any model, at a negligible cost compared to a training step."""

TOLERANCES = {
    # Two float32 implementations of one model differ by 1e-6 (thousands of weights) to 1e-4 (billions).
    "float32": (1e-3, 2e-4),
    "bfloat16": (1.0, 0.15),  # logits near 20 are rounded to 0.06
    "float16": (0.3, 0.05),
    "fp8": (5.0, 1.5),
}
"""Data type -> (largest, largest mean) absolute difference of logprobs, in nats.

Measured with benchmarks/tolerances.py against float32 on a 28-layer Qwen3 with random weights and a logit spread of 3,
worst of three draws: float16 0.04 and 0.011; bfloat16 0.36 and 0.085; 8-bit weights and inputs (e4m3) scaled per
tensor, block or channel 2.2 to 3.8 and 0.78 to 0.81. Another output head gave at least 8.2 and 3.0, one missing layer
at least 1.6 and 0.39, so 8 bits detect only the former.
"""


@dataclass(frozen=True)
class Fingerprint:
    """Example: Fingerprint(sequences=((3, 1, 4),), logprobs=((-2.5, -0.1),), dtype="float32")"""

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Logprob of every token but the first, given the tokens before it, at temperature 1."""
    dtype: str
    """Data type of the trainer's matrix products. Sums and softmax are float32."""

    @property
    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(first token, the others) of each sequence, as `Engine.logprobs` takes them."""
        # The first token has no context, so it has no logprob.
        return [(sequence[:1], sequence[1:]) for sequence in self.sequences]

    def problem(self, measured: Sequence[Sequence[float]], dtype: str) -> str:
        """Describe how `measured`, from an engine that computes in `dtype`, differs beyond rounding; "" if it does not.

        The tolerance is that of the coarser data type.
        """
        if [len(row) for row in measured] != [len(row) for row in self.logprobs]:
            return f"got {[len(row) for row in measured]} logprobs, expected {[len(row) for row in self.logprobs]}"
        # Pairs compare by their first number. An unknown data type counts as the coarsest.
        max_gap, max_mean = max(TOLERANCES.get(name, TOLERANCES["fp8"]) for name in (self.dtype, dtype))
        gaps = [
            abs(ours - theirs)
            for row, measured_row in zip(self.logprobs, measured, strict=True)
            for ours, theirs in zip(row, measured_row, strict=True)
        ]
        largest, mean = max(gaps), sum(gaps) / len(gaps)
        # NaN is neither larger nor smaller, so `max` may miss it.
        if all(map(math.isfinite, gaps)) and largest <= max_gap and mean <= max_mean:
            return ""
        return (
            f"logprobs differ by up to {largest:.2g} and by {mean:.2g} on average; {dtype} allows "
            f"{max_gap:g} and {max_mean:g}"
        )


def fixed_sequences(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Sequences for a vocabulary: the same on every machine, spread over all token ids."""
    # Not a library's generator, which may change between versions; every version must draw the same tokens.
    state, sequences = 1, []
    for _ in range(NUM_SEQUENCES):
        sequence = []
        for _ in range(SEQUENCE_LENGTH):
            state = state * 6364136223846793005 + 1442695040888963407 & 2**64 - 1  # the generator of Knuth's MMIX
            sequence.append((state >> 33) % vocab_size)
        sequences.append(tuple(sequence))
    return tuple(sequences)
