r"""Math rewards: find the final answer of a response and compare it with the true one.

The final answer is, in this order: the last \boxed{...}; the rest of the line after the last "####"; the text after the
last "answer is" or "answer:"; the last number. Two answers are equal if their normalized texts are, or if the package
math-verify finds them equal, so that "x+1" is "1+x".

math-verify runs sympy on text of the policy, which may take any time and memory, and can only be interrupted on a main
thread. Each process therefore has one child for it, which is started on first use, limits the processor time and memory
of each comparison, and is replaced when it dies.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import math
import os
import re
import resource
import signal
import threading
from collections.abc import Mapping
from itertools import pairwise
from types import FrameType
from typing import Any

import psutil

from rftdask.data.task import Task, final_answer
from rftdask.errors import ProcessLostError, WaitTimeout
from rftdask.processes.child import Channel, Child
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.rewards.text import FORMAT_REWARD, starts_with_thought
from rftdask.rollouts.workflows.base import Reward

_MAX_LENGTH = 400
"""Characters of an answer that are read; bounds the work on very long text."""
_MAX_VERIFIED_LENGTH = 20_000
"""Characters at the end of a response that math-verify reads."""
_MAX_BOXES = 8
"""Boxes that are tried, from the end, before the search is given up."""
_PHRASE = re.compile(r"\banswer(?: is|:| =)[\s:*]{0,10}([^\n]+)", re.IGNORECASE)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?<![\w.])(?:{_DIGITS})")
_SIGNED = re.compile(rf"[-+]?(?:{_DIGITS})")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-]+[A-Za-z]+)*")
"""Words, which mathematics would read as products: "on" as o times n, equal to "no"."""
_RATIO = re.compile(r"[-+]?\s*(?:\\frac\{[0-9]+\}\{[0-9]+\}|[0-9]+\s*/\s*[0-9]+)")
_WORDS_BEFORE = re.compile(r"(?:[A-Za-z ,.:;!?'\"()]*[ (:])?-?")
_WORDS_AFTER = re.compile(r"(?:[ .,:;!?)][A-Za-z ,.:;!?'\"()]*)?")
_LATEX = (
    (re.compile(r"\\(?:left|right|displaystyle|!|,|;|\(|\)|\[|\])|\^\{?\\circ\}?|\*\*"), ""),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\?[$%]"), ""),
    (re.compile("[\u2212\u2013]"), "-"),  # minus sign and en dash
    (re.compile(r"\s+"), " "),
)


@reward("math_reward", in_thread=True)
def math_reward(response: str, truth: str, task: Task) -> Reward:
    """Return 1 if the final answer of the response equals the truth, else 0. Metric: accuracy."""
    correct = float(is_right(response, truth))
    return Reward(correct, {"accuracy": correct})


@reward("math_boxed_reward", in_thread=True)
def math_boxed_reward(
    response: str, truth: str, task: Task, with_think: bool = False, format_score_coef: float = FORMAT_REWARD
) -> Reward:
    r"""1 if the last \boxed{...} equals the truth, else 0; with `with_think`, minus `format_score_coef` unless the
    response begins with one <think>...</think>. Metrics: accuracy, format_score.
    """
    correct = float(same_answer(_last_boxed(response) or "", truth))
    format_score = -format_score_coef if with_think and not starts_with_thought(response) else 0.0
    return Reward(correct + format_score, {"accuracy": correct, "format_score": format_score})


@reward("math_dapo_reward", in_thread=True)
def math_dapo_reward(
    response: str,
    truth: str,
    task: Task,
    *,
    num_tokens: int,
    enable_overlong_penalty: bool = False,
    penalty_factor: float = 1.0,
    max_response_length: int = 0,
    cache_length: int = 0,
    **_workflow_options: object,
) -> Reward:
    """Return 1 if the final answer equals the truth, else -1; with `enable_overlong_penalty` plus `overlong_penalty`.
    Metrics: accuracy, 1 or 0; format_score, the penalty.

    Args: num_tokens: length of the response, given by the workflow; the others are `reward_fn_args`.
    Raises: ValueError: inconsistent lengths.
    Source: DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment) and section 2.4.
    """
    correct = is_right(response, truth)
    penalty = 0.0
    if enable_overlong_penalty:
        penalty = overlong_penalty(num_tokens, max_response_length, cache_length, penalty_factor)
    return Reward((1.0 if correct else -1.0) + penalty, {"accuracy": float(correct), "format_score": penalty})


math_dapo_reward.needs_num_tokens = True  # type: ignore[attr-defined]


def overlong_penalty(num_tokens: int, max_length: int, cache_length: int, factor: float) -> float:
    """0 up to max_length - cache_length tokens, then falling linearly to -factor at max_length, and -factor beyond."""
    if not 0 < cache_length < max_length:
        bounds = f"0 < cache_length {cache_length} < max_response_length {max_length} must hold"
        raise ValueError(f"math_dapo_reward: {bounds} (reward_fn_args, with enable_overlong_penalty)")
    over = num_tokens - (max_length - cache_length)
    return -factor * min(max(over / cache_length, 0.0), 1.0)


@reward("accuracy_reward", in_thread=True)
def accuracy_reward(response: str, truth: str, task: Task) -> Reward:
    """Return 1 if math-verify finds an answer in the response that equals the truth, else 0. Metric: accuracy.

    Raises: ValueError: the truth is not mathematics.
    """
    correct = is_equal(response[-_MAX_VERIFIED_LENGTH:], truth if "\\boxed" in truth or "$" in truth else f"${truth}$")
    if correct is None:
        raise ValueError(f"task {task.group_id}: the truth {truth!r:.100} is not mathematics; use exact_reward")
    return Reward(float(correct), {"accuracy": float(correct)})


def is_right(response: str, truth: str) -> bool:
    """Return True if the final answer of a response equals the truth. May wait for math-verify."""
    true_answer = _true_answer(truth)
    text = _normalize(true_answer)
    is_number = _single_number(text) is not None or _RATIO.fullmatch(text.rpartition("=")[2].strip())
    if _marked_answer(response) is None and text and not is_number and not _WORDS.fullmatch(text):
        # The last number may be only a part of the answer, as the 1 in "we get $x+1$".
        return bool(is_equal(response[-_MAX_VERIFIED_LENGTH:], _boxed(true_answer)))
    return same_answer(extract_answer(response), truth)


def extract_answer(response: str) -> str:
    """Return the final answer of a response; "": none."""
    if (marked := _marked_answer(response)) is not None:
        return marked
    last = ""
    for match in _NUMBER.finditer(response):
        # A minus before the number is taken as its sign, even in 5-3.
        last = response[match.start() - 1 : match.end()] if response[: match.start()].endswith("-") else match.group()
    return last


def same_answer(answer: str, truth: str) -> bool:
    """True if two answers are equal, for which it may wait for math-verify. An empty answer equals nothing."""
    true_answer = _true_answer(truth)
    left, right = _normalize(answer), _normalize(true_answer)
    if not left or not right:
        return False
    left_number, right_number = _single_number(left), _single_number(right)
    if (left_number or left.replace(" ", "")) == (right_number or right.replace(" ", "")):
        return True
    if left_number and right_number and _INTEGER.fullmatch(left_number) and _INTEGER.fullmatch(right_number):
        return int(left_number) == int(right_number)
    if _WORDS.fullmatch(left) or _WORDS.fullmatch(right):
        return False
    # Percent signs matter to math-verify; words around a number do not.
    left = left_number if left_number and "%" not in answer else answer
    right = right_number if right_number and "%" not in true_answer else true_answer
    return bool(is_equal(_boxed(left), _boxed(right)))


def _true_answer(truth: str) -> str:
    # The truth may be a whole solution, as in MATH, or end in "#### 72", as in GSM8K.
    boxed = _last_boxed(truth)
    return final_answer(truth) if boxed is None else boxed


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer[:_MAX_LENGTH].strip().strip('$')}}}"


def _marked_answer(response: str) -> str | None:
    """Return the answer that the response marks as final; None: none."""
    if (boxed := _last_boxed(response)) is not None:
        return boxed
    _, mark, rest = response.rpartition("####")
    if mark and rest.strip():
        return rest.lstrip().split("\n", 1)[0].strip()
    if phrases := _PHRASE.findall(response):
        return re.split(r"\.(?:\s|$)", phrases[-1][:_MAX_LENGTH], maxsplit=1)[0].strip()
    return None


def _last_boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...} whose braces close; None: none."""
    end = len(text)
    for _ in range(_MAX_BOXES):
        start = text.rfind("\\boxed{", 0, end)
        if start < 0:
            return None
        depth, body = 0, start + len("\\boxed{")
        # Nested braces, as in \frac{1}{2}, are beyond a regular expression.
        for position, character in enumerate(text[body : body + _MAX_LENGTH], start=body):
            depth += (character == "{") - (character == "}")
            if depth < 0:
                return text[body:position].strip()
        end = start
    return None


