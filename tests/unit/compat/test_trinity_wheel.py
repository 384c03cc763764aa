"""Promise: workflows of Trinity-RFT's own wheel run as they are, their files copied unchanged into a plug-in folder;
the package itself is not imported. What they ask is recorded, and what they return is the reward.
"""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.explorer import SandboxConfig
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.rollouts.runner import TextEngine
from tests.unit.rollouts.rollout_cases import MODEL, CharTokenizer, outcome, prompt_of, replies

pytestmark = pytest.mark.extras
FILES = (
    "customized_math_workflows.py",
    "customized_toolcall_workflows.py",
    "math_ruler_workflow.py",
    "rubric_judge_workflow.py",
    "envs/sciworld/sciworld_workflow.py",
    "envs/agentscope/agentscopev1_react_workflow.py",
    "envs/sudoku",
)
"""Below trinity/common/workflows; all that these import from it has its name in rftdask.compat.trinity."""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        wheel = distribution("trinity-rft")
    except PackageNotFoundError:
        pytest.skip("trinity-rft is not installed; tests/conformance/install_peers.sh does it")
    assert wheel.version == "0.6.0"
    folder = tmp_path_factory.mktemp("wheel")
    for name in FILES:
        source = Path(str(wheel.locate_file(f"trinity/common/workflows/{name}")))
        if source.is_dir():
            shutil.copytree(source, folder / source.name)
        else:
            shutil.copy(source, folder)
    return str(folder)


def roll(
    plugins: str,
    workflow: str,
    policy: str | Callable[[GenerateRequest], str],
    judge: str = "",
    row: dict[str, Any] | None = None,
    question: str = "1+1?",
    **fields: Any,
) -> list[Experience]:
    """Return the rows of one rollout; `judge` is the answer of the auxiliary model."""
    chat = ({"role": "user", "content": question},)
    task = Task("t", 0, 0, messages=chat, workflow=workflow, row=row or {}, **{"truth": "2", **fields})
    batch = {"auxiliary": {"judge": TextEngine(replies(judge), CharTokenizer())}} if judge else {}
    limits = MODEL.model_copy(update={"max_prompt_tokens": 100_000})
    # Java reserves more address space than a limit of memory leaves it.
    sandbox = SandboxConfig(max_memory_gb=None)
    settings = {"plugin_dirs": (plugins,), "max_timeout": 120.0, "max_retry_times": 0, "sandbox": sandbox}
    sampling = SamplingParams(max_tokens=400)
    rows = outcome(
        [task], TextEngine(replies(policy), CharTokenizer()), batch, model=limits, sampling=sampling, **settings
    )
    assert {row.status for row in rows.experiences} == {Status.OK}, rows.experiences[0].error
    return rows.experiences


def test_one_question_in_a_box(plugins: str) -> None:
    [row] = roll(plugins, "customized_math_workflows.MathBoxedWorkflow", r"it is \boxed{2}")
    assert row.reward == 1.0 and "boxed" in row.prompt_text


def test_calls_of_tools_that_are_compared(plugins: str) -> None:
    call = {"name": "add", "arguments": {"x": 1}}
    row = {
        "tools": json.dumps([{"name": "add", "parameters": {}}]),
        "raw_system": "Be brief. ",
        "conversations": [{"from": "human", "value": "add one"}],
        "answer": json.dumps([call]),
    }
    said = f"<think>so</think><tool_call>[{json.dumps(call)}]</tool_call>"
    for name in ("customized_toolcall_workflows.ToolCallWorkflow", "tool_call_workflow"):
        [right] = roll(plugins, name, said, row=row, truth=row["answer"])
        [wrong] = roll(plugins, name, said.replace("think>", "thought>"), row=row, truth=row["answer"])
        assert (right.reward, wrong.reward) == (1.0, 0.0), name


def test_judges(plugins: str) -> None:
    [row] = roll(plugins, "math_ruler_workflow.MathRULERWorkflow", "2", judge="both are fine: [0.75]")
    assert (row.reward, row.metrics["judge_success"]) == (0.75, 1.0)
    rubric = [{"title": "right", "description": "it is 2", "weight": 1}]
    rated = '```json\n{"rating": 7}\n```'
    [row] = roll(plugins, "rubric_judge_workflow.RubricJudgeWorkflow", "2", judge=rated, row={"rubric": rubric})
    assert row.reward == pytest.approx(0.7)


def test_a_board_of_several_steps(plugins: str) -> None:
    solution = [[(3 * (r % 3) + r // 3 + c) % 9 + 1 for c in range(9)] for r in range(9)]
    puzzle = [list(row) for row in solution]
    puzzle[0][0] = puzzle[8][8] = 0
    moves = [f"0 0 {solution[0][0]}", f"8 8 {solution[8][8]}"]
    by_step = replies_in_turn(moves)
    board = {"puzzle": puzzle, "solution": solution}
    rows = roll(plugins, "sudoku.sudoku_workflow.SudokuWorkflow", by_step, row=board)
    assert [row.response_text for row in rows] == moves and rows[-1].reward == 1.0


def replies_in_turn(said: list[str]) -> Callable[[GenerateRequest], str]:
    left = iter(said)
    return lambda request: next(left)


def test_an_experiment_of_scienceworld(plugins: str) -> None:
    pytest.importorskip("scienceworld")
    if shutil.which("java") is None:
        pytest.skip("no Java")
    told = json.dumps({"task_name": "boil", "var_num": 0, "jar_path": None})
    for name in ("sciworld_workflow.SciWorldWorkflow", "sciworld_workflow"):
        asked: list[str] = []

        def act(request: GenerateRequest, asked: list[str] = asked) -> str:
            asked.append(prompt_of(request))
            return "<think>so</think><action>" + ("open door to kitchen" if len(asked) == 1 else "wait1") + "</action>"

        [row] = roll(plugins, name, act, question=told)
        assert row.turns is not None and 0 <= (row.reward or 0.0) < 1, name
        assert "boil water" in row.prompt_text and "The door is already open" in row.response_text


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_react_agent_of_agentscope(plugins: str) -> None:
    pytest.importorskip("agentscope.agent", exc_type=ImportError)  # 1.0.21 and mcp 2 do not go together
    ends = '<tool_call>{"name": "generate_response", "arguments": {"result": "\\\\boxed{2}"}}</tool_call>'

    def act(request: GenerateRequest) -> str:
        # It talks first; AgentScope asks again for the call that ends the task.
        return ends if "two, I think" in prompt_of(request) else "two, I think"

    for name in ("agentscopev1_react_workflow.AgentScopeReactMathWorkflow", "agentscope_react_workflow"):
        rows = roll(plugins, name, act)
        assert rows[-1].reward == 1.0 and rows[-1].metrics["react_memory_length"] >= 3, name
