"""Command-line agent that uses only the standard library. `ask.py QUESTION` prints the answer of the model at
OPENAI_BASE_URL, with the key OPENAI_API_KEY. Its only tool reads number.txt in the working directory.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MAX_TURNS = 3


def complete(messages: list[Any]) -> dict[str, Any]:
    """Return the model's next message, from POST /chat/completions."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [LOOK]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def main(question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        messages.append(message := complete(messages))
        for call in message.get("tool_calls") or ():
            result = Path("number.txt").read_text() if call["function"]["name"] == "look" else "?"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            break
    print(messages[-1]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:])
