"""Promises of the reward functions, by examples of responses, truths and rewards."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.data.datasets import open_dataset
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.rewards import compute_reward, get_reward, reward
from rftdask.rollouts.rewards.math_answer import extract_answer, same_answer
from rftdask.rollouts.rewards.registry import wait_for_reward
from rftdask.rollouts.workflows.base import Reward

TASK = Task(taskset="t", epoch=0, index=0)


def value_of(name: str, response: str, truth: str = "", **arguments: object) -> float:
    value = get_reward(name)(response, truth, TASK, **arguments)
    assert isinstance(value, Reward)
    return value.value


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        (r"\boxed{12} and then \boxed{1", "12"),
        (r"#### 5 but \boxed{6}", "6"),
        ("3 + 4 = 7\n#### 7\n", "7"),
        ("#### 7 eggs\nThe answer is 8", "7 eggs"),
        ("The answer is 42. I counted 3 times.", "42"),
        ("**Answer:**\n\n42 apples", "42 apples"),
        ("First 3, then 1,234.5!", "1,234.5"),
        ("that leaves -3", "-3"),
        ("none", ""),
        ("", ""),
        (r"\boxed{}", ""),
    ],
)
def test_final_answer_is_found_in_this_order(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("72", "72"),
        ("72.0", "72"),
        ("$1,234.50", "1234.5"),
        (r"\$18", "18"),
        ("18 dollars", "18"),
        ("She earns $18 a day.", "18"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("1/2", "0.5"),
        (r"\dfrac{1}{2}", "1/2"),
        (r"\frac12", "0.5"),
        (r"-\frac{3}{4}", "-0.75"),
        ("0.3333333", "1/3"),
        ("x = 5", "5"),
        (r"\text{5 cm}", "5"),
        ("10{,}000", "10000"),
        (r"90^\circ", "90"),
        ("\u22125", "-5"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\text{Yes}", "Yes"),
        ("x^2 + 1", "x^2+1"),
        ("7", "3+4 = 7\n#### 7"),
        ("7", r"so it is \boxed{7}."),
        ("**7**", "7"),
    ],
)
def test_equal_answers(answer: str, truth: str) -> None:
    assert same_answer(answer, truth)


DIFFERENT = {
    "": ("",),
    "0": ("",),
    "72": ("73", "-72", "\u0667\u0662"),
    "2": ("2x", "2^3", r"\sqrt{2}", r"2\pi"),
    "3": ("3 or 4",),
    "1": ("1/0", "0.5000001", "0.9999999", "__import__('os')", "1e309"),
    "inf": ("nan",),
    "10000000": ("10000001",),
    "12": ("1,2",),
    "9": ("9**9**9",),
}
"""Truth -> other answers."""


@pytest.mark.parametrize(
    ("truth", "answer"), [(truth, answer) for truth, given in DIFFERENT.items() for answer in given]
)
def test_different_answers(truth: str, answer: str) -> None:
    assert not same_answer(answer, truth)


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.00", "${}", "about {} units", r"\boxed{{{}}}"])
)
def test_number_is_recognized_in_any_form(number: int, form: str) -> None:
    assert value_of("math_reward", form.format(number), str(number)) == 1.0


@given(st.text(), st.text())
def test_any_text_gets_a_reward(response: str, truth: str) -> None:
    for name in ("math_reward", "math_boxed_reward", "format_reward", "exact_reward"):
        value_of(name, response, truth)


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 50_000,
        "{" * 300_000,
        "9" * 300_000,
        "1," * 150_000,
        "answer is " * 30_000,
        "answer:" + "\n" * 300_000,
        "#" * 300_000,
        "<answer>" * 40_000,
        "<think>" * 40_000,
        " " * 300_000,
        "a" * 300_000,
    ],
    ids=lambda response: response[:8],
)
def test_very_long_text_is_fast(response: str) -> None:
    """Quadratic work on any of these takes minutes and ends in the timeout of the test run."""
    for name in ("math_reward", "math_boxed_reward", "format_reward"):
        value_of(name, response, "1", **({"with_think": True} if name == "math_boxed_reward" else {}))
    value_of("countdown_reward", response, '{"target": 1, "numbers": [1]}')


def test_math_reward_reports_accuracy() -> None:
    assert get_reward("math_reward")("#### 72", "72", TASK) == Reward(1.0, {"accuracy": 1.0})
    assert get_reward("math_reward")("#### 71", "72", TASK) == Reward(0.0, {"accuracy": 0.0})


def test_math_boxed_reward_reads_only_boxes() -> None:
    assert value_of("math_boxed_reward", "#### 72", "72") == 0.0
    assert value_of("math_boxed_reward", r"\boxed{72}", "72") == 1.0
    assert value_of("math_boxed_reward", r"\boxed{72}", "72", with_think=True) == 0.9
    assert value_of("math_boxed_reward", r"<think>hm</think> \boxed{72}", "72", with_think=True) == 1.0
    assert value_of("math_boxed_reward", "7", "72", with_think=True, format_score_coef=0.5) == -0.5


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think>\n<answer>b</answer>", 0.1),
        (" <think>a</think><answer>b</answer>\n", 0.1),
        ("<think>a</think> so <answer>b</answer>", -0.1),
        ("<think>a</think><answer>b</answer> done", -0.1),
        ("<answer>b</answer><think>a</think>", -0.1),
        ("<think>a<answer>b</answer>", -0.1),
        ("<think>a</think><answer>", -0.1),
        ("", -0.1),
    ],
)
def test_format_reward_needs_a_thought_then_an_answer(response: str, value: float) -> None:
    assert value_of("format_reward", response) == value


def test_exact_reward_compares_the_text() -> None:
    assert value_of("exact_reward", " yes\n", "yes") == 1.0
    assert value_of("exact_reward", "Yes", "yes") == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<answer>6*4</answer> no: <answer> (6-2)*4+8 </answer>", 1.0),
        ("<answer>8+6+4+2</answer>", 0.1),  # every number, another value
        ("<answer>6*4</answer>", 0.1),  # the value, but not every number
        ("<answer>6*4+8-8+2-2</answer>", 0.1),  # a number twice
        ("<answer>9**9**9</answer>", 0.1),
        ("(6-2)*4+8", 0.0),
    ],
)
@pytest.mark.parametrize(
    ("truth", "row"),
    [
        ('{"target": 24, "numbers": [8, 6, 4, 2]}', {}),
        ("24", {"target": 24, "nums": [8, 6, 4, 2]}),
        ("(6-2)*4+8", {"metadata": {"target": 24, "numbers": [8, 6, 4, 2]}}),
    ],
)
def test_countdown_needs_each_number_once(response: str, value: float, truth: str, row: dict[str, object]) -> None:
    task = Task(taskset="t", epoch=0, index=0, row=row)
    assert get_reward("countdown_reward")(response, truth, task).value == value  # type: ignore[union-attr]


def test_countdown_without_a_puzzle_raises() -> None:
    with pytest.raises(ValueError, match="t/0/0 is not a countdown puzzle"):
        value_of("countdown_reward", "<answer>1</answer>", "1")


@pytest.mark.extras
def test_generated_task_is_scored_by_its_generator() -> None:
    row = open_dataset("reasoning-gym:chain_sum", dataset_args={"size": 1})[0]
    task = Task(taskset="t", epoch=0, index=0, row=row)
    score = get_reward("reasoning_gym_reward")
    assert score(f"<answer>{row['answer']}</answer>", "", task) == Reward(1.0, {"accuracy": 1.0})
    assert score(row["answer"], "", task) == Reward(1.0, {"accuracy": 1.0})
    assert score("<answer>none</answer>", "", task).value < 1.0  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="not from reasoning-gym"):
        score("", "", TASK)


def length_reward(response: str, truth: str, task: Task, target: int = 1) -> float:
    return float(len(response) - target)


def test_reward_function_is_found_by_name_and_path() -> None:
    assert reward("test_length_reward")(length_reward) is length_reward
    assert get_reward("test_length_reward") is length_reward
    assert get_reward("rftdask.rollouts.rewards.text.format_reward") is get_reward("format_reward")


def test_unknown_reward_function_error_suggests_names() -> None:
    with pytest.raises(UserError, match="unknown reward function 'math_rewards'; did you mean math_reward"):
        get_reward("math_rewards")
    with pytest.raises(UserError, match=r"cannot import 'no_such_package\.rewards'"):
        get_reward("no_such_package.rewards.f")
    with pytest.raises(UserError, match="has no 'formatreward'; did you mean format_reward"):
        get_reward("rftdask.rollouts.rewards.text.formatreward")
    with pytest.raises(UserError, match="is a float, not a function"):
        get_reward("rftdask.rollouts.rewards.text.FORMAT_REWARD")


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="'math_reward' exists already"):
        reward("math_reward")(length_reward)


def test_task_arguments_reach_the_reward_function() -> None:
    reward("test_length_reward")(length_reward)
    task = Task(taskset="t", epoch=0, index=0, reward_fn="test_length_reward", reward_fn_args={"target": 2})
    assert compute_reward(task, "abc", default="math_reward") == Reward(1.0)
    assert compute_reward(task, "abc", default="test_length_reward", defaults={"target": 3}) == Reward(1.0)
    assert compute_reward(TASK, "abc", default="test_length_reward", defaults={"target": 3}) == Reward(0.0)


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_async_reward_function_is_awaited(in_thread: bool) -> None:
    async def waits(response: str, truth: str, task: Task) -> float:
        await asyncio.sleep(0)
        return float(response == truth)

    name = f"test_async_reward_{in_thread}"
    reward(name, in_thread=in_thread)(waits)

    async def scored() -> list[Reward]:
        return [await wait_for_reward(TASK, "", name), compute_reward(TASK, "x", name)]

    assert asyncio.run(scored()) == [Reward(1.0), Reward(0.0)]
    assert compute_reward(TASK, "", name) == Reward(1.0), "where no event loop runs"