def _normalize(text: str) -> str:
    text = text[:_MAX_LENGTH]
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text.strip().removesuffix(".").strip()


def _single_number(text: str) -> str | None:
    # The number in a normalized answer of one number and words, without commas: 18 in "She earns 18 a day", and None in
    # "2x", "3 or 4" and "2^3".
    text = text.rpartition("=")[2].strip()
    if _SIGNED.fullmatch(text):
        return text.replace(",", "")
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    before, after = text[: matches[0].start()], text[matches[0].end() :]
    if not (_WORDS_BEFORE.fullmatch(before) and _WORDS_AFTER.fullmatch(after)):
        return None
    return "-" * before.endswith("-") + matches[0].group().replace(",", "")


# ---- an answer with a stated confidence

WEIGHTS = {"format": 0.5, "accuracy": 0.5, "brier": 0.5, "mean_confidence": 1e-5, "confidence_one_or_zero": 1e-5}
"""Weights of the parts. The last two are too small to be learned; their metrics show the policy's confidence."""
_PARTS = ("think", "answer", "analysis", "confidence")
_TAG = re.compile(r"<(/?)(think|answer|analysis|confidence)>")
_PROBABILITY = re.compile(r"\s*(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?\s*")


@reward("rlcr_reward", in_thread=True)
def rlcr_reward(response: str, truth: str, task: Task, weights: Mapping[str, float] | None = None) -> Reward:
    """Sum of weighted parts, which are also metrics:

    - `format`: 1 if the response ends with
      <think>...</think><answer>...</answer><analysis>...</analysis><confidence>p</confidence>
    - `accuracy` of the answer, and `brier`, 1 - (accuracy - p)^2; both 0 without that form
    - `mean_confidence`: p; `confidence_one_or_zero`: 1 if p is below 0.01 or above 0.99

    Without a confidence from 0 to 1 all parts are 0. Parts and weights are those of Trinity-RFT's rlcr_reward.
    Raises: ValueError: weights are not a finite number for each part.
    Source: RLCR, arXiv:2507.16806: the Brier score is proper, so honest confidence is optimal.
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
    value = float(text) if _PROBABILITY.fullmatch(text) else math.nan
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


# ---- math-verify in a child process

CPU_S = 5.0
"""Processor time of one comparison, so that the verdict does not depend on the load of the machine."""
_WAIT_S = 120.0
"""Timeout of one comparison, including the child's start and work that no signal interrupts."""
_MEMORY_BYTES = 2 << 30
"""Memory of a comparison beyond that of the idle child."""

