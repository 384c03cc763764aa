"""The agent of tool_loop.py in LangGraph; only the address of the model differs from ordinary use. ../learn.py trains
it.
"""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from rftdask.rollouts.workflows.base import PolicyModel, Reward, Task
from rftdask.rollouts.workflows.registry import workflow

MAX_STEPS = 6
"""Maximum steps of the graph; an answer of the policy and a tool call are one step each."""


@workflow("langgraph_agent", in_process=True)
async def langgraph_agent(task: Task, model: PolicyModel) -> Reward:
    """Ask the graph for the number behind a letter. Reward 1 if the answer is right."""
    num_calls = 0

    @tool
    def look() -> str:
        """The number."""
        nonlocal num_calls
        num_calls += 1
        return task.truth

    client = model.openai_client()
    chat = ChatOpenAI(
        model="policy", base_url=str(client.base_url), api_key=client.api_key, http_async_client=client._client
    )
    graph = create_react_agent(chat, [look])
    answer = ""
    async for state in graph.astream(
        {"messages": [("user", task.prompt)]}, {"recursion_limit": MAX_STEPS + 1}, stream_mode="values"
    ):
        answer = str(state["messages"][-1].content)
        if len(state["messages"]) > MAX_STEPS:
            break
    return Reward(float(answer == task.truth), {"num_tool_calls": float(num_calls)})
