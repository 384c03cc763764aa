"""Promises of a batch that does not wait for all rollouts."""

import asyncio
import logging
import time
from itertools import count
from typing import Any

import pytest

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import load_config
from rftdask.config.schema.explorer import OverRolloutConfig
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from tests.unit.rollouts.rollout_cases import (
    CharTokenizer,
    cut_at,
    generation,
    named,
    outcome,
    replies,
    returns,
    run,
    task,
)

LONG = "a rather long answer, in more than one piece"


async def late_for_odd_rollouts(task: Task, model: PolicyModel) -> float:
    answer = await model.generate("p")
    if task.index == 3 and answer.tokens[0] % 2:
        await asyncio.sleep(3600)
    return 1.0


@pytest.mark.parametrize("keeps", [False, True])
def test_late_rollouts_are_cancelled_and_siblings_kept_or_not(keeps: bool) -> None:
    numbers = count()
    name = named(late_for_odd_rollouts)
    over = OverRolloutConfig(ratio=0.25, wait_after_min=0.05, return_partial_tasks=keeps)
    groups: dict[int, list[Experience]] = {}
    experiences = outcome(
        [task(index, name) for index in range(4)],
        TextEngine(replies(lambda request: str(next(numbers) % 2)), CharTokenizer()),
        {"repeat_times": 2, "on_group": groups.__setitem__},
        max_timeout=60.0,
        over_rollout=over,
    ).experiences
    assert [e.status for e in experiences[:6]] == [Status.OK] * 6
    early, late = experiences[6:]
    assert early.status is (Status.OK if keeps else Status.FILTERED)
    assert (late.status, late.reward) == (Status.TIMEOUT, None)
    assert late.error == "cancelled 0.05 s after 3 of 4 tasks were done (explorer.over_rollout)"
    assert [e.status for e in groups[3]] == [early.status, late.status]


def test_no_more_rollouts_of_a_workflow_run_than_it_allows() -> None:
    running: list[int] = []
    most = 0

    async def licensed(task: Task, model: PolicyModel) -> float:
        nonlocal most
        running.append(task.index)
        most = max(most, len(running))
        await model.generate("p")
        await asyncio.sleep(0)
        running.remove(task.index)
        return 1.0

    name = named(licensed, max_concurrent=2)
    log: list = []
    result = outcome([task(i, name) for i in range(7)], TextEngine(replies("4", log), CharTokenizer()), {})
    assert most == 2 and [len(call) for call in log] == [2, 2, 2, 1]
    assert {e.status for e in result.experiences} == {Status.OK}
    assert result.times[0].queue_s < result.times[6].queue_s


def test_a_blocked_event_loop_is_logged_and_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    async def blocks(task: Task, model: PolicyModel) -> float:
        while True:
            pass

    with caplog.at_level(logging.WARNING):
        bad, good = run([task(0, named(blocks)), task(1)], replies("4"), max_timeout=1.0, max_retry_times=0)
    assert (bad.status, good.status) == (Status.TIMEOUT, Status.OK)
    assert "blocked the event loop for 0.5 s" in bad.error
    assert "the event loop of all rollouts is blocked" in caplog.text and "in blocks" in caplog.text


def test_time_lost_to_a_blocked_event_loop_is_given_back() -> None:
    async def blocks(task: Task, model: PolicyModel) -> float:
        await model.generate("p")
        time.sleep(1.5)
        return 1.0

    async def patient(task: Task, model: PolicyModel) -> float:
        await model.generate("p")
        for _ in range(3):
            await asyncio.sleep(0.01)
        return 1.0

    tasks = [task(0, named(patient)), task(1, named(blocks))]
    patient_one, _ = run(tasks, replies("4"), max_timeout=0.75, max_retry_times=0)
    assert patient_one.status is Status.OK, patient_one.error


def test_a_slow_rollout_delays_only_one_call() -> None:
    async def three_turns(task: Task, model: PolicyModel) -> float:
        if task.index == 0:
            await asyncio.sleep(3600)
        for _ in range(3):
            await model.generate("p")
        return 1.0

    name, log = named(three_turns), []  # type: ignore[var-annotated]
    batch = {"max_wait_s": 0.3}
    policy = TextEngine(replies("4", log), CharTokenizer())
    result = outcome([task(0, name), task(1, name)], policy, batch, max_timeout=0.7, max_retry_times=0)
    # If each call waited 0.3 s for task 0, the third would miss the deadline of task 1.
    assert [e.status for e in result.experiences] == [Status.TIMEOUT, Status.OK, Status.OK, Status.OK]


