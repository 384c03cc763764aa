"""Algorithm type: a value of `algorithm.algorithm_type`, with its default parts.

A type consists of class attributes with literal values, so that a configuration can be checked by reading the file,
without importing torch. Each part can be replaced by name and arguments.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class AlgorithmType:
    """Base of algorithm types, with the values of GRPO. A custom type, in a separate file:

    class PatientGrpo(AlgorithmType):
        "GRPO over large groups, without a reference."

        repeat_times = 32
        kl_loss_fn = "none"
    """

    algorithm_type: ClassVar[str]
    """Name in a configuration. A type without one is named by its class."""
    deprecated_names: ClassVar[tuple[str, ...]] = ()
    """Old names, accepted with a warning."""
    schema: ClassVar[str] = "experience"
    """Rows to train on: experience (rollouts), sft (prompt and response), dpo (pairs), kto (responses with a verdict)
    or cpt (plain text)."""
    repeat_times: ClassVar[int] = 8
    """Default number of rollouts per task."""
    sample_strategy: ClassVar[str] = "default"
    """Default sample strategy; "mix" puts demonstrations into every batch."""
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
    """True if a value model is trained alongside the policy."""
