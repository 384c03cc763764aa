"""An operator that limits rewards: it changes a batch before the algorithm sees it."""

from dataclasses import dataclass, replace

from rftdask.algorithm.operators import ExperienceTable, Operator


@dataclass(frozen=True)
class CapReward(Operator):
    """Cap rewards at `most`; the metric `capped` counts the rewards above it."""

    most: float = 1.0

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        capped_N = table.rewards_N.clamp(max=self.most)
        return replace(table, rewards_N=capped_N), {"capped": float((table.rewards_N > self.most).sum())}
