"""Rules of a configuration, each with the keys it reads."""

from collections.abc import Callable, Iterator

from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

Rule = Callable[[Config], Iterator[Problem]]
"""Yields (path, message) for every refusal."""


class Rules(list[tuple[tuple[str, ...], Rule]]):
    """(keys it reads, the rule), in the order in which they are written."""

    def reading(self, *keys: str) -> Callable[[Rule], Rule]:
        """Decorator: adds a rule, which is left out when one of these keys is broken."""

        def add(rule: Rule) -> Rule:
            self.append((keys, rule))
            return rule

        return add


def is_natural(value: object) -> bool:
    """An integer from 0 on; `True` is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """An integer or a float; `True` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
