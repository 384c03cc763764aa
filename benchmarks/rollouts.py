"""Cost of the runner per rollout, without a model.

    OMP_NUM_THREADS=1 python benchmarks/rollouts.py [--tasks 1000] [--rounds 5] [--quick] [--json FILE]

Measures, best of --rounds, with an engine that answers at once:
    no-op tasks/s       tasks of one rollout that only ask the policy, through one worker's runner; higher is better
    one-task batch      milliseconds from calling the runner with one task to its experience; lower is better
on the event loop ("in process") and in sandboxes, where each task has its own process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from report import Report, make_parser

from rftdask.config.schema.explorer import ExplorerConfig, SandboxConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer
from rftdask.synchronizer.published import Published


class _Tokenizer:
    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return str(conversation[-1]["content"])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode()


async def _generate(requests: list[GenerateRequest]) -> list[Generation]:
    return [Generation((52,), (-1.0,), "stop", 0, 0) for _ in requests]


def run(tasks: Sequence[Task], options: SandboxConfig, fork_servers: dict[SandboxSpec, ForkServer]) -> float:
    """Return the seconds of one batch. A fork server stays between batches, as in a worker."""

    def keep(spec: SandboxSpec) -> ForkServer:
        if spec not in fork_servers:
            fork_servers[spec] = ForkServer(spec)
        return fork_servers[spec]

    async def batch() -> float:
        began = time.perf_counter()
        outcome = await run_work_unit(
            tasks,
            repeat_times=1,
            explore_step=1,
            policy=TextEngine(_generate, _Tokenizer()),
            explorer=ExplorerConfig(sandbox=options),
            model=ModelConfig(model_path="none", max_response_tokens=4),
            sampling={"t": SamplingParams(max_tokens=4)},
            weights=Published(0, "", ""),
            fork_server=keep,
        )
        took_s = time.perf_counter() - began
        failed = [each.error for each in outcome.experiences if not each.status.trainable]
        if failed:
            raise SystemExit(f"{len(failed)} of {len(tasks)} rollouts failed, the first: {failed[0]}")
        return took_s

    return asyncio.run(batch())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    report = Report(arguments)
    num_tasks, rounds = (100, 1) if arguments.quick else (arguments.tasks, arguments.rounds)
    tasks = [
        Task(
            taskset="t",
            epoch=0,
            index=i,
            prompt="2+2=",
            truth="4",
            workflow="simple_workflow",
            reward_fn="exact_reward",
        )
        for i in range(num_tasks)
    ]
    fork_servers: dict[SandboxSpec, ForkServer] = {}
    for where, options in (
        ("in process", SandboxConfig()),
        ("sandboxes", SandboxConfig(mode="always", max_processes=16)),
    ):
        run(tasks[:1], options, fork_servers)
        many_s = min(run(tasks, options, fork_servers) for _ in range(rounds))
        one_s = min(run(tasks[:1], options, fork_servers) for _ in range(4 * rounds))
        goal = 1000 if where == "in process" else None
        report.add(f"no-op tasks, {where}", len(tasks) / many_s, "tasks/s", goal=goal)
        report.add(f"a batch of one task, {where}", 1e3 * one_s, "ms", less_is_better=True, goal=20)
    for fork_server in fork_servers.values():
        fork_server.close()
    report.write()


if __name__ == "__main__":
    main()
