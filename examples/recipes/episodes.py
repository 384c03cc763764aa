"""An environment of verifiers: sums to be done in one turn. An installed one is named in the same way, without a file.

What plays is a harness that runs in process; those that come with verifiers install a program of their own first.
"""

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    """The row of a task, beside its prompt."""

    answer: str


class SumTask(vf.Task[SumData, vf.State]):
    """One sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last reply is the answer."""
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Sixty-four sums."""

    def load(self) -> list[SumTask]:
        """All of them, in the same order every time."""
        pairs = [(10 + 7 * i % 90, i % 10) for i in range(64)]
        return [SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task) for a, b in pairs]


class Ask(vf.Harness[vf.HarnessConfig]):
    """Asks the policy once, as any client of OpenAI's API does."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """One call; what it says is in the trace."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)


__all__ = ["Ask", "Sums"]
