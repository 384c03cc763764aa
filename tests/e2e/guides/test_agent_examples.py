"""Promise of examples/agents: an agent on openai's client learns to use its tool, from rewards alone."""

import re
from pathlib import Path

from tests.integration.run_cases import RunProcess

ROOT = Path(__file__).parents[3]
DEADLINE_S = 400.0
LAST_LINE = re.compile(r"tool loop: reward (\d\.\d\d) -> (\d\.\d\d) in (\d+) s, run: (\S+)")


def test_the_tool_loop_learns_to_call_its_tool(tmp_path: Path) -> None:
    env = {"RFTDASK_RUNS": str(tmp_path)}
    with RunProcess(program=(str(ROOT / "examples/agents/learn.py"),), env=env) as run:
        ended = run.end(DEADLINE_S)
        assert ended.code == 0, ended
        run.wait_for_no_survivors()
    last = LAST_LINE.fullmatch(ended.out.splitlines()[-1])
    assert last is not None, ended.out[-500:]
    print(last[0])
    before, after = float(last[1]), float(last[2])
    assert after >= 0.5 and after >= before + 0.3, last[0]
