"""An environment of verifiers: sums that take one turn. An installed environment is named in the same way, without a
file.

The harness runs in process; those that come with verifiers first install a program.
"""

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    """Row of a task, in addition to its prompt."""

    answer: str


class SumTask(vf.Task[SumData, vf.State]):
    """One sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is the answer."""
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Sixty-four sums."""

    def load(self) -> list[SumTask]:
        """Return all sums, always in the same order."""
        pairs = [(10 + 7 * i % 90, i % 10) for i in range(64)]
        return [SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task) for a, b in pairs]


class Ask(vf.Harness[vf.HarnessConfig]):
    """Harness that asks the policy once, like any client of OpenAI's API."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Make one call; the trace records the reply."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)


__all__ = ["Ask", "Sums"]
