"""Workflows whose reward comes from another model: a reward model, a judge with a rubric, or a judge that compares
the answers of a group (RULER).

Invariant: an unreadable verdict fails the rollout and never becomes a reward of zero.
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
from rftdask.rollouts.workflows.base import AuxiliaryModel, PolicyModel, Reward
from rftdask.rollouts.workflows.episode import question_of
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
    """Ask as in math_workflow. The reward is the probability, 0 to 1, with which the auxiliary model prefers "Yes" to
    "No" as the answer to whether the response is correct. Metric: accuracy of the response, if the task has a truth.

    `workflow_args`: auxiliary_model (default: the only one), yes ("Yes"), no ("No").
    """
    options = {"auxiliary_model": "", "yes": "Yes", "no": "No", **task.workflow_args}
    judge = model.auxiliary(options["auxiliary_model"])
    answer = (await ask(task, model, MATH_SYSTEM_PROMPT)).text
    with model.timer("reward"):
        question = _GRADE.format(question=question_of(task), answer=answer)
        # The logprob of a word is the sum over its tokens.
        yes, no = [sum(await judge.logprobs(question, options[word])) for word in ("yes", "no")]
    metrics = {"accuracy": float(await asyncio.to_thread(is_right, answer, task.truth))} if task.truth else {}
    # Softmax over the two words; the exponent is clamped to avoid overflow.
    return Reward(1.0 / (1.0 + math.exp(min(max(no - yes, -700.0), 700.0))), metrics)


@workflow("rubric_judge_workflow")
async def rubric_judge_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask, and let a judge decide which criteria the answer meets. The reward is their share of the weights, 0 to 1.

    Criteria: `workflow_args.rubric` or the row's column `rubric`, a list of texts or of {criterion, weight (1)}.
    `workflow_args`: auxiliary_model (default: the only one), max_judge_tokens (256).

    Raises: ValueError: no rubric, or a criterion without a verdict.
    """
    options: dict[str, Any] = {"auxiliary_model": "", "max_judge_tokens": 256, **task.workflow_args}
    rubric = read_rubric(options.get("rubric") or task.row.get("rubric") or (), task)
    judge = model.auxiliary(options["auxiliary_model"])
    answer = (await ask(task, model)).text
    with model.timer("reward"):
        listed = "\n".join(f"{number}: {text}" for number, (text, _) in enumerate(rubric, start=1))
        prompt = _JUDGE.format(question=question_of(task), answer=answer, criteria=listed)
        met = parse_verdicts(await _ask_judge(judge, prompt, options), len(rubric))
    total = sum(weight for _, weight in rubric)
    earned = sum(weight for (_, weight), is_met in zip(rubric, met, strict=True) if is_met)
    return Reward(earned / total, {"num_criteria_met": float(sum(met))})


@workflow("rubric_judge_openai_workflow", in_process=True, requires={"openai": "openai"})
async def rubric_judge_openai_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask, and let a model behind an API rate the answer by the whole rubric, 1 to 10. The reward is a tenth of it.

    The rubric is as in rubric_judge_workflow; `title` and `description` also make a criterion. `workflow_args`:
    judge_model_name; judge_api_base_url_env (OPENAI_BASE_URL) and judge_api_key_env (OPENAI_API_KEY): names of
    environment variables, so that no key is stored; judge_timeout_s (120): timeout of each of at most 4 tries.

    Raises: ValueError: no judge, no rubric, or no rating.
    Source: arXiv:2507.17746 (RaR-Implicit).
    """
    options: dict[str, Any] = {"judge_model_name": "", "judge_timeout_s": 120.0}
    options |= {"judge_api_base_url_env": "OPENAI_BASE_URL", "judge_api_key_env": "OPENAI_API_KEY"}
    options |= task.workflow_args
    base_url = os.environ.get(options["judge_api_base_url_env"], "")
    if not options["judge_model_name"] or not base_url:
        variable = f"the environment variable {options['judge_api_base_url_env']} (judge_api_base_url_env)"
        raise ValueError(f"set workflow_args.judge_model_name, and {variable} to the judge's address")
    rubric = read_rubric(options.get("rubric") or task.row.get("rubric") or (), task)
    answer = (await ask(task, model)).text
    listed = "\n".join(f"- {text} (weight {weight:g})" for text, weight in rubric)
    prompt = _RATE.format(question=question_of(task), answer=answer, criteria=listed)
    with model.timer("reward"):
        openai = importlib.import_module("openai")  # by name, because it is optional
        key, seconds = os.environ.get(options["judge_api_key_env"], "none"), float(options["judge_timeout_s"])
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, timeout=seconds, max_retries=3) as judge:
            verdict = await judge.chat.completions.create(
                model=options["judge_model_name"], messages=[{"role": "user", "content": prompt}], temperature=0.0
            )
    return Reward(parse_rating(verdict.choices[0].message.content or "") / 10.0)


def parse_rating(text: str) -> int:
    """Return the last {"rating": 1 to 10} in a judge's answer. Raises: ValueError: there is none."""
    ratings = _RATING.findall(text)
    if not ratings or not 1 <= int(ratings[-1]) <= 10:
        raise ValueError(f"the judge gave no rating from 1 to 10: {text!r:.200}")
    return int(ratings[-1])


