"""The advantages: from the rewards of a batch to what each experience, or each token, is to be reinforced by.

    base    what an advantage function takes and gives; statistics of groups
    group   one number per rollout, compared with the other rollouts of its task
    tokens  one number per token: critics, rewards to go, teachers, filters of tokens
    turns   rollouts of several turns

An algorithm type whose loss is PPO's stands here, beside the advantage that makes it special. Knows nothing of losses.
"""
