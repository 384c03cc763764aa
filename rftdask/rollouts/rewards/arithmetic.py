"""Exact arithmetic over integers and + - * / ( ) in bounded time, for untrusted text."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

MAX_LENGTH = 200
"""Characters of an expression; also bounds the digits of intermediate results and the recursion."""
_MAX_SIGNS = 20
"""Nesting of minus signs."""
_OTHER = re.compile(r"[^-+*/()0-9 \t\n]")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class ExpressionError(ValueError):
    """The text is not an expression, is too large, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of `text` and its integers from left to right. Raises: ExpressionError."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"expression of {len(text)} characters; at most {MAX_LENGTH}")
    if other := _OTHER.search(text.strip()):
        raise ExpressionError(f"unexpected {other[0]!r}")
    integers: list[int] = []

    def value(node: ast.expr, num_signs: int = 0) -> Fraction:
        match node:
            case ast.Constant(value=int(integer)):
                integers.append(integer)
                return Fraction(integer)
            case ast.UnaryOp(op=ast.USub(), operand=operand) if num_signs < _MAX_SIGNS:
                return -value(operand, num_signs + 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                result: Fraction = _OPERATIONS[type(op)](value(left, num_signs), value(right, num_signs))
                return result
        raise ExpressionError("only integers, + - * / and parentheses are allowed")

    # Python parses the text but does not evaluate it, because the policy wrote it. It refuses line breaks and 007.
    source = re.sub(r"\b0+(?=[0-9])", "", " ".join(text.split()))
    try:
        return value(ast.parse(source, mode="eval").body), integers
    except SyntaxError as error:
        raise ExpressionError(f"not an expression: {error.msg}") from None
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
