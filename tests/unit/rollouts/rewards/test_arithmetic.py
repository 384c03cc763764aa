"""Promises of the arithmetic parser: exact values, and refusal of other text in bounded time."""

import contextlib
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.rollouts.rewards.arithmetic import MAX_LENGTH, ExpressionError, evaluate

Built = tuple[str, Fraction, list[int], int]
"""Text, value, integers and precedence (0 sum, 1 product, 2 atom) of an expression made part by part."""


def _atom(number: int) -> Built:
    return str(number), Fraction(number), [number], 2


def _join(parts: tuple[Built, str, Built, str]) -> Built:
    (left, left_value, left_numbers, left_rank), operator, after, space = parts
    right, right_value, right_numbers, right_rank = after
    rank = 0 if operator in "+-" else 1
    if operator == "/" and right_value == 0:
        operator = "*"
    left = left if left_rank >= rank else f"({left})"
    right = right if right_rank > rank else f"({right})"  # equal rank too: operators bind to the left
    calculate = {"+": add, "-": sub, "*": mul, "/": truediv}[operator]
    value = calculate(left_value, right_value)
    return f"{left}{space}{operator}{space}{right}", value, left_numbers + right_numbers, rank


def _wrap(parts: tuple[Built, bool]) -> Built:
    (text, value, numbers, rank), negate = parts
    if negate:
        return f"-{text}" if rank == 2 else f"-({text})", -value, numbers, 2
    return f"({text})", value, numbers, 2


expressions = st.recursive(
    st.integers(0, 10**6).map(_atom),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner, st.sampled_from(["", " "])).map(_join),
        st.tuples(inner, st.booleans()).map(_wrap),
    ),
    max_leaves=10,
).filter(lambda built: len(built[0]) <= MAX_LENGTH)


@given(expressions)
def test_expression_has_exact_value_and_integers(built: Built) -> None:
    text, value, numbers, _ = built
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8-3-2", 3), ("8/2/2", 2), ("2+3*4", 14), ("(2+3)*4", 20), ("-2*-3", 6), ("1/3", Fraction(1, 3)), (" 7 \n", 7)],
)
def test_operators_bind_as_usual(text: str, value: Fraction) -> None:
    assert evaluate(text)[0] == value


OTHER_TEXT = [
    *("", "1 2", "__import__('os').system('true')", "9" * (MAX_LENGTH + 1), "(" * MAX_LENGTH),
    *("(" * 100 + "1" + ")" * 100, "-" * 100 + "1", "9**9**9", "95**67**81", "2//1", "1e9", "nan", "inf", "1.5"),
    *("0x10", "1_000", "1+", "(1", "1)", "()", "1/0", "1/(2-2)", "+1", "1;2", "1=1"),
    "\u0661\u0662",  # Arabic digits
    "\uff11+\uff11",  # full-width digits
    "\u00b2",  # a superscript, isdigit() but not an int
]


@pytest.mark.parametrize("text", OTHER_TEXT)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


@given(st.text(max_size=300))
def test_any_text_is_evaluated_or_refused(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        evaluate(text)


def test_largest_expression_is_fast() -> None:
    value, _ = evaluate("9" * 99 + "*" + "9" * 100)
    assert value == (10**99 - 1) * (10**100 - 1)
