"""Promises of the runner: every rollout yields an experience or its error."""

import asyncio
import contextlib
import math
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience, Status
from rftdask.data.seeds import derived_seed
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.errors import RoleError, UserError
from rftdask.rollouts.policy.request_queues import GenerateBatch
from rftdask.rollouts.rollout import STOP_GRACE_S
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from tests.unit.rollouts.rollout_cases import (
    VERSION,
    CharTokenizer,
    cut_at,
    generation,
    hangs,
    named,
    outcome,
    prompt_of,
    replies,
    returns,
    run,
    task,
)


def failure(experience: Experience) -> tuple[Status, float | None, int, int]:
    return experience.status, experience.reward, len(experience.tokens), experience.attempt


def test_a_rollout_becomes_an_experience_with_the_exact_tokens() -> None:
    [experience] = run([task(5, workflow="simple_workflow", reward_fn="math_reward")], replies("it is 4"))
    prompt = "<user>q5<assistant>"
    assert experience == Experience(
        taskset="t",
        epoch=0,
        task_index=5,
        rollout=0,
        explore_step=3,
        tokens=(*map(ord, prompt), *map(ord, "it is 4"), 0),
        prompt_length=len(prompt),
        rollout_logprobs=(-0.5,) * 8,
        reward=1.0,
        min_policy_version=VERSION,
        max_policy_version=VERSION,
        weights_hash="hash7",
        seed=derived_seed(42, "t/0/5", 0, 0),
        prompt_text=prompt,
        response_text="it is 4",
        truth="4",
        metrics={"accuracy": 1.0, "num_prompt_tokens": 19.0, "num_response_tokens": 8.0, "prompt_truncated": 0.0},
    )


def test_experiences_are_ordered_by_task_rollout_and_turn() -> None:
    async def two_turns(task: Task, model: PolicyModel) -> float:
        await asyncio.sleep((2 - task.index) / 1000)  # the later task ends first
        for turn in range(2):
            await model.generate(f"turn {turn}")
        return 1.0

    name = named(two_turns)
    experiences = run([task(1, name), task(2, name)], replies("x"), repeat_times=2)
    assert [experience.uid for experience in experiences] == [
        f"t/0/{index}/{rollout}/{turn}" for index in (1, 2) for rollout in (0, 1) for turn in (0, 1)
    ]
    assert len({experience.seed for experience in experiences}) == 8


def test_experiences_contain_the_steps_of_the_workflow() -> None:
    async def walks(task: Task, model: PolicyModel) -> Reward:
        for turn in range(2):
            await model.generate(f"turn {turn}")
        return Reward(1.0, steps=(Step("start", 0.25), Step("door")))

    rows = run([task(0, named(walks)), task(1, returns(Reward(1.0)))], replies("x"))
    assert [(e.env_state, e.turn_reward, e.reward) for e in rows] == [
        ("start", 0.25, 1.0),
        ("door", None, 1.0),
        (None, None, 1.0),
    ]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Step("a"), Step("b")), "ValueError: 2 steps returned for 1 calls of the policy"),
        ((Step("a", math.nan),), "ValueError: reward of step 0 is nan, not a finite number"),
        ((Step(7),), "ValueError: state of step 0 is 7, not a string"),  # type: ignore[arg-type]
    ],
)
def test_invalid_steps_fail_the_rollout(steps: tuple[Step, ...], message: str) -> None:
    [bad] = run([task(0, returns(Reward(1.0, steps=steps)))], replies("x"))
    assert bad.status is Status.FAILED
    assert bad.error.startswith(message)


def test_a_group_is_reported_as_soon_as_its_rollouts_have_ended() -> None:
    events: list[str] = []
    first_is_reported = asyncio.Event()

    async def waits(task: Task, model: PolicyModel) -> float:
        await model.generate("x")
        if task.index == 1:
            await first_is_reported.wait()
        events.append(f"rollout of {task.index}")
        return 1.0

    def report(number: int, experiences: list[Experience]) -> None:
        events.append(f"group {number} with {[e.uid for e in experiences]}")
        first_is_reported.set()

    name = named(waits)
    run([task(1, name), task(2, name)], replies("x"), repeat_times=2, on_group=report)
    assert events == [
        "rollout of 2",
        "rollout of 2",
        "group 1 with ['t/0/2/0/0', 't/0/2/1/0']",
        "rollout of 1",
        "rollout of 1",
        "group 0 with ['t/0/1/0/0', 't/0/1/1/0']",
    ]


