"""Promises of the shipped workflows with several turns, tools, judges and games."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rftdask.data.task import Task
from rftdask.engines.base import POLICY
from rftdask.errors import UserError
from rftdask.rollouts.policy.answer_parsers import parse_tool_calls
from rftdask.rollouts.policy.base import ForwardingPolicy, Method
from rftdask.rollouts.rewards import compute_reward, get_reward
from rftdask.rollouts.rewards.math_answer import overlong_penalty
from rftdask.rollouts.workflows.base import PolicyModel, Response, Reward, Step, as_reward
from rftdask.rollouts.workflows.episode import find_action
from rftdask.rollouts.workflows.games import board_text
from rftdask.rollouts.workflows.judged import parse_rating, parse_verdicts, read_rubric
from rftdask.rollouts.workflows.registry import find_workflow
from rftdask.rollouts.workflows.sudoku import has_clash, make_board, read_board
from rftdask.rollouts.workflows.tools import call_tool
from rftdask.rollouts.workflows.turns import StepWiseWorkflow, propagate_rewards


class Script(ForwardingPolicy):
    """Models with scripted answers, in order; "judge" is the auxiliary model."""

    def __init__(self, answers: Sequence[str], judged: Sequence[Any] = ()) -> None:
        super().__init__(("judge",) if judged else ())
        self.asked: list[str] = []
        self.prompts: list[Any] = []
        """Texts, and chats as (role, content) pairs."""
        self._answers = {POLICY: iter(answers), "judge": iter(judged)}

    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        said = next(self._answers[name])
        if method == "logprobs":
            return said
        prompt: Any = arguments.get("prompt", "")
        if method == "chat":
            prompt = [(message["role"], message["content"]) for message in arguments["messages"]]
        self.prompts.append(prompt)
        self.asked.append(f"{name}{prompt[-1][1] if method == 'chat' else prompt}")
        return Response(said, (1,), tuple(range(len(said))), (), "stop")


def task(**fields: Any) -> Task:
    chat = ({"role": "user", "content": "What is 6*7?"},)
    return Task(**{"taskset": "t", "epoch": 0, "index": 0, "messages": chat, "truth": "42", **fields})


def play(name: str, model: Script, **fields: Any) -> Reward:
    return as_reward(asyncio.run(find_workflow(name).run(task(**fields), model)))  # type: ignore[arg-type]


def call(expression: Any, name: str = "calculator") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def test_tool_result_is_shown_and_last_answer_scored() -> None:
    model = Script(["let me see " + call("6*7"), r"so \boxed{42}"])
    reward = play("calculator_workflow", model)
    assert (reward.value, reward.metrics) == (1.0, {"accuracy": 1.0, "num_tool_calls": 1.0, "num_turns": 2.0})
    assert model.asked[1] == "<tool_response>42</tool_response>"
    assert "tool" in model.times and model.state == {"turn": 1, "num_tool_calls": 1}


def test_policy_that_only_calls_tools_ends_after_max_turns() -> None:
    reward = play("calculator_workflow", Script([call("1+1")] * 9), workflow_args={"max_turns": 3})
    assert reward.metrics["num_turns"] == 3.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("(1+2)/4"), "3/4"),
        (call("1/0"), "error: division by zero"),
        (call("__import__('os')"), "error: unexpected '_'"),
        (call("9" * 300), "error: expression of 300 characters; at most 200"),
        (call(7), 'error: calculator needs {"expression": text}'),
        (call("1", "python"), "error: there is no tool 'python'; there is calculator"),
    ],
)
def test_tool_answers_every_call_and_runs_no_code(text: str, said: str) -> None:
    [parsed] = parse_tool_calls(text)
    assert call_tool(parsed) == said


@pytest.mark.parametrize("text", ["", "<tool_call>{", "<tool_call>[]</tool_call>", "<tool_call>{no}</tool_call>"])
def test_invalid_json_is_not_a_call(text: str) -> None:
    assert parse_tool_calls(text) == []


def test_reward_model_gives_the_probability_of_yes() -> None:
    reward = play("math_rm_workflow", Script(["42"], [(math.log(0.6),), (math.log(0.2),)]))
    assert reward.value == pytest.approx(0.75) and reward.metrics == {"accuracy": 1.0}


def test_rubric_may_be_met_in_part() -> None:
    rubric = ["is polite", {"criterion": "is right", "weight": 3}]
    model = Script(["42"], ["1: no\n2: Yes."])
    reward = play("rubric_judge_workflow", model, workflow_args={"rubric": rubric})
    assert (reward.value, reward.metrics) == (0.75, {"num_criteria_met": 1.0})
    assert "2: is right" in model.asked[1] and "42" in model.asked[1]


def test_unreadable_verdict_fails_the_rollout() -> None:
    with pytest.raises(ValueError, match="no verdict on criterion 2"):
        play("rubric_judge_workflow", Script(["42"], ["1: yes"]), row={"rubric": ["a", "b"]})
    assert parse_verdicts("**1**: YES\ncriterion 2 - no", 2) == [True, False]
    with pytest.raises(ValueError, match="t/0/0 has no rubric"):
        read_rubric([], task())
    with pytest.raises(ValueError, match="needs a text and a weight above 0"):
        read_rubric([{"criterion": "x", "weight": 0}], task())


@pytest.mark.parametrize(("name", "value"), [("math_eval_workflow", 1.0), ("on_policy_distill_math_workflow", 0.0)])
def test_metrics_and_rewards_are_separate(name: str, value: float) -> None:
    reward = play(name, Script([r"\boxed{42}"]), reward_fn="format_reward")
    assert (reward.value, reward.metrics) == (value, {"accuracy": 1.0})


def test_frozen_lake_is_played_in_text() -> None:
    pytest.importorskip("gymnasium")
    moves = ["Down", "I go down, so Down", "Right", "no idea", "Right", "Down", "Right"]
    model = Script(moves)
    reward = play("frozen_lake_workflow", model)
    assert reward.value == pytest.approx(0.9)  # the goal's 1, less 0.1 for the reply that names no move
    assert reward.metrics == {"num_turns": 7.0, "num_invalid": 1.0, "success": 1.0}
    assert [step.state for step in reward.steps] == ["0", "4", "8", "9", "9", "10", "14"]
    assert [step.reward for step in reward.steps] == [0.0, 0.0, 0.0, -0.1, 0.0, 0.0, 1.0]
    assert "[S]FFF" in model.asked[0] and model.asked[0].endswith("Answer with one of: Left, Down, Right, Up.")
    assert not find_workflow("frozen_lake_workflow").in_process


def test_game_with_history_is_one_chat() -> None:
    pytest.importorskip("gymnasium")
    arguments = {"env_id": "Blackjack-v1", "actions": ["Stick", "Hit"], "show": "state", "history": True}
    model = Script(["Hit", "Hit", "Stick", "Stick"])
    reward = play("gymnasium_workflow", model, workflow_args=arguments, row={"seed": 2})
    assert len(reward.steps) == len(model.asked) > 1
    assert model.asked[0].startswith(f"({reward.steps[0].state.strip('()')})")  # type: ignore[union-attr]
    assert [len(chat) for chat in model.prompts] == [2 * turn + 1 for turn in range(len(model.asked))]


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_textarena_game_is_a_chat() -> None:
    pytest.importorskip("textarena")
    arguments: dict[str, Any] = {"env_id": "GuessTheNumber-v0"}
    model = Script([f"[{number}]" for number in range(1, 21)])
    reward = play("textarena_workflow", model, workflow_args=arguments, row={"seed": 3})
    assert model.asked[0].startswith("You are Player 0.") and "higher" in model.asked[1]
    assert "Guess The Number" not in model.asked[1], "earlier text is not repeated"
    assert reward.metrics["num_turns"] == len(model.asked) and len(model.prompts[1]) == 3
    assert reward.metrics["success"] == float(reward.value > 0)
    arguments["max_turns"] = 2
    again = play("textarena_workflow", Script(["[5]"] * 20), workflow_args=arguments, row={"seed": 3})
    assert again.metrics["num_turns"] <= 2
    with pytest.raises(ValueError, match="opponent is required if num_players"):
        play("textarena_workflow", Script([]), workflow_args={"env_id": "TicTacToe-v0", "num_players": 2})


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_auxiliary_model_plays_the_opponent() -> None:
    pytest.importorskip("textarena")
    arguments = {"env_id": "TicTacToe-v0", "num_players": 2, "opponent": "judge"}
    model = Script(["[0]", "[1]", "[2]"], judged=["[4]", "[7]"])
    reward = play("textarena_workflow", model, workflow_args=arguments)
    assert (reward.value, reward.metrics["num_turns"]) == (1.0, 3.0)


def test_games_read_the_last_action_and_hide_codes() -> None:
    assert find_action("not left but RIGHT.", ["Left", "Right"]) == 1
    assert find_action("upright", ["Up", "Right"]) is None
    assert board_text("  (Down)\n\x1b[41mS\x1b[0mFFF\n") == "(Down)\n[S]FFF"
    with pytest.raises(ValueError, match=r"workflow_args\.env_id is missing"):
        play("gymnasium_workflow", Script([]))


FUNCTION = {"name": "email", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}}
ACE = {
    "tools": json.dumps([FUNCTION]),
    "raw_system": "Be brief. ",
    "conversations": [{"from": "human", "value": "tell Bob"}, {"from": "function_call", "value": {"name": "look"}}],
    "answer": json.dumps([{"name": "email", "arguments": {"to": "Bob", "n": 1}}, {"name": "look", "arguments": {}}]),
}


def calls(*listed: Any, thought: str = "<think>hm</think> ") -> str:
    return f"{thought}<tool_call>{json.dumps(list(listed))}</tool_call>"


EMAIL, LOOK = {"name": "email", "arguments": {"n": 1, "to": "Bob"}}, {"name": "look", "arguments": {}}


@pytest.mark.parametrize(
    ("said", "value", "metrics"),
    [
        (calls(LOOK, EMAIL), 1.0, (1.0, 1.0, 1.0)),
        (calls(EMAIL, {"name": "look", "arguments": {"x": 1}}), 0.0, (0.0, 1.0, 1.0)),
        (calls(EMAIL), 0.0, (0.0, 1.0, 0.0)),
        (calls(EMAIL, LOOK, thought=""), 0.0, (0.0, 0.0, 0.0)),
        (calls(EMAIL, LOOK) + "<think></think>", 0.0, (0.0, 0.0, 0.0)),
        ("<tool_call>[]</tool_call><think>late</think>", 0.0, (0.0, 0.0, 0.0)),
        (calls("email"), 0.0, (0.0, 0.0, 0.0)),
        ("<think></think><tool_call>[" + "[" * 5000 + "</tool_call>", 0.0, (0.0, 0.0, 0.0)),
    ],
)
def test_calls_are_compared_but_not_executed(said: str, value: float, metrics: tuple[float, ...]) -> None:
    """The form of Tool-N1: one thought, then all of the correct calls in any order."""
    model = Script([said])
    reward = play("tool_call_workflow", model, row=ACE, truth="")
    assert (reward.value, tuple(reward.metrics.values())) == (value, metrics)
    assert model.asked == ['{"name": "look"}']
    assert find_workflow("toolcall_workflow").run == find_workflow("tool_call_workflow").run


def test_missing_tools_or_truth_are_dataset_errors() -> None:
    with pytest.raises(ValueError, match="column tools is not a list of functions: None"):
        play("tool_call_workflow", Script([""]))
    with pytest.raises(ValueError, match="the answer is not a JSON list"):
        play("tool_call_workflow", Script([""]), row={**ACE, "answer": "Bob"}, truth="")


def calibrated(answer: str = "42", sure: str = "0.8", before: str = "") -> str:
    parts = f"<think>w</think>\n<answer>{answer}</answer>\n<analysis>c</analysis>\n"
    return f"{before}{parts}<confidence>{sure}</confidence>"


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (calibrated(), (0.5, 0.5, 0.5 * (1 - 0.2**2), 8e-6, 0.0)),
        (calibrated("41", "0.2"), (0.5, 0.0, 0.5 * (1 - 0.2**2), 2e-6, 0.0)),
        (calibrated(before="<answer>1</answer> <confidence>0.1</confidence> "), (0.5, 0.5, 0.48, 8e-6, 0.0)),
        (calibrated() + " and more", (0.0, 0.0, 0.0, 8e-6, 0.0)),
        (calibrated(before="<answer>never closed "), (0.0, 0.0, 0.0, 8e-6, 0.0)),
        (calibrated("4<analysis>2</analysis>"), (0.0, 0.0, 0.0, 8e-6, 0.0)),
        (calibrated().replace("\n<analysis>", "so <analysis>"), (0.0, 0.0, 0.0, 8e-6, 0.0)),
        (calibrated(sure="1"), (0.5, 0.5, 0.5, 1e-5, 1e-5)),
        (calibrated(sure="0.009"), (0.5, 0.5, 0.5 * (1 - 0.991**2), 9e-8, 1e-5)),
        *((calibrated(sure=sure), (0.0,) * 5) for sure in ("", "sure", "NaN", "inf", "-0.01", "1.01")),
        (calibrated() + "<confidence>0.1", (0.0,) * 5),
        ("", (0.0,) * 5),
    ],
)
def test_stated_confidence_gets_its_brier_score(said: str, parts: tuple[float, ...]) -> None:
    scored = compute_reward(task(reward_fn="rlcr_reward"), said, "")
    assert tuple(scored.metrics.values()) == pytest.approx(parts) and scored.value == pytest.approx(sum(parts))


def test_low_confidence_earns_nothing_without_a_truth() -> None:
    scored = compute_reward(task(reward_fn="rlcr_reward", truth=""), calibrated(sure="0"), "")
    assert scored.metrics["brier"] == 0.0 and scored.metrics["format"] == 0.5

    def weighted(weights: dict[str, float]) -> float:
        asked = task(reward_fn="rlcr_reward", reward_fn_args={"weights": weights})
        return compute_reward(asked, calibrated(sure="1"), "").value

    whole = dict(zip(scored.metrics, (1.0, 2.0, 3.0, 0.0, 0.0), strict=True))
    assert weighted(whole) == 6.0
    for weights in ({"format": 1.0}, {**whole, "other": 1.0}, {**whole, "format": math.nan}):
        with pytest.raises(ValueError, match="needs a finite number for each of format, accuracy, brier"):
            weighted(weights)


SMALL = [[0, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 0]]


def test_last_sudoku_move_earns_the_reward() -> None:
    reward = play("sudoku_workflow", Script(["0 0 1", "3 3 1\n"]), row={"puzzle": SMALL})
    assert (reward.value, [step.reward for step in reward.steps]) == (1.0, [0.0, 1.0])
    assert reward.metrics == {"num_turns": 2.0, "num_moves": 2.0, "solved": 1.0}
    assert SMALL[0][0] == 0  # the row of the dataset is unchanged
    flat = "".join(str(cell) for row in SMALL for cell in row)
    assert play("sudoku_workflow", Script(["0 0 1\n3 3 1"]), row={"puzzle": flat.replace("0", ".")}).value == 1.0


@pytest.mark.parametrize("said", ["", "I give up", "0 0 2", "0 1 1", "0 0 5", "4 0 1", "0 0 1\n" * 6, "0 0 1 1"])
def test_wrong_move_ends_a_sudoku(said: str) -> None:
    reward = play("sudoku_workflow", Script([said, "0 0 1"]), row={"puzzle": SMALL})
    assert (reward.value, len(reward.steps)) == (-1.0, 1)


def test_generated_sudoku_is_equal_for_all_rollouts() -> None:
    for size in (4, 9, 16):
        board = make_board(size, "hard", 7)
        assert board == make_board(size, "hard", 7) != make_board(size, "hard", 8)
        assert not has_clash(board) and sum(cell == 0 for row in board for cell in row) == size * size * 2 // 3
    for bad in ("123", [[1, 1], [0, 0]], [[1, 2, 3, 4]] * 4, [[5, 0, 0, 0], *[[0] * 4] * 3], 7):
        with pytest.raises(ValueError, match="not a square board"):
            read_board(bad)


def group(model: Script, answers: Sequence[str], **fields: Any) -> list[Reward]:
    async def judged() -> list[Reward]:
        group_reward = find_workflow("math_ruler_workflow").group_reward
        assert group_reward is not None
        return list(await group_reward(task(**fields), answers, model))  # type: ignore[arg-type]

    return asyncio.run(judged())


def test_judge_compares_the_answers_of_a_group() -> None:
    model = Script([], ["[1, 2, 3] no: [0.9, -3]"])
    assert [reward.value for reward in group(model, ["a", "b", "a"])] == [0.9, 0.0, 0.9]
    assert model.asked[0].count("Answer ") == 2  # equal texts are one answer
    with pytest.raises(ValueError, match="no list of 2 scores"):
        group(Script([], ["[0.1, 0.2, 0.3]"]), ["a", "b"])
    own = play("math_ruler_workflow", Script([r"\boxed{42}"]))
    assert (own.value, own.metrics) == (0.0, {"accuracy": 1.0, "gold_reward": 1.0})


def test_judge_rates_by_a_whole_rubric(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_rating('so {"rating": 3} no ```json\n{"rating" : 10}```') == 10
    for text in ("", '{"rating": 11}', '{"rating": 0}', '{"rating": 7.5}'):
        with pytest.raises(ValueError, match="no rating from 1 to 10"):
            parse_rating(text)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="judge_model_name, and the environment variable OPENAI_BASE_URL"):
        play("rubric_judge_openai_workflow", Script([""]), row={"rubric": ["a"]})
    rubric = [{"title": "Polite", "description": "says please", "weight": 2}]
    assert read_rubric(rubric, task()) == [("Polite: says please", 2.0)]


class Counts(StepWiseWorkflow):
    propagation = "mean"
    max_turns = 4

    async def step(self, task: Task, model: PolicyModel, number: int) -> tuple[Step, bool]:
        answer = await model.generate(str(number))
        return Step(f"at {number}", float(answer.text)), number < 2


def test_step_wise_reward_follows_its_propagation() -> None:
    reward = asyncio.run(Counts().run(task(), Script(["0", "3", "6", "9"])))
    assert reward == Reward(3.0, {"num_turns": 3.0}, (Step("at 0", 0.0), Step("at 1", 3.0), Step("at 2", 6.0)))


@pytest.mark.parametrize(
    ("rule", "worth"), [("sum", 3.0), ("mean", 1.0), ("last", 0.0), ("max", 2.0), ("discounted", 1 + 2 * 0.5)]
)
def test_rewards_are_propagated(rule: Any, worth: float) -> None:
    assert propagate_rewards([1.0, 2.0, 0.0], rule, gamma=0.5) == worth
    with pytest.raises(ValueError, match="without a step"):
        propagate_rewards([], rule)


def test_list_of_steps_is_worth_their_sum() -> None:
    assert as_reward([Step("a", 1.0), Step("b"), Step("c", 0.5)]).value == 1.5
    assert as_reward(0.5) == Reward(0.5)
    assert as_reward("text").value == "text"  # checked elsewhere


def test_dapo_overlong_penalty() -> None:
    # Equation 13 with L_max 20, L_cache 4: 0 to 16 tokens, then (16 - |y|) / 4, then -1.
    assert [overlong_penalty(n, 20, 4, 1.0) for n in (3, 16, 17, 20, 25)] == [0.0, 0.0, -0.25, -1.0, -1.0]
    with pytest.raises(ValueError, match="0 < cache_length 0 < max_response_length 0"):
        overlong_penalty(1, 0, 0, 1.0)


def test_math_dapo_reward_counts_the_tokens_of_the_response() -> None:
    arguments = {"enable_overlong_penalty": True, "max_response_length": 20, "cache_length": 4, "penalty_factor": 0.5}
    long = Response("4" * 10 + " is wrong, 42 is right", (), tuple(range(18)), (), "stop")
    scored = compute_reward(task(reward_fn="math_dapo_reward", reward_fn_args=arguments), long, "")
    assert (scored.value, scored.metrics) == (0.75, {"accuracy": 1.0, "format_score": -0.25})
    wrong = compute_reward(task(reward_fn="math_dapo_reward"), Response("41", (), (1,), (), "stop"), "")
    assert wrong.value == -1.0
    with pytest.raises(ValueError, match="needs the response's tokens"):
        compute_reward(task(reward_fn="math_dapo_reward"), "42", "")


@pytest.mark.parametrize(
    ("said", "truth", "value"),
    [(r"so $\frac{1}{2}$", "0.5", 1.0), (r"\boxed{x+1}", "$1+x$", 1.0), ("it is 3", "4", 0.0), ("", "4", 0.0)],
)
def test_accuracy_reward_does_algebra(said: str, truth: str, value: float) -> None:
    assert compute_reward(task(reward_fn="accuracy_reward", truth=truth), said, "").value == value


def test_missing_environment_is_refused_by_name() -> None:
    function = get_reward("exact_reward")
    function.requires = {"no_such.module": "some-extra", "neither": "some-extra"}  # type: ignore[attr-defined]
    why = r"needs the extra 'some-extra', of which no_such and neither are not installed: .*'rftdask\[some-extra\]'"
    try:
        with pytest.raises(UserError, match=why):
            get_reward("exact_reward")
    finally:
        del function.requires  # type: ignore[attr-defined]
