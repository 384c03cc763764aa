"""Promise: agents in any language are recorded and rewarded: those of examples/agents/over_http, in shell and
JavaScript.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rftdask.buffer.log import open_log
from rftdask.config import load_config
from rftdask.storage import open_storage
from tests.integration.run_cases import REPEAT_TIMES, RunProcess, run_folder, write_config

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[3] / "examples/agents/over_http"


@pytest.mark.parametrize("program", [("bash", "agent.sh"), ("node", "agent.mjs")])
def test_an_agent_that_uses_plain_http_is_recorded(program: tuple[str, str], tmp_path: Path) -> None:
    if missing := [name for name in (program[0], *(("curl", "jq") * (program[0] == "bash"))) if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} is not on this machine")
    config = write_config(tmp_path)
    with RunProcess("serve", str(config), "--port", "0", env={"RFTDASK_SERVE_TOKEN": "a-token"}) as run:
        assert run.process.stdout is not None
        url = run.process.stdout.readline().split()[1].removesuffix("/v1")
        command = [program[0], str(FOLDER / program[1]), "5:", str(2 * REPEAT_TIMES)]
        environment = {**os.environ, "URL": url, "KEY": "a-token"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended
        wrong = subprocess.run(command, env={**environment, "KEY": "x"}, capture_output=True, text=True, timeout=120)
        assert wrong.returncode != 0 and "401" in wrong.stderr + wrong.stdout, wrong
        run.process.terminate()
        assert run.process.wait(60) == 0
    log = open_log(open_storage(str(run_folder(config))), load_config(config))
    rows = [row for name in log.shards() for row in log.read(name).to_pylist()]
    assert sorted((row["task_index"], row["rollout"]) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    told = [json.loads(line)["reward"] for line in ended.stdout.splitlines()]
    assert sorted(told) == pytest.approx(sorted(row["reward"] for row in rows))
    expected = [sum("a" <= c <= "z" for c in row["response_text"]) / max(1, len(row["response_text"])) for row in rows]
    assert [row["reward"] for row in rows] == pytest.approx(expected)
