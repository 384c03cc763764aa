"""Promises of the workflows: one call of the policy, the right prompt and reward, and lookup by name."""

from dataclasses import replace
from typing import Any

import pytest

from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.registry import find_workflow, workflow
from rftdask.rollouts.workflows.single_turn import BOXED_SYSTEM_PROMPT, MATH_SYSTEM_PROMPT, THINKING_SYSTEM_PROMPT
from tests.unit.rollouts.rollout_cases import CharTokenizer, outcome, replies, task
from tests.unit.rollouts.workflows.test_shipped_workflows import Script, play

ASKED = ("user", "2+2?")


def run(name: str, answer: str, *chat: tuple[str, str], **fields: Any) -> tuple[Reward, list[Any]]:
    """The reward of one answer, and the prompts."""
    model, messages = Script([answer]), tuple({"role": role, "content": text} for role, text in chat or [ASKED])
    return play(name, model, **{"messages": messages, "truth": "4", **fields}), model.prompts


def test_simple_workflow_sends_the_chat_unchanged() -> None:
    reward, asked = run("simple_workflow", "so 4", reward_fn="math_reward")
    assert (reward, asked) == (Reward(1.0, {"accuracy": 1.0}), [[ASKED]])


def test_simple_workflow_uses_exact_reward_by_default() -> None:
    assert run("simple_workflow", "so 4")[0] == Reward(0.0, {"accuracy": 0.0})
    assert run("simple_workflow", "4")[0] == Reward(1.0, {"accuracy": 1.0})


@pytest.mark.parametrize("name", ["simple_workflow", "math_workflow", "math_boxed_workflow"])
def test_the_template_shows_the_tools_of_the_task(name: str) -> None:
    tools = ({"type": "function", "function": {"name": "add"}},)
    asked = replace(task(0, name), messages=({"role": "user", "content": "2+2?"},), tools=tools)
    [row] = outcome([asked], TextEngine(replies("4"), CharTokenizer()), {}).experiences
    assert row.prompt_text.startswith("[add]") and row.prompt_text.endswith("<user>2+2?<assistant>")


@pytest.mark.parametrize("name", ["simple_workflow", "math_workflow", "math_boxed_workflow"])
def test_plain_text_prompt_is_continued_unchanged(name: str) -> None:
    assert run(name, "4", messages=(), prompt="2+2=")[1] == ["2+2="]


@pytest.mark.parametrize(
    ("name", "arguments", "system_prompt"),
    [
        ("math_workflow", {}, MATH_SYSTEM_PROMPT),
        ("math_boxed_workflow", {}, BOXED_SYSTEM_PROMPT),
        ("math_boxed_workflow", {"with_think": True}, THINKING_SYSTEM_PROMPT),
    ],
)
def test_math_workflows_have_a_system_prompt(name: str, arguments: dict[str, Any], system_prompt: str) -> None:
    assert run(name, "4", workflow_args=arguments)[1] == [[("system", system_prompt), ASKED]]
    own = [("system", "own"), ASKED]
    assert run(name, "4", *own, workflow_args=arguments)[1] == [own]


def test_math_workflow_finds_the_answer_in_the_text() -> None:
    assert run("math_workflow", "2+2 = 4\n#### 4")[0] == Reward(1.0, {"accuracy": 1.0})
    assert run("math_workflow", "#### 4", reward_fn="exact_reward")[0] == Reward(0.0, {"accuracy": 0.0})


@pytest.mark.parametrize("reward_fn", ["", "math_boxed_reward"])
def test_math_boxed_workflow_charges_for_a_missing_thought(reward_fn: str) -> None:
    arguments = {"with_think": True, "format_score_coef": 0.25}
    reward, _ = run("math_boxed_workflow", r"\boxed{4}", workflow_args=arguments, reward_fn=reward_fn)
    assert reward == Reward(0.75, {"accuracy": 1.0, "format_score": -0.25})


@pytest.mark.parametrize("name", ["simple_workflow", "math_workflow", "math_boxed_workflow"])
def test_async_names_are_the_same_workflows(name: str) -> None:
    assert find_workflow(f"async_{name}").run is find_workflow(name).run


class Counting:
    """A workflow as a class; every rollout has its own instance."""

    def __init__(self) -> None:
        self.num_runs = 0

    async def run(self, task: Task, model: PolicyModel) -> float:
        self.num_runs += 1
        return float(self.num_runs)


def not_async(task: Task, model: PolicyModel) -> float:
    return 1.0


def test_class_is_instantiated_for_each_rollout() -> None:
    workflow("test_counting_workflow")(Counting)
    assert [run("test_counting_workflow", "")[0].value for _ in range(2)] == [1.0, 1.0]


def test_object_with_run_is_a_workflow() -> None:
    workflow("test_counting_object")(Counting())
    assert run("test_counting_object", "")[0].value == 1.0


def test_dotted_path_names_an_unregistered_workflow() -> None:
    path = "rftdask.rollouts.workflows.single_turn.math_workflow"
    assert find_workflow(path).run is find_workflow("math_workflow").run


def test_unknown_workflow_error_suggests_names() -> None:
    with pytest.raises(UserError, match="unknown workflow 'math_worklow'; did you mean math_workflow"):
        find_workflow("math_worklow")
    with pytest.raises(UserError, match=r"unknown workflow 'zzz'; there are .*simple_workflow"):
        find_workflow("zzz")


def test_blocking_function_cannot_be_in_process() -> None:
    workflow("test_not_async")(not_async)
    assert not find_workflow("test_not_async").in_process
    not_async.in_process = True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"'test_not_async' is declared in_process, so .* must be async"):
        find_workflow("test_not_async")


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="'math_workflow' exists already"):
        workflow("math_workflow")(Counting)
