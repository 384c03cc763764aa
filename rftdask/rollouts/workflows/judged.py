"""Workflows whose reward comes from an auxiliary model: a reward model, or a judge with a rubric.

Invariant: a verdict that cannot be read is a failure of the rollout, never a reward of zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.rewards.math_answer import extract_answer, same_answer
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.registry import workflow
from rftdask.rollouts.workflows.single_turn import MATH_SYSTEM_PROMPT, ask

_VERDICT = re.compile(r"^\W*(?:criterion\s*)?(\d+)\W+(yes|no)\b", re.IGNORECASE | re.MULTILINE)
_GRADE = "Question:\n{question}\n\nAnswer:\n{answer}\n\nIs the answer correct? Reply Yes or No.\n"
_JUDGE = (
    "Judge an answer by criteria. For each criterion write one line with its number and yes or no, such as "
    '"1: yes", and nothing else.\n\nQuestion:\n{question}\n\nAnswer:\n{answer}\n\nCriteria:\n{criteria}\n'
)


@workflow("async_math_rm_workflow")
@workflow("math_rm_workflow")
async def math_rm_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask as math_workflow does; the reward is the probability, 0 to 1, that the auxiliary model gives "Yes" against
    "No" when it is asked whether the answer is correct. Metric: accuracy, of the answer itself, where there is a truth.

    `workflow_args`: auxiliary_model (name; "" the only one), yes ("Yes"), no ("No").
    """
    options = {"auxiliary_model": "", "yes": "Yes", "no": "No", **task.workflow_args}
    judge = model.auxiliary(options["auxiliary_model"])
    answer = (await ask(task, model, MATH_SYSTEM_PROMPT)).text
    with model.timer("reward"):
        question = _GRADE.format(question=_question(task), answer=answer)
        # A word may be several tokens, whose logprobs add up to its own.
        yes, no = [sum(await judge.logprobs(question, options[word])) for word in ("yes", "no")]
    metrics = {"accuracy": float(same_answer(extract_answer(answer), task.truth))} if task.truth else {}
    # softmax over the two words alone; the exponent is bounded, so that exp does not overflow.
    return Reward(1.0 / (1.0 + math.exp(min(max(no - yes, -700.0), 700.0))), metrics)


@workflow("rubric_judge_workflow")
async def rubric_judge_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask; a judge says which criteria the answer meets, and the reward is the share of their weights, 0 to 1.

    The criteria are `workflow_args.rubric`, or the column `rubric` of the task's row: a list of texts, or of
    {criterion, weight (1)}. `workflow_args`: auxiliary_model (name; "" the only one), max_judge_tokens (256).

    Raises: ValueError: no rubric, or the judge gives no verdict on a criterion.
    """
    options: dict[str, Any] = {"auxiliary_model": "", "max_judge_tokens": 256, **task.workflow_args}
    rubric = read_rubric(options.get("rubric") or task.row.get("rubric") or (), task)
    judge = model.auxiliary(options["auxiliary_model"])
    answer = (await ask(task, model)).text
    with model.timer("reward"):
        listed = "\n".join(f"{number}: {text}" for number, (text, _) in enumerate(rubric, start=1))
        prompt = _JUDGE.format(question=_question(task), answer=answer, criteria=listed)
        asked = [{"role": "user", "content": prompt}]
        # Greedy: the same answer gets the same verdict.
        said = await judge.chat(asked, max_tokens=options["max_judge_tokens"], temperature=0.0)
        # Raises where a verdict is missing: half a verdict would be a reward that nobody gave.
        met = parse_verdicts(said.text, len(rubric))
    total = sum(weight for _, weight in rubric)
    earned = sum(weight for (_, weight), is_met in zip(rubric, met, strict=True) if is_met)
    return Reward(earned / total, {"num_criteria_met": float(sum(met))})


def read_rubric(rubric: Sequence[Any], task: Task) -> list[tuple[str, float]]:
    """(criterion, weight) of each. Raises: ValueError: there is none, or one is no text or has no weight above 0."""
    read = []
    for entry in rubric:
        text, weight = (entry.get("criterion"), entry.get("weight", 1)) if isinstance(entry, Mapping) else (entry, 1)
        if not isinstance(text, str) or not isinstance(weight, int | float) or weight <= 0:
            raise ValueError(f"task {task.group_id}: criterion {entry!r:.100} is no text, or has no weight above 0")
        read.append((text, float(weight)))
    if not read:
        raise ValueError(f"task {task.group_id} has no rubric: set workflow_args.rubric, or give a column rubric")
    return read


def parse_verdicts(text: str, count: int) -> list[bool]:
    """Read a judge's verdicts: True for each of `count` criteria that is met. Raises: ValueError: there is no verdict
    on one.
    """
    verdicts = {int(number): word.lower() == "yes" for number, word in _VERDICT.findall(text)}
    missing = [str(number) for number in range(1, count + 1) if number not in verdicts]
    if missing:
        raise ValueError(f"the judge gave no verdict on criterion {', '.join(missing)}: {text!r:.200}")
    return [verdicts[number] for number in range(1, count + 1)]


def _question(task: Task) -> str:
    return str(task.messages[-1]["content"]) if task.messages else task.prompt
