"""Promise: agents of LangGraph, the OpenAI Agents SDK and the command line `llm` run unchanged on
`model.openai_client()`, with tools, and each is recorded as one conversation.
"""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.unit.rollouts.policy.agent_rows import rows, sampled
from tests.unit.rollouts.rollout_cases import prompt_of, replies

pytestmark = [
    pytest.mark.extras,
    # Warnings of third-party packages.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning"),
]
CALL = '<tool_call>{"name":"add",  "arguments":{"x": 2, "y": 3}}</tool_call>'
ENGINE = replies(lambda request: "it is 5" if "<tool>5" in prompt_of(request) else CALL)
CONVERSATION = f"{CALL}<tool>5<assistant>it is 5"


def add(x: int, y: int) -> int:
    """The sum of two numbers."""
    return x + y


def test_langgraph_agent_is_one_conversation() -> None:
    pytest.importorskip("langgraph.prebuilt")
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    async def agent(client: AsyncOpenAI) -> None:
        model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key, temperature=0.5)
        ended = await create_react_agent(model, [add]).ainvoke({"messages": [("user", "2+3?")]})
        assert ended["messages"][-1].content == "it is 5"
        chunks = [chunk.content async for chunk in model.astream("again")]
        assert "".join(map(str, chunks)) == CALL

    whole, streamed = rows(agent, ENGINE)
    assert (whole.prompt_text, whole.response_text) == ("[add]<user>2+3?<assistant>", CONVERSATION)
    assert (whole.temperature, sampled(streamed)) == (0.5, CALL)


@pytest.mark.parametrize("responses", [False, True])
def test_openai_agents_sdk_agent_is_one_conversation(responses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    agents: Any = pytest.importorskip("agents")
    monkeypatch.setitem(os.environ, "OPENAI_AGENTS_DISABLE_TRACING", "1")  # sends data to openai.com
    agents.set_tracing_disabled(True)

    async def agent(client: AsyncOpenAI) -> None:
        kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
        model = kind(model="policy", openai_client=client)
        adder = agents.Agent(name="adder", instructions="add", model=model, tools=[agents.function_tool(add)])
        ended = await agents.Runner.run(adder, "2+3?")
        assert ended.final_output == "it is 5"
        streamed = agents.Runner.run_streamed(adder, "2+3 again?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "it is 5"

    recorded = rows(agent, ENGINE)
    assert [row.prompt_text for row in recorded] == [
        "[add]<system>add<user>2+3?<assistant>",
        "[add]<system>add<user>2+3 again?<assistant>",
    ]
    assert [row.response_text for row in recorded] == [CONVERSATION] * 2


@pytest.mark.parametrize("options", [(), ("--no-stream",)])
def test_command_line_agent_is_one_conversation(options: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("llm")

    async def agent(client: AsyncOpenAI) -> None:
        # The program's two configuration files.
        about = {"model_id": "policy", "model_name": "policy", "api_base": str(client.base_url), "supports_tools": True}
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([{**about, "api_key_name": "policy"}]))
        (tmp_path / "keys.json").write_text(json.dumps({"policy": client.api_key}))
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llm", "prompt", "--model", "policy", "--no-log", *options),
            *("--functions", inspect.getsource(add), "2+3?"),
            env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, errors = await program.communicate()
        assert (program.returncode, printed.decode().strip()) == (0, "it is 5"), errors.decode()

    [row] = rows(agent, ENGINE)
    assert (row.prompt_text, row.response_text) == ("[add]<user>2+3?<assistant>", CONVERSATION)