def test_auxiliary_models_are_called_by_name_and_not_recorded() -> None:
    async def judged(task: Task, model: PolicyModel) -> Reward:
        answer = await model.chat(task.messages)
        verdict = await model.auxiliary("judge").chat([{"role": "user", "content": answer.text}], max_tokens=3)
        [logprob] = await model.auxiliary().logprobs("q", "a")
        with pytest.raises(ValueError, match=r"auxiliary model .other. does not exist; .*has: judge"):
            model.auxiliary("other")
        return Reward(float(verdict.text == "yes"), {"logprob": logprob})

    async def score(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return [(-0.25,) * len(response) for _, response in pairs]

    judge = TextEngine(replies("yes"), CharTokenizer(), score)
    policy = TextEngine(replies("4"), CharTokenizer())
    result = outcome([task(0, named(judged))], policy, {"auxiliary": {"judge": judge}})
    [experience] = result.experiences
    assert (experience.reward, experience.response_text, experience.metrics["logprob"]) == (1.0, "4", -0.25)
    assert result.times[0].generate_s > 0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"temperature": 0.25}, ("temperature", 0.25)),
        ({"top_p": 0.5}, ("top_p", 0.5)),
        ({"top_k": 7}, ("top_k", 7)),
        ({"repetition_penalty": 1.5}, ("repetition_penalty", 1.5)),
        ({"min_response_tokens": 2}, ("min_tokens", 2)),
        ({"max_response_tokens": 9}, ("max_tokens", 9)),
        ({"max_prompt_tokens": 11}, ("prompt", 11)),
        ({"max_model_len": 112}, ("prompt", 12)),  # 100 tokens are for the response
    ],
)
def test_auxiliary_requests_use_their_own_limits_and_sampling(
    section: dict[str, float], expected: tuple[str, float]
) -> None:
    async def judged(task: Task, model: PolicyModel) -> float:
        for policy_or_judge in (model, model.auxiliary("judge")):
            await policy_or_judge.generate("a prompt of some length")
        return 0.0

    calls: tuple[list[list[GenerateRequest]], ...] = ([], [])
    policy, judge = (TextEngine(replies("yes", log), CharTokenizer()) for log in calls)
    judge_section = {"name": "judge", "model_path": "none", "engine_type": "fake", **section}
    changes = {"auxiliary_models": [judge_section], "model": cut_at(20)}
    rows = outcome([task(0, named(judged))], policy, {"auxiliary": {"judge": judge}}, **changes)
    assert rows.experiences[0].status == Status.OK
    [[[of_policy]], [[of_judge]]] = calls
    key, value = expected
    usual, changed = (
        len(request.prompt_tokens) if key == "prompt" else getattr(request.sampling, key)
        for request in (of_policy, of_judge)
    )
    assert changed == value != usual


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1.0}, "ValueError: temperature -1.0 must be 0 (greedy) or at least"),
        ({"max_tokens": 0}, "ValueError: max_tokens >= 1"),
        ({"top_p": float("nan")}, "ValueError: sampling parameters must be finite numbers"),
        ({"max_tokns": 3}, "TypeError: "),
    ],
)
def test_an_invalid_call_fails_only_its_own_rollout(options: dict[str, float], error: str) -> None:
    bad, good = run([task(0, returns(1.0, **options)), task(1)], replies("4"), max_retry_times=0)
    assert bad.error.startswith(error) and good.status is Status.OK


def test_max_tokens_of_a_call_is_bounded_by_the_run() -> None:
    log: list = []
    run([task(0, returns(1.0, max_tokens=10**9))], replies("4", log))
    assert log[0][0].sampling.max_tokens == 100


def test_seeds_count_only_calls_of_the_policy() -> None:
    seeds = []

    async def engine(requests):  # type: ignore[no-untyped-def]
        seeds.extend(request.seed for request in requests)
        return [generation("4", request) for request in requests]

    async def asks_a_judge_first(task: Task, model: PolicyModel) -> float:
        await model.auxiliary().generate("p")
        await model.generate("p")
        return 1.0

    judge = TextEngine(replies("x"), CharTokenizer())
    for name in (named(asks_a_judge_first), returns(1.0)):
        outcome([task(0, name)], TextEngine(engine, CharTokenizer()), {"auxiliary": {"j": judge}})
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 24),
        ({"max_prompt_tokens": 9}, 9),
        ({"max_model_len": 20, "max_response_tokens": 8}, 12),
        ({"max_prompt_tokens": 9, "enable_prompt_truncation": False}, None),
    ],
)
def test_a_prompt_is_as_long_as_the_model_allows(keys: dict[str, Any], length: int | None) -> None:
    tree = {
        "model": {"model_path": "none", "max_model_len": 200, "max_response_tokens": 100, **keys},
        "buffer": {"total_steps": 1, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    log: list[list[GenerateRequest]] = []
    model = load_config(tree).model
    policy = TextEngine(replies("yes", log), CharTokenizer())
    asked = task(0, "simple_workflow", prompt="a prompt of some length.", messages=(), reward_fn="math_reward")
    [row] = outcome([asked], policy, {}, model=model, max_retry_times=0).experiences
    if length is None:
        assert row.status is Status.FAILED and "PromptTooLongError" in row.error
    else:
        [[request]] = log
        assert len(request.prompt_tokens) == length