async def ruler_rewards(task: Task, answers: Sequence[str], model: PolicyModel) -> list[Reward]:
    """Rewards, 0 to 1, of a group's answers, which an auxiliary model compares in one prompt. Equal answers are shown
    once. Metric: ruler_score.

    `workflow_args`: auxiliary_model (default: the only one), max_judge_tokens (1024).
    Raises: ValueError: a score is missing. Source: RULER, of OpenPipe's ART.
    """
    options: dict[str, Any] = {"auxiliary_model": "", "max_judge_tokens": 1024, **task.workflow_args}
    distinct = list(dict.fromkeys(answers))
    listed = "\n\n".join(f"Answer {number}:\n{text}" for number, text in enumerate(distinct, start=1))
    prompt = _COMPARE.format(question=question_of(task), answers=listed, count=len(distinct))
    with model.timer("reward"):
        verdict = await _ask_judge(model.auxiliary(options["auxiliary_model"]), prompt, options)
    scores = dict(zip(distinct, parse_scores(verdict, len(distinct)), strict=True))
    return [Reward(scores[answer], {"ruler_score": scores[answer]}) for answer in answers]


async def _ask_judge(judge: AuxiliaryModel, prompt: str, options: Mapping[str, Any]) -> str:
    # Greedy, so that equal answers get equal verdicts.
    question = [{"role": "user", "content": prompt}]
    return (await judge.chat(question, max_tokens=options["max_judge_tokens"], temperature=0.0)).text


def parse_scores(text: str, count: int) -> list[float]:
    """Return the last list of `count` numbers in a judge's answer, each clamped to 0 to 1. Raises: ValueError: none."""
    lists = [re.findall(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)", listed) for listed in _LIST.findall(text)]
    scores = [[min(1.0, max(0.0, float(number))) for number in listed] for listed in lists if len(listed) == count]
    if not scores:
        raise ValueError(f"the judge gave no list of {count} scores: {text[-200:]!r}")
    return scores[-1]


@workflow("async_math_ruler_workflow", group_reward=ruler_rewards)
@workflow("math_ruler_workflow", group_reward=ruler_rewards)
async def math_ruler_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask as in math_workflow. Once all rollouts of the task have ended, a judge scores them against each other
    (ruler_rewards). The task's reward function (default: math_reward) is only the metric gold_reward.
    """
    gold = await wait_for_reward(task, await ask(task, model, MATH_SYSTEM_PROMPT), "math_reward")
    return Reward(0.0, {**gold.metrics, "gold_reward": gold.value})


def read_rubric(rubric: Sequence[Any], task: Task) -> list[tuple[str, float]]:
    """Return (criterion, weight) pairs. Raises: ValueError: no criterion, or an invalid text or weight."""
    criteria = []
    for entry in rubric:
        text, weight = entry, 1
        if isinstance(entry, Mapping):
            # Datasets of Rubrics as Rewards use title and description.
            parts = [entry[key] for key in ("criterion", "title", "description") if isinstance(entry.get(key), str)]
            text, weight = ": ".join(parts) or None, entry.get("weight", 1)
        if not isinstance(text, str) or not isinstance(weight, int | float) or weight <= 0:
            raise ValueError(f"task {task.group_id}: criterion {entry!r:.100} needs a text and a weight above 0")
        criteria.append((text, float(weight)))
    if not criteria:
        raise ValueError(f"task {task.group_id} has no rubric; set workflow_args.rubric or add a column rubric")
    return criteria


def parse_verdicts(text: str, count: int) -> list[bool]:
    """Return a judge's verdicts: True for each of `count` criteria that is met. Raises: ValueError: one is missing."""
    verdicts = {int(number): word.lower() == "yes" for number, word in _VERDICT.findall(text)}
    missing = [str(number) for number in range(1, count + 1) if number not in verdicts]
    if missing:
        raise ValueError(f"the judge gave no verdict on criterion {', '.join(missing)}: {text!r:.200}")
    return [verdicts[number] for number in range(1, count + 1)]
