"""Reasons for not training an experience. A dropped row gets a code and a counter; it never disappears."""

from enum import IntEnum

from torch import Tensor


class DropReason(IntEnum):
    """Code of a row; 0: kept. The ledger stores the names in lower case, so they must never be renamed."""

    KEPT = 0
    INVALID_ROLLOUT = 1
    """The rollout failed, timed out or has no finite reward."""
    LOW_STD = 2
    """The rewards of the group do not differ enough."""
    SURPLUS_NEGATIVE = 3
    """More samples below the mean than above it in its group (REC, drop "balance")."""
    REWARD_RANGE = 4
    """The reward is outside the accepted range."""
    TRUNCATED = 5
    """The response reached the length limit."""
    NOT_BEST = 6
    """Another rollout of the group has a better reward (RAFT)."""
    LEFT_OUT = 7
    """A custom operator or advantage function did not return the row."""


def count_drops(reasons_N: Tensor) -> dict[str, float]:
    """Metrics "dropped/<reason>" for each reason present, and "dropped/total"."""
    counts = {
        f"dropped/{reason.name.lower()}": float((reasons_N == reason).sum())
        for reason in DropReason
        if reason and bool((reasons_N == reason).any())
    }
    return {**counts, "dropped/total": float((reasons_N != DropReason.KEPT).sum())}
