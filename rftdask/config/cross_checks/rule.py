"""Rules of a configuration, each with the keys it reads."""

from collections.abc import Callable, Iterator

from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

Rule = Callable[[Config], Iterator[Problem]]
"""Yields (path, message) for every refusal."""


class Rules(list[tuple[tuple[str, ...], Rule]]):
    """List of (keys it reads, rule), in the order written."""

    def reading(self, *keys: str) -> Callable[[Rule], Rule]:
        """Return a decorator that adds a rule. The rule is skipped if one of these keys is broken."""

        def add(rule: Rule) -> Rule:
            self.append((keys, rule))
            return rule

        return add


def is_natural(value: object) -> bool:
    """Return True for an integer of at least 0, but not for `True`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """Return True for an integer or float, but not for `True`."""
    return isinstance(value, int | float) and not isinstance(value, bool)
