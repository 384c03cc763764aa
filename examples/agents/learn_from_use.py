"""A policy learns from its use by an unmodified command-line agent, in about a minute on a laptop.

    python examples/agents/learn_from_use.py

`rftdask serve` serves the policy through OpenAI's API and records the requests, and a trainer learns at the same time.
The agent is `llm` (https://llm.datasette.io, in the extra `agents`), started as a user would type it. The policy is the
toy of learn.py: asked for the number behind a letter, it guesses in 70 % of the cases and calls the tool in 30 %. The
user reports with POST /feedback whether the answer was right.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from learn import LETTERS, NUMBERS, make_toy

from rftdask import Experiment
from rftdask.config import load_config

HERE = Path(__file__).parent
SERVED = HERE / "served.yaml"
TOOL = HERE / "with_llm" / "look.py"
ALONE = "import sys; sys.modules['pandas'] = None; from llm.cli import cli; cli()"
LLM = (sys.executable, "-c", ALONE, "prompt", "--no-log")
"""llm as in its own environment (pipx, uv): it would import pandas if installed, without needing it."""
AT_ONCE = 3
"""Concurrent uses; each is a process that computes for most of its time."""
NUM_REPORTED = 8
"""Number of uses whose mean reward is printed: the first ones, and the same number with the final policy."""
DEADLINE_S = 120.0


def warm_up() -> None:
    """Create the policy that is served first, by running the first stage of tool_loop.yaml."""
    tree = yaml.safe_load((HERE / "tool_loop.yaml").read_text())
    experiment = Experiment(**{**tree, "name": "served_first", "stages": tree["stages"][:1]})
    experiment.prepare()
    make_toy(Path(experiment.config.checkpoint_root_dir) / "tool_loop_toy")
    experiment.run()


@contextlib.contextmanager
def command(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command of rftdask while the block runs."""
    with subprocess.Popen([sys.executable, "-m", "rftdask", *arguments], text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def post(url: str, key: str, **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def wait_for(server: str, version: int) -> None:
    """Wait until the server serves a version. Raises: TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{server}/health", timeout=DEADLINE_S) as reply:
            if json.load(reply)["policy_version"] >= version:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{server} has not loaded version {version} in {DEADLINE_S:.0f} s")


def use(server: str, key: str, task: str) -> float:
    """Ask llm for the number behind a letter and send the server the reward: 1 if the answer is right."""
    letter, number = random.choice(LETTERS), str(random.choice(NUMBERS))
    session = post(f"{server}/sessions", key, task_id=task)
    with tempfile.TemporaryDirectory() as folder:
        # llm needs only the address of its model; the key identifies the session
        model = {"model_id": "policy", "model_name": "policy", "api_base": f"{server}/v1", "api_key_name": "policy"}
        Path(folder, "extra-openai-models.yaml").write_text(yaml.safe_dump([{**model, "supports_tools": True}]))
        Path(folder, "number.txt").write_text(number)
        done = subprocess.run(
            [*LLM, "--model", "policy", "--key", session["api_key"], "--functions", str(TOOL), f"{letter}:"],
            cwd=folder,
            env={**os.environ, "LLM_USER_PATH": folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    reward = float(done.stdout.strip() == number)
    post(f"{server}/feedback", key, session_id=session["session_id"], reward=reward)
    return reward


def main(overrides: list[str]) -> None:
    began = time.monotonic()
    warm_up()
    config = load_config(SERVED, overrides)
    repeats, num_tasks = config.algorithm.repeat_times, config.buffer.batch_size * config.trainer.total_steps
    tasks = [str(number // repeats) for number in range(num_tasks * repeats)]
    with (
        command("serve", str(SERVED), *overrides, stdout=subprocess.PIPE) as server,
        command("run", str(SERVED), "mode=train", "--progress", "none", *overrides) as trainer,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        assert server.stdout is not None
        if not (line := server.stdout.readline()):
            sys.exit("rftdask serve did not start; its output is above")
        _, address, *_, key = line.split(";")[0].split()
        url = address.removesuffix("/v1")
        rewards = list(pool.map(lambda task: use(url, key, task), tasks))
        if trainer.wait(DEADLINE_S):
            sys.exit(f"the trainer failed with code {trainer.returncode}")
        wait_for(url, version=config.trainer.total_steps)
        rewards += pool.map(lambda _: use(url, key, "after"), range(NUM_REPORTED))
    before, after = (sum(part) / NUM_REPORTED for part in (rewards[:NUM_REPORTED], rewards[-NUM_REPORTED:]))
    print(
        f"llm: reward {before:.2f} -> {after:.2f} in {time.monotonic() - began:.0f} s, run: {config.checkpoint_job_dir}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
