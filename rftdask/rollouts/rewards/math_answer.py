r"""Math rewards: find the final answer in a response and compare it with the true one.

The final answer is, in this order: the last \boxed{...}; the rest of the line after the last "####"; what follows the
last "answer is" or "answer:"; the last number. Answers are equal when their normalized texts or their numbers are.
Numbers are integers, decimals and fractions, with thousands separators, currency, percent sign, unit words or "x ="
around them. Of whatever else math-verify is asked (math_verifier.py), so that "x+1" is "1+x"; but not of two integers,
nor of words.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rftdask.data.task import Task, final_answer
from rftdask.rollouts.rewards.math_verifier import is_equal
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.rewards.text import FORMAT_REWARD, starts_with_thought
from rftdask.rollouts.workflows.base import Reward

_MAX_LENGTH = 400
"""Characters of an answer that are looked at; bounds the work on runaway text."""
_MAX_VERIFIED_LENGTH = 20_000
"""Characters of a response that math-verify looks at, from its end: the answer is there."""
_MAX_BOXES = 8
"""Opened boxes that are tried from the end before the search is given up."""
_TOLERANCE = Fraction(1, 10**6)
"""Relative tolerance of two numbers neither of which is an integer: who writes a decimal has rounded it."""

_PHRASE = re.compile(r"\banswer(?: is|:| =)[\s:*]{0,10}([^\n]+)", re.IGNORECASE)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?<![\w.])(?:{_DIGITS})")
_SIGNED = re.compile(rf"[-+]?(?:{_DIGITS})")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-]+[A-Za-z]+)*")
"""As mathematics "on" would be o times n, and so "no"."""
_RATIO = re.compile(r"([-+]?)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+)\s*/\s*([0-9]+))")
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
    """1 if the final answer of the response equals the truth, else 0. Metric: accuracy."""
    correct = float(is_right(response, truth))
    return Reward(correct, {"accuracy": correct})


@reward("math_boxed_reward", in_thread=True)
def math_boxed_reward(
    response: str, truth: str, task: Task, with_think: bool = False, format_score_coef: float = FORMAT_REWARD
) -> Reward:
    r"""1 if the last \boxed{...} equals the truth, else 0; with `with_think`, minus `format_score_coef` if the response
    does not begin with one <think>...</think>. Metrics: accuracy, format_score.
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
    **_of_the_workflow: object,
) -> Reward:
    """1 if the final answer equals the truth, else -1; with `enable_overlong_penalty` plus `overlong_penalty`, which
    grows as a response nears its longest length.
    Metrics: accuracy, 1 or 0; format_score, the penalty.

    Args: num_tokens: of the response, given by the workflow; the others are `reward_fn_args`.
    Raises: ValueError: lengths that do not go together.
    Source: DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment) and section 2.4.
    """
    correct = is_right(response, truth)
    penalty = 0.0
    if enable_overlong_penalty:
        penalty = overlong_penalty(num_tokens, max_response_length, cache_length, penalty_factor)
    return Reward((1.0 if correct else -1.0) + penalty, {"accuracy": float(correct), "format_score": penalty})


def overlong_penalty(num_tokens: int, max_length: int, cache_length: int, factor: float) -> float:
    """0 up to max_length - cache_length tokens, then falling in a line to -factor at max_length, and -factor beyond."""
    if not 0 < cache_length < max_length:
        raise ValueError(
            f"math_dapo_reward: 0 < cache_length {cache_length} < max_response_length {max_length} must hold "
            "(reward_fn_args, with enable_overlong_penalty)"
        )
    over = num_tokens - (max_length - cache_length)
    return -factor * min(max(over / cache_length, 0.0), 1.0)


math_dapo_reward.needs_num_tokens = True  # type: ignore[attr-defined]


@reward("accuracy_reward", in_thread=True)
def accuracy_reward(response: str, truth: str, task: Task) -> Reward:
    """1 if math-verify alone finds an answer in the response that equals the truth, else 0. Metric: accuracy.

    Raises: ValueError: the truth is no mathematics.
    """
    correct = is_equal(response[-_MAX_VERIFIED_LENGTH:], truth if "\\boxed" in truth or "$" in truth else f"${truth}$")
    if correct is None:
        raise ValueError(f"task {task.group_id}: the truth {truth!r:.100} is no mathematics; use exact_reward")
    return Reward(float(correct), {"accuracy": float(correct)})


