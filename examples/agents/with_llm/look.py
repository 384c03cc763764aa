"""Tool for `llm --functions`: reads number.txt in the working directory of llm."""

import pathlib  # import the module: llm treats every imported callable as a tool


def look() -> str:
    """The number."""
    return pathlib.Path("number.txt").read_text()
