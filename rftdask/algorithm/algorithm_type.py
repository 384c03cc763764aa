"""An algorithm type: the name that `algorithm.algorithm_type` chooses, and the parts that it chooses with it.

A type is class attributes with literal values and nothing else, so that a configuration is checked by reading the file,
without importing torch. Each part can be replaced by name and arguments.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class AlgorithmType:
    """The base of the types; its values are GRPO's. A type of your own, in a file of its own:

    class PatientGrpo(AlgorithmType):
        "GRPO over large groups, without a reference."

        repeat_times = 32
        kl_loss_fn = "none"
    """

    algorithm_type: ClassVar[str]
    """The name by which a configuration chooses it; a type without one is chosen by its class."""
    deprecated_names: ClassVar[tuple[str, ...]] = ()
    """Old names, each with one warning."""
    schema: ClassVar[str] = "experience"
    """What it trains on: experience (rollouts), sft (prompt and response), dpo (pairs), kto (responses with a verdict)
    or cpt (plain text)."""
    repeat_times: ClassVar[int] = 8
    """Rollouts per task when the user gives none."""
    sample_strategy: ClassVar[str] = "default"
    """How batches are taken when the user says nothing; "mix" puts demonstrations into every batch."""
    advantage_fn: ClassVar[str | None] = "grpo"
    """None: the loss takes no advantages."""
    advantage_fn_args: ClassVar[Mapping[str, Any]] = {}
    policy_loss_fn: ClassVar[str] = "ppo"
    policy_loss_fn_args: ClassVar[Mapping[str, Any]] = {}
    kl_loss_fn: ClassVar[str] = "k2"
    """"none": no reference model is loaded."""
    entropy_loss_fn: ClassVar[str] = "default"
    loss_agg_mode: ClassVar[str] = "token-mean"
    has_critic: ClassVar[bool] = False
    """Whether a value model is trained beside the policy."""
