"""Registries: names of a plug-in's classes, by the rule of config/plugins.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


class Registry:
    """Example: @WORKFLOWS.register_module("my_workflow") above a class in a file of a plug-in folder."""

    def __init__(self, name: str, ours: Callable[[], Mapping[str, Any]] = dict) -> None:
        """ours: returns the names of this package, which cannot be taken."""
        self.name = name
        self.modules: dict[str, type] = {}
        self._ours = ours

    def get(self, module_key: str | None) -> Any:
        """Return the class of that name. Raises: ValueError: unknown name."""
        if module_key is None:
            return None
        if module_key not in self.modules:
            raise ValueError(f"{module_key!r} is not registered in {self.name}")
        return self.modules[module_key]

    def register_module(
        self, module_name: str | None, module_cls: _Class | None = None, force: bool = False, lazy: bool = False
    ) -> Any:
        """Register a class, or return a decorator that does. Raises: KeyError: the name is taken."""

        def decorate(cls: _Class) -> _Class:
            name = module_name or cls.__name__
            if name in self._ours() or (name in self.modules and not force):
                raise KeyError(f"{name} is already registered in {self.name}; choose another name")
            self.modules[name] = cls
            # As if the file had called the class so: then it is found by this name like any other part of it.
            setattr(sys.modules[cls.__module__], name, cls)
            return cls

        return decorate if module_cls is None else decorate(module_cls)


class Unsupported(Registry):
    """Registry of parts that do not run here."""

    def register_module(
        self, module_name: str | None, module_cls: _Class | None = None, force: bool = False, lazy: bool = False
    ) -> Any:
        """Raises: NotImplementedError."""
        raise NotImplementedError(f"parts of {self.name} are written for rftdask itself, see docs/extending.md")
