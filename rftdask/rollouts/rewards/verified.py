"""accuracy_reward: whether the answer equals the truth as mathematics, decided by the package math-verify.

It does algebra (sympy) on what the policy wrote, which may take any time and memory; so it runs in a sandbox.
"""

from __future__ import annotations

import importlib

from rftdask.data.task import Task
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.workflows.base import Reward

_MAX_LENGTH = 20_000
"""Characters of the response that are looked at, from its end: the answer is there."""


@reward("accuracy_reward", in_process=False, requires={"math_verify": "math-verify"})
def accuracy_reward(response: str, truth: str, task: Task) -> Reward:
    """1 if math-verify finds an answer in the response that equals the truth, else 0. Metric: accuracy.

    Raises: ValueError: the truth is no mathematics.
    """
    # By name: whether it is installed must not change the type check. It cannot time out by itself, off the main
    # thread; the attempt's deadline does that.
    math_verify = importlib.import_module("math_verify")
    gold = math_verify.parse(truth if "\\boxed" in truth or "$" in truth else f"${truth}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"task {task.group_id}: the truth {truth!r:.100} is no mathematics; use exact_reward")
    said = math_verify.parse(response[-_MAX_LENGTH:], parsing_timeout=None)
    correct = float(math_verify.verify(gold, said, timeout_seconds=None))
    return Reward(correct, {"accuracy": correct})
