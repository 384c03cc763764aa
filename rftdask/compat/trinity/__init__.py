"""User code of Trinity-RFT 0.6: its import names, base classes and registries over ours.

A plug-in that says `from trinity.common.workflows import Workflow` gets the classes of this package (`install`, called
by config/plugins.py when such a file is imported). Each base class says by `__rftdask_part__` what stands for a
subclass of it here: a workflow, a reward function, an operator, a selector, a loss. Nothing of Trinity-RFT is needed.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from rftdask.compat.trinity import (
    algorithm,
    experience,
    marks,
    model,
    monitor,
    operators,
    registry,
    rewards,
    task,
    workflows,
)
from rftdask.errors import UserError

_PACKAGES = ("common", "common.models", "utils", "buffer", "buffer.operators", "buffer.selector", "algorithm")
_MODULES = {
    "common.config": task,
    "common.experience": experience,
    "common.models.model": model,
    "common.rewards": rewards,
    "common.rewards.reward_fn": rewards,
    "common.rewards.math_reward": rewards,
    "common.workflows": workflows,
    "common.workflows.workflow": workflows,
    "common.workflows.step_wise_workflow": workflows,
    "buffer.operators": operators,
    "buffer.operators.experience_operator": operators,
    "buffer.selector": operators,
    "buffer.selector.selector": operators,
    "algorithm": algorithm,
    "algorithm.algorithm": algorithm,
    "algorithm.utils": algorithm,
    "algorithm.advantage_fn": algorithm,
    "algorithm.advantage_fn.advantage_fn": algorithm,
    "algorithm.policy_loss_fn": algorithm,
    "algorithm.policy_loss_fn.policy_loss_fn": algorithm,
    "utils.annotations": marks,
    "utils.monitor": monitor,
    "utils.registry": registry,
}
"""Name below `trinity` -> the module that a user's import gets."""


def install() -> None:
    """Let `import trinity...` give the modules of this package, in this process, from now on. Idempotent.

    Raises: UserError: Trinity-RFT itself has been imported here.
    """
    there = sys.modules.get("trinity")
    if there is not None:
        if getattr(there, "__file__", None):
            raise UserError("Trinity-RFT itself is imported in this process; its plug-ins need a process without it")
        return
    root = ModuleType("trinity", "Trinity-RFT's names, by rftdask.compat.trinity")
    log = ModuleType("trinity.utils.log")
    vars(log)["get_logger"] = get_logger
    # Those of ours last: they take the place of a bare package of the same name.
    made: dict[str, ModuleType] = {"trinity": root}
    made |= {f"trinity.{name}": ModuleType(f"trinity.{name}") for name in _PACKAGES}
    made |= {"trinity.utils.log": log} | {f"trinity.{name}": module for name, module in _MODULES.items()}
    for name, module in made.items():
        if module.__spec__ is None:  # else `find_spec` of it is an error
            module.__spec__ = ModuleSpec(name, None)
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(made[parent], last):
            setattr(made[parent], last, module)  # for `from trinity.common import workflows`
    sys.modules.update(made)


def get_logger(name: str | None = None, **_: object) -> logging.Logger:
    """A logger of Python's own."""
    return logging.getLogger(name)
