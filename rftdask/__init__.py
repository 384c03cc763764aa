"""rftdask: reinforcement fine-tuning of language models as an elastic batch system on Dask.

The run lives on storage, every process is a cache over it. Start at `Experiment`, or at the command `rftdask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Experiment", "__version__"]
__plugin_adapters__ = {"trinity": "rftdask.compat.trinity"}
"""Package that a user's plug-in imports -> module whose `install` provides it (config/plugins.py)."""

if TYPE_CHECKING:
    from rftdask.driver.experiment import Experiment


def __getattr__(name: str) -> Any:
    if name == "Experiment":
        # Late, so that a child process or a config check does not import what only a driver needs.
        from rftdask.driver.experiment import Experiment

        return Experiment
    raise AttributeError(f"module 'rftdask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
