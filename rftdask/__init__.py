"""rftdask: reinforcement fine-tuning of language models as an elastic batch system on Dask.

A run lives on storage; its processes only cache it. Start with `Experiment`, or with the command `rftdask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Experiment", "__version__"]

if TYPE_CHECKING:
    from rftdask.driver.experiment import Experiment


def __getattr__(name: str) -> Any:
    if name != "Experiment":
        raise AttributeError(f"module 'rftdask' has no attribute {name!r}")
    # Late: child processes and config checks do not need the driver, which imports Dask.
    from rftdask.driver.experiment import Experiment

    return Experiment


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