def test_a_task_of_a_bad_row_fails_with_its_problem() -> None:
    log: list[list[GenerateRequest]] = []
    policy = TextEngine(replies("4", log), CharTokenizer())
    tasks = [task(0), task(1, problem="row 1: column 'answer' is empty")]
    good, *bad = outcome(tasks, policy, {"repeat_times": 1}).experiences
    assert good.status is Status.OK and sum(map(len, log)) == 1, "the policy is not asked for the bad row"
    [row] = bad
    assert (row.status, row.attempt, row.group_id) == (Status.FAILED, 0, "t/0/1")
    assert row.error == "DataError: row 1: column 'answer' is empty"


def test_the_same_batch_gives_the_same_table() -> None:
    def reply(request: GenerateRequest) -> str:
        return str(request.seed % 7)

    tasks = [task(index) for index in range(5)]
    first, second = (experiences_to_table(run(tasks, replies(reply), repeat_times=3)) for _ in range(2))
    assert first.equals(second)
    assert len({row["response_text"] for row in first.to_pylist()}) > 1


def test_all_single_turn_rollouts_share_one_call_in_order() -> None:
    log: list[list[GenerateRequest]] = []
    run([task(1, prompt="a", messages=()), task(2, prompt="b", messages=())], replies("4", log), repeat_times=2)
    assert [[prompt_of(request) for request in call] for call in log] == [["a", "a", "b", "b"]]


def test_a_truncated_response_is_still_rewarded() -> None:
    [experience] = run([task()], replies("44444"), sampling=SamplingParams(max_tokens=1))
    assert (experience.status, experience.reward, experience.response_text) == (Status.TRUNCATED, 1.0, "4")


def test_a_retry_has_the_same_seed_and_a_clean_record() -> None:
    attempts = []

    async def fails_once(task: Task, model: PolicyModel) -> float:
        await model.generate("first")
        attempts.append(task.index)
        if len(attempts) == 1:
            raise ConnectionError("the environment is gone")
        await model.generate("second")
        return 0.5

    log: list[list[GenerateRequest]] = []
    experiences = run([task(0, named(fails_once))], replies("x", log))
    assert [(row.turn, row.attempt, row.prompt_text) for row in experiences] == [(0, 1, "first"), (1, 1, "second")]
    assert [call[0].seed for call in log] == [derived_seed(42, "t/0/0", 0, turn) for turn in (0, 0, 1)]


def test_stored_errors_contain_no_secrets() -> None:
    async def asks_a_judge(task: Task, model: PolicyModel) -> float:
        raise OSError("no answer from https://me:hunter2@judge/v1?token=abc")

    [bad] = run([task(0, named(asks_a_judge))], replies("x"))
    assert bad.error == "OSError: no answer from https://me:***@judge/v1?token=***"


def test_the_last_failure_becomes_an_experience_without_reward() -> None:
    async def fails_for_task_1(task: Task, model: PolicyModel) -> float:
        await model.generate("p")
        if task.index == 1:
            raise KeyError("no\nsuch key")
        return 1.0

    name = named(fails_for_task_1)
    good, bad = run([task(0, name), task(1, name)], replies("x"), max_retry_times=2)
    assert good.status is Status.OK
    assert failure(bad) == (Status.FAILED, None, 0, 2)
    assert bad.error == r"KeyError: 'no\nsuch key'"
    assert (bad.prompt_text, bad.truth, bad.min_policy_version, bad.weights_hash) == ("q1", "4", VERSION, "hash7")
    experiences_to_table([good, bad])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, "not a number") for value in (None, "1", [1.0], 1j)),
        *((value, "not a finite number in float32") for value in (math.nan, math.inf, -math.inf, 1e39, 10**400)),
        (Reward(math.nan), "not a finite number in float32"),
        (Reward(1.0, {"style": "good"}), "metric style is 'good'"),  # type: ignore[dict-item]
        (Reward(1.0, {"a\ud800": 1.0}), r"the name of a metric is 'a\ud800', not a text in UTF-8"),
        (Reward(1.0, {7: 1.0}), "the name of a metric is 7, not a text"),  # type: ignore[dict-item]
        (Reward(1.0, {"steps": 10**400}), "which float64 cannot hold"),
    ],
)
def test_a_reward_or_metric_that_is_not_finite_fails(value: Any, error: str) -> None:
    name = returns(value)
    [experience] = run([task(0, name)], replies("x"))
    assert failure(experience) == (Status.FAILED, None, 0, 1)
    assert error in experience.error
    assert f"workflow {name}, task t/0/0" in experience.error


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1), Fraction(1)])
def test_every_real_number_is_a_reward(value: Any) -> None:
    [experience] = run([task(0, returns(value))], replies("x"))
    assert experience.reward == 1.0 and type(experience.reward) is float


def test_a_workflow_that_never_calls_the_policy_has_failed() -> None:
    async def idle(task: Task, model: PolicyModel) -> float:
        return 1.0

    [experience] = run([task(0, named(idle))], replies("x"))
    assert experience.status is Status.FAILED and "never called" in experience.error


