"""Promises of examples/agents: agents on openai's client, on LangGraph and as an external program learn to use their
tool, guided only by rewards, and a served policy learns from its use by the command line llm. Promise of
examples/environments: each file is valid and, with another model and size, runs without a network.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rftdask import Experiment
from tests.integration.run_cases import RunProcess, call_cli, finish

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / "examples/agents"
ENVIRONMENTS = ROOT / "examples/environments"
ADDITION = ROOT / "tests/unit/rollouts/workflows"  # the folder of the environment of verifiers.yaml
DEADLINE_S = 400.0
LAST_LINE = re.compile(r"[\w ]+: reward (\d\.\d\d) -> (\d\.\d\d) in (\d+) s.*")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(("learn.py",), id="tool_loop", marks=pytest.mark.long),
        pytest.param(("learn.py", "program_agent"), id="program", marks=pytest.mark.long),
        pytest.param(("learn.py", "langgraph_agent"), id="langgraph", marks=[pytest.mark.extras, pytest.mark.long]),
    ],
)
def test_an_agent_learns_to_call_its_tool(program: tuple[str, ...], tmp_path: Path) -> None:
    if program[-1] == "langgraph_agent":
        pytest.importorskip("langgraph.prebuilt")
    env = {"RFTDASK_RUNS": str(tmp_path)}
    with RunProcess(program=(str(AGENTS / program[0]), *program[1:]), env=env) as run:
        ended = run.end(DEADLINE_S, code=0)
    last = LAST_LINE.fullmatch(ended.out.splitlines()[-1])
    assert last is not None, ended.out[-500:]
    print(last[0])
    before, after = float(last[1]), float(last[2])
    assert after >= 0.5 and after >= before + 0.3, last[0]


@pytest.mark.long
@pytest.mark.extras
def test_a_served_policy_learns_from_a_command_line_agent(tmp_path: Path) -> None:
    pytest.importorskip("llm")
    with RunProcess(program=(str(AGENTS / "learn_from_use.py"),), env={"RFTDASK_RUNS": str(tmp_path)}) as run:
        ended = run.end(DEADLINE_S, code=0)
    last = LAST_LINE.fullmatch(ended.out.splitlines()[-1])
    assert last is not None, ended.out[-500:]
    print(last[0])
    served, warmed_up = tmp_path / "rftdask/served", tmp_path / "rftdask/served_first/warmup"
    rows = Experiment.open(served).experiences()
    # One use is one rollout and one row, whose answers are the policy's; uses of the final policy may be included.
    assert len(rows) == len(os.listdir(served / "serve/done")) and len(rows) in (3 * 8, 4 * 8)
    assert set(rows["reward"]) == {0.0, 1.0}
    assert rows["max_policy_version"].max() >= 2, "it was not served what was learned"
    assert {row.partition("]")[0] for row in rows["prompt_text"]} == {"[look"}, "llm has one tool"
    # The share is exact, while the mean of a few uses is noisy.
    before, after = (share_of_calls(path / "actor/huggingface") for path in (
        warmed_up / "global_step_200", served / "global_step_3"
    ))  # fmt: skip
    print(f"calls of the tool: {before:.2f} -> {after:.2f}")
    assert after >= 0.8 and after >= before + 0.4, (before, after)


def share_of_calls(model: Path) -> float:
    """Return the probability that the policy starts its answer with a call of the tool, averaged over the letters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # late: heavy

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompts = tokenizer([f"[look]{letter}:" for letter in "abcdefgh"], return_tensors="pt", add_special_tokens=False)
    last = policy(**prompts).logits[:, -1].detach().softmax(-1)
    return float(last[:, tokenizer.convert_tokens_to_ids("<")].mean())


def test_every_environment_is_tried_and_valid_as_it_is() -> None:
    assert {file.stem for file in ENVIRONMENTS.glob("*.yaml")} == {
        "gymnasium",
        "openenv",
        "scienceworld",
        "textarena",
        "reasoning_gym",
        "verifiers",
        "alfworld",  # not run: its games come with no package; test_games.py tests the choice among them
    }
    for file in ENVIRONMENTS.glob("*.yaml"):
        assert len(file.read_text().splitlines()) <= 10
        assert call_cli("validate", str(file)).code == 0, file.name


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("gymnasium", "gymnasium"),
        pytest.param("openenv", "websockets", marks=pytest.mark.extras),
        pytest.param("scienceworld", "scienceworld", marks=pytest.mark.extras),
        pytest.param("textarena", "textarena", marks=pytest.mark.extras),
        pytest.param("reasoning_gym", "reasoning_gym", marks=pytest.mark.extras),
        pytest.param("verifiers", "verifiers", marks=pytest.mark.extras),
    ],
)
def test_an_environment_runs_as_it_is(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    if name == "scienceworld" and shutil.which("java") is None:
        pytest.skip("no Java")
    monkeypatch.syspath_prepend(ADDITION)
    small = ("model.model_path=none", "explorer.rollout_model.engine_type=fake", "trainer.trainer_type=fake")
    small += ("buffer.batch_size=2", "algorithm.repeat_times=2", "algorithm.kl_loss_fn=none", "trainer.total_steps=1")
    small += ("model.max_response_tokens=8", "model.max_prompt_tokens=4000", "monitor.monitor_type=none")
    small += (f"checkpoint_root_dir={tmp_path}", "cluster.num_cpus=2", "explorer.max_retry_times=0")
    with contextlib.ExitStack() as stack:
        if name == "openenv":
            program = [sys.executable, str(ADDITION / "openenv_server.py")]
            server = stack.enter_context(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
            stack.callback(server.terminate)
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            small += (f"buffer.explorer_input.taskset.workflow_args.base_url={url}",)
        output = finish(ENVIRONMENTS / f"{name}.yaml", *small).out
    assert "failed" not in output.lower() or "failed 0" in output.lower(), output
