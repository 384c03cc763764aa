"""Checks in the constructors of the parts: a value out of range is a ValueError that names the argument."""


def require(condition: bool, message: str) -> None:
    """Raises: ValueError: `condition` is false; the message is `message`."""
    if not condition:
        raise ValueError(message)


def one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises: ValueError: `value` is none of `allowed`; the message names the field."""
    require(value in allowed, f"{field} is {value!r}; allowed: {', '.join(allowed)}")
