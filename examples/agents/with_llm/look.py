"""The tool that `llm --functions` is given: it reads number.txt in the folder where llm is started."""

import pathlib  # as a module: of what has a name here, llm takes all that can be called for a tool


def look() -> str:
    """The number."""
    return pathlib.Path("number.txt").read_text()
