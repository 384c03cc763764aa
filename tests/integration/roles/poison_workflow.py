"""Workflows that crash their worker; POISON_FILE gets a line for each crash.

They run on the worker's own event loop (explorer.sandbox.mode=never), like a library that crashes.
"""

import asyncio
import os
import signal

from rftdask.rollouts.workflows.base import PolicyModel, Task


async def poisonous(task: Task, model: PolicyModel) -> float:
    answer = await model.generate(task.prompt)
    if task.index == 5:
        await asyncio.sleep(1.0)  # a nanny does not restart a worker that dies during its start
        with open(os.environ["POISON_FILE"], "a") as file:
            file.write(f"{task.epoch}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(answer.tokens) % 3)
