"""The parts of algorithms that a configuration can name: their arguments and traits, read from rftdask.algorithm.

No table is kept here by hand, and torch is not imported: names, fields and class attributes are read from the source.
A part of the user's own is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rftdask.config.plugins import RegisteredPart, find_part, read_parts, trait

LABELS = {
    "algorithm_type": "algorithm_type",
    "advantage_fn": "advantage_name",
    "policy_loss_fn": "loss_name",
    "kl_penalty_fn": "kl_name",
    "kl_loss_fn": "kl_name",
    "entropy_loss_fn": "entropy_name",
    "operator": "operator_name",
    "selector": "selector_name",
    "rollout_correction": "correction_name",
}
"""Key of the configuration -> the class attribute with which a class of rftdask.algorithm registers its name."""


def registered_parts(key: str) -> Mapping[str, RegisteredPart]:
    """The package's own parts for a key of `LABELS`, by name."""
    return read_parts("rftdask.algorithm", LABELS[key])


@cache
def old_names(key: str) -> Mapping[str, str]:
    """Deprecated name -> name, of the parts for a key."""
    parts = registered_parts(key).items()
    return {old: name for name, part in parts for old in part.traits.get("deprecated_names", ())}


def known_part(key: str, name: str) -> Any:
    """The part that a name means: the `RegisteredPart` of one of ours, which imports nothing, or a class of the user's,
    whose folder has been loaded (`load_plugin_folders`).

    Raises: UserError: no such part, see `find_part`.
    """
    registered = registered_parts(key)
    return registered[name] if name in registered else find_part(key, name, registered)


def load_part(key: str, name: str, plugin_dirs: Sequence[str] = ()) -> Any:
    """The class that a name means, imported; an old name gives the part it stands for and one warning per process.

    Raises: UserError: no such part, see `find_part`.
    """
    if name in old_names(key):
        warn_once(f"{key} {name!r} is deprecated: it is {old_names(key)[name]!r}")
        name = old_names(key)[name]
    return find_part(key, name, registered_parts(key), plugin_dirs)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """A FutureWarning, once per process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, FutureWarning, stacklevel=4)


@dataclass(frozen=True)
class AlgorithmInfo:
    """What a configuration depends on of an algorithm type, with its default parts."""

    schema: str
    """What it trains on: experience (rollouts), sft (prompt and response), dpo (pairs) or cpt (plain text)."""
    repeat_times: int
    """Rollouts per task when the user gives none."""
    critic: bool = False
    """Trains a value model beside the policy."""
    reference: bool = False
    """Compares the policy with the frozen initial weights (a KL loss, or a loss that needs them)."""
    grouped: bool = True
    """Its advantage compares the rollouts of one task, so a lone rollout teaches nothing."""
    sample_strategy: str = "default"
    """How batches are taken when the user says nothing; "mix" puts demonstrations of a dataset into every batch."""


@cache
def algorithm_info(name: str) -> AlgorithmInfo:
    """The facts about an algorithm type, by its name in the configuration. Raises: UserError: there is none."""
    kind = known_part("algorithm_type", name)
    loss = known_part("policy_loss_fn", trait(kind, "policy_loss_fn"))
    advantage_fn = trait(kind, "advantage_fn")
    advantage = None if advantage_fn is None else known_part("advantage_fn", advantage_fn)
    return AlgorithmInfo(
        schema=trait(kind, "schema"),
        repeat_times=trait(kind, "repeat_times"),
        critic=advantage is not None and trait(advantage, "uses_critic"),
        reference=trait(kind, "kl_loss_fn") != "none" or trait(loss, "uses_reference"),
        grouped=advantage is not None and trait(advantage, "uses_groups"),
        sample_strategy=trait(kind, "sample_strategy"),
    )


def advantage_needs(algorithm_type: str, advantage_fn: str | None) -> frozenset[str]:
    """Optional tensors that the advantage needs, for example "teacher_logprobs_NT"; advantage_fn: None, the type's."""
    kind = known_part("algorithm_type", algorithm_type)
    name = advantage_fn or trait(kind, "advantage_fn")
    return frozenset(trait(known_part("advantage_fn", name), "needs", ()) if name else ())
