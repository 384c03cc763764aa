"""A verifiers environment for tests: add one, in one turn or with a tool call before the answer.

Its harness runs in process; the shipped harnesses would install a program first.
"""

import json

import httpx
import verifiers.v1 as vf
from pydantic import Field

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "The sum.", "parameters": {"type": "object", "properties": {}}},
}


class AdditionData(vf.TaskData):
    answer: str


class AdditionTask(vf.Task[AdditionData, vf.State]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def num_replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self) -> list[AdditionTask]:
        return [AdditionTask(AdditionData(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task) for i in range(3)]


class DirectConfig(vf.HarnessConfig):
    with_tool: bool = False
    parameters: dict = Field(default_factory=dict)


class DirectHarness(vf.Harness[DirectConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        body = {"model": ctx.model, **self.config.parameters, **({"tools": [LOOK]} if self.config.with_tool else {})}
        messages = [{"role": "user", "content": [{"type": "text", "text": data.prompt}]}]
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:
            while True:
                answer = await client.post(f"{endpoint}/chat/completions", json={**body, "messages": messages})
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    said = json.dumps({"sum": data.answer if call["function"]["name"] == "look" else None})
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


__all__ = ["AdditionTaskset", "DirectHarness"]
