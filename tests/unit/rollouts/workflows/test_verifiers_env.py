"""Promises of environments of the package verifiers: their tasks are a taskset by name."""

from typing import Any

import pytest

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.tasksets import Taskset
from rftdask.errors import DataError
from rftdask.rollouts.policy.request_queues import GenerateBatch
from tests.unit.rollouts.rollout_cases import prompt_of, replies, run

pytestmark = pytest.mark.extras


def taskset(**settings: Any) -> Taskset:
    config = {"path": "verifiers:addition-env", "default_workflow_type": "verifiers_workflow"}
    return Taskset(TasksetConfig(name="t", dataset_args=settings, **config))


def rollouts(tasks: Taskset, engine: GenerateBatch, num_tasks: int = 1) -> list[Experience]:
    return run([tasks.task(0, index) for index in range(num_tasks)], engine, max_retry_times=0)


def test_tasks_of_an_environment_are_a_taskset() -> None:
    tasks = taskset()
    assert (len(tasks), tasks.task(0, 2).prompt, tasks.task(0, 2).truth) == (3, "2+1=", "3")
    assert len(taskset(size=2)) == 2
    assert tasks.fingerprint == taskset().fingerprint != taskset(size=2).fingerprint
    with pytest.raises(DataError, match=r"verifiers:no-such-env: .*'no-such-env' not found"):
        Taskset(TasksetConfig(name="t", path="verifiers:no-such-env"))
    with pytest.raises(DataError, match=r"dataset_args .*agentt"):
        taskset(agentt={})


def test_episode_is_a_rollout_with_environment_rewards() -> None:
    [right, wrong] = rollouts(taskset(), replies("it is 1"), num_tasks=2)
    assert (right.status, right.reward) == (Status.OK, 2.0)
    assert (right.metrics["right"], right.metrics["num_replies"]) == (2.0, 1.0)
    assert (wrong.status, wrong.reward) == (Status.OK, 0.0)
    assert right.prompt_text == "<user>0+1=<assistant>"
    assert right.tokens[right.prompt_length :].tolist() == [*map(ord, "it is 1"), 0]


def test_tool_turns_are_recorded_with_their_tokens() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    engine = replies(lambda request: "it is 1" if '{"sum": "1"}' in prompt_of(request) else call)
    [row] = rollouts(taskset(agent={"harness": {"id": "addition-env", "with_tool": True}}), engine)
    assert (row.prompt_text, row.reward, row.metrics["num_replies"]) == ("[look]<user>0+1=<assistant>", 2.0, 2.0)
    added = '<tool>{"sum": "1"}<assistant>'
    assert row.response_text == f"{call}{added}it is 1"
    assert [turn.source for turn in row.turns or ()] == ["user", "tool"]
    sampled = row.tokens[row.prompt_length :][row.loss_mask]
    assert sampled.tolist() == [*map(ord, call), 0, *map(ord, "it is 1"), 0]


def test_failed_episode_reports_its_reason() -> None:
    asks = {"id": "addition-env", "parameters": {"response_format": {"type": "grammar"}}}
    [failed] = rollouts(taskset(agent={"harness": asks}), replies("it is 1"))
    assert (failed.status, failed.reward) == (Status.FAILED, None)
    assert "response_format {'type': 'grammar'} is not supported" in failed.error
