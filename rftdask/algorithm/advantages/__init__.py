"""The advantage functions by name."""

from rftdask.algorithm.advantages.base import AdvantageFn
from rftdask.algorithm.advantages.group import Asymre, Drpo, Grpo, Opmd, Rec, Reinforce, Rloo
from rftdask.algorithm.advantages.tokens import ClipB, ClipV, Gae, Jsd, OnPolicyDistill, ReinforcePlusPlus, Remax
from rftdask.algorithm.advantages.turns import Gigpo, StepWiseGrpo

ADVANTAGE_FNS: dict[str, type[AdvantageFn]] = {
    "grpo": Grpo,
    "reinforce": Reinforce,
    "rloo": Rloo,
    "opmd": Opmd,
    "asymre": Asymre,
    "rec": Rec,
    "drpo": Drpo,
    "step_wise_grpo": StepWiseGrpo,
    "gigpo": Gigpo,
    "ppo": Gae,
    "reinforceplusplus": ReinforcePlusPlus,
    "remax": Remax,
    "on_policy_distill": OnPolicyDistill,
    "jsd": Jsd,
    "clipb": ClipB,
    "clipv": ClipV,
}

DEPRECATED_ADVANTAGE_FNS = {"grpo_verl": "grpo", "opmd_verl": "opmd", "asymre_verl": "asymre"}
