"""Traits of engines: what holds for every engine of a class, known by the name that a configuration gives it.

They are class attributes of the engine. Those of this package's engines are read from their source, so that checking a
configuration loads neither torch nor vLLM; an engine of the user's own is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from rftdask.config.plugins import RegisteredPart, find_part, read_parts


class EngineTraits:
    """Base of `rftdask.engines.base.Engine`. All values are literals.

    Example:
        class VllmEngine(Engine):
            engine_type = "vllm"
            required_package = "vllm"
    """

    engine_type: ClassVar[str] = ""
    """Name in a configuration. A class without one is named as `package.module.Name`."""
    is_external: ClassVar[bool] = False
    """The model runs elsewhere and speaks text: no tokens or logprobs to train on, no weights to load."""
    has_model: ClassVar[bool] = True
    """It computes with a model's weights. False: no model folder and no tokenizer are needed, and nothing that it
    loads can be verified."""
    repeats_bits: ClassVar[bool] = False
    """The same requests given at once give the same bits each time."""
    takes_dora: ClassVar[bool] = True
    """It serves adapters that were trained with DoRA."""
    required_package: ClassVar[str | None] = None
    """Optional package that it imports; the extra of rftdask that installs it has the same name."""
    config_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its section that it follows, of those that not every engine follows."""
    imports_ahead: ClassVar[tuple[str, ...]] = ()
    """Modules whose import takes seconds, for a process that is started before it is needed. None: not worth it."""


def registered_engines() -> Mapping[str, RegisteredPart]:
    """engine_type -> class, of the engines of this package."""
    return read_parts("rftdask.engines", "engine_type")


@cache
def engine_traits(engine_type: str) -> type[EngineTraits]:
    """The traits of an engine by its name in a configuration. Raises: UserError: there is none of that name."""
    registered = registered_engines()
    if engine_type in registered:
        part = registered[engine_type]
        return type(part.attribute, (EngineTraits,), dict(part.traits))
    engine: type[EngineTraits] = find_part("engine", engine_type, registered)
    return engine
