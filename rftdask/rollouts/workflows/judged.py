"""Workflows whose reward comes from another model: a reward model, a judge with a rubric, or one that compares the
answers of a group (RULER).

Invariant: a verdict that cannot be read is a failure of the rollout, never a reward of zero.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.rewards.math_answer import is_right
from rftdask.rollouts.rewards.registry import wait_for_reward
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.registry import workflow
from rftdask.rollouts.workflows.single_turn import MATH_SYSTEM_PROMPT, ask

_VERDICT = re.compile(r"^\W*(?:criterion\s*)?(\d+)\W+(yes|no)\b", re.IGNORECASE | re.MULTILINE)
_GRADE = "Question:\n{question}\n\nAnswer:\n{answer}\n\nIs the answer correct? Reply Yes or No.\n"
_JUDGE = (
    "Judge an answer by criteria. For each criterion write one line with its number and yes or no, such as "
    '"1: yes", and nothing else.\n\nQuestion:\n{question}\n\nAnswer:\n{answer}\n\nCriteria:\n{criteria}\n'
)

_RATING = re.compile(r'"rating"\s*:\s*([0-9]{1,3})(?![0-9.])')
_RATE = (
    "Rate an answer by criteria, all of them together, from 1 (meets none) to 10 (meets all). Reply with JSON alone, "
    'such as {{"rating": 7}}.\n\nQuestion:\n{question}\n\nAnswer:\n{answer}\n\nCriteria:\n{criteria}\n'
)
_LIST = re.compile(r"\[([-+0-9., \n]+)\]")
_COMPARE = (
    "Compare {count} answers to a question and give each a score from 0 to 1 for how well it resolves the question. "
    "Think briefly if you must; end with the scores as a list in the order of the answers, such as [0.2, 0.9].\n\n"
    "Question:\n{question}\n\n{answers}\n\nEnd with a list of {count} numbers.\n"
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
    metrics = {"accuracy": float(await asyncio.to_thread(is_right, answer, task.truth))} if task.truth else {}
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


@workflow("rubric_judge_openai_workflow", in_process=True, requires={"openai": "openai"})
async def rubric_judge_openai_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask; a model behind an API rates the answer by the rubric as a whole, 1 to 10, and the reward is a tenth of it.

    The rubric is as in rubric_judge_workflow, with `title` and `description` accepted as a criterion. `workflow_args`:
    judge_model_name; judge_api_base_url_env (OPENAI_BASE_URL) and judge_api_key_env (OPENAI_API_KEY): environment
    variables, since no key is written down; judge_timeout_s (120), of each of at most 4 tries.

    Raises: ValueError: no judge is named, there is no rubric, or the judge gives no rating.
    Source: arXiv:2507.17746 (RaR-Implicit).
    """
    options: dict[str, Any] = {
        "judge_model_name": "",
        "judge_api_base_url_env": "OPENAI_BASE_URL",
        "judge_api_key_env": "OPENAI_API_KEY",
        "judge_timeout_s": 120.0,
        **task.workflow_args,
    }
    base_url = os.environ.get(options["judge_api_base_url_env"], "")
    if not options["judge_model_name"] or not base_url:
        raise ValueError(
            f"workflow_args.judge_model_name must be set, and the variable {options['judge_api_base_url_env']} have "
            "the judge's address (judge_api_base_url_env)"
        )
    rubric = read_rubric(options.get("rubric") or task.row.get("rubric") or (), task)
    answer = (await ask(task, model)).text
    listed = "\n".join(f"- {text} (weight {weight:g})" for text, weight in rubric)
    prompt = _RATE.format(question=_question(task), answer=answer, criteria=listed)
    with model.timer("reward"):
        openai = importlib.import_module("openai")  # an extra, so by its name
        key, seconds = os.environ.get(options["judge_api_key_env"], "none"), float(options["judge_timeout_s"])
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, timeout=seconds, max_retries=3) as judge:
            said = await judge.chat.completions.create(
                model=options["judge_model_name"], messages=[{"role": "user", "content": prompt}], temperature=0.0
            )
    return Reward(parse_rating(said.choices[0].message.content or "") / 10.0)


def parse_rating(text: str) -> int:
    """The last {"rating": 1 to 10} of what a judge said. Raises: ValueError: there is none."""
    found = _RATING.findall(text)
    if not found or not 1 <= int(found[-1]) <= 10:
        raise ValueError(f"the judge gave no rating from 1 to 10: {text!r:.200}")
    return int(found[-1])


async def ruler_rewards(task: Task, answers: Sequence[str], model: PolicyModel) -> list[Reward]:
    """Rewards, 0 to 1, of the answers of a group, which an auxiliary model reads side by side. An answer that is there
    twice is shown once. Metric: ruler_score.

    `workflow_args`: auxiliary_model ("" the only one), max_judge_tokens (1024).
    Raises: ValueError: the judge gives no score for one. Source: RULER, of OpenPipe's ART.
    """
    options: dict[str, Any] = {"auxiliary_model": "", "max_judge_tokens": 1024, **task.workflow_args}
    distinct = list(dict.fromkeys(answers))
    listed = "\n\n".join(f"Answer {number}:\n{text}" for number, text in enumerate(distinct, start=1))
    prompt = _COMPARE.format(question=_question(task), answers=listed, count=len(distinct))
    with model.timer("reward"):
        judge = model.auxiliary(options["auxiliary_model"])
        asked = [{"role": "user", "content": prompt}]
        said = await judge.chat(asked, max_tokens=options["max_judge_tokens"], temperature=0.0)
    scores = dict(zip(distinct, parse_scores(said.text, len(distinct)), strict=True))
    return [Reward(scores[answer], {"ruler_score": scores[answer]}) for answer in answers]


def parse_scores(text: str, count: int) -> list[float]:
    """The last list of `count` numbers in what a judge said, each brought within 0 and 1. Raises: ValueError: there is
    none.
    """
    lists = [re.findall(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)", listed) for listed in _LIST.findall(text)]
    scores = [[min(1.0, max(0.0, float(number))) for number in listed] for listed in lists if len(listed) == count]
    if not scores:
        raise ValueError(f"the judge gave no list of {count} scores: {text[-200:]!r}")
    return scores[-1]


@workflow("async_math_ruler_workflow", group_reward=ruler_rewards)
@workflow("math_ruler_workflow", group_reward=ruler_rewards)
async def math_ruler_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask as math_workflow does; once all rollouts of the task have ended, one judge scores them against each other
    (ruler_rewards). What the task's reward function says, math_reward by default, is the metric gold_reward alone.
    """
    gold = await wait_for_reward(task, await ask(task, model, MATH_SYSTEM_PROMPT), "math_reward")
    return Reward(0.0, {**gold.metrics, "gold_reward": gold.value})


def read_rubric(rubric: Sequence[Any], task: Task) -> list[tuple[str, float]]:
    """(criterion, weight) of each. Raises: ValueError: there is none, or one is no text or has no weight above 0."""
    read = []
    for entry in rubric:
        text, weight = entry, 1
        if isinstance(entry, Mapping):
            # Those of rubrics as rewards have a title and a description.
            parts = [entry[key] for key in ("criterion", "title", "description") if isinstance(entry.get(key), str)]
            text, weight = ": ".join(parts) or None, entry.get("weight", 1)
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
