"""User code of Trinity-RFT 0.6: its import names, base classes and registries, backed by this package.

A plug-in with `from trinity.common.workflows import Workflow` gets the classes of this package. config/plugins.py calls
`install` when it imports such a file. `__rftdask_part__` of each base class returns what stands for a subclass here: a
workflow, a reward function, an operator, a selector, a loss. Trinity-RFT need not be installed.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from rftdask.compat.trinity import algorithm, experience, model, monitor, operators, registry, rewards, task, workflows
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
    "utils.monitor": monitor,
    "utils.registry": registry,
}
"""Name below `trinity` -> module that a user's import gets."""


def install() -> None:
    """Make `import trinity...` return the modules of this package, in this process. Idempotent.

    Raises: UserError: Trinity-RFT itself has been imported.
    """
    there = sys.modules.get("trinity")
    if there is not None:
        if getattr(there, "__file__", None):
            raise UserError("Trinity-RFT itself is imported in this process; its plug-ins need a process without it")
        return
    root = ModuleType("trinity", "Trinity-RFT's names, by rftdask.compat.trinity")
    log = ModuleType("trinity.utils.log")
    vars(log)["get_logger"] = get_logger
    marks = ModuleType("trinity.utils.annotations")
    vars(marks).update(dict.fromkeys(("Deprecated", "Experimental"), lambda marked: marked))
    # Our modules last: they replace bare packages of the same name.
    made: dict[str, ModuleType] = {"trinity": root}
    made |= {f"trinity.{name}": ModuleType(f"trinity.{name}") for name in _PACKAGES}
    made |= {"trinity.utils.log": log, "trinity.utils.annotations": marks}
    made |= {f"trinity.{name}": module for name, module in _MODULES.items()}
    for name, module in made.items():
        if module.__spec__ is None:  # else `find_spec` of it is an error
            module.__spec__ = ModuleSpec(name, None)
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(made[parent], last):
            setattr(made[parent], last, module)  # for `from trinity.common import workflows`
    sys.modules.update(made)


def get_logger(name: str | None = None, **_: object) -> logging.Logger:
    """Return a logger of Python's logging."""
    return logging.getLogger(name)
