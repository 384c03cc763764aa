"""Promise: a served policy learns from its use: a program that knows only HTTP sends requests and rewards, a trainer
trains at the same time, and the rewards rise while newer weights are served.
"""

import itertools
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.toy_runs import run_folder, write_grpo_config
from tests.integration.run_cases import RunProcess

NUM_ROUNDS = 24
TOKEN = "a-token"
LOWER = frozenset("abcdefghijklmnopqrstuvwxyz")


def post(url: str, **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
        response: dict[str, Any] = json.loads(answer.read())
    return response


def version(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=120) as answer:
        return int(json.loads(answer.read())["policy_version"])


@pytest.mark.long
def test_a_served_policy_learns_the_rewarded_behavior(tmp_path: Path) -> None:
    config = write_grpo_config(
        tmp_path,
        model={"max_prompt_tokens": 32},
        algorithm={"repeat_times": 8, "kl_loss_fn": "none", "optimizer": {"lr": 2.0e-2}},
        trainer={"total_steps": NUM_ROUNDS, "save_interval": 0},
        synchronizer={"sync_style": "fully_async", "sync_interval": 1, "sync_offset": 0},
    )
    means = []
    with (
        RunProcess("serve", str(config), "--port", "0", env={"RFTDASK_SERVE_TOKEN": TOKEN}) as server,
        RunProcess("run", str(config), "mode=train", "--progress", "none") as trainer,
    ):
        assert server.process.stdout is not None
        url = server.process.stdout.readline().split()[1].removesuffix("/v1")
        names = itertools.count()
        for number in range(NUM_ROUNDS):
            rewards = []
            for task, _ in itertools.product(range(4), range(8)):
                session = f"s{next(names)}"
                messages = [{"role": "user", "content": f"{task}:"}]
                answer = post(f"{url}/sessions/{session}/v1/chat/completions", model="p", messages=messages)
                text = answer["choices"][0]["message"]["content"]
                rewards.append(sum(each in LOWER for each in text) / max(1, len(text)))
                task_id = f"{number}/{task}"
                post(f"{url}/feedback", session_id=session, reward=rewards[-1], task_id=task_id)
            means.append(sum(rewards) / len(rewards))
            if number + 1 < NUM_ROUNDS:  # the next round uses the weights that this one trained
                trainer.wait_until(lambda: version(url) > number)  # noqa: B023 -- used only in this round
        trainer.end(code=0)
        server.process.terminate()
        assert server.process.wait(60) == 0
    print([round(mean, 2) for mean in means])
    first, last = sum(means[:3]) / 3, sum(means[-3:]) / 3
    assert last > first + 0.3, means
    assert os.listdir(run_folder(config) / "serve" / "done")
