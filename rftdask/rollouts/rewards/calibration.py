"""Reward of an answer with a stated confidence (RLCR).

Source: "Beyond Binary Rewards: Training LMs to Reason About Their Uncertainty", arXiv:2507.16806: correctness plus the
Brier score of the confidence. The Brier score is proper, so honest confidence is optimal. Parts, weights and form are
those of Trinity-RFT's rlcr_reward (main branch; 0.6.0 has none).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise

from rftdask.data.task import Task
from rftdask.rollouts.rewards.math_answer import is_right
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.workflows.base import Reward

WEIGHTS = {"format": 0.5, "accuracy": 0.5, "brier": 0.5, "mean_confidence": 1e-5, "confidence_one_or_zero": 1e-5}
"""Weights of the parts. The last two are too small to be learned; their metrics show the policy's confidence."""
_PARTS = ("think", "answer", "analysis", "confidence")
_TAG = re.compile(r"<(/?)(think|answer|analysis|confidence)>")
_NUMBER = re.compile(r"\s*(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?\s*")


@reward("rlcr_reward", in_thread=True)
def rlcr_reward(response: str, truth: str, task: Task, weights: Mapping[str, float] | None = None) -> Reward:
    """Sum of weighted parts, which are also metrics:

    - `format`: 1 if the response ends with
      <think>...</think><answer>...</answer><analysis>...</analysis><confidence>p</confidence>
    - `accuracy` of the answer, and `brier`, 1 - (accuracy - p)^2; both 0 without that form
    - `mean_confidence`: p; `confidence_one_or_zero`: 1 if p is below 0.01 or above 0.99

    Without a confidence from 0 to 1 all parts are 0.
    Raises: ValueError: weights are not a finite number for each part.
    """
    weights = WEIGHTS if weights is None else weights
    is_number = all(isinstance(weights.get(name), int | float) and math.isfinite(weights[name]) for name in WEIGHTS)
    if set(weights) != set(WEIGHTS) or not is_number:
        names = ", ".join(WEIGHTS)
        raise ValueError(f"reward_fn_args.weights {dict(weights)} needs a finite number for each of {names}")
    parts = dict.fromkeys(WEIGHTS, 0.0)
    sure = confidence(response)
    if sure is not None:
        parts["mean_confidence"] = sure
        parts["confidence_one_or_zero"] = float(sure < 0.01 or sure > 0.99)
        answer = ending_answer(response)
        if answer is not None:
            parts["format"] = 1.0
            # Without a truth, neither the answer nor a low confidence earns anything.
            if truth:
                correct = float(is_right(answer, truth))
                parts["accuracy"], parts["brier"] = correct, 1.0 - (correct - sure) ** 2
    weighted = {name: weights[name] * value for name, value in parts.items()}
    return Reward(sum(weighted.values()), weighted)


def confidence(response: str) -> float | None:
    """Return the number in the last <confidence>; None: it is not closed, or not a number from 0 to 1."""
    text, closed, _ = response[response.rfind("<confidence>") :].partition("</confidence>")
    text = text.removeprefix("<confidence>") if closed and text.startswith("<confidence>") else ""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if 0.0 <= value <= 1.0 else None


def ending_answer(response: str) -> str | None:
    """The answer in the four parts that end a response; None: it does not end with them, or a tag is unclosed or
    nested.
    """
    tags = list(_TAG.finditer(response))
    opened, closed = tags[::2], tags[1::2]
    pairs = list(zip(opened, closed, strict=False))
    if len(opened) != len(closed) or any(begin[1] or not end[1] or begin[2] != end[2] for begin, end in pairs):
        return None
    last = pairs[-len(_PARTS) :]
    if tuple(begin[2] for begin, _ in last) != _PARTS or response[last[-1][1].end() :].strip():
        return None
    between = (response[a[1].end() : b[0].start()] for a, b in pairwise(last))
    return None if any(text.strip() for text in between) else response[last[1][0].end() : last[1][1].start()]
