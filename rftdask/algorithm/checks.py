"""Checks of constructor arguments: a value out of range is a ValueError that names the argument."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`; the message names the field."""
    require(value in allowed, f"{field} is {value!r}; allowed: {', '.join(allowed)}")
