"""Words for mistakes: a value, what is wrong with it, what is allowed. Shows no secrets and no long values.

Knows pydantic's error types and nothing of the schema's keys.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rftdask.storage.safe_text import mask

_LONGEST_SHOWN = 60
_SHORT_WORD = 3
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text; put it in quotes",
    "bool": "true or false",
    "tuple": "a list",
    "dict": "a section (key: value lines)",
    "model": "a section (key: value lines)",
}
_BOUNDS = {
    "greater_than_equal": ("too small", "at least", "ge"),
    "greater_than": ("too small", "more than", "gt"),
    "less_than_equal": ("too large", "at most", "le"),
    "less_than": ("too large", "less than", "lt"),
}


def show(value: Any) -> str:
    """A value as YAML would write it, short; of a list or section only its size; without secrets."""
    if isinstance(value, Mapping):
        return "a section" if value else "{}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "[]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = mask(value)
        return repr(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")
    return str(value)


def readable(detail: Mapping[str, Any], info: FieldInfo) -> str:
    """One line for one of pydantic's errors on the key `info`."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "required, and not given" if isinstance(detail["loc"][-1], str) else "the list is too short"
    if kind == "literal_error":
        allowed = allowed_values(info.annotation)
        hint = nearest(str(value), map(str, allowed))
        return f"{show(value)} is not {one_of(allowed)}" + (f"; did you mean {hint}?" if hint else "")
    if kind in _BOUNDS:
        wrong, bound, name = _BOUNDS[kind]
        return f"{show(value)} is {wrong}; it must be {bound} {context[name]:g}"
    if kind == "value_error":
        return f"{show(value)} is {context['error']}"
    if kind in ("string_too_short", "string_pattern_mismatch"):
        return f"{show(value)} is not a usable name" if value else "must not be empty"
    if kind == "too_long":
        return f"the list has {context['actual_length']} items; it must have {context['max_length']}"
    # The rest of pydantic's kinds are named by the type that was wanted: int_parsing, float_type, bool_parsing.
    wanted = _WANTED.get(kind.split("_")[0])
    return f"{show(value)} is not {wanted}" if wanted else f"{show(value)}: {detail['msg']}"


def one_of(values: Iterable[Any]) -> str:
    """ "a", "a or b", or "one of a, b, c"."""
    words = [str(value) for value in values]
    return " or ".join(words) if len(words) < 3 else "one of " + ", ".join(words)


def nearest(word: str, words: Iterable[str]) -> str:
    """The words most like `word`, as "a or b"; empty when none is like it."""
    by_lower = {item.lower(): item for item in words}
    found = difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=0.7)
    if not found and len(word) <= _SHORT_WORD:
        found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)  # of "rl" and "lr" half is alike
    return " or ".join(by_lower[match] for match in found)


def allowed_values(annotation: Any) -> list[Any]:
    """The values of a Literal type, inside a union or not; empty for other types."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [value for part in get_args(annotation) for value in allowed_values(part)]
    return []