def test_a_hung_attempt_is_cancelled_before_its_retry() -> None:
    events: list[str] = []

    async def hangs(task: Task, model: PolicyModel) -> float:
        events.append("begin")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            events.append("end")
        return 1.0

    [experience] = run([task(0, named(hangs))], replies("x"), max_timeout=0.01)
    assert events == ["begin", "end", "begin", "end"]
    assert failure(experience) == (Status.TIMEOUT, None, 0, 1)
    assert experience.error.startswith("TimeoutError: not finished after max_timeout 0.01 s")


def test_an_attempt_that_ignores_cancellation_is_not_retried() -> None:
    events: list[str] = []

    async def stubborn(task: Task, model: PolicyModel) -> float:
        events.append("begin")
        end = asyncio.Event()
        asyncio.get_running_loop().call_later(STOP_GRACE_S + 0.2, end.set)
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()
        try:
            await model.generate("p")
        except RuntimeError as error:
            events.append(str(error))
        return 1.0

    [experience] = run([task(0, named(stubborn))], replies("x"), max_timeout=0.01)
    assert failure(experience) == (Status.TIMEOUT, None, 0, 0)
    assert experience.error.endswith("and it ignored its cancellation")
    assert events == ["begin", "this attempt at the rollout has ended; its model takes no more calls"]


def test_a_workflow_that_exits_or_cancels_itself_has_failed() -> None:
    async def exits(task: Task, model: PolicyModel) -> float:
        sys.exit(3)

    async def cancels(task: Task, model: PolicyModel) -> float:
        raise asyncio.CancelledError

    first, second, good = run([task(0, named(exits)), task(1, named(cancels)), task(2)], replies("4"))
    assert first.error == "RuntimeError: the workflow called sys.exit(3)"
    assert second.error == "RuntimeError: the workflow cancelled itself"
    assert good.status is Status.OK


def test_an_engine_error_ends_the_unit_even_if_swallowed() -> None:
    async def swallows(task: Task, model: PolicyModel) -> float:
        await model.generate("p")
        with contextlib.suppress(Exception):
            await model.generate("p")
        return 1.0

    def breaks_at(call: int) -> GenerateBatch:
        numbers = iter(range(1, 100))

        async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
            if next(numbers) == call:
                raise RoleError("engine 0: out of memory")
            return [generation("4", request) for request in requests]

        return generate_batch

    name = named(swallows)
    for flow, call in [("math_workflow", 1), (name, 1), (name, 2)]:
        with pytest.raises(RoleError, match="engine 0: out of memory"):
            run([task(0, flow), task(1, flow)], breaks_at(call), repeat_times=2)


def test_an_engine_error_ends_all_other_rollouts() -> None:
    async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
        raise RoleError("gone")

    with pytest.raises(RoleError, match="gone"):
        run([task(0, named(hangs)), task(1)], generate_batch)


def test_a_lost_request_is_an_engine_error() -> None:
    async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
        return [generation("4", request) for request in requests[1:]]

    with pytest.raises(RoleError, match="1 generations for 2 requests"):
        run([task()], generate_batch, repeat_times=2)


def test_an_unknown_workflow_or_reward_is_an_early_error() -> None:
    log: list[list[GenerateRequest]] = []
    with pytest.raises(UserError, match="unknown workflow 'math_workflows'; did you mean math_workflow"):
        run([task(0), task(1, "math_workflows")], replies("4", log))
    with pytest.raises(UserError, match="unknown reward function"):
        run([task(0, reward_fn="mathreward")], replies("4", log))
    assert log == []


def test_a_long_prompt_is_truncated_or_fails_without_a_retry() -> None:
    long = task(0, prompt="0123456789", messages=())
    [cut] = run([long], replies("4"), model=cut_at(4))
    assert (tuple(cut.tokens[: cut.prompt_length]), cut.metrics["prompt_truncated"]) == (tuple(map(ord, "6789")), 1.0)
    [failed] = run([long], replies("4"), model=cut_at(4, enable_prompt_truncation=False))
    assert failure(failed) == (Status.FAILED, None, 0, 0)
    assert failed.error.startswith("PromptTooLongError: prompt of 10 tokens exceeds max_prompt_tokens 4")


def test_sampling_of_a_call_overrides_that_of_the_taskset() -> None:
    async def asks_twice(task: Task, model: PolicyModel) -> float:
        await model.generate("p")
        await model.generate("p", top_p=0.5)
        return 1.0

    greedy = SamplingParams(max_tokens=100, temperature=0.0)
    first, second = run([task(0, named(asks_twice))], replies("x"), sampling=greedy)
    assert [(row.temperature, row.top_p) for row in (first, second)] == [(0.0, 1.0), (0.0, 0.5)]