def is_right(response: str, truth: str) -> bool:
    """True if the final answer of a response equals the truth. It may wait for math-verify."""
    true_answer = _true_answer(truth)
    text = _normalize(true_answer)
    if _marked_answer(response) is None and text and _number(text) is None and not _WORDS.fullmatch(text):
        # The last number may be a part of the answer, as the 1 of "we get $x+1$".
        return bool(is_equal(response[-_MAX_VERIFIED_LENGTH:], _boxed(true_answer)))
    return same_answer(extract_answer(response), truth)


def extract_answer(response: str) -> str:
    """The final answer of a response; "" if it has none."""
    marked = _marked_answer(response)
    if marked is not None:
        return marked
    last = ""
    for match in _NUMBER.finditer(response):
        # A minus sign belongs to the number; one between two numbers, as in 5-3, is taken for a sign too.
        last = response[match.start() - 1 : match.end()] if response[: match.start()].endswith("-") else match.group()
    return last


def same_answer(answer: str, truth: str) -> bool:
    """True if two answers are equal as normalized texts, as numbers, or to math-verify, for which it may wait. An empty
    answer equals nothing.
    """
    true_answer = _true_answer(truth)
    left, right = _normalize(answer), _normalize(true_answer)
    if not left or not right:
        return False
    # First as texts: equal expressions need not be numbers.
    if left.replace(" ", "") == right.replace(" ", ""):
        return True
    left_number, right_number = _number(left), _number(right)
    if left_number is not None and right_number is not None:
        # An integer is exact: 0.999999 is not 1.
        if left_number.denominator == 1 or right_number.denominator == 1:
            equal = left_number == right_number
        else:
            equal = abs(left_number - right_number) <= _TOLERANCE
        if equal:
            return True
    integers = _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right)
    if integers or _WORDS.fullmatch(left) or _WORDS.fullmatch(right):
        return False
    return bool(is_equal(_boxed(answer), _boxed(true_answer)))


def _true_answer(truth: str) -> str:
    # The truth may be a whole solution, as in MATH, or a worked one that ends in "#### 72", as in GSM8K.
    boxed = _last_boxed(truth)
    return final_answer(truth) if boxed is None else boxed


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer[:_MAX_LENGTH].strip().strip('$')}}}"


def _marked_answer(response: str) -> str | None:
    """What is said to be the final answer; None: nothing is."""
    boxed = _last_boxed(response)
    if boxed is not None:
        return boxed
    _, mark, rest = response.rpartition("####")
    if mark and rest.strip():
        return rest.lstrip().split("\n", 1)[0].strip()
    phrases = _PHRASE.findall(response)
    if phrases:
        return re.split(r"\.(?:\s|$)", phrases[-1][:_MAX_LENGTH], maxsplit=1)[0].strip()
    return None


def _last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{...} whose braces close; None if there is none."""
    end = len(text)
    for _ in range(_MAX_BOXES):
        start = text.rfind("\\boxed{", 0, end)
        if start < 0:
            return None
        depth = 0
        body = start + len("\\boxed{")
        # Braces are counted, because \frac{1}{2} is inside; no pattern can do that.
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


def _number(text: str) -> Fraction | None:
    # The number a normalized answer stands for; None if it is not one number.
    text = text.rpartition("=")[2].strip()
    if _SIGNED.fullmatch(text):
        return Fraction(text.replace(",", ""))
    ratio = _RATIO.fullmatch(text)
    if ratio:
        top, bottom = int(ratio[2] or ratio[4]), int(ratio[3] or ratio[5])
        return None if bottom == 0 else Fraction(-top if ratio[1] == "-" else top, bottom)
    # 18 of "18 dollars" and of "She earns 18 a day"; none of "2x", "3 or 4" and "2^3".
    matches = list(_NUMBER.finditer(text))
    # Of two numbers nobody can say which one is the answer.
    if len(matches) != 1:
        return None
    before, after = text[: matches[0].start()], text[matches[0].end() :]
    if not (_WORDS_BEFORE.fullmatch(before) and _WORDS_AFTER.fullmatch(after)):
        return None
    value = Fraction(matches[0].group().replace(",", ""))
    return -value if before.endswith("-") else value
