"""Correction for the gap between the engine that sampled and the trainer that learns: one factor per token.

w = p_trainer / p_sampler of the sampled token at the weights that sampled it. The sampler's logprobs are
`rollout_logprobs`; the trainer's are `proximal_logprobs` or, if not recomputed, the detached current ones. Knows
nothing of losses. Invariant: where sampler and trainer agree, every factor is exactly 1.
Sources: TIS, Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025; MIS and
geometric masks, Liu et al., "When Speed Kills Stability", 2025; IcePop, Ling Team, "Every Step Evolves",
arXiv:2510.18855.
"""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs

METHODS = ("none", "truncate", "mask", "geometric_mask")
LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Correction:
    """Factor of each token's policy loss.

    TIS     method "truncate", low 0, high C:        min(w, C)
    MIS     method "mask", low 0, high C:            w where w <= C, else 0
    IcePop  method "mask", level "token", low a, high b: w where a <= w <= b, else 0
    geometric mask  method "geometric_mask", low a, high b: 1 where the sequence's geometric mean of w is within [a,
    b], else 0
    """

    method: str = "none"
    level: str = "token"
    """w of the token; "sequence": product over the sequence's trained tokens; "geometric": its geometric mean."""
    low: float = 0.0
    high: float = 2.0

    correction_name = "rollout_correction"

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("level", self.level, LEVELS)
        require(0.0 <= self.low <= 1.0 <= self.high, f"need low <= 1 <= high and low >= 0, got {self.low}, {self.high}")

    @property
    def is_active(self) -> bool:
        """True if a correction is applied."""
        return self.method != "none"

    def factors(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T] factors, detached, and metrics: is_weight (mean factor), is_clip_frac."""
        proximal_BT = inputs.proximal_logprobs_BT
        trainer_BT = inputs.policy_logprobs_BT.detach() if proximal_BT is None else proximal_BT
        log_w_BT = (trainer_BT - inputs.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.method == "geometric_mask" or self.level == "geometric":
            log_w_BT = inputs.spread(inputs.sequence_means(log_w_BT))
        elif self.level == "sequence":
            # Bounded again, since a product over a long sequence overflows.
            log_w_BT = inputs.spread(inputs.sequence_sums(log_w_BT)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        weight_BT = log_w_BT.exp()
        outside_BT = (weight_BT < self.low) | (weight_BT > self.high)
        if self.method == "truncate":
            factor_BT = weight_BT.clamp(self.low, self.high)
        elif self.method == "mask":
            factor_BT = weight_BT.masked_fill(outside_BT, 0.0)
        else:
            # Geometric mask: kept tokens have factor 1.
            factor_BT = (~outside_BT).to(weight_BT.dtype)
        return factor_BT, {"is_weight": inputs.weighted(factor_BT), "is_clip_frac": inputs.weighted(outside_BT)}
