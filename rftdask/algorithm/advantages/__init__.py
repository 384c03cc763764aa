"""Advantages: from the rewards of a batch to a number per experience or per token.

    base    inputs and results of advantage functions; statistics of groups
    group   one number per rollout, compared with the other rollouts of its task
    tokens  one number per token: critics, rewards to go, teachers, filters of tokens
    turns   rollouts of several turns

An algorithm type with PPO's loss is defined here, next to the advantage that characterizes it. Knows nothing of losses.
"""
