"""Forks: what the workers of this machine, and their engines and ranks, are forked from (processes/nursery.py).

A worker needs Dask alone, and is a fork on every Linux. An engine or rank needs torch, and is one
where there is no GPU, whose libraries must not be touched before a fork.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rftdask.cluster.layout import EXPLORER_RESOURCE, TRAINER_RESOURCE

if TYPE_CHECKING:  # a job's first process has no time for a configuration
    from rftdask.config import Config

WORKER_IMPORTS = ("distributed", "rftdask.cluster.preloads", "rftdask.explorer.worker_task")
"""What a worker imports, whatever its role."""
RANK_IMPORT = "rftdask.trainer.rank"
_MODELS = "transformers.models.auto.modeling_auto"
"""What loading any model imports."""


def can_fork(has_gpus: bool) -> bool:
    """Whether engines and ranks may be forks; the libraries of a GPU, and those of macOS, cannot."""
    return sys.platform == "linux" and not has_gpus


def has_gpu_devices() -> bool:
    """Whether this machine has a GPU, whoever may use it; found without loading anything."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


def imports_ahead(stages: Sequence[Config], roles: Collection[str]) -> list[str]:
    """Modules that engines and ranks of the roles import in some of the stages."""
    modules: list[str] = []
    for stage in stages:
        if EXPLORER_RESOURCE in roles:
            modules += [module for _, engine in stage.explorer.engines() for module in engine.traits.imports_ahead]
        if TRAINER_RESOURCE in roles:
            modules += [RANK_IMPORT, *([_MODELS] if stage.trainer.has_model else [])]
    return list(dict.fromkeys(modules))
