"""rftdask: reinforcement fine-tuning of language models as an elastic batch system on Dask.

A run lives on storage; its processes only cache it. Start with `Experiment`, or with the command `rftdask`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Experiment", "__version__"]
__plugin_adapters__ = {"trinity": "rftdask.compat.trinity"}
"""Package that a user's plug-in imports -> module whose `install` provides it (config/plugins.py)."""

if TYPE_CHECKING:
    from rftdask.driver.experiment import Experiment


def __getattr__(name: str) -> Any:
    if name == "Experiment":
        # Late: child processes and config checks do not need the driver, which imports Dask.
        return import_module("rftdask.driver.experiment").Experiment
    raise AttributeError(f"module 'rftdask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
