"""Promises of environments of the package verifiers: their tasks are a taskset by name; an episode is a rollout whose
calls are recorded with their sampled tokens; rewards are the environment's; failures give their reason.
"""

import asyncio
from typing import Any

import pytest

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.tasksets import Taskset
from rftdask.errors import DataError
from rftdask.rollouts.policy.lockstep_queue import GenerateBatch
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.synchronizer.published import Published
from tests.unit.rollouts.rollout_cases import CharTokenizer, keep, prompt_of, replies, settings

pytestmark = pytest.mark.extras


class ToolTokenizer(CharTokenizer):
    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        names = [tool["function"]["name"] for tool in options.pop("tools", [])]
        return "".join(f"[{name}]" for name in names) + super().apply_chat_template(conversation, **options)


def taskset(**settings: Any) -> Taskset:
    return Taskset(
        TasksetConfig(
            name="t", path="verifiers:addition-env", dataset_args=settings, default_workflow_type="verifiers_workflow"
        )
    )


def rollouts(tasks: Taskset, engine: GenerateBatch, num_tasks: int = 1) -> list[Experience]:
    batch = run_work_unit(
        [tasks.task(0, index) for index in range(num_tasks)],
        repeat_times=1,
        explore_step=1,
        policy=TextEngine(engine, ToolTokenizer()),
        **settings(max_retry_times=0),
        weights=Published(7, "", ""),
        fork_server=keep,
    )
    return asyncio.run(batch).experiences


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
    assert (right.status, right.reward, right.metrics["right"], right.metrics["num_replies"]) == (
        Status.OK,
        2.0,
        2.0,
        1.0,
    )
    assert (wrong.status, wrong.reward) == (Status.OK, 0.0)
    assert right.prompt_text == "<user>0+1=<assistant>"
    assert right.tokens[right.prompt_length :].tolist() == [*map(ord, "it is 1"), 0]


def test_tool_turns_are_recorded_with_their_tokens() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    engine = replies(lambda request: "it is 1" if '{"sum": "1"}' in prompt_of(request) else call)
    [row] = rollouts(taskset(agent={"harness": {"id": "addition-env", "with_tool": True}}), engine)
    assert (row.prompt_text, row.reward, row.metrics["num_replies"]) == ("[look]<user>0+1=<assistant>", 2.0, 2.0)
    added = '<tool>{"sum": "1"}<assistant>'
    assert row.response_text == f"{call}{added}it is 1" and [turn.source for turn in row.turns or ()] == [
        "user",
        "tool",
    ]
    sampled = row.tokens[row.prompt_length :][row.loss_mask]
    assert sampled.tolist() == [*map(ord, call), 0, *map(ord, "it is 1"), 0]


def test_failed_episode_reports_its_reason() -> None:
    asks = {"id": "addition-env", "parameters": {"response_format": {"type": "grammar"}}}
    [failed] = rollouts(taskset(agent={"harness": asks}), replies("it is 1"))
    assert (failed.status, failed.reward) == (Status.FAILED, None)
    assert "response_format {'type': 'grammar'} is not supported" in failed.error
