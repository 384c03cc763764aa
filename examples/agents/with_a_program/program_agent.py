"""An agent that is a program: started as somebody would type it, in a folder of its own, and told by two variables of
its environment where its model is. See ../learn.py, which trains it.

Put another command in PROGRAM, in any language; its policy learns in the same way.
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
    """Have the program asked for the number behind a letter, which a file of its folder has: 1 for the right one."""
    client = model.openai_client()
    where = {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "number.txt").write_text(str(task.truth))
        program = await asyncio.create_subprocess_exec(
            *PROGRAM, str(task.prompt), cwd=folder, env={**os.environ, **where}, stdout=asyncio.subprocess.PIPE
        )
        try:
            said, _ = await program.communicate()
        finally:  # an attempt that takes too long is cancelled, and so is what it has started
            if program.returncode is None:
                program.kill()
    return float(said.decode().strip() == task.truth)
