"""Why an experience is not trained. A drop is a code beside the row and a counter, never a missing row."""

from enum import IntEnum

from torch import Tensor


class DropReason(IntEnum):
    """Code of a row; 0 is kept. The ledger has the names, in lower case: never rename one."""

    KEPT = 0
    INVALID_ROLLOUT = 1
    """The rollout failed, timed out or has no finite reward."""
    LOW_STD = 2
    """The rewards of its group do not differ enough to teach anything."""
    SURPLUS_NEGATIVE = 3
    """More samples below the mean than above it in its group (REC, drop "balance")."""
    REWARD_RANGE = 4
    """Its reward is outside the wanted range."""
    TRUNCATED = 5
    """Its response hit the length limit."""
    NOT_BEST = 6
    """Other rollouts of its group have better rewards (RAFT)."""
    LEFT_OUT = 7
    """An operator or advantage function that is not of this package did not return it."""


def count_drops(reasons_N: Tensor) -> dict[str, float]:
    """Metrics "dropped/<reason>" for each reason present, and "dropped/total"."""
    counts = {
        f"dropped/{reason.name.lower()}": float((reasons_N == reason).sum())
        for reason in DropReason
        if reason and bool((reasons_N == reason).any())
    }
    return {**counts, "dropped/total": float((reasons_N != DropReason.KEPT).sum())}
