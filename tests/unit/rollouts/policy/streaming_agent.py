"""A workflow that runs in a sandbox, which is to import little."""

from rftdask.rollouts.workflows.base import PolicyModel, Task


async def streams(task: Task, model: PolicyModel) -> float:
    """Reads a stream; the engine of the test goes on once somebody asks "go". Rewards that it arrived as a whole."""
    client, text = model.openai_client(), ""
    async for chunk in await client.completions.create(model="p", prompt="x", stream=True):
        text += chunk.choices[0].text
        if text == "h":
            await client.completions.create(model="p", prompt="go")
    return float(text == task.truth)
