"""An agent that is an external program. It runs in its own folder, and two environment variables hold the address and
the key of its model. ../learn.py trains it.

Replace PROGRAM with another command, in any language, to train its policy in the same way.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from rftdask.rollouts.workflows.base import PolicyModel, Task
from rftdask.rollouts.workflows.registry import workflow

PROGRAM = (sys.executable, "-S", str(Path(__file__).with_name("ask.py")))


@workflow("program_agent", in_process=True)
async def program_agent(task: Task, model: PolicyModel) -> float:
    """Ask the program for the number behind a letter; a file in its folder holds the number. Reward 1 if the answer is
    right.
    """
    client = model.openai_client()
    endpoint = {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "number.txt").write_text(str(task.truth))
        program = await asyncio.create_subprocess_exec(
            *PROGRAM, str(task.prompt), cwd=folder, env={**os.environ, **endpoint}, stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await program.communicate()
        finally:  # a cancelled attempt (timeout) must also end its program
            if program.returncode is None:
                program.kill()
    return float(output.decode().strip() == task.truth)
