"""The algorithm names a configuration may use, and the few facts about them that a configuration depends on.

The formulas live in rftdask.algorithm, which needs torch; this table does not. A test holds the two together.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmInfo:
    """Facts about one `algorithm.algorithm_type`."""

    schema: str
    """What it trains on: experience (rollouts), sft (prompt and response), dpo (pairs) or cpt (plain text)."""
    repeat_times: int
    """Rollouts per task when the user gives none."""
    critic: bool = False
    """Trains a value model beside the policy."""
    reference: bool = False
    """Its defaults compare the policy with the frozen initial weights (KL)."""
    grouped: bool = True
    """Its advantage compares the rollouts of one task, so a lone rollout teaches nothing."""
    sample_strategy: str = "default"
    """How batches are taken when the user says nothing; "mix" puts demonstrations of a dataset into every batch."""


def _rollouts(
    repeat_times: int = 8, *, critic: bool = False, reference: bool = False, grouped: bool = True, mix: bool = False
) -> AlgorithmInfo:
    return AlgorithmInfo("experience", repeat_times, critic, reference, grouped, "mix" if mix else "default")


ALGORITHMS: dict[str, AlgorithmInfo] = {
    "ppo": _rollouts(1, critic=True, reference=True, grouped=False),
    "grpo": _rollouts(reference=True),
    "dr_grpo": _rollouts(),
    "bnpo": _rollouts(),
    "dapo": _rollouts(16),
    "drpo": _rollouts(),
    "reinforceplusplus": _rollouts(reference=True, grouped=False),
    "rloo": _rollouts(reference=True),
    "remax": _rollouts(1, reference=True, grouped=False),
    "opmd": _rollouts(reference=True),
    "asymre": _rollouts(),
    "topr": _rollouts(reference=True, grouped=False),
    "cispo": _rollouts(reference=True),
    "gspo": _rollouts(reference=True),
    "sapo": _rollouts(reference=True),
    "vespo": _rollouts(),
    "sppo": _rollouts(),
    "rec": _rollouts(reference=True),
    "m2po": _rollouts(),
    "dppo": _rollouts(),
    "decoupled_ppo": _rollouts(),
    "multi_step_grpo": _rollouts(reference=True),
    "gigpo": _rollouts(reference=True),
    "mix": _rollouts(reference=True, mix=True),
    "mix_chord": _rollouts(reference=True, mix=True),
    "raft": _rollouts(1, grouped=False),
    "sft": AlgorithmInfo("sft", 1, grouped=False),
    "cpt": AlgorithmInfo("cpt", 1, grouped=False),
    "dpo": AlgorithmInfo("dpo", 2, reference=True, grouped=False),
    "on_policy_distill": _rollouts(grouped=False),
    "jsd": _rollouts(grouped=False),
}

ALIASES: dict[str, str] = {"grpo_verl": "grpo", "opmd_verl": "opmd", "asymre_verl": "asymre"}
"""Deprecated twins of the reference system; the same names exist for its advantage functions."""

TEACHER_ADVANTAGES = ("on_policy_distill", "jsd")
"""Advantage functions that compare the policy with a teacher."""
BASELINE_ADVANTAGES = ("remax",)
"""Advantage functions whose baseline is a greedy rollout of the same task."""
