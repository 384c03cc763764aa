"""Reinforcement fine-tuning algorithms as pure functions on tensors: advantages, losses, operators, rules.

Needs torch and nothing else of this package; knows no Dask, no storage, no config file. Start at `make_algorithm`.
"""

from rftdask.algorithm.advantages import ADVANTAGE_FNS
from rftdask.algorithm.advantages.base import AdvantageInputs, AdvantageResult
from rftdask.algorithm.aggregation import AGGREGATIONS, token_weights
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.compose import ALGORITHMS, make_algorithm
from rftdask.algorithm.corrections import Correction
from rftdask.algorithm.drops import DropReason, count_drops
from rftdask.algorithm.entropy import ENTROPY_FNS
from rftdask.algorithm.kl import KL_FNS
from rftdask.algorithm.loss_inputs import LossInputs
from rftdask.algorithm.losses.policy_losses import POLICY_LOSS_FNS

__all__ = [
    "ADVANTAGE_FNS",
    "AGGREGATIONS",
    "ALGORITHMS",
    "ENTROPY_FNS",
    "KL_FNS",
    "POLICY_LOSS_FNS",
    "AdvantageInputs",
    "AdvantageResult",
    "Algorithm",
    "Correction",
    "DropReason",
    "LossInputs",
    "count_drops",
    "make_algorithm",
    "token_weights",
]
