"""Promise of examples/agents: an agent on openai's client, and one of LangGraph, learn to use their tool, from rewards
alone.
"""

import re
from pathlib import Path

import pytest

from tests.integration.run_cases import RunProcess

AGENTS = Path(__file__).parents[3] / "examples/agents"
DEADLINE_S = 400.0
LAST_LINE = re.compile(r"[\w ]+: reward (\d\.\d\d) -> (\d\.\d\d) in (\d+) s.*")


@pytest.mark.parametrize(
    "program",
    [
        ("learn.py",),
        pytest.param(("learn.py", "langgraph_agent"), marks=pytest.mark.extras),
    ],
    ids=["tool_loop", "langgraph"],
)
def test_an_agent_learns_to_call_its_tool(program: tuple[str, ...], tmp_path: Path) -> None:
    if program[-1] == "langgraph_agent":
        pytest.importorskip("langgraph.prebuilt")
    env = {"RFTDASK_RUNS": str(tmp_path)}
    with RunProcess(program=(str(AGENTS / program[0]), *program[1:]), env=env) as run:
        ended = run.end(DEADLINE_S)
        assert ended.code == 0, ended
        run.wait_for_no_survivors()
    last = LAST_LINE.fullmatch(ended.out.splitlines()[-1])
    assert last is not None, ended.out[-500:]
    print(last[0])
    before, after = float(last[1]), float(last[2])
    assert after >= 0.5 and after >= before + 0.3, last[0]
