"""Reward functions: score a response to a task. See `registry.py` for the names."""

from rftdask.rollouts.rewards.registry import RewardFn, compute_reward, get_reward, reward

__all__ = ["RewardFn", "compute_reward", "get_reward", "reward"]
