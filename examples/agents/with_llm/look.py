"""The tool that `llm --functions` is given: it reads number.txt in the folder where llm is started."""

from pathlib import Path


def look() -> str:
    """The number."""
    return Path("number.txt").read_text()
