"""What a workflow talks to: the policy and auxiliary models as text in, text out, over an engine's queue or an API.

The folder knows no tasks and no rewards.
"""
