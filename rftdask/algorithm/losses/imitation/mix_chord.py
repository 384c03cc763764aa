"""CHORD: a mixture that starts with much imitation and ends with little, on tokens that can still be learned."""

import math
from dataclasses import dataclass

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import PolicyLoss
from rftdask.algorithm.losses.imitation.mix import Mixture
from rftdask.algorithm.losses.imitation.sft import Sft
from rftdask.algorithm.losses.imitation.sft_is import SftPhi


@dataclass(frozen=True)
class MixChord(Mixture):
    """Mixture whose weight warms up and decays, with CHORD's phi on the demonstrations. CHORD, arXiv:2508.11408.

    mu(step) = peak * step / warmup during the warm-up, then valley + (peak - valley) * (1 + cos(pi x)) / 2 with x from
    0 to 1 during the decay, then valley.
    """

    mu_warmup_steps: int = 0
    mu_decay_steps: int = 0
    mu_peak: float = 0.1
    mu_valley: float = 0.1
    enable_phi_function: bool = True
    """Weight demonstrated tokens by p (1 - p)."""

    loss_name = "mix_chord"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = (self.mu_warmup_steps, self.mu_decay_steps)
        require(min(steps) >= 0, f"mu_warmup_steps and mu_decay_steps must be >= 0, got {steps}")
        ends = (self.mu_peak, self.mu_valley)
        require(all(0.0 <= mu <= 1.0 for mu in ends), f"mu_peak and mu_valley must be within [0, 1], got {ends}")

    def mu_at(self, step: int) -> float:
        """Weight at an optimizer step: warm-up, decay, then the valley."""
        if step < self.mu_warmup_steps:
            return step / self.mu_warmup_steps * self.mu_peak
        if step >= self.mu_warmup_steps + self.mu_decay_steps:
            # Checked before the division, for a decay of 0 steps.
            return self.mu_valley
        # Half a cosine from peak to valley, as in learning rate schedules.
        share = (step - self.mu_warmup_steps) / self.mu_decay_steps
        return self.mu_valley + (self.mu_peak - self.mu_valley) * 0.5 * (1.0 + math.cos(math.pi * share))

    def imitation(self) -> PolicyLoss:
        """SFT, with phi weighted so that learned and unreachable tokens count little."""
        return SftPhi() if self.enable_phi_function else Sft()


class MixChordAlgorithm(AlgorithmType):
    """GRPO on rollouts, CHORD's phi on demonstrations, with a schedule for mu."""

    algorithm_type = "mix_chord"
    policy_loss_fn = "mix_chord"
    entropy_loss_fn = "mix"
    sample_strategy = "mix"
