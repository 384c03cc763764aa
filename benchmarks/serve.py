"""Overhead of `rftdask serve` per answer with hundreds of concurrent agents.

    OMP_NUM_THREADS=1 python benchmarks/serve.py [--sessions 512] [--turns 8] [--tokens 200] [--answer-s 8]
                                                 [--workers 0] [--quick] [--json FILE]

Concurrent sessions of several turns: each turn sends the whole conversation, and each session ends with a reward. The
server is a process started as a user starts it, with the engine of simulated.py, which needs the given seconds for an
answer whatever its load. The overhead is the duration of a call minus that of the same request in the bare engine,
measured in a separate process with the same concurrency. With --workers the engines run on that many Dask workers
(`rftdask join`, TLS) instead of below the server; these processes share the two cores of the machine.

All agents are one process on the same machine, whose own work is part of the overhead.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from report import Report, make_parser
from simulated import STEP_S, SimulatedEngine

from rftdask.engines.base import GenerateRequest, Generation, SamplingParams

TOKEN = "a-token"


def write_config(root: Path, tokens: int, turns: int, workers: int) -> Path:
    tree = {
        "name": "served",
        "mode": "serve",
        "checkpoint_root_dir": str(root / "runs"),
        "model": {"model_path": "none", "max_prompt_tokens": 8 * tokens * turns, "max_response_tokens": tokens},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "kl_loss_fn": "none"},
        "buffer": {"batch_size": 8},
        "explorer": {
            "rollout_model": {"engine_type": "simulated.SimulatedEngine", "engine_num": max(1, workers)},
            "proxy_port": 0,
        },
        "cluster": {"type": "joined" if workers else "local"},
        "monitor": {"monitor_type": "none"},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def bare(sessions: int, turns: int, tokens: int) -> list[float]:
    """Return the seconds of each answer of the bare engine; a session sends its next request after an answer."""
    began: dict[int, float] = {}
    left, taken_s = {number: turns for number in range(sessions)}, []
    asking, numbers = list(range(sessions)), itertools.count()
    session_of: dict[int, int] = {}

    def take() -> list[tuple[int, GenerateRequest | None]]:
        taken: list[tuple[int, GenerateRequest | None]] = []
        while asking:
            session, number = asking.pop(), next(numbers)
            session_of[number], began[number] = session, time.perf_counter()
            sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens)
            taken.append((number, GenerateRequest((1, 2, 3), sampling, seed=number)))
        return taken

    def give(number: int, generation: Generation) -> None:
        taken_s.append(time.perf_counter() - began[number])
        session = session_of[number]
        left[session] -= 1
        if left[session]:
            asking.append(session)

    SimulatedEngine().serve(take, give)
    return taken_s


async def play(url: str, sessions: int, turns: int, tokens: int, ramp_s: float) -> tuple[list[float], list[float], int]:
    """Play the sessions. Returns the seconds of answers and of rewards, and the number of answers that asked for a
    retry.
    """
    answers_s: list[float] = []
    rewards_s: list[float] = []
    num_refused = 0
    headers = {"Authorization": f"Bearer {TOKEN}"}

    async def session(number: int) -> None:
        nonlocal num_refused
        # Agents do not start at the same moment.
        await asyncio.sleep(ramp_s * number / sessions)
        messages: list[dict[str, Any]] = []
        # One client per agent: httpx searches the whole pool for every request.
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, verify=False) as client:
            for turn in range(turns):
                messages.append({"role": "user", "content": f"turn {turn}"})
                body = {"model": "policy", "messages": messages, "max_tokens": tokens}
                while True:
                    began = time.perf_counter()
                    answer = await client.post(f"/sessions/s{number}/v1/chat/completions", json=body)
                    if answer.status_code != 429:
                        break
                    num_refused += 1
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                assert answer.status_code == 200, answer.text
                answers_s.append(time.perf_counter() - began)
                messages.append(answer.json()["choices"][0]["message"])
            began = time.perf_counter()
            feedback = {"session_id": f"s{number}", "reward": number % 2, "task_id": str(number // 8)}
            answer = await client.post("/feedback", json=feedback)
            assert answer.status_code == 200 and answer.json()["num_rows"] >= 1, answer.text
            rewards_s.append(time.perf_counter() - began)

    await asyncio.gather(*map(session, range(sessions)))
    return answers_s, rewards_s, num_refused


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=512, help="at once")
    parser.add_argument("--turns", type=int, default=8, help="turns of each session")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="number of Dask workers with one engine each; 0: the server runs the engine",
    )
    parser.add_argument("--answer-s", type=float, default=8.0, help="seconds in which the engine decodes an answer")
    args = parser.parse_args()
    report = Report(args)
    sessions, turns, tokens, answer_s = args.sessions, args.turns, args.tokens, args.answer_s
    if args.quick:
        sessions, turns, tokens, answer_s = 8, 2, 20, 0.2
    with tempfile.TemporaryDirectory(prefix="rftdask-serve-") as folder:
        root = Path(folder)
        os.environ[STEP_S] = repr(answer_s / tokens)
        floor_s = bare(sessions, turns, tokens)
        config, program = str(write_config(root, tokens, turns, args.workers)), [sys.executable, "-m", "rftdask"]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "RFTDASK_SERVE_TOKEN": TOKEN, "PYTHONPATH": path}
        server = subprocess.Popen(
            [*program, "serve", config, "--max-concurrent", str(2 * sessions)],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        joined = [subprocess.Popen([*program, "join", config], env=env) for _ in range(args.workers)]
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if line.startswith("serving "))
            url = line.split()[1].removesuffix("/v1")
            while httpx.get(f"{url}/health").json()["engines"] < args.workers:
                time.sleep(0.1)
            began = time.perf_counter()
            answers_s, rewards_s, num_refused = asyncio.run(play(url, sessions, turns, tokens, answer_s))
            wall_s = time.perf_counter() - began
        finally:
            server.terminate()
            for process in (server, *joined):
                process.wait(60)
    what = f"{sessions} sessions of {turns} turns" + f", {args.workers} workers" * bool(args.workers)
    floor = float(np.median(floor_s))
    for share in (50, 99):
        overhead = float(np.percentile(answers_s, share)) - floor
        report.add(f"{what}, overhead of an answer, p{share}", overhead, "s", less_is_better=True)
    for share in (50, 99):
        report.add(f"{what}, a reward, p{share}", float(np.percentile(rewards_s, share)), "s", less_is_better=True)
    report.add(f"{what}, answers", len(answers_s) / wall_s, "1/s", against="the bare engine", other=sessions / floor)
    print(f"    the bare engine: p50 {floor:.3f} s, p99 {np.percentile(floor_s, 99):.3f} s; {num_refused} refusals")
    report.write()


if __name__ == "__main__":
    main()
