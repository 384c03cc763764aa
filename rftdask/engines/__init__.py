"""Engines by name. Importing this package needs neither torch nor transformers nor vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rftdask.engines.base import Engine
from rftdask.errors import UserError


def _transformers(model_path: str, **options: Any) -> Engine:
    # Late: torch and transformers take seconds to import, and only a process that generates needs them.
    from rftdask.engines.transformers import TransformersEngine

    return TransformersEngine(model_path, **options)


def _vllm(model_path: str, **options: Any) -> Engine:
    from rftdask.engines.vllm import VllmEngine

    return VllmEngine(model_path, **options)


def _fake(model_path: str, **options: Any) -> Engine:
    from rftdask.engines.fake import FakeEngine

    return FakeEngine(model_path, **options)


ENGINES: dict[str, Callable[..., Engine]] = {"transformers": _transformers, "vllm": _vllm, "fake": _fake}


def make_engine(engine_type: str, model_path: str, **options: Any) -> Engine:
    """The engine called `engine_type`, its model loaded, serving policy version 0.

    Args: options: keyword arguments of that engine's class.
    Raises: UserError: no such engine, or the model folder cannot be loaded.
    """
    if engine_type not in ENGINES:
        raise UserError(f"engine_type {engine_type!r} is unknown; choose one of: {', '.join(sorted(ENGINES))}")
    return ENGINES[engine_type](model_path, **options)