def test_weights_that_changed_in_flight_have_no_hash_here() -> None:
    async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
        return [Generation((52,), (-1.0,), "stop", VERSION, VERSION + 1) for _ in requests]

    [experience] = run([task()], generate_batch)
    assert (experience.min_policy_version, experience.max_policy_version) == (VERSION, VERSION + 1)
    assert experience.weights_hash == ""


def test_seeds_depend_on_run_task_rollout_and_turn() -> None:
    tasks = [(1, "t/0/0", 0), (2, "t/0/0", 0), (1, "t/0/1", 0), (1, "t/0/0", 1)]
    seeds = [*(derived_seed(*key, 0) for key in tasks), derived_seed(1, "t/0/0", 0, 1)]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(42, "gsm8k/0/17", 3, 0) == 4272670318136131685  # resumed runs rely on it after an upgrade


def test_a_greedy_baseline_adds_one_rollout_at_temperature_0() -> None:
    calls: list[list[GenerateRequest]] = []
    tasks = [task(i, workflow="simple_workflow", reward_fn="math_reward") for i in (0, 1)]
    rows = run(tasks, replies("it is 4", calls), repeat_times=2, greedy_baseline=True)
    assert [(e.task_index, e.rollout, e.temperature) for e in rows] == [
        *[(0, 0, 1.0), (0, 1, 1.0), (0, 2, 0.0)],
        *[(1, 0, 1.0), (1, 1, 1.0), (1, 2, 0.0)],
    ]
    temperatures = [request.sampling.temperature for call in calls for request in call]
    assert sorted(temperatures) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def judged_group(verdict: str, **changes: Any) -> list[Experience]:
    responses = iter(["a", "b", "a"])
    batch = {"repeat_times": 3, "auxiliary": {"judge": TextEngine(replies(verdict), CharTokenizer())}}
    policy = TextEngine(replies(lambda request: next(responses)), CharTokenizer())
    return outcome([task(0, "math_ruler_workflow")], policy, batch, **changes).experiences


def test_a_group_is_rewarded_together_once_all_have_ended() -> None:
    rows = judged_group("[0.25, 0.75]")
    assert [(row.response_text, row.reward) for row in rows] == [("a", 0.25), ("b", 0.75), ("a", 0.25)]
    assert {row.status for row in rows} == {Status.OK} and rows[1].metrics["ruler_score"] == 0.75


def test_without_a_verdict_the_whole_group_has_failed() -> None:
    rows = judged_group("I cannot say")
    assert [(row.status, row.reward) for row in rows] == [(Status.FAILED, None)] * 3
    assert rows[0].error.startswith("reward of the group: ValueError: the judge gave no list of 2 scores")


async def _asks_a_judge(task: Task, model: Any) -> float:
    """Call the policy and the judge, then fail if the policy's response is long."""
    answer = await model.chat(task.messages)
    judge = model.auxiliary("judge")
    await judge.generate(answer.text)
    if len(answer.text) > 1:
        raise ValueError("the response is long")
    return 1.0


def test_use_of_auxiliary_models_counts_all_attempts() -> None:
    name = f"{__name__}._asks_a_judge"
    batch = {"repeat_times": 2, "auxiliary": {"judge": TextEngine(replies("yes"), CharTokenizer())}}
    never = {"sandbox": {"mode": "never"}}
    use = outcome([task(0, name)], TextEngine(replies("4"), CharTokenizer()), batch, **never).uses["judge"]
    assert (use.calls, use.failures, use.response_tokens) == (2, 0, 2 * 4)  # three letters and the end token
    assert use.prompt_tokens == 2 * 1
    retried = outcome([task(0, name)], TextEngine(replies("44"), CharTokenizer()), batch, max_retry_times=1, **never)
    assert {row.status for row in retried.experiences} == {Status.FAILED}
    assert retried.uses["judge"].calls == 4
    sums = {"calls": 2.0, "failures": 0.0, "prompt_tokens": 2.0, "response_tokens": 8.0, "cost": 8e-5}
    assert use.sums(None, 10.0) == sums
    assert "cost" not in use.sums(None, None)


def test_a_dead_auxiliary_engine_ends_the_unit() -> None:
    async def dead(requests: list[GenerateRequest]) -> list[Generation]:
        raise RoleError("the engine of the judge has died")

    batch = {"repeat_times": 1, "auxiliary": {"judge": TextEngine(dead, CharTokenizer())}}
    policy = TextEngine(replies("4"), CharTokenizer())
    with pytest.raises(RoleError, match="the engine of the judge has died"):
        outcome([task(0, f"{__name__}._asks_a_judge")], policy, batch, sandbox={"mode": "never"})