log = logging.getLogger(__name__)


class _Verifier:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held during a comparison, because the child makes one at a time."""
        self._child: Child | None = None
        self._inherited: Child | None = None

    def is_equal(self, answer: str, truth: str) -> bool | None:
        """True if math-verify finds the same mathematics in both texts: LaTeX in a \\boxed{} or between dollars, or
        plain numbers. None: the truth has none. False, with a logged warning, if the comparison exceeds its limits.
        """
        with self._lock:
            # Twice, because a child may have died for another reason, such as the end of its session.
            for _ in range(2):
                if self._child is None:
                    self._child = Child(f"{__name__}:serve", {}, name="math-verifier", may_fork=False)
                try:
                    verdict, reason = self._child.request([answer, truth], _WAIT_S)
                    break
                except (ProcessLostError, WaitTimeout) as error:
                    verdict, reason = False, str(error)
                    self.close()
                except BaseException:
                    self.close()  # a verdict that was not received would be taken for the next one
                    raise
        if reason:
            log.warning("math-verify gave up, so the answer counts as wrong: %s: %.200r", reason, answer[-200:])
        return verdict if verdict is None else bool(verdict)

    def close(self) -> None:
        """End the child. Idempotent."""
        if self._child is not None:
            self._child.close(grace_s=0.0)
            self._child = None

    def forget(self) -> None:
        """Drop the child in a fork, as it belongs to the parent process. Its finalizer would remove its folder."""
        self._inherited, self._child, self._lock = self._child, None, threading.Lock()


_VERIFIER = _Verifier()
is_equal = _VERIFIER.is_equal
atexit.register(_VERIFIER.close)
os.register_at_fork(after_in_child=_VERIFIER.forget)


class _OutOfTimeError(BaseException):
    """Not an Exception, because math-verify catches those and continues."""


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """Run the child: reply to each [answer, truth] with [verdict (None: no mathematics), reason for giving up]."""
    math_verify = importlib.import_module("math_verify")
    # It warns about missing timeouts and about everything that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGPROF, out_of_time)
    for answer, truth in channel:
        # Counts all threads of this process. Repeated, in case something swallows the first signal.
        signal.setitimer(signal.ITIMER_PROF, CPU_S, 1.0)
        verdict: bool | None = False
        reason = ""
        try:
            gold = math_verify.parse(truth, parsing_timeout=None)
            parsed = math_verify.parse(answer, parsing_timeout=None)
            verdict = bool(math_verify.verify(gold, parsed, timeout_seconds=None)) if gold else None
        except _OutOfTimeError:
            reason = f"it used {CPU_S:.0f} s of processor time"
        except MemoryError:
            reason = f"it used {_MEMORY_BYTES >> 30} GB of memory"
        except RecursionError:
            reason = "the expression is nested too deeply"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        channel.send([verdict, reason])
