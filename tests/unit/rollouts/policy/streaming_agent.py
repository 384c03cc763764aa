"""A workflow that runs in a sandbox; it must import little."""

from rftdask.rollouts.workflows.base import PolicyModel, Task


async def streams(task: Task, model: PolicyModel) -> float:
    """Read a stream whose engine waits for the prompt "go". The reward is 1 if the whole text arrived."""
    client, text = model.openai_client(), ""
    async for chunk in await client.completions.create(model="p", prompt="x", stream=True):
        text += chunk.choices[0].text
        if text == "h":
            await client.completions.create(model="p", prompt="go")
    return float(text == task.truth)
