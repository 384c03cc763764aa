"""Exact arithmetic over integers and + - * / ( ) in bounded time, for untrusted text.

expression := term (("+" | "-") term)*
term       := factor (("*" | "/") factor)*
factor     := integer | "-" factor | "(" expression ")"
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 200
"""Characters of an expression; also bounds the digits of intermediate results."""
MAX_DEPTH = 20
"""Nesting of parentheses and signs; bounds the recursion."""

_TOKEN = re.compile(r"[ \t\n]*([0-9]+|[-+*/()])")


class ExpressionError(ValueError):
    """The text is not an expression of this grammar, is too large, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of `text` and its integers from left to right. Raises: ExpressionError."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"expression of {len(text)} characters; at most {MAX_LENGTH}")
    # Not eval(), because the policy wrote the text.
    parser = _Parser(_tokens(text.strip()))
    value = parser.expression(0)
    if parser.peek():
        raise ExpressionError(f"unexpected {parser.peek()!r}")
    return value, parser.integers


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position : position + 1]!r}")
        tokens.append(match.group(1))
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self.integers: list[int] = []

    def peek(self) -> str:
        """Return the next token; "" at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.peek()
        self._next += 1
        return token

    def expression(self, depth: int) -> Fraction:
        """Parse terms, added and subtracted from left to right."""
        value = self._term(depth)
        while self.peek() in ("+", "-"):
            value = value + self._term(depth) if self._take() == "+" else value - self._term(depth)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.peek() in ("*", "/"):
            times = self._take() == "*"
            operand = self._factor(depth)
            if not times and operand == 0:
                raise ExpressionError("division by zero")
            # Fractions are exact: 1/3*3 is 1.
            value = value * operand if times else value / operand
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"deeper than {MAX_DEPTH}")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.expression(depth + 1)
            if self._take() != ")":
                raise ExpressionError("missing ')'")
            return value
        if not token.isdigit():  # tokens hold ASCII digits only
            raise ExpressionError(f"unexpected {token!r}" if token else "unexpected end")
        self.integers.append(int(token))
        return Fraction(int(token))
